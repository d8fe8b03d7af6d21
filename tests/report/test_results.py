"""Pages of results: every cell of a study, scores and keyed hashes, and no text but of the
canaries."""

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradleak.records.schema import GuaranteeRecord, NoiseRecord, Record
from gradleak.records.store import Summary, read_summary, write_record
from gradleak.report.papers.study_results import (
    Answered,
    StudyCell,
    find_answers,
    write_command,
    write_examples_csv,
    write_guesses,
    write_results_csv,
    write_results_markdown,
)

STUDY = ["studies/some.yaml"]
SETTING: dict[str, Any] = {
    "target": {"name": "minilm", "weights": "full"},
    "limit": 25,
    "batch_size": 1,
    "seed": 0,
    "defenses": [],
}
COLA = {"name": "cola", "selection": "lamp_test"}


def planned(attack: str, data: dict[str, Any] = COLA, **spec: Any) -> StudyCell:
    whole = {
        **SETTING,
        "data": data,
        "attacks": [{"name": attack, "steps": 3, "newer_field": 1}],
        **spec,
    }
    return StudyCell(
        {"attacks": attack, "batch_size": str(whole["batch_size"])},
        whole,
        {attack: {"newer_field": 1}},
    )


@pytest.fixture
def ran(make_record: Callable[..., Record], tmp_path: Path) -> Callable[..., Summary]:
    def make(
        attack: str, data: dict[str, Any] = COLA, model: str = "ff00", n: int = 10, **spec: Any
    ) -> Summary:
        plain = make_record((attack,), flags=("few_examples",))
        whole = {
            **SETTING,
            "data": data,
            "attacks": [{"name": attack, "steps": 3}],
            "limit": n,
            **spec,
        }
        target = replace(
            plain.target,
            fingerprint=model,
            name="/home/somebody/models/ft" if model == "ft" else "tiny",
        )
        record = replace(
            plain,
            spec=whole,
            target=target,
            data=replace(plain.data, examples=n),
            machine={"name": "a GPU"},
        )
        return read_summary(write_record(tmp_path, record))

    return make


def page(answered: list[Answered]) -> str:
    return "\n".join(write_results_markdown(STUDY, answered, "gradleak tables RUN"))


def test_a_record_with_fewer_examples_of_another_model_answers_a_cell_and_says_so(
    ran: Callable[..., Summary],
) -> None:
    half = {"name": "minilm", "weights": "half"}
    (one,) = find_answers(
        [planned("tag")],
        [ran("tag", n=5), ran("tag", n=10), ran("tag", n=4, model="half", target=half)],
    )
    # Of one model the one with most
    assert sorted(found.record.data.examples for found in one.answers) == [4, 10]
    text = page([one])
    assert (
        "`gradleak run studies/some.yaml --set limit=4 --set target=minilm:weights=half`: 1 of the"
        " lines below" in text
    )
    assert (
        "When: 2026-01-02. Where: a GPU." in text and "Model B: tiny, half, 100 parameters" in text
    )
    assert "| 1 | tag | A | 10 | 50.0 [40.0, 60.0] | 20.0 | 0.0 s | few_examples |" in text


def test_noise_what_is_proven_and_records_of_other_runs_stand_on_the_page(
    ran: Callable[..., Summary],
) -> None:
    plain, other = ran("tag"), ran("dlg")
    proven = GuaranteeRecord(
        "dp_sgd", "one release", "example", "analytic Gaussian", 4.5, 1e-5, against_server=True
    )
    record = replace(plain.record, noise=NoiseRecord(2.5, 2.4, 2.6, {}), guarantees=(proven,))
    (one,) = find_answers([planned("tag")], [replace(plain, record=record)])
    text = "\n".join(
        write_results_markdown(STUDY, [one], "gradleak tables RUN", [record, other.record])
    )
    assert "| batch_size | noise | attack |" in text and "| 1 | 2.5 | tag |" in text
    assert "one release, per example: ε 4.5 (analytic Gaussian) at δ 1e-05" in text
    assert "Of no cell of this study, but in the papers' tables below: 1 records of dlg" in text
    assert "noise" not in page(find_answers([planned("dlg")], [other]))


def test_records_that_differ_in_what_changes_the_question_do_not_answer(
    ran: Callable[..., Summary],
) -> None:
    sign = [{"name": "sign"}]
    others = [
        ran("tag", batch_size=2),
        ran("tag", seed=1),
        ran("tag", defenses=sign),
        ran("dlg"),
        ran("tag", {"name": "sst2"}),
    ]
    others += [
        ran("tag", target={**SETTING["target"], "attend_padding": True}),
        ran("tag", target={"name": "huggingface"}),
    ]
    cell = planned("tag", target={**SETTING["target"], "attend_padding": False})
    (one,) = find_answers([cell], others)
    assert not one.answers


def test_a_field_that_an_older_record_lacks_was_at_its_default(ran: Callable[..., Summary]) -> None:
    usual = planned("tag")
    changed = replace(
        usual, spec={**usual.spec, "attacks": [{"name": "tag", "steps": 3, "newer_field": 2}]}
    )
    assert [len(one.answers) for one in find_answers([usual, changed], [ran("tag")])] == [1, 0]


def test_cells_that_were_not_run_say_so_with_the_command(ran: Callable[..., Summary]) -> None:
    answered = find_answers([planned("tag"), planned("dlg", batch_size=2)], [ran("tag")])
    command = "gradleak run studies/some.yaml --only attacks=dlg --only batch_size=2"
    assert "| 2 | dlg |  |  | not run |" in page(answered)
    assert "1 of 2 cells were not run." in page(answered) and command in page(answered)
    rows = list(csv.DictReader(io.StringIO(write_results_csv(STUDY, answered))))
    assert [(row["mean"], row["command"]) for row in rows] == [("0.5", ""), ("not run", command)]
    assert write_command(["a.yaml", "--set", "limit=3"], planned("tag")).startswith(
        "gradleak run a.yaml --set limit=3 --only"
    )


def test_no_page_holds_a_guess_a_secret_or_a_machines_path(ran: Callable[..., Summary]) -> None:
    folder = {"name": "huggingface", "path": "/home/somebody/models/ft"}
    cell = planned("tag", target={"name": "huggingface", "path": "bert-base-uncased"})
    answered = find_answers(
        [planned("tag"), cell], [ran("tag"), ran("tag", model="ft", target=folder)]
    )
    assert "'target=…/ft'" in page(answered)
    guesses = "\n".join(write_guesses(answered, lambda record: {(0, 0): "My PIN is 4471"}))
    texts = [
        page(answered),
        write_results_csv(STUDY, answered),
        write_examples_csv(answered),
        guesses,
    ]
    assert guesses == ""
    assert not any(word in text for text in texts for word in ("4471", "dog", "somebody"))
    # The keyed hash, the tokens and the score
    assert "cd34cd34cd34cd34,6,0.5" in write_examples_csv(answered)


def test_canaries_alone_show_guesses_as_the_search_went_on(ran: Callable[..., Summary]) -> None:
    canaries = {"name": "canaries"}
    cells = [planned("tag", canaries), planned("dlg", canaries)]
    drawn = "\n".join(
        write_guesses(
            find_answers(cells, [ran("tag", canaries)]), lambda record: {(0, 0): "My PIN is 4471"}
        )
    )
    assert "Secret 1: My PIN is 4471" in drawn
    assert "| 1, tag | 0 | the dog |" in drawn and "| 1, tag | answer | is 4471 my dog |" in drawn
    mixed = find_answers(
        [planned("tag", canaries), planned("tag")], [ran("tag", canaries), ran("tag")]
    )
    assert not list(write_guesses(mixed, lambda record: {}))


def test_an_older_version_of_an_attack_stands_beside_the_newer_and_says_so(
    ran: Callable[..., Summary],
) -> None:
    old = ran("tag", n=100)
    newer = ran("tag", n=10)
    attack = replace(newer.record.attacks["tag"], version=2)
    new = replace(newer, record=replace(newer.record, attacks={"tag": attack}))
    (one,) = find_answers([planned("tag")], [old, new])
    assert [(found.record.data.examples, one.attack(found)) for found in one.answers] == [
        (10, "tag"),
        (100, "tag (version 1)"),
    ]
    (alone,) = find_answers(
        [replace(planned("tag"), versions={"tag": 2})], [old]
    )  # the attack has changed, and was not run since
    assert [alone.attack(found) for found in alone.answers] == ["tag (version 1)"]
