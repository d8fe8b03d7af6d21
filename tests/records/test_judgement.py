"""What leaks, what is not shown and what could not be judged: each word by its rule, and none of
them is "safe"."""

from dataclasses import replace
from pathlib import Path

import pytest

from gradleak.records.flags import RaisedFlag
from gradleak.records.judgement import (
    LEAKS,
    NOT_JUDGED,
    NOT_SHOWN,
    RULES,
    Coverage,
    Gap,
    judge_record,
    judge_setting,
    leading_metric,
    list_flags,
    list_flags_beside,
)
from gradleak.records.run_folder import read_run
from gradleak.records.schema import Record, Score
from gradleak.records.settings import Setting
from gradleak.records.store import read_summary, write_record


def changed(
    record: Record,
    *flags: str,
    mean: float = 0.5,
    certified: bool = False,
    exact: float | None = None,
) -> Record:
    """The record of one example with these flags, score and proof."""
    attack = record.attacks["lamp_cos"]
    values = {"rouge1": mean} | ({} if exact is None else {"exact_match": exact})
    example = replace(
        attack.examples[0],
        certified=certified,
        values=values,
        blind_values={"rouge1": 0.1, "exact_match": 0.0},
    )
    scores = {
        "rouge1": replace(attack.scores["rouge1"], mean=mean, low=mean - 0.1, high=mean + 0.1)
    }
    if exact is not None:
        scores["exact_match"] = Score(exact, 0.0, 1.0, 0.0, 0.0, 0.975, "fraction", "higher", 1)
    one = replace(
        attack,
        examples=(example,),
        scores=scores,
        flags=tuple(RaisedFlag(flag, "Why.") for flag in flags),
    )
    return replace(record, attacks={"lamp_cos": one}, worst_case=scores, flags=(), findings=())


@pytest.mark.parametrize(
    ("flags", "mean", "certified", "word"),
    [
        ((), 0.5, False, LEAKS),
        (("search_failed", "few_examples"), 0.5, False, LEAKS),
        (("near_chance",), 0.5, False, NOT_SHOWN),
        ((), 0.05, False, NOT_SHOWN),  # below blind, whatever flags it lacks
        (("near_chance", "search_failed"), 0.05, False, NOT_JUDGED),
        (("near_chance", "few_examples"), 1.0, False, NOT_JUDGED),
        (("near_chance", "search_failed"), 0.1, True, LEAKS),
    ],
)
def test_each_word_has_its_rule(
    record: Record, flags: tuple[str, ...], mean: float, certified: bool, word: str
) -> None:
    assert judge_record(changed(record, *flags, mean=mean, certified=certified)).verdict == word


def test_no_word_is_safe() -> None:
    assert set(RULES) == {LEAKS, NOT_SHOWN, NOT_JUDGED}
    assert "safe" not in " ".join([*RULES, *RULES.values()])


def test_a_proven_result_is_not_in_doubt(record: Record) -> None:
    proven = changed(record, "no_objective", "few_examples", mean=1.0, certified=True)
    assert judge_record(proven).doubts == () and judge_record(proven).proven == 1


def test_the_blind_attack_lists_no_flag_that_it_has_by_its_making(record: Record) -> None:
    flagged = changed(record, "no_objective", "few_examples")
    assert list(list_flags(flagged)) == ["no_objective", "few_examples"]
    blind = replace(flagged.attacks["lamp_cos"], spec={"name": "blind"})
    assert list(list_flags(replace(flagged, attacks={"blind": blind}))) == ["few_examples"]


def test_words_that_updates_name_leak_without_any_attack(record: Record) -> None:
    named = replace(changed(record, "near_chance"), findings=record.findings)
    assert judge_record(named).verdict == LEAKS and judge_record(named).named == 1


def test_only_blind_judges_nothing(record: Record) -> None:
    attack = replace(changed(record).attacks["lamp_cos"], spec={"name": "blind"})
    found = judge_record(replace(record, attacks={"blind": attack}, findings=()))
    assert (found.verdict, found.doubts) == (NOT_JUDGED, ("only_blind",))


def test_one_attack_without_the_fault_is_enough_for_some_doubts_only(
    record: Record, tmp_path: Path
) -> None:
    one = changed(record, "near_chance", "not_adaptive", "search_failed")
    other = replace(changed(record, "near_chance"), spec={**record.spec, "attacks": ["tag"]})
    both = Setting(tuple(read_summary(write_record(tmp_path, each)) for each in (one, other)))
    assert judge_setting(both).doubts == ("search_failed",)


def test_another_metric_must_be_clear_of_blind(record: Record) -> None:
    leading = changed(record, "near_chance", mean=0.1, exact=1.0)
    assert judge_record(leading).verdict == NOT_SHOWN
    clear = replace(leading.worst_case["exact_match"], low=0.9, blind_high=0.4)
    attack = replace(
        leading.attacks["lamp_cos"], scores={**leading.worst_case, "exact_match": clear}
    )
    assert judge_record(replace(leading, attacks={"lamp_cos": attack})).above_blind == (
        "exact_match",
    )


def test_the_leading_metric_is_the_first_that_was_measured() -> None:
    there = Score(0.5, 0.4, 0.6, 0.1, 0.0, 0.2, "fraction", "higher", 1)
    none = replace(there, mean=None)
    assert leading_metric({"exact_match": there, "rouge1": there}) == "rouge1"
    assert leading_metric({"exact_match": there, "rouge1": none}) == "exact_match"
    assert leading_metric({"psnr": there, "mse": there}) == "mse"
    assert leading_metric({"exact_match": none}) == "exact_match" and leading_metric({}) == "rouge1"


def test_coverage_says_what_is_not_there() -> None:
    gaps = (
        Gap("missing", "seed=1", "study.json", "Why."),
        Gap("failed", "seed=2", "a.failed.txt", "Why."),
    )
    assert Coverage(4, 2, gaps).sentence() == "2 of 4 cells were run: 1 missing, 1 failed."
    assert Coverage(4, 4).sentence() == "4 of 4 cells were run."
    assert Coverage(None, 3).sentence() == ""
    assert "1 missing" in Coverage(None, 3, gaps).sentence()


def test_a_record_that_was_made_whole_is_read_as_one(record: Record, tmp_path: Path) -> None:
    write_record(tmp_path / "below", changed(record))
    found = read_run(tmp_path)
    assert len(found.summaries) == 1 and found.coverage == Coverage(None, 1)


def test_a_worst_case_below_the_blind_attacks_guess_is_no_contradiction(
    record: Record, tmp_path: Path
) -> None:
    """A worst case is over the attacks that look; blind is what it stands beside."""
    looking = changed(record, mean=0.5)
    blind = changed(record, mean=0.9).attacks["lamp_cos"]
    both = {**looking.attacks, "blind": replace(blind, spec={"name": "blind"})}
    write_record(tmp_path, replace(looking, attacks=both))
    assert read_run(tmp_path).coverage == Coverage(None, 1)


def test_flags_of_an_attack_do_not_stand_beside_what_another_proved_without_the_fault(
    record: Record,
) -> None:
    proven = changed(record, "few_examples", mean=1.0, certified=True)
    weak = changed(
        record,
        "near_chance",
        "search_failed",
        "no_objective",
        "generous_knowledge",
        "few_examples",
        mean=0.05,
    )
    attacks = {"span": replace(proven.attacks["lamp_cos"], spec={"name": "span"}), **weak.attacks}
    both = replace(proven, attacks=attacks)
    assert list(list_flags_beside(judge_record(both), both)) == ["few_examples"]
    names = ["near_chance", "search_failed", "no_objective", "generous_knowledge", "few_examples"]
    assert list(list_flags_beside(judge_record(weak), weak)) == names


def test_what_blind_is_by_its_making_is_no_flag_of_a_setting(record: Record) -> None:
    attack = changed(record, "near_chance", "no_objective", "not_adaptive", "few_examples").attacks[
        "lamp_cos"
    ]
    assert list(
        list_flags(
            replace(record, attacks={"blind": replace(attack, spec={"name": "blind"})}, flags=())
        )
    ) == ["few_examples"]
