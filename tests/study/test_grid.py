"""A grid goes on after failures and interruptions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradleak.audit import run_audit
from gradleak.audit.display import Silent
from gradleak.audit.spec import AuditSpec
from gradleak.records.store import read_record
from gradleak.study import grid
from gradleak.study.cells import Cell
from gradleak.study.grid import run_cells


def cells(count: int) -> list[Cell]:
    plain = {"target": "tiny", "attacks": ["tag:steps=2"], "limit": 1, "metrics": ["rouge1", "exact_match"]}
    return [Cell({"seed": str(seed)}, AuditSpec.from_plain({**plain, "seed": seed})) for seed in range(count)]


def counting(
    monkeypatch: pytest.MonkeyPatch, fail_at: Sequence[int] = (), error: type[BaseException] = RuntimeError
) -> list[int]:
    """Notes the seeds that are run; fails at some of them."""
    real, seeds = run_audit, []

    def run(spec: AuditSpec, **rest: Any) -> Any:
        seeds.append(spec.seed)
        if spec.seed in fail_at:
            raise error("out of luck")
        return real(spec, **rest)

    monkeypatch.setattr(grid, "run_audit", run)
    return seeds


def test_finished_cells_are_skipped_and_records_bear_the_spec_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = counting(monkeypatch)
    first = run_cells(cells(1), tmp_path, "cpu", Silent())
    again = run_cells(cells(2), tmp_path, "cpu", Silent())
    assert seeds == [0, 1]
    assert [result.skipped for result in first + again] == [False, True, False]
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == sorted(cell.spec.id for cell in cells(2))


def test_a_failing_cell_leaves_its_traceback_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, fail_at=[0])
    results = run_cells(cells(2), tmp_path, "cpu", Silent())
    failure = results[0].failure
    assert failure == tmp_path / f"{cells(1)[0].spec.id}.failed.txt"
    assert "out of luck" in failure.read_text()
    assert results[1].record is not None
    monkeypatch.undo()
    run_cells(cells(1), tmp_path, "cpu", Silent())
    assert not failure.exists()


def test_an_interruption_leaves_finished_records_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, fail_at=[1], error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells(2), tmp_path, "cpu", Silent())
    (path,) = tmp_path.glob("*.json")
    assert read_record(path).spec["seed"] == 0
