"""The gate opens only where little leak is shown, by enough examples and by attacks that can be
believed."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gradleak.cli import main
from gradleak.cli.gate import write_junit, write_sarif
from gradleak.core.errors import GradleakError
from gradleak.records.flags import RaisedFlag
from gradleak.records.schema import (
    AttackRecord,
    DataRecord,
    ExampleRecord,
    Record,
    Score,
    TargetRecord,
)
from gradleak.records.store import write_record
from gradleak.study.gate_checks import (
    Accepted,
    Bound,
    GateCheck,
    examples_needed,
    judge,
    read_bound,
)

EXACT = [read_bound("exact_match=0.05", upper=True)]
Captured = pytest.CaptureFixture[str]


def write(
    folder: Path, leaking: int, n: int, flags: tuple[str, ...] = (), attack: str = "tag"
) -> Path:
    """A record of n examples, the first of which are rebuilt whole."""
    score = Score(leaking / n, 0.0, 1.0, 0.0, 0.0, 0.0, "fraction", "higher", n)
    distance = Score(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, "fraction", "lower", n)
    values = [
        {"exact_match": float(place < leaking), "secret_edit_distance": 1.0} for place in range(n)
    ]
    examples = tuple(
        ExampleRecord(place, 0, None, None, False, one, one) for place, one in enumerate(values)
    )
    raised = tuple(RaisedFlag(name, "Why.") for name in flags)
    scores = {"exact_match": score, "secret_edit_distance": distance}
    record = Record(
        created="2026-01-02T03:04:05+00:00",
        spec={"attacks": [{"name": attack}], "n": n},
        versions={},
        machine={},
        data=DataRecord("ab", n, n),
        target=TargetRecord("tiny", "ff", 1, 1),
        secrets=(),
        attacks={attack: AttackRecord({"name": attack}, scores, examples, (), flags=raised)},
        worst_case=scores,
    )
    return write_record(folder, record)


def test_none_of_59_is_what_a_bound_of_five_percent_needs(tmp_path: Path) -> None:
    assert [examples_needed(limit) for limit in (0.05, 0.01, 0.5)] == [59, 299, 5]
    (passed,) = judge(write(tmp_path / "59", 0, 59), EXACT)
    (failed,) = judge(write(tmp_path / "58", 0, 58), EXACT)
    assert passed.passed
    assert not failed.passed
    assert "needs 59 examples, none of them leaking" in failed.message


def test_a_check_is_told_in_percent_as_tables_are(tmp_path: Path) -> None:
    (check,) = judge(write(tmp_path, 1, 59), [read_bound("exact_match=0.5%", upper=True)])
    assert check.title == "exact_match ≤ 0.5 %"
    assert check.message.startswith("exact_match is 1.69 % over 59 examples and may be as high as ")
    assert "(one-sided, 95 %)" in check.message
    assert Bound("secret_edit_distance", 0.8, upper=False).write("characters") == (
        "secret_edit_distance ≥ 0.8"
    )


def test_one_leak_in_59_passes_the_bound_and_shuts_the_gate(tmp_path: Path) -> None:
    (finding,) = judge(write(tmp_path, 1, 59), EXACT)
    assert not finding.passed


@pytest.mark.parametrize(
    "flag", ["search_failed", "not_adaptive", "dead_gradient", "no_objective", "few_examples"]
)
def test_a_flag_that_makes_a_low_score_unreliable_shuts_the_gate_unless_accepted(
    tmp_path: Path, flag: str
) -> None:
    path = write(tmp_path, 0, 100, (flag,))
    assert [(finding.rule, finding.passed) for finding in judge(path, EXACT)] == [
        ("exact_match", True),
        (flag, False),
    ]
    assert not any(finding.shuts for finding in judge(path, EXACT, [Accepted(flag)]))


@pytest.mark.parametrize("flag", ["near_chance", "generous_knowledge", "one_draw"])
def test_other_flags_do_not(tmp_path: Path, flag: str) -> None:
    assert all(finding.passed for finding in judge(write(tmp_path, 0, 100, (flag,)), EXACT))


def test_the_blind_attack_alone_opens_no_gate(tmp_path: Path) -> None:
    assert judge(write(tmp_path, 0, 100, attack="blind"), EXACT)[-1].rule == "only_blind"


@pytest.mark.parametrize(
    ("bound", "upper", "message"),
    [
        ("exact_match", True, "write --max exact_match=0.05"),
        ("exact_mtch=0.1", True, "did you mean 'exact_match'"),
        ("secret_edit_distance=0.5", True, "use --min secret_edit_distance=0.5"),
    ],
)
def test_bad_bounds_are_refused_with_the_fix(
    tmp_path: Path, bound: str, upper: bool, message: str
) -> None:
    path = write(tmp_path, 0, 100)
    with pytest.raises(GradleakError, match=message):
        judge(path, [read_bound(bound, upper=upper)])


def test_the_command_has_an_exit_code_of_its_own_and_writes_both_files(
    tmp_path: Path, capsys: Captured
) -> None:
    run, xml, plain = tmp_path / "run", tmp_path / "gate.xml", tmp_path / "gate.sarif"
    write(run, 3, 100)
    assert (
        main(
            [
                "gate",
                str(run),
                "--max",
                "exact_match=0.05",
                "--junit",
                str(xml),
                "--sarif",
                str(plain),
            ]
        )
        == 4
    )
    out, err = capsys.readouterr()
    assert "FAIL" in out and "The gate is shut" in err
    suite = ET.fromstring(xml.read_text(encoding="utf-8")).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    (result,) = json.loads(plain.read_text(encoding="utf-8"))["runs"][0]["results"]
    assert result["ruleId"] == "exact_match"
    (record,) = run.glob("*.json")
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == record.as_uri()
    assert main(["gate", str(run), "--max", "exact_match=0.5"]) == 0
    assert main(["gate", str(run)]) == 2


def test_files_of_an_open_gate_hold_no_failure(tmp_path: Path) -> None:
    findings = judge(write(tmp_path, 0, 100), EXACT)
    assert "<failure" not in write_junit(findings)
    assert json.loads(write_sarif(findings, "0"))["runs"][0]["results"] == []


def test_junit_of_a_message_with_colours_can_be_read() -> None:
    finding = GateCheck(
        "the run", (), "failed", "no failed cell", False, "It failed: \x1b[31mboom\x00 & <more>."
    )
    (failure,) = ET.fromstring(write_junit([finding])).iter("failure")
    assert failure.get("message") == "It failed: ?[31mboom? & <more>."
