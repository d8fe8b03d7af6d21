"""Through all combinations of outcomes and flags: no two screens, pages or files say different
things of one result."""

import itertools
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradleak.cli.gate import write_junit, write_sarif
from gradleak.records.flags import RaisedFlag
from gradleak.records.judgement import (
    DOUBTS,
    LEAKS,
    NO_FLAGS,
    NOT_JUDGED,
    NOT_SHOWN,
    Coverage,
    Judgement,
    judge_record,
    judge_setting,
)
from gradleak.records.schema import (
    AttackRecord,
    BatchRecord,
    DataRecord,
    ExampleRecord,
    FindingRecord,
    Record,
    Score,
    SecretRecord,
    TargetRecord,
)
from gradleak.records.settings import Setting, worst_score
from gradleak.records.statistics import Interval
from gradleak.records.store import Summary, columns_of, write_record
from gradleak.report.naming import Labels
from gradleak.report.page import build_report
from gradleak.report.page.charts import compare_attacks
from gradleak.report.page.forms import write_html, write_markdown
from gradleak.report.page.opening import Opening, SettingList, reach_verdict
from gradleak.report.page.section import JudgedRun
from gradleak.report.page.story import tell_story
from gradleak.report.pictures.heat_map import HeatCell, HeatMap, Lead, conclude, write_score
from gradleak.report.pictures.tradeoff_chart import Point
from gradleak.report.verdict import write_conclusion
from gradleak.study.gate_checks import check_setting, read_bound
from gradleak.study.leak_map import draw_cell

N = 6
BOUNDS = [read_bound("exact_match=0.9", upper=True)]
WORDS = {
    LEAKS: "This setting leaks",
    NOT_SHOWN: "Not shown either way",
    NOT_JUDGED: "Could not be judged",
}
# How many are: proven, rebuilt word for word, too long for that to be luck; and what the others
# score (blind: 0.2)
OUTCOMES = {
    "nothing": (0, 0, 0, 0.1),
    "as much as blind": (0, 0, 0, 0.2),
    "more than blind": (0, 0, 0, 0.5),
    "one is proven": (1, 1, 1, 0.1),
    "all are proven": (N, N, N, 1.0),
    "one is rebuilt, too long for luck": (0, 1, 1, 0.1),
    "one is rebuilt, which may be luck": (0, 1, 0, 0.1),
    "all are rebuilt": (0, N, 0, 1.0),
}
FLAGS = (*DOUBTS, "near_chance", "generous_knowledge")
# One of each kind of rule
KINDS = ("search_failed", "not_adaptive", "no_objective", "few_examples", "near_chance")


def record_of(
    outcome: str, flags: tuple[str, ...], named: int = 0, attack: str = "tag", seed: int = 0
) -> Record:
    proven, exact, whole, rouge1 = OUTCOMES[outcome]
    values = [
        {"rouge1": 1.0 if place < exact else rouge1, "exact_match": float(place < exact)}
        for place in range(N)
    ]
    blind = {"rouge1": 0.2, "exact_match": 0.0}
    examples = tuple(
        ExampleRecord(
            place, 0, "a guess", None, place < proven, dict(one), dict(blind), place < whole
        )
        for place, one in enumerate(values)
    )
    scores = {}
    for metric, chance in blind.items():
        mean = sum(one[metric] for one in values) / N
        scores[metric] = Score(
            mean,
            mean - 0.05,
            mean + 0.05,
            chance,
            chance - 0.04,
            chance + 0.04,
            "fraction",
            "higher",
            N,
        )
    spec: dict[str, Any] = {
        "attacks": [{"name": attack}],
        "seed": seed,
        "data": {"name": "canaries"},
        "defenses": [],
    }
    raised = tuple(RaisedFlag(name, f"Why {name}.") for name in flags)
    said = tuple(
        FindingRecord(place, "bag_of_words", True, "rows", 3, (), 1.0, 1.0)
        for place in range(named)
    )
    batches = tuple(
        BatchRecord(place, objective_at_guess=0.1, objective_at_truth=0.2) for place in range(N)
    )
    return Record(
        created="2026-01-02T03:04:05+00:00",
        spec=spec,
        versions={},
        machine={},
        data=DataRecord("ab", N, N),
        target=TargetRecord("tiny", "ff", 100, 50),
        secrets=tuple(SecretRecord(place, 0, "cd" * 32, 5) for place in range(N)),
        attacks={attack: AttackRecord(spec["attacks"][0], scores, examples, batches, (), raised)},
        worst_case=scores,
        findings=said,
    )


def every(flags: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...], int, str]]:
    subsets = [
        chosen for size in range(len(flags) + 1) for chosen in itertools.combinations(flags, size)
    ]
    subsets += [(flag,) for flag in FLAGS if flag not in flags]
    yield from itertools.product(OUTCOMES, subsets, (0,), ("tag",))
    some = [
        (),
        ("near_chance",),
        ("near_chance", "search_failed"),
        ("search_failed", "few_examples"),
    ]
    yield from itertools.product(OUTCOMES, some, (0, 3), ("tag", "blind"))


def setting_of(record: Record) -> Setting:
    return Setting(
        (
            Summary(
                Path(f"{record.id}.json"),
                record,
                {key: columns_of(one) for key, one in record.attacks.items()},
            ),
        )
    )


@pytest.mark.parametrize(
    "chosen", [KINDS, pytest.param(FLAGS, marks=pytest.mark.long)], ids=["kinds", "all"]
)
def test_no_two_outlets_disagree(chosen: Sequence[str]) -> None:
    seen = set()
    for outcome, flags, named, attack in every(chosen):
        record = record_of(outcome, flags, named, attack)
        setting, labels = setting_of(record), Labels([record])
        judged = judge_setting(setting)
        seen.add(judged.verdict)
        where = f"{outcome}, {flags}, {named}, {attack}: {judged}"
        assert judged == judge_record(record), where
        mapped = draw_cell(1, "query", record)
        alone = JudgedRun(setting.summaries, Coverage(None, 1))
        run = reach_verdict(alone)
        words = {"run": run.verdict, "map": mapped.verdict, "point": point_of(judged).verdict}
        findings = list(check_setting(setting, labels, BOUNDS))
        words |= {f"gate {one.rule}": one.verdict for one in findings}
        assert set(words.values()) == {judged.verdict}, where
        (heat,) = compare_attacks(alone).cells
        assert heat.verdict == judged.verdict or named, where
        marks = {
            heat.in_doubt,
            point_of(judged).in_doubt,
            write_score(heat_map_of([mapped]), mapped).endswith("?"),
        }
        assert marks == {judged.may_be_more}, where
        assert (run.leaks, run.in_doubt) == (
            judged.verdict == LEAKS,
            judged.verdict == NOT_JUDGED,
        ), where
        closing = write_conclusion(judged, record)
        assert closing.startswith(WORDS[judged.verdict]) and closing in run.sentences, where
        assert run.headline.startswith(WORDS[judged.verdict]) or named, where
        assert not (judged.leaks and "no more was rebuilt" in closing), where
        happened = tell_story(alone).happened
        assert ("no attack is shown" in happened.lower()) == (
            not judged.above_blind and not judged.whole
        ), where
        shut = {one.rule for one in findings if not one.passed} - {"exact_match", "names_words"}
        assert shut == set(judged.doubts), where
        assert judged.verdict != NOT_JUDGED or shut, where
    assert seen == set(WORDS)


def heat_map_of(cells: Sequence[HeatCell]) -> HeatMap:
    layers = tuple(one.layer for one in cells)
    return HeatMap(
        *(
            "",
            "tiny",
            "canaries",
            "tag",
            "rouge1",
            N,
            N,
            0,
            (),
            100,
            layers,
            ("query",),
            tuple(cells),
        ),
        overall={"query": cells[0].scores},
        leads={"rouge1": Lead("query")},
    )


def point_of(judged: Judgement) -> Point:
    leak = Score(0.1, 0.0, 0.2, 0.1, 0.0, 0.2, "fraction", "higher", N)
    return Point("none", leak, Interval(0.0, 0.0, 0.0, N), {}, (), False, "ab", "cd", judged)


@pytest.mark.parametrize("word", WORDS)
def test_the_files_of_a_gate_hold_the_word_of_the_page(word: str) -> None:
    chosen = {
        LEAKS: ("one is proven", ()),
        NOT_SHOWN: ("nothing", ("near_chance",)),
        NOT_JUDGED: ("nothing", ("search_failed",)),
    }
    record = record_of(*chosen[word])
    findings = [
        replace(one, passed=False)
        for one in check_setting(setting_of(record), Labels([record]), BOUNDS)
    ]
    results = json.loads(write_sarif(findings, "0"))["runs"][0]["results"]
    assert {result["properties"]["verdict"] for result in results} == {word}
    root = ET.fromstring(write_junit(findings))
    assert {one.get("value") for one in root.iter("property") if one.get("name") == "verdict"} == {
        word
    }


def test_a_page_of_many_says_one_thing_of_each_and_calls_nothing_safe(tmp_path: Path) -> None:
    """The two contradictions that were seen: leaks above and blind's equal below; a headline of
    a setting that is not shown."""
    chosen = [
        ("as much as blind", ("near_chance",)),
        ("nothing", ("near_chance", "search_failed")),
        ("one is proven", ("near_chance", "no_objective")),
        ("more than blind", ("search_failed",)),
        ("more than blind", ("near_chance", "few_examples")),
    ]
    for seed, (outcome, flags) in enumerate(chosen):
        write_record(tmp_path, record_of(outcome, flags, seed=seed))
    report = build_report(tmp_path, lambda record: {})
    assert report.find(Opening).verdict.headline.startswith(
        "2 of 5 settings leak; 1 not shown either way; 2 could not be judged. In the worst, "
    )
    assert [row.verdict for row in report.find(SettingList).settings][:2] == [LEAKS, LEAKS]
    first = report.find(SettingList).settings[0]
    assert (
        first.score.mean is not None
        and f"{100 * first.score.mean:.1f}" in report.find(Opening).verdict.headline
    )
    for page in (write_html(report), write_markdown(report)):
        text = (
            page.replace("not a proof of safety", "")
            .replace("none is called safe", "")
            .replace("unsafe-inline", "")
        )
        assert "safe" not in text.lower()
        assert all(page.count(word) >= 1 for word in WORDS)


def test_a_leak_is_quoted_by_the_attack_that_made_it_where_as_many_blind_guesses_do_as_well() -> (
    None
):
    """Nobody is told that half was rebuilt where blind guesses get all, and that this is a leak."""
    record = record_of("more than blind", ())
    other = record_of("as much as blind", ("near_chance",), attack="dlg").attacks["dlg"]
    lucky = {"rouge1": 1.0, "exact_match": 0.0}
    examples = tuple(replace(one, draw_values=lucky) for one in other.examples)
    attacks = {**record.attacks, "dlg": replace(other, examples=examples)}
    tried = [(attack, columns_of(attack)) for attack in attacks.values()]
    worst = {
        metric: worst_score(tried, metric, list(range(N)), "fraction", "higher") for metric in lucky
    }
    assert (worst["rouge1"].mean, worst["rouge1"].blind) == (0.5, 1.0)
    record = replace(record, attacks=attacks, worst_case=worst)
    setting = setting_of(record)
    judged = judge_setting(setting)
    assert judged.leaks and judged.above_blind == ("rouge1",)
    alone = JudgedRun(setting.summaries, Coverage(None, 1))
    happened = tell_story(alone).happened
    assert "About 50.0 % of the words" in happened and "a blind guess gets 20.0 %" in happened
    run = reach_verdict(alone)
    assert "gain +30.0" in run.headline
    assert any("blind 100.0 (best of 2), gain -50.0" in one for one in run.sentences)


def test_a_map_names_no_module_as_leaking_of_which_no_layer_is_shown_to() -> None:
    cells = [
        draw_cell(layer, "query", record_of("as much as blind", ("near_chance",)))
        for layer in (1, 2)
    ]
    said = " ".join(conclude(heat_map_of(cells)))
    assert (
        "query scores highest, and no layer of it is shown to leak" in said
        and "leaks most" not in said
    )
    assert "0 of 2 views leak; 2 not shown either way." in said


def test_what_is_no_flag_is_explained_too() -> None:
    assert all(text.endswith(".") for text in NO_FLAGS.values())
