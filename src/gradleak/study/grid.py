"""Runs the cells of a study, those of one group key in one call; what is finished stays
finished.

This is the one way in which a cell is run, in this process, in several or on a cluster: it is asked
whether it is answered already, claimed, audited beside others of its kind, alone where that fails,
and leaves a record or a file that says why there is none.
"""

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gradleak.audit.outcomes import begun_calls
from gradleak.audit.ready import Opened
from gradleak.audit.runner import (
    Finished,
    Inputs,
    find_record,
    group_key,
    has_parts,
    run_audits,
)
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Display, Progress
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.records.files import DiskFull, full_disk_explained, write_whole
from gradleak.records.plain import to_plain
from gradleak.records.run_folder import FAILED_SUFFIX, claim
from gradleak.records.schema import AttackRecord, Record
from gradleak.records.store import check_writable
from gradleak.study.cells import Cell

MOST = 8  # cells in one call: records are written when it ends
Opening = Callable[[AuditSpec], Opened]


@dataclass(frozen=True)
class CellResult:
    """What became of a cell: its record, or the file that says why there is none."""

    cell: Cell
    record: Record | None
    failure: Path | None = None
    skipped: bool = False  # its record was there already
    refusal: str = ""  # why the attack cannot be made on it, where that is all that is wrong


@dataclass(frozen=True)
class Failure:
    """Why an audit has no record, in words, so that it can come from another process."""

    name: str  # of the error
    traceback: str
    refusal: str = ""  # its sentence, where the attack cannot be made and nothing else is wrong

    @staticmethod
    def of(error: Exception) -> "Failure":
        """Describes an error that ended an audit."""
        refused = isinstance(error, GradleakError) and not isinstance(error, RunFailed)
        told = "".join(traceback.format_exception(error))
        return Failure(type(error).__name__, told, str(error) if refused else "")


Answer = Record | Failure


def audit_in_one_call(
    specs: Sequence[AuditSpec],
    run: Callable[[Sequence[AuditSpec]], list[Finished | GradleakError]],
    say: Callable[[str], None] = lambda sentence: None,
) -> Iterator[Answer]:
    """Audits settings of one group key in one call and yields what became of each.

    Where that fails, they are audited one by one, so that the one at fault fails alone.
    """
    try:
        found = run(specs) if specs else []
    except DiskFull:
        raise  # whatever is run next cannot be written down either
    except Exception as error:  # one cell must not end a night's run
        if len(specs) == 1:
            yield Failure.of(error)
            return
        why = "" if isinstance(error, GradleakError) else f" ({type(error).__name__})"
        say(f"{len(specs)} cells cannot be attacked together{why}: trying them one by one.")
        for spec in specs:
            yield from audit_in_one_call([spec], run)
        return
    for one in found:
        yield Failure.of(one) if isinstance(one, GradleakError) else one.record


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
    opening: Opening | None = None,
    alike: Callable[[Cell], object] = by_group_key,
) -> list[CellResult]:
    """Runs the cells that have no record in the folder yet. A cell that fails leaves its traceback
    there and the run goes on.

    Cells that failed before are run again unless `retry` is off; cells that another run works on
    are left to it.
    """
    check_writable(folder)
    grid = Grid(folder, display, number_cells(cells), Inputs(folder), device, memory, opening)
    results = grid.find_answers(cells, retry=retry)
    failed = sum(result.record is None for result in results.values())
    say_skipped(display, len(results) - failed, failed, len(cells))
    clock = Clock(len(cells) - len(results))
    elsewhere: list[Cell] = []
    for group in groups_of(cells, begun_calls(folder), alike):
        left = [cell for cell in group if cell.spec.id not in results]
        # A run that was cut while it wrote this group's records: the same call again, from its
        # finished parts.
        cut = bool(left) and has_parts(folder, [cell.spec for cell in group])
        with grid.hold(group if cut else left) as ours:
            for result in grid.run(ours, clock.describe_rest(), again=cut):
                results[result.cell.spec.id] = result
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

    def describe_rest(self) -> str:
        """Returns the time that is left, in brackets; nothing as long as no cell has ended."""
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
    """Where cells are run, what they are called, and what is left of each."""

    folder: Path
    display: Display
    numbers: Mapping[str, int]  # of cells, by their id
    inputs: Inputs
    device: str = "cpu"
    memory: int | None = None  # bytes the process may hold
    opening: Opening | None = None  # by whoever keeps what is opened from call to call

    def find_answers(self, cells: Sequence[Cell], *, retry: bool) -> dict[str, CellResult]:
        """Returns what there is of cells by now, by their ids: records, and failures unless they
        are to be tried again."""
        found: dict[str, CellResult] = {}
        for cell in cells:
            record = find_record(self.folder, cell.spec, self.inputs)
            failure = failure_file(self.folder, cell)
            if record is not None:
                found[cell.spec.id] = CellResult(cell, record, skipped=True)
            elif not retry and failure.exists():
                found[cell.spec.id] = CellResult(cell, None, failure, skipped=True)
        return found

    @contextlib.contextmanager
    def hold(self, cells: Sequence[Cell]) -> Iterator[list[Cell]]:
        """Claims cells until the block ends; gives those that no other run works on."""
        with contextlib.ExitStack() as held:
            yield [cell for cell in cells if held.enter_context(claim(self.folder, cell.spec.id))]

    def run(self, cells: Sequence[Cell], left: str = "", again: bool = False) -> list[CellResult]:
        """Runs cells of one group key in one call: those that another run has not finished by
        now, or `again` all of them."""
        found = {} if again else self.find_answers(cells, retry=True)
        waiting = [cell for cell in cells if cell.spec.id not in found]
        for cell in waiting:
            self.display.say(
                f"Cell {self.numbers[cell.spec.id]} of {len(self.numbers)}{left}: {cell.title}"
            )
        answers = audit_in_one_call([cell.spec for cell in waiting], self._audit, self.display.say)
        return [*found.values(), *map(self.keep, waiting, answers)]

    def _audit(self, specs: Sequence[AuditSpec]) -> list[Finished | GradleakError]:
        number, all_of = self.numbers[specs[0].id], len(self.numbers)
        label = f"{number}/{all_of} " if len(specs) == 1 else f"{len(specs)} cells of {all_of}, "
        return run_audits(
            specs,
            device=self.device,
            out=self.folder,
            display=Numbered(self.display, label),
            opened=None if self.opening is None else self.opening(specs[0]),
            memory=self.memory,
        )

    def keep(self, cell: Cell, answer: Answer) -> CellResult:
        """Returns what became of a cell, and keeps beside its folder's records why there is
        none."""
        path = failure_file(self.folder, cell)
        if isinstance(answer, Record):
            path.unlink(missing_ok=True)
            return CellResult(cell, answer)
        with full_disk_explained(f"write {path}"):
            write_whole(path, f"{cell.title}\n{cell.spec.to_dict()}\n\n{answer.traceback}")
        self.display.say(
            f"Refused: {answer.refusal}"
            if answer.refusal
            else f"Failed ({answer.name}); the traceback is in {path}."
        )
        return CellResult(cell, None, path, refusal=answer.refusal)


def number_cells(cells: Sequence[Cell]) -> dict[str, int]:
    """Returns the place of each cell among all, from 1, by its id."""
    return {cell.spec.id: number for number, cell in enumerate(cells, start=1)}


def say_skipped(display: Display, finished: int, failed: int, cells: int) -> None:
    """Says how many of so many cells need not be run, since they are finished or have failed."""
    if finished:
        display.say(f"{finished} of {cells} cells are finished already: skipped.")
    if failed:
        display.say(f"{failed} cells failed before: skipped. Add --retry-failed to try them again.")


def failure_file(folder: Path, cell: Cell) -> Path:
    """Where the traceback of a cell lies if it failed."""
    return folder / f"{cell.spec.id}{FAILED_SUFFIX}"


def only_attack(record: Record) -> AttackRecord:
    """The attack of a cell that has one."""
    (attack,) = record.attacks.values()
    return attack


def write_result(path: Path, schema: str, found: object, **more: object) -> None:
    """Writes what was made of a grid's records as JSON, whole or not at all."""
    plain = {"schema": schema, **more, **to_plain(found)}
    write_whole(path, json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
