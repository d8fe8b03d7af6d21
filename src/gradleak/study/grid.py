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
from gradleak.records.schema import Record
from gradleak.records.store import check_writable, open_key, read_record
from gradleak.study.cells import Cell


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
    finished = {cell.spec.id: record for cell in cells if (record := _finished(folder, cell)) is not None}
    if finished:
        display.say(f"{len(finished)} of {len(cells)} cells are finished already: skipped.")
    clock = Clock(len(cells) - len(finished))
    results = []
    for number, cell in enumerate(cells, start=1):
        if cell.spec.id in finished:
            results.append(CellResult(cell, finished[cell.spec.id], skipped=True))
            continue
        display.say(f"Cell {number} of {len(cells)}{clock.left()}: {cell.title}")
        results.append(_run_cell(cell, folder, device, Numbered(display, f"{number}/{len(cells)} ")))
        clock.finished += 1
    return results


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


def _run_cell(cell: Cell, folder: Path, device: str, display: Display) -> CellResult:
    failure = folder / f"{cell.spec.id}.failed.txt"
    try:
        finished = run_audit(cell.spec, device=device, out=folder, display=display)
    except Exception as error:  # one cell must not end a night's run
        failure.write_text(f"{cell.title}\n{cell.spec.to_dict()}\n\n{traceback.format_exc()}", encoding="utf-8")
        display.say(f"Failed ({type(error).__name__}); the traceback is in {failure}.")
        return CellResult(cell, None, failure)
    failure.unlink(missing_ok=True)
    return CellResult(cell, finished.record)


def _finished(folder: Path, cell: Cell) -> Record | None:
    """The record of a cell, if there is one and it is of the data as it is now."""
    path = folder / f"{cell.spec.id}.json"
    if not path.exists():
        return None
    record = read_record(path)
    return record if record.data.hash == data_hash(open_key(folder), private_examples(cell.spec)) else None
