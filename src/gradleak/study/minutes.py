"""Cells of several studies in a given time: by priority as many as fit, the last one cut, and
all that is finished kept.

The time is read from the command line, counted from the command's start and ended by an alarm.
"""

import contextlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from gradleak.audit.outcomes import Kept, begun_calls
from gradleak.audit.runner import Inputs, find_record, has_parts, name_of
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Display, Progress, Silent
from gradleak.core.errors import GradleakError
from gradleak.records.run_folder import claim
from gradleak.records.store import RECORD
from gradleak.report.numbers import write_duration
from gradleak.study.cells import Cell, Job, Share
from gradleak.study.engine import LOOK, ProcessWatch, work_together
from gradleak.study.grid import (
    CellResult,
    Grid,
    failure_file,
    groups_of,
    number_cells,
    say_skipped,
)
from gradleak.study.pace import LastOpened, Pace, Trials, learns, machine_of, read_pace, write_pace

TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
# Of the time, and in seconds: for what cannot be interrupted, the last words, and Python's own end
# (3 s on a busy machine).
RESERVE, MOST_RESERVE = 1 / 6, 5.0
# Seconds from one ring of the alarm to the next: the first may be swallowed by a destructor
AGAIN = 2.0
# Seconds that an attack is tried, as in `check`, or of the time, whichever is less
TRIAL, TRIAL_SHARE = 3.0, 0.005
ALL_TRIALS = 0.1  # of the time, as long as something that is known fits
# seconds: what learns keeps a checkpoint a minute, so that less would leave nothing behind
WORTH_LEARNING = 90.0
# Times what is foretold must be left for several cells in one call: where it is cut, all of them
# are
TOGETHER = 1.2


def read_time(words: str) -> float:
    """The seconds that `9m`, `90s` or `1h30m` stands for."""
    match = TIME.fullmatch(words.strip())
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise GradleakError(f"Cannot read --for {words!r}: write a time such as 90s, 9m or 1h30m.")
    return float(total)


class TimeIsUp(KeyboardInterrupt):
    """Ends what runs as an interruption by hand does: nothing that goes on after errors goes on
    after this."""


@contextlib.contextmanager
def ring_after(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUp` in the block when so many seconds are over. On Windows, without such
    signals, a cell is never cut."""
    if sys.platform == "win32":
        yield
        return

    def ring(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds), AGAIN)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Allowance:
    """The time there is, from the start of the command on (time.monotonic, which processes of
    one machine share)."""

    began: float
    seconds: float
    clock: Callable[[], float] = time.monotonic
    alarm: Callable[[float], AbstractContextManager[None]] = ring_after

    @property
    def left(self) -> float:
        """Seconds for cells; the reserve is not among them."""
        return self.began + self.seconds - self.reserve - self.clock()

    @property
    def reserve(self) -> float:
        return min(RESERVE * self.seconds, MOST_RESERVE)


@dataclass(frozen=True)
class SharedCall:
    """Cells of one study that may share a call; `begun`: a call with all of them was cut, and
    goes on as it was."""

    job: Job
    cells: tuple[Cell, ...]
    begun: bool

    def read_kept(self) -> Kept:
        """What is finished of a call that was cut."""
        specs = [cell.spec for cell in self.cells]
        return Kept.of(self.job.folder, name_of(specs), len(specs)) if self.begun else Kept({}, 0)


@dataclass(frozen=True)
class Waiting:
    """A cell that was not finished: how long it would take, as far as that is known, and whether
    parts of it are kept."""

    job: Job
    cell: Cell
    seconds: float | None
    begun: bool


@dataclass(frozen=True)
class TimedRun:
    """What became of all cells in the time there was."""

    ran: tuple[tuple[Job, CellResult], ...]
    failed: tuple[tuple[Job, CellResult], ...]
    waiting: tuple[Waiting, ...]
    before: int  # cells that were finished already
    failed_before: int  # and such as had failed
    seconds: float  # from the start of the command


def fill_minutes(
    shares: Sequence[Share],
    out: Path,
    devices: Sequence[str],
    workers: int,
    allowance: Allowance,
    display: Display,
    *,
    retry: bool = False,
    memory: int | None = None,
) -> TimedRun:
    """Runs cells in the order of the shares until the time is over, in one process or in several
    that share the cells out."""
    jobs = {share.job.name: share.job for share in shares}
    cells = [(share.job, cell) for share in shares for cell in share.cells]
    if retry:
        for job, cell in cells:
            failure_file(job.folder, cell).unlink(missing_ok=True)
    folders = {name: Folder(job.folder) for name, job in jobs.items()}
    before = {
        (job.name, cell.spec.id) for job, cell in cells if folders[job.name].find(cell) is not None
    }
    broken = {
        (job.name, cell.spec.id) for job, cell in cells if failure_file(job.folder, cell).exists()
    } - before
    say_skipped(display, len(before), len(broken), len(cells))
    if len(before) + len(broken) < len(cells):
        if workers > 1:
            watch = TimeWatch(allowance, [job.folder for job in jobs.values()])
            given = (tuple(shares), out, allowance)
            work_together(devices, workers, display, memory, _work, given, watch)
        else:
            Stretch(shares, out, devices[0], allowance, display, memory, folders).run()
    return _sum_up(
        cells, folders, before, broken, read_pace(out, machine_of(devices[0])), allowance
    )


def _work(
    shares: Sequence[Share], out: Path, allowance: Allowance, device: str, memory: int | None
) -> None:
    """One process of several."""
    folders = {share.job.name: Folder(share.job.folder) for share in shares}
    with contextlib.suppress(KeyboardInterrupt):
        Stretch(shares, out, device, allowance, Silent(), memory, folders).run()


class Folder:
    """A run folder, and which cells have a record of the data as it is now. A record is read
    once."""

    def __init__(self, path: Path) -> None:
        self.path, self.inputs = path, Inputs(path)
        self.records: dict[str, CellResult] = {}

    def is_over(self, cell: Cell) -> bool:
        """Whether there is nothing left to do for it: a record is there, or a traceback."""
        return failure_file(self.path, cell).exists() or self.find(cell) is not None

    def find(self, cell: Cell) -> CellResult | None:
        if cell.spec.id not in self.records:
            found = find_record(self.path, cell.spec, self.inputs)
            if found is not None:
                self.records[cell.spec.id] = CellResult(cell, found, skipped=True)
        return self.records.get(cell.spec.id)


@dataclass
class Stretch:
    """One process at work: it takes the first cells on the list that still fit, runs them, and
    looks again."""

    shares: Sequence[Share]
    out: Path
    device: str
    allowance: Allowance
    display: Display
    memory: int | None
    folders: Mapping[str, Folder]
    trials: Trials = field(init=False)
    groups: list[SharedCall] = field(init=False)
    running: "RunningCall | None" = None

    def __post_init__(self) -> None:
        pace = read_pace(self.out, machine_of(self.device))
        trial = min(TRIAL, TRIAL_SHARE * self.allowance.seconds)
        opened, most = LastOpened(self.device, self.display), ALL_TRIALS * self.allowance.seconds
        self.trials = Trials(pace, opened, trial, most, self.allowance.clock)
        self.groups = groups_in_order(self.shares)

    @property
    def pace(self) -> Pace:
        return self.trials.pace

    def run(self) -> None:
        """Runs calls until none fits any more, or the time is over."""
        try:
            with self.allowance.alarm(self.allowance.left):
                while self._run_next():
                    write_pace(self.out, machine_of(self.device), self.pace)
        except TimeIsUp:
            self._note_the_cut()
        write_pace(self.out, machine_of(self.device), self.pace)

    def _run_next(self) -> bool:
        """Runs the first call that fits. Where none does, the time that is left is free for
        further trials."""
        if self._run_first_that_fits():
            return True
        self.trials.left = self.allowance.left
        return self._run_first_that_fits()

    def _run_first_that_fits(self) -> bool:
        """Whether there was one; another run may be at work on all of them."""
        for group in list(self.groups):
            left = [cell for cell in group.cells if not self.folders[group.job.name].is_over(cell)]
            if not left:
                self.groups.remove(group)
                continue
            free = [
                cell
                for cell in (group.cells if group.begun else left)
                if _is_free(group.job.folder, cell)
            ]
            if free and self._run(group, self._that_fit(group, free)):
                return True
        return False

    def _that_fit(self, group: SharedCall, cells: Sequence[Cell]) -> list[Cell]:
        """Those of a group that can be finished in one call in the time that is left.

        Before any cell with these attacks has come to its end, what is foretold may be far off:
        then one cell is a call.
        """
        spec, left = cells[0].spec, self.allowance.left
        total = 0.0 if self.trials.opened.holds(spec) else self.pace.seconds_to_open(spec)
        if learns(spec):  # it runs alone, and keeps what it has learnt where it is cut
            return (
                list(cells)
                if total + max(WORTH_LEARNING, self.pace.seconds(spec) or 0.0) <= left
                else []
            )
        if group.begun:
            return list(cells) if self._is_worth_going_on(group, total) else []
        chosen: list[Cell] = []
        for cell in cells:
            if chosen and not self.pace.has_measured(cell.spec):
                break
            self.trials.make_sure(cell.spec)
            seconds = self.pace.seconds(cell.spec)
            margin = TOGETHER if chosen else 1.0
            if seconds is not None and margin * (total + seconds) <= self.allowance.left:
                total += seconds
                chosen.append(cell)
        return chosen

    def _is_worth_going_on(self, group: SharedCall, opening: float) -> bool:
        """Whether a call that was cut can be finished now, or at least another part of it, with
        room."""
        specs, kept = [cell.spec for cell in group.cells], group.read_kept()
        for spec in specs:
            self.trials.make_sure(spec)
        each = [self.pace.seconds(spec, kept.done) for spec in specs]
        if None in each:
            return False
        part = TOGETHER * self.pace.seconds_of_part(specs, kept.part)
        return opening + min(sum(filter(None, each)), part) <= self.allowance.left

    def _run(self, group: SharedCall, cells: Sequence[Cell]) -> bool:
        """Runs cells in one call, but for those that another run works on or has done; says
        whether any was left to run."""
        job, folder = group.job, self.folders[group.job.name]
        with contextlib.ExitStack() as held:
            free = [cell for cell in cells if held.enter_context(claim(job.folder, cell.spec.id))]
            ours = free if group.begun else [cell for cell in free if not folder.is_over(cell)]
            if not ours or (group.begun and len(ours) < len(group.cells)):
                return False
            specs = [cell.spec for cell in ours]
            count = "1 cell" if len(ours) == 1 else f"{len(ours)} cells"
            self.display.say(
                f"{job.name}: {count}, {self._foretold(group, ours)};"
                f" {write_duration(self.allowance.left)} left."
            )
            opening = self.trials.opening
            self.running = RunningCall(job.folder, specs, self.allowance.clock())
            grid = Grid(
                job.folder,
                self.display,
                number_cells(job.cells),
                folder.inputs,
                self.device,
                self.memory,
                self.trials.open,
            )
            results = grid.run(ours, again=group.begun)
            took = self.allowance.clock() - self.running.began - (self.trials.opening - opening)
            self.running = None
            records = [
                result.record
                for result in results
                if result.record is not None and not result.skipped
            ]
            if len(records) == len(ours) and not group.begun and not learns(specs[0]):
                by_id = {record.id: record for record in records}
                self.pace.learn(specs, [by_id[spec.id] for spec in specs], took)
            elif any(result.failure for result in results):
                # Whatever is wrong, the next call begins with a fresh one
                self.trials.opened.let_go()
        return True

    def _foretold(self, group: SharedCall, cells: Sequence[Cell]) -> str:
        done = group.read_kept().done
        each = [self.pace.seconds(cell.spec, done) for cell in cells]
        return (
            f"about {write_duration(sum(filter(None, each)))}"
            if None not in each
            else "no telling how long"
        )

    def _note_the_cut(self) -> None:
        """The call that was cut takes longer than it ran; one that has kept what it learnt goes
        on from there next time."""
        call = self.running
        if call is not None and not (learns(call.specs[0]) and call.has_learnt()):
            done, part = call.count_finished(), call.read_kept().part
            self.pace.learn_of_cut(call.specs, self.allowance.clock() - call.began, done, part)


class RunningCall:
    """A call that runs, and what was there of it before."""

    def __init__(self, folder: Path, specs: Sequence[AuditSpec], began: float) -> None:
        self.folder, self.specs, self.began = folder, specs, began
        self._learnt, self._finished = find_fits(folder), 0
        self._finished = self.count_finished()

    def has_learnt(self) -> bool:
        """Whether it has kept anything of what it learns."""
        return find_fits(self.folder) != self._learnt

    def read_kept(self) -> Kept:
        return Kept.of(self.folder, name_of(self.specs), len(self.specs))

    def count_finished(self) -> int:
        """How often it came to the end of an attack on a batch since it began."""
        batches = [spec.limit * spec.draws for spec in self.specs]
        done = sum(min(count, most) for count in self.read_kept().done.values() for most in batches)
        return round(done) - self._finished


def groups_in_order(shares: Sequence[Share]) -> list[SharedCall]:
    """Cells that may share a call, within each share; a call that was cut stands where the first
    of its cells does."""
    groups: list[SharedCall] = []
    taken: set[tuple[str, str]] = set()
    for share in shares:
        job = share.job
        free = {cell.spec.id: cell for cell in job.cells if (job.name, cell.spec.id) not in taken}
        mine = [cell for cell in share.cells if cell.spec.id in free]
        ids = {cell.spec.id for cell in mine}
        calls = [
            call
            for call in begun_calls(job.folder)
            if ids.intersection(call) and free.keys() >= set(call)
        ]
        # From further down the list
        mine += [free[one] for call in calls for one in call if one not in ids]
        for group in groups_of(mine, calls):
            groups.append(
                SharedCall(job, tuple(group), has_parts(job.folder, [cell.spec for cell in group]))
            )
            taken |= {(job.name, cell.spec.id) for cell in group}
    return groups


def _is_free(folder: Path, cell: Cell) -> bool:
    """Whether no other run works on a cell at the moment."""
    with claim(folder, cell.spec.id) as ours:
        return ours


def find_fits(folder: Path) -> frozenset[tuple[str, int]]:
    """The fits in a folder, finished or not, each with when it was written."""
    found = set()
    for path in folder.glob("fits/*"):
        with contextlib.suppress(OSError):  # a checkpoint that another run has just removed
            found.add((path.name, path.stat().st_mtime_ns))
    return frozenset(found)


class TimeWatch(ProcessWatch):
    """Counts seconds, and the records in the folders that processes work on; over when half of the
    reserve is gone too."""

    counted, rest = "seconds", "waits for the next run"

    def __init__(self, allowance: Allowance, folders: Sequence[Path]) -> None:
        self.allowance, self.folders = allowance, folders
        self.records = self._count_records()
        self.progress = Progress(total=round(allowance.seconds))
        self.pause = min(LOOK, allowance.reserve / 10)

    def is_over(self) -> bool:
        return self.allowance.left <= -self.allowance.reserve / 2

    def look(self) -> str | None:
        spent = round(self.allowance.clock() - self.allowance.began)
        self.progress.done = min(self.progress.total, spent)
        before, self.records = self.records, self._count_records()
        left = write_duration(max(0.0, self.allowance.left))
        return f"{self.records} records are there; {left} left." if self.records > before else None

    def _count_records(self) -> int:
        return sum(1 for folder in self.folders for _ in folder.glob(RECORD))


def _sum_up(
    cells: Sequence[tuple[Job, Cell]],
    folders: Mapping[str, Folder],
    before: set[tuple[str, str]],
    broken: set[tuple[str, str]],
    pace: Pace,
    allowance: Allowance,
) -> TimedRun:
    """Read off the folders, whoever worked there."""
    ran, failed = list[tuple[Job, CellResult]](), list[tuple[Job, CellResult]]()
    waiting: list[Waiting] = []
    told = before | broken
    begun = {
        name: {one for call in begun_calls(folder.path) for one in call}
        for name, folder in folders.items()
    }
    for job, cell in cells:
        if (job.name, cell.spec.id) in told:
            continue
        failure = failure_file(job.folder, cell)
        record = folders[job.name].find(cell)
        if record is not None:
            ran.append((job, record))
        elif failure.exists():
            failed.append((job, CellResult(cell, None, failure)))
        else:
            is_begun = cell.spec.id in begun[job.name]
            waiting.append(Waiting(job, cell, pace.seconds(cell.spec), is_begun))
    spent = allowance.clock() - allowance.began
    return TimedRun(tuple(ran), tuple(failed), tuple(waiting), len(before), len(broken), spent)
