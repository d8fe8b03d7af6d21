"""Runs the cells of a study, those of one group key in one call; what is finished stays
finished."""

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gradleak.audit.answered import Inputs, finished
from gradleak.audit.display import Display
from gradleak.audit.outcomes import begun_calls
from gradleak.audit.runner import Finished, group_key, has_parts, run_audits
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Progress
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.prior import AnyPrior
from gradleak.core.target import Target
from gradleak.records.errors import DiskFull, full_disk_explained
from gradleak.records.files import write_whole
from gradleak.records.schema import Record
from gradleak.records.store import check_writable
from gradleak.study.cells import Cell
from gradleak.study.claims import claim
from gradleak.study.plan import FAILED

MOST = 8  # cells in one call: records are written when it ends
Opened = Callable[[AuditSpec], tuple[Target, AnyPrior]]


@dataclass(frozen=True)
class CellResult:
    """What became of a cell: its record, or the file that says why there is none."""

    cell: Cell
    record: Record | None
    failure: Path | None = None
    skipped: bool = False  # its record was there already
    refusal: str = ""  # why the attack cannot be made on it, where that is all that is wrong


def by_group_key(cell: Cell) -> object:
    """What cells of one call have in common, unless someone has a reason to part them further."""
    return group_key(cell.spec)


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    device: str,
    display: Display,
    *,
    retry: bool = True,
    memory: int | None = None,
    opened: Opened | None = None,
    alike: Callable[[Cell], object] = by_group_key,
) -> list[CellResult]:
    """Runs the cells that have no record in the folder yet. A cell that fails leaves its traceback
    there and the run goes on.

    Cells that failed before are run again unless `retry` is off; cells that another run works on
    are left to it.
    """
    check_writable(folder)
    inputs = Inputs(folder)
    results = {
        cell.spec.id: found
        for cell in cells
        if (found := _finished(folder, cell, inputs)) is not None
    }
    if results:
        display.say(f"{len(results)} of {len(cells)} cells are finished already: skipped.")
    if not retry:
        failed = [
            cell
            for cell in cells
            if cell.spec.id not in results and failure_file(folder, cell).exists()
        ]
        results |= {
            cell.spec.id: CellResult(cell, None, failure_file(folder, cell), skipped=True)
            for cell in failed
        }
        if failed:
            display.say(
                f"{len(failed)} cells failed before: skipped. Add --retry-failed to try them again."
            )
    grid = Grid(
        folder,
        device,
        display,
        inputs,
        {cell.spec.id: number for number, cell in enumerate(cells, start=1)},
        memory,
        opened,
    )
    clock = Clock(len(cells) - len(results))
    elsewhere: list[Cell] = []
    for group in groups_of(cells, begun_calls(folder), alike):
        left = [cell for cell in group if cell.spec.id not in results]
        # A run that was cut while it wrote this group's records: the same call again, from its
        # finished parts.
        cut = bool(left) and has_parts(folder, [cell.spec for cell in group])
        with contextlib.ExitStack() as held:
            ours = [
                cell
                for cell in (group if cut else left)
                if held.enter_context(claim(folder, cell.spec.id))
            ]
            results |= {
                result.cell.spec.id: result for result in grid.run(ours, clock.left(), again=cut)
            }
        elsewhere += [cell for cell in left if cell.spec.id not in results]
        clock.finished += len(ours)
    if elsewhere:
        display.say(f"Waiting for {len(elsewhere)} cells that another run works on.")
    for cell in elsewhere:
        with claim(folder, cell.spec.id, wait=True):
            (results[cell.spec.id],) = grid.run([cell])  # from its record, unless it was given up
    return [results[cell.spec.id] for cell in cells]


def groups_of(
    cells: Sequence[Cell],
    begun: Sequence[Sequence[str]] = (),
    alike: Callable[[Cell], object] = by_group_key,
) -> list[list[Cell]]:
    """Cells that one call attacks together, by the study alone, so that where a run was cut changes
    nothing.

    Calls that were cut and left finished parts (`begun`, by the ids of their cells) are made again
    as they were: a run that had so many minutes may have made smaller ones.
    """
    by_id = {cell.spec.id: cell for cell in cells}
    calls: dict[str, tuple[str, ...]] = {}  # by cell
    for call in map(tuple, begun):
        if all(one in by_id and one not in calls for one in call):
            calls |= dict.fromkeys(call, call)
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        if cell.spec.id in calls:
            # Their order names the parts
            groups[calls[cell.spec.id]] = [by_id[one] for one in calls[cell.spec.id]]
        else:
            groups.setdefault(alike(cell), []).append(cell)
    return [
        group[start : start + MOST]
        for group in groups.values()
        for start in range(0, len(group), MOST)
    ]


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
        return (
            f" (about {seconds / 60:.0f} min left)"
            if seconds >= 60
            else f" (about {seconds:.0f} s left)"
        )


@dataclass(frozen=True)
class Grid:
    """Where cells are run, and what they are called."""

    folder: Path
    device: str
    display: Display
    inputs: Inputs
    numbers: Mapping[str, int]  # of cells, by their id
    memory: int | None = None  # bytes the process may hold
    opened: Opened | None = None  # by whoever keeps them from call to call

    def run(self, cells: Sequence[Cell], left: str = "", again: bool = False) -> list[CellResult]:
        """Runs cells of one group key in one call: those that another run has not finished by
        now, or `again` all of them."""
        found = (
            {}
            if again
            else {cell.spec.id: _finished(self.folder, cell, self.inputs) for cell in cells}
        )
        done = [result for result in found.values() if result is not None]
        waiting = [cell for cell in cells if found.get(cell.spec.id) is None]
        for cell in waiting:
            self.display.say(
                f"Cell {self.numbers[cell.spec.id]} of {len(self.numbers)}{left}: {cell.title}"
            )
        return [*done, *(self._run(waiting) if waiting else ())]

    def _run(self, cells: Sequence[Cell]) -> list[CellResult]:
        """In one call; where that fails, one by one, so that the one at fault fails alone."""
        number, all_of = self.numbers[cells[0].spec.id], len(self.numbers)
        label = f"{number}/{all_of} " if len(cells) == 1 else f"{len(cells)} cells of {all_of}, "
        display = Numbered(self.display, label)
        try:
            specs = [cell.spec for cell in cells]
            target, prior = (None, None) if self.opened is None else self.opened(specs[0])
            found = run_audits(
                specs,
                device=self.device,
                out=self.folder,
                display=display,
                target=target,
                prior=prior,
                memory=self.memory,
            )
        except DiskFull:
            raise  # whatever is run next cannot be written down either
        except Exception as error:  # one cell must not end a night's run
            if len(cells) == 1:
                return [self._failed(cells[0], error)]
            self.display.say(
                f"{len(cells)} cells failed together ({type(error).__name__}): trying them one by"
                " one."
            )
            return [result for cell in cells for result in self._run([cell])]
        return [self._ended(cell, one) for cell, one in zip(cells, found, strict=True)]

    def _ended(self, cell: Cell, found: Finished | GradleakError) -> CellResult:
        if isinstance(found, GradleakError):
            return self._failed(cell, found)
        failure_file(self.folder, cell).unlink(missing_ok=True)
        return CellResult(cell, found.record)

    def _failed(self, cell: Cell, error: Exception) -> CellResult:
        failure = failure_file(self.folder, cell)
        with full_disk_explained(f"write {failure}"):
            write_whole(
                failure,
                f"{cell.title}\n{cell.spec.to_dict()}\n\n{''.join(traceback.format_exception(error))}",
            )
        self.display.say(f"Failed ({type(error).__name__}); the traceback is in {failure}.")
        refused = isinstance(error, GradleakError) and not isinstance(error, RunFailed)
        return CellResult(cell, None, failure, refusal=str(error) if refused else "")


def failure_file(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.spec.id}{FAILED}"


def _finished(folder: Path, cell: Cell, inputs: Inputs) -> CellResult | None:
    record = finished(folder, cell.spec, inputs)
    return None if record is None else CellResult(cell, record, skipped=True)
