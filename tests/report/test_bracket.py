"""The bracket in reports: three numbers on one scale, in every form, and the words beside them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradleak.cli import main
from gradleak.core.errors import GradleakError
from gradleak.records.judgement import judge_record, list_brackets
from gradleak.records.schema import BoundRecord, BoundsRecord, Record, Score
from gradleak.records.store import read_record, write_record
from gradleak.report.page import build_report
from gradleak.report.page.bracket import WhatNoAttackCouldDo
from gradleak.report.page.forms import write_html, write_json, write_markdown
from gradleak.report.terminal.console import open_console
from gradleak.report.terminal.record_screen import print_bracket
from gradleak.report.verdict import write_conclusion
from gradleak.study.gate_checks import judge, read_accepted, read_bound

RIGHT = Score(0.12, 0.08, 0.17, 0.02, 0.0, 0.05, "fraction", "higher", 40)


def make_bounds(mean: float = 0.4, guaranteed: float = 0.75) -> BoundsRecord:
    return BoundsRecord(
        *("english", 150, 1),
        (
            BoundRecord(
                *("oracle", "token_accuracy", mean, mean - 0.05, mean + 0.06, 0.24, "fraction"),
                *("estimate", 40, "Told all."),
            ),
            BoundRecord(
                *("information", "bits", 7213.4, None, None, 0.0, "bits", "theorem", 40, "Any.")
            ),
            BoundRecord(
                *("guarantee", "token_accuracy", guaranteed, None, None, 0.24, "fraction"),
                *("theorem", 40, "Any."),
            ),
        ),
        remarks=("Not by the sampling rate.",),
    )


@pytest.fixture
def bounded(make_record: Callable[..., Record]) -> Record:
    record = make_record()
    (attack,) = record.attacks.values()
    scored = replace(attack, scores={**attack.scores, "token_accuracy": RIGHT})
    return replace(record, attacks={"tag": scored}, bounds=make_bounds())


def test_a_bracket_has_what_was_rebuilt_between_its_ends(bounded: Record) -> None:
    (found,) = list_brackets(bounded)
    assert found.attack == "tag"
    assert found.rebuilt == RIGHT
    assert found.at_most.mean == 0.4
    assert found.guaranteed is not None
    assert not found.is_crossed


def test_an_attack_above_the_oracle_is_said_to_be(bounded: Record) -> None:
    crossed = replace(bounded, bounds=make_bounds(mean=0.01))
    assert next(list_brackets(crossed)).is_crossed
    console = open_console()
    with console.capture() as capture:
        print_bracket(console, crossed)
    assert "more token_accuracy than the oracle" in " ".join(capture.get().split())


def test_the_conclusion_says_what_no_attack_could_do(bounded: Record) -> None:
    said = write_conclusion(judge_record(bounded), bounded)
    assert (
        "an oracle has 40.0 [35.0, 46.0] % of the words right (without the update 24.0 %)" in said
    )
    assert "a better search may get more" in said
    near = replace(bounded, bounds=make_bounds(mean=0.15))
    assert "better search" not in write_conclusion(judge_record(near), near)
    without = replace(bounded, bounds=None)
    assert "oracle" not in write_conclusion(judge_record(without), without)


def test_every_form_shows_the_bracket(bounded: Record, tmp_path: Path) -> None:
    write_record(tmp_path, bounded)
    report = build_report(tmp_path, lambda record: {})
    page = write_html(report)
    assert "What no attack could do" in page
    assert "rebuilt 12.0 [8.0, 17.0], at most 40.0 [35.0, 46.0]" in page
    assert "at most 7,213 bits about one example" in page
    assert "| tag | 12.0 [8.0, 17.0] | 40.0 [35.0, 46.0] | 75.0 | 24.0 |" in write_markdown(report)
    assert '"bounded"' in write_json(report)


def test_records_without_bounds_have_no_section(
    make_record: Callable[..., Record], tmp_path: Path
) -> None:
    path = write_record(tmp_path, make_record())
    report = build_report(tmp_path, lambda record: {})
    assert not report.find(WhatNoAttackCouldDo).is_shown
    assert 'id="bounds"' not in write_html(report)
    assert "What no attack could do" not in write_markdown(report)
    assert read_record(path).bounds is None


def test_a_record_keeps_its_bounds_on_disk(bounded: Record, tmp_path: Path) -> None:
    assert read_record(write_record(tmp_path, bounded)).bounds == bounded.bounds


@pytest.mark.parametrize(
    ("asked", "rule", "passed"),
    [
        ("token_accuracy=0.8", "token_accuracy", True),  # guaranteed
        ("token_accuracy=0.5", "prior_dependent", False),  # at most, under the prior
        ("token_accuracy=0.3", "token_accuracy", False),
        ("bits=8000", "bits", True),
        ("bits=10", "bits", False),
        ("exact_match=0.1", "exact_match", False),  # of which the record has no bound
    ],
)
def test_the_gate_asks_for_what_is_possible(
    bounded: Record, tmp_path: Path, asked: str, rule: str, passed: bool
) -> None:
    write_record(tmp_path, bounded)
    bound = read_bound(asked, upper=True, possible=True)
    (found,) = judge(tmp_path, [bound])
    assert (found.rule, found.passed) == (rule, passed)
    (waived,) = judge(tmp_path, [bound], [read_accepted("prior_dependent=English mails")])
    assert waived.shuts is (not passed and rule != "prior_dependent")


def test_the_gate_needs_bounds_that_were_computed(
    make_record: Callable[..., Record], tmp_path: Path
) -> None:
    write_record(tmp_path, make_record())
    (found,) = judge(tmp_path, [read_bound("bits=1", upper=True, possible=True)])
    assert found.shuts
    assert "gradleak bound" in found.message


@pytest.mark.parametrize("asked", ["rouge1=0.1", "bits=-1", "bits"])
def test_a_strange_possible_bound_is_refused(asked: str) -> None:
    with pytest.raises(GradleakError, match="--max-possible"):
        read_bound(asked, upper=True, possible=True)


def test_the_gate_writes_what_is_possible_for_machines(
    bounded: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "run", bounded)
    asked = ["gate", str(tmp_path / "run"), "--max-possible", "token_accuracy=50%"]
    files = ["--junit", str(tmp_path / "gate.xml"), "--sarif", str(tmp_path / "gate.sarif")]
    assert main([*asked, *files]) == 4
    assert 'type="prior_dependent"' in (tmp_path / "gate.xml").read_text(encoding="utf-8")
    assert '"prior_dependent"' in (tmp_path / "gate.sarif").read_text(encoding="utf-8")
    assert main([*asked, *files, "--accept", "prior_dependent"]) == 0
    assert "The gate is open" in capsys.readouterr().out
