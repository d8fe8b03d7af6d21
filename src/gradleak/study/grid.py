"""Runs the cells of a study, kin in one call; what is finished stays finished."""

import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gradleak.audit.client import private_examples
from gradleak.audit.display import Display
from gradleak.audit.runner import has_parts, kin, run_audits
from gradleak.audit.spec import AuditSpec
from gradleak.audit.writing import data_hash
from gradleak.core.attack import Progress
from gradleak.core.errors import GradleakError
from gradleak.records.schema import Record
from gradleak.records.store import check_writable, open_key, read_record
from gradleak.study.cells import Cell

MOST = 16  # cells in one call: records are written when it ends


@dataclass(frozen=True)
class CellResult:
    """What became of a cell: its record, or the file that says why there is none."""

    cell: Cell
    record: Record | None
    failure: Path | None = None
    skipped: bool = False  # its record was there already


def run_cells(cells: Sequence[Cell], folder: Path, device: str, display: Display) -> list[CellResult]:
    """Runs the cells that have no record in the folder yet. A cell that fails leaves its traceback there and the run goes on."""
    check_writable(folder)
    numbers = {cell.spec.id: number for number, cell in enumerate(cells, start=1)}
    there = {cell.spec.id: record for cell in cells if (record := finished(folder, cell.spec)) is not None}
    if there:
        display.say(f"{len(there)} of {len(cells)} cells are finished already: skipped.")
    results = {name: CellResult(cells[numbers[name] - 1], record, skipped=True) for name, record in there.items()}
    clock = Clock(len(cells) - len(there))
    for group in groups_of(cells):
        left = [cell for cell in group if cell.spec.id not in there]
        if left and has_parts(folder, [cell.spec for cell in group]):
            left = group  # the run was cut while this group was written: the same call again, from its finished parts
        if not left:
            continue
        for cell in left:
            display.say(f"Cell {numbers[cell.spec.id]} of {len(cells)}{clock.left()}: {cell.title}")
        label = f"{numbers[left[0].spec.id]}/{len(cells)} " if len(left) == 1 else f"{len(left)} cells of {len(cells)}, "
        results |= {result.cell.spec.id: result for result in _run_group(left, folder, device, Numbered(display, label))}
        clock.finished += len(left)
    return [results[cell.spec.id] for cell in cells]


def groups_of(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that one call attacks together, by the study alone, so that where a run was cut changes nothing."""
    kins: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        kins.setdefault(kin(cell.spec), []).append(cell)
    return [group[start : start + MOST] for group in kins.values() for start in range(0, len(group), MOST)]


@dataclass(frozen=True)
class Numbered:
    """Puts the cell's number before the titles of what is watched."""

    inner: Display
    prefix: str

    def say(self, sentence: str) -> None:
        self.inner.say(sentence)

    def watch(self, title: str, progress: Progress) -> AbstractContextManager[None]:
        return self.inner.watch(self.prefix + title, progress)


class Clock:
    """Tells how long the cells that wait will take, from those that ran."""

    def __init__(self, cells: int) -> None:
        self.cells, self.finished, self.began = cells, 0, time.monotonic()

    def left(self) -> str:
        if not self.finished:
            return ""
        seconds = (time.monotonic() - self.began) / self.finished * (self.cells - self.finished)
        return f" (about {seconds / 60:.0f} min left)" if seconds >= 60 else f" (about {seconds:.0f} s left)"


def _run_group(cells: Sequence[Cell], folder: Path, device: str, display: Display) -> list[CellResult]:
    """Runs cells in one call; where that fails, one by one, so that the one at fault fails alone."""
    try:
        found = run_audits([cell.spec for cell in cells], device=device, out=folder, display=display)
    except Exception as error:  # one cell must not end a night's run
        if len(cells) == 1:
            return [_failed(cells[0], folder, error, display)]
        display.say(f"{len(cells)} cells failed together ({type(error).__name__}): trying them one by one.")
        return [result for cell in cells for result in _run_group([cell], folder, device, display)]
    results = []
    for cell, one in zip(cells, found, strict=True):
        if isinstance(one, GradleakError):
            results.append(_failed(cell, folder, one, display))
            continue
        _failure_file(cell, folder).unlink(missing_ok=True)
        results.append(CellResult(cell, one.record))
    return results


def _failed(cell: Cell, folder: Path, error: Exception, display: Display) -> CellResult:
    failure = _failure_file(cell, folder)
    told = "".join(traceback.format_exception(error))
    failure.write_text(f"{cell.title}\n{cell.spec.to_dict()}\n\n{told}", encoding="utf-8")
    display.say(f"Failed ({type(error).__name__}); the traceback is in {failure}.")
    return CellResult(cell, None, failure)


def _failure_file(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.spec.id}.failed.txt"


def finished(folder: Path, spec: AuditSpec) -> Record | None:
    """The record of an audit, if there is one and it is of the data as it is now."""
    path = folder / f"{spec.id}.json"
    if not path.exists():
        return None
    record = read_record(path)
    return record if record.data.hash == data_hash(open_key(folder), private_examples(spec)) else None
