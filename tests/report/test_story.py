"""The sentence that comes first, and what a person who decides is told after it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradleak.records.schema import AttackRecord, Record, Score
from gradleak.records.store import write_record
from gradleak.report.page import build_report
from gradleak.report.page.opening import Opening
from gradleak.report.page.story import Story

Make = Callable[..., Record]


def told(folder: Path, *records: Record) -> Story:
    for record in records:
        write_record(folder, record)
    return build_report(folder, lambda record: {}).find(Opening).story


def with_exact(record: Record, share: float, n: int, **knowledge: tuple[str, ...]) -> Record:
    """The record with so many examples rebuilt word for word, by each attack that is named with
    what it knew."""
    exact = Score(share, share, share, 0.0, 0.0, 0.0, "fraction", "higher", n)

    def scored(name: str, attack: AttackRecord) -> AttackRecord:
        whole = exact if name in knowledge else replace(exact, mean=0.0)
        return replace(
            attack,
            scores={**attack.scores, "exact_match": whole},
            knowledge=knowledge.get(name, ("lengths",)),
        )

    attacks = {name: scored(name, attack) for name, attack in record.attacks.items()}
    return replace(record, attacks=attacks, worst_case={**record.worst_case, "exact_match": exact})


def test_what_came_out_word_for_word_is_counted_and_what_the_attacker_knew_is_said(
    tmp_path: Path, make_record: Make
) -> None:
    record = with_exact(make_record(("tag", "span"), 0.9), 1.0, 12, span=("batch_size",))
    assert (
        told(tmp_path, record).happened
        == "12 of 12 private texts were rebuilt word for word; the attacker (span) was told only"
        " how many examples a batch holds."
    )


def test_who_was_told_nothing_and_a_defense_that_is_none_are_not_made_up(
    tmp_path: Path, make_record: Make
) -> None:
    record = with_exact(make_record(("span",), 0.9), 0.5, 12, span=("defense",))
    assert (
        told(tmp_path, record).happened
        == "6 of 12 private texts were rebuilt word for word; the attacker was told nothing beyond"
        " the update."
    )


def test_a_part_is_told_beside_what_a_blind_guess_gets(tmp_path: Path, make_record: Make) -> None:
    story = told(tmp_path, make_record(("tag",), 0.5))
    assert (
        "About 50.0 % of the words of 1 private text were rebuilt, where a blind guess gets 20.0 %"
        in story.happened
    )
    assert any("lower bound" in sentence for sentence in story.means)


def test_little_in_doubt_is_no_conclusion_and_says_what_would_help(
    tmp_path: Path, make_record: Make
) -> None:
    story = told(tmp_path, make_record(("tag",), 0.1, flags=("near_chance", "search_failed")))
    assert story.happened.startswith(
        "No attack is shown to have rebuilt more of the 1 private text than a blind guess would"
    )
    assert (
        "Nothing can be concluded about safety" in story.means[0]
        and "search_failed" in story.means[0]
    )
    assert any("more steps" in sentence for sentence in story.would_change)


def test_no_word_of_it_calls_anything_safe(tmp_path: Path, make_record: Make) -> None:
    story = told(tmp_path, make_record(("tag",), 0.1, flags=("near_chance",)))
    assert "does not show that updates are safe" in " ".join(story.means)
    assert any("Any attack but tag" in sentence for sentence in story.not_tried)
    assert any("honest" in sentence for sentence in story.not_tried)


def test_of_several_settings_the_one_that_leaks_is_told_and_the_others_are_what_would_change_it(
    tmp_path: Path, make_record: Make
) -> None:
    leaking, quiet = make_record(("tag",), 0.5), make_record(("tag",), 0.1, flags=("near_chance",))
    noise = replace(
        quiet, spec={**quiet.spec, "defenses": [{"name": "gaussian_noise", "std": 0.1}]}
    )
    story = told(tmp_path, leaking, noise)
    assert story.happened.startswith("In the setting that leaks most (no defense), about 50.0 %")
    assert any("under: gaussian_noise:std=0.1" in sentence for sentence in story.would_change)


@pytest.mark.parametrize("mean", [0.01, 0.3])
def test_pictures_are_told_in_their_own_words(
    tmp_path: Path, make_record: Make, mean: float
) -> None:
    record = make_record(("ig",), 0.5, flags=() if mean < 0.1 else ("near_chance",))
    score: Any = Score(mean, mean, mean, 0.2, 0.2, 0.2, "squared", "lower", 2)
    pictures = replace(
        record,
        attacks={
            key: replace(
                attack,
                scores={"mse": score},
                examples=tuple(
                    replace(one, values={"mse": mean}, blind_values={"mse": 0.2})
                    for one in attack.examples
                ),
            )
            for key, attack in record.attacks.items()
        },
        worst_case={"mse": score},
    )
    story = told(tmp_path, pictures)
    assert "private pictures" in story.happened
    assert "word" not in " ".join([story.happened, *story.means, *story.would_change])
