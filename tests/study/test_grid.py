"""A grid goes on after failures and interruptions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradleak.audit.runner import run_audits
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Silent
from gradleak.core.errors import GradleakError
from gradleak.records.store import read_record
from gradleak.study import grid
from gradleak.study.cells import Cell
from gradleak.study.grid import run_cells


def cells(count: int) -> list[Cell]:
    plain = {
        "target": "tiny",
        "attacks": ["tag:steps=2"],
        "limit": 1,
        "metrics": ["rouge1", "exact_match"],
    }
    return [
        Cell({"seed": str(seed)}, AuditSpec.from_plain({**plain, "seed": seed}))
        for seed in range(count)
    ]


def counting(
    monkeypatch: pytest.MonkeyPatch,
    fail_at: Sequence[int] = (),
    error: type[BaseException] = RuntimeError,
) -> list[int]:
    """Notes the seeds that are run; fails at some of them."""
    seeds = []

    def run(specs: Sequence[AuditSpec], **rest: Any) -> Any:
        seeds.extend(spec.seed for spec in specs)
        if seeds[-1] in fail_at:
            raise error("out of luck")
        return run_audits(specs, **rest)

    monkeypatch.setattr(grid, "run_audits", run)
    return seeds


def test_finished_cells_are_skipped_and_records_bear_the_spec_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = counting(monkeypatch)
    first = run_cells(cells(1), tmp_path, "cpu", Silent())
    again = run_cells(cells(2), tmp_path, "cpu", Silent())
    assert seeds == [0, 1]
    assert [result.skipped for result in first + again] == [False, True, False]
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == sorted(
        cell.spec.id for cell in cells(2)
    )


def test_a_cell_is_run_again_when_the_answers_of_its_attack_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = counting(monkeypatch)
    (first,) = run_cells(cells(1), tmp_path, "cpu", Silent())
    monkeypatch.setattr(type(cells(1)[0].spec.attacks[0]), "version", 2)
    (second,) = run_cells(cells(1), tmp_path, "cpu", Silent())
    assert seeds == [0, 0] and first.record is not None and second.record is not None
    assert [
        result.record.attacks["tag"].version for result in (first, second) if result.record
    ] == [1, 2]
    assert first.record.id == second.record.id
    assert run_cells(cells(1), tmp_path, "cpu", Silent())[0].skipped


def test_a_failing_cell_leaves_its_traceback_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting(monkeypatch, fail_at=[0])
    results = run_cells(cells(2), tmp_path, "cpu", Silent())
    failure = results[0].failure
    assert failure == tmp_path / f"{cells(1)[0].spec.id}.failed.txt"
    assert "out of luck" in failure.read_text()
    assert results[1].record is not None
    monkeypatch.undo()
    run_cells(cells(1), tmp_path, "cpu", Silent())
    assert not failure.exists()


def test_a_cell_that_is_refused_says_why_and_one_that_fails_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Silent, "say", lambda self, sentence: said.append(sentence))
    for error, says in (
        (GradleakError, "Refused: out of luck"),
        (RuntimeError, f"Failed (RuntimeError); the traceback is in {tmp_path}"),
    ):
        counting(monkeypatch, fail_at=[0], error=error)
        (result,) = run_cells(cells(1), tmp_path, "cpu", Silent())
        assert result.refusal == ("out of luck" if error is GradleakError else "")
        assert said[-1].startswith(says)


def test_an_interruption_leaves_finished_records_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting(monkeypatch, fail_at=[1], error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells(2), tmp_path, "cpu", Silent())
    (path,) = tmp_path.glob("*.json")
    assert read_record(path).spec["seed"] == 0


def kin_cells(*limits: int) -> list[Cell]:
    plain = {"target": "tiny", "attacks": ["tag:steps=2"], "metrics": ["rouge1"]}
    return [
        Cell({"limit": str(limit)}, AuditSpec.from_plain({**plain, "limit": limit}))
        for limit in limits
    ]


def test_kin_run_in_one_call_and_only_those_that_are_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []

    def run(specs: Sequence[AuditSpec], **rest: Any) -> Any:
        calls.append([spec.limit for spec in specs])
        return run_audits(specs, **rest)

    monkeypatch.setattr(grid, "run_audits", run)
    run_cells([*kin_cells(1, 2), *cells(2)[1:]], tmp_path, "cpu", Silent())
    results = run_cells(kin_cells(3, 1, 2, 4), tmp_path, "cpu", Silent())
    assert calls == [[1, 2], [1], [3, 4]]
    assert [result.cell.spec.limit for result in results] == [3, 1, 2, 4]
    assert [result.skipped for result in results] == [False, True, True, False]


def test_cells_of_one_call_that_fail_are_tried_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(specs: Sequence[AuditSpec], **rest: Any) -> Any:
        if any(spec.limit == 2 for spec in specs):
            raise RuntimeError("out of luck")
        return run_audits(specs, **rest)

    monkeypatch.setattr(grid, "run_audits", run)
    results = run_cells(kin_cells(1, 2, 3), tmp_path, "cpu", Silent())
    assert [result.record is not None for result in results] == [True, False, True]
    assert results[1].failure is not None and "out of luck" in results[1].failure.read_text()
