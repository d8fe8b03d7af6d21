"""Runs the cells of a study one after the other; what is finished stays finished."""

import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gradleak.audit import run_audit
from gradleak.audit.client import private_examples
from gradleak.audit.display import Display
from gradleak.audit.runner import data_hash
from gradleak.core.attack import Progress
from gradleak.core.dataset import Dataset
from gradleak.records.schema import Record
from gradleak.records.store import check_writable, open_key, read_record
from gradleak.study.cells import Cell
from gradleak.study.claims import claim
from gradleak.study.files import write_whole
from gradleak.study.plan import FAILED


@dataclass(frozen=True)
class CellResult:
    """What became of a cell: its record, or the file that says why there is none."""

    cell: Cell
    record: Record | None
    failure: Path | None = None
    skipped: bool = False  # its record was there already


def run_cells(cells: Sequence[Cell], folder: Path, device: str, display: Display, *, retry: bool = True) -> list[CellResult]:
    """Runs the cells that have no record in the folder yet. A cell that fails leaves its traceback there and the run goes on.

    Cells that failed before are run again unless `retry` is off; cells that another run works on are left to it.
    """
    check_writable(folder)
    data = DataHashes(folder)
    results = {cell.spec.id: found for cell in cells if (found := _finished(folder, cell, data)) is not None}
    if results:
        display.say(f"{len(results)} of {len(cells)} cells are finished already: skipped.")
    if not retry:
        failed = [cell for cell in cells if cell.spec.id not in results and _failure(folder, cell).exists()]
        results |= {cell.spec.id: CellResult(cell, None, _failure(folder, cell), skipped=True) for cell in failed}
        if failed:
            display.say(f"{len(failed)} cells failed before: skipped. Add --retry-failed to try them again.")
    clock = Clock(len(cells) - len(results))
    elsewhere = []
    for number, cell in enumerate(cells, start=1):
        if cell.spec.id in results:
            continue
        with claim(folder, cell.spec.id) as ours:
            if not ours:
                elsewhere.append(cell)
                continue
            display.say(f"Cell {number} of {len(cells)}{clock.left()}: {cell.title}")
            results[cell.spec.id] = _run_cell(cell, folder, device, Numbered(display, f"{number}/{len(cells)} "), data)
        clock.finished += 1
    if elsewhere:
        display.say(f"Waiting for {len(elsewhere)} cells that another run works on.")
    for cell in elsewhere:
        with claim(folder, cell.spec.id, wait=True):
            results[cell.spec.id] = _run_cell(cell, folder, device, display, data)  # from its record, unless it was given up
    return [results[cell.spec.id] for cell in cells]


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


def _run_cell(cell: Cell, folder: Path, device: str, display: Display, data: "DataHashes") -> CellResult:
    failure = _failure(folder, cell)
    finished = _finished(folder, cell, data)  # another run may have been quicker
    if finished is not None:
        return finished
    try:
        audited = run_audit(cell.spec, device=device, out=folder, display=display)
    except Exception as error:  # one cell must not end a night's run
        write_whole(failure, f"{cell.title}\n{cell.spec.to_dict()}\n\n{traceback.format_exc()}")
        display.say(f"Failed ({type(error).__name__}); the traceback is in {failure}.")
        return CellResult(cell, None, failure)
    failure.unlink(missing_ok=True)
    return CellResult(cell, audited.record)


class DataHashes:
    """The hash of each cell's data as it is now; cells mostly share theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._known = folder, dict[tuple[Dataset, int, int], str]()

    def of(self, cell: Cell) -> str:
        spec = cell.spec
        key = (spec.data, spec.limit, spec.batch_size)
        if key not in self._known:
            self._known[key] = data_hash(open_key(self.folder), private_examples(spec))
        return self._known[key]


def _failure(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.spec.id}{FAILED}"


def _finished(folder: Path, cell: Cell, data: DataHashes) -> CellResult | None:
    """The record of a cell, if there is one and it is of the data as it is now."""
    path = folder / f"{cell.spec.id}.json"
    if not path.exists():
        return None
    record = read_record(path)
    return CellResult(cell, record, skipped=True) if record.data.hash == data.of(cell) else None
