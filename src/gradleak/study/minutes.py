"""Cells of several studies in a given time: by priority as many as fit, the last one cut, and
all that is finished kept."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from gradleak.audit.answered import Inputs, finished
from gradleak.audit.display import Display, Silent
from gradleak.audit.outcomes import Kept, begun_calls
from gradleak.audit.runner import has_parts, name_of
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Progress
from gradleak.records.summary import RECORD
from gradleak.report.numbers import write_duration
from gradleak.study.allowance import Allowance, TimeIsUp
from gradleak.study.cells import Cell
from gradleak.study.claims import claim
from gradleak.study.engine import LOOK, work_together
from gradleak.study.grid import CellResult, Grid, failure_file, groups_of
from gradleak.study.pace import Opened, Pace, Trials, learns, machine_of, read_pace, write_pace
from gradleak.study.priority import Job, Share

# Seconds that an attack is tried, as in `check`, or of the time, whichever is less
TRIAL, TRIAL_SHARE = 3.0, 0.005
ALL_TRIALS = 0.1  # of the time, as long as something that is known fits
# seconds: what learns keeps a checkpoint a minute, so that less would leave nothing behind
WORTH_LEARNING = 90.0
# Times what is foretold must be left for several cells in one call: where it is cut, all of them
# are
TOGETHER = 1.2


@dataclass(frozen=True)
class Group:
    """Cells of one study that may share a call; `begun`: a call with all of them was cut, and
    goes on as it was."""

    job: Job
    cells: tuple[Cell, ...]
    begun: bool

    def kept(self) -> Kept:
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
class Summary:
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
) -> Summary:
    """Runs cells in the order of the shares until the time is over, in one process or in several
    that share the cells out."""
    jobs = {share.job.name: share.job for share in shares}
    cells = [(share.job, cell) for share in shares for cell in share.cells]
    if retry:
        for job, cell in cells:
            failure_file(job.folder, cell).unlink(missing_ok=True)
    folders = {name: Folder(job.folder) for name, job in jobs.items()}
    before = {
        (job.name, cell.spec.id) for job, cell in cells if folders[job.name].is_finished(cell)
    }
    broken = {
        (job.name, cell.spec.id) for job, cell in cells if failure_file(job.folder, cell).exists()
    } - before
    if before:
        display.say(f"{len(before)} of {len(cells)} cells are finished already: skipped.")
    if broken:
        display.say(
            f"{len(broken)} cells failed before: skipped. Add --retry-failed to try them again."
        )
    if len(before) + len(broken) < len(cells):
        if workers > 1:
            watch = Watch(allowance, [job.folder for job in jobs.values()], display)
            work_together(
                devices,
                workers,
                display,
                memory,
                _work,
                (tuple(shares), out, allowance),
                watch.until_all_end,
            )
        else:
            Stretch(shares, out, devices[0], allowance, display, memory, folders).run()
    return _summary(
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

    def is_finished(self, cell: Cell) -> bool:
        return self.record(cell) is not None

    def is_over(self, cell: Cell) -> bool:
        """Whether there is nothing left to do for it: a record is there, or a traceback."""
        return failure_file(self.path, cell).exists() or self.is_finished(cell)

    def record(self, cell: Cell) -> CellResult | None:
        if cell.spec.id not in self.records:
            found = finished(self.path, cell.spec, self.inputs)
            if found is None:
                return None
            self.records[cell.spec.id] = CellResult(cell, found, skipped=True)
        return self.records[cell.spec.id]


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
    groups: list[Group] = field(init=False)
    running: "Call | None" = None

    def __post_init__(self) -> None:
        pace = read_pace(self.out, machine_of(self.device))
        trial = min(TRIAL, TRIAL_SHARE * self.allowance.seconds)
        opened, most = Opened(self.device, self.display), ALL_TRIALS * self.allowance.seconds
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

    def _that_fit(self, group: Group, cells: Sequence[Cell]) -> list[Cell]:
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

    def _is_worth_going_on(self, group: Group, opening: float) -> bool:
        """Whether a call that was cut can be finished now, or at least another part of it, with
        room."""
        specs, kept = [cell.spec for cell in group.cells], group.kept()
        for spec in specs:
            self.trials.make_sure(spec)
        each = [self.pace.seconds(spec, kept.done) for spec in specs]
        if None in each:
            return False
        part = TOGETHER * self.pace.seconds_of_part(specs, kept.part)
        return opening + min(sum(filter(None, each)), part) <= self.allowance.left

    def _run(self, group: Group, cells: Sequence[Cell]) -> bool:
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
            self.running = Call(job.folder, specs, self.allowance.clock())
            numbers = {cell.spec.id: number for number, cell in enumerate(job.cells, start=1)}
            grid = Grid(
                job.folder,
                self.device,
                self.display,
                folder.inputs,
                numbers,
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

    def _foretold(self, group: Group, cells: Sequence[Cell]) -> str:
        done = group.kept().done
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
            done, part = call.finished(), call.kept().part
            self.pace.learn_of_cut(call.specs, self.allowance.clock() - call.began, done, part)


class Call:
    """A call that runs, and what was there of it before."""

    def __init__(self, folder: Path, specs: Sequence[AuditSpec], began: float) -> None:
        self.folder, self.specs, self.began = folder, specs, began
        self._learnt, self._finished = _learnt(folder), 0
        self._finished = self.finished()

    def has_learnt(self) -> bool:
        """Whether it has kept anything of what it learns."""
        return _learnt(self.folder) != self._learnt

    def kept(self) -> Kept:
        return Kept.of(self.folder, name_of(self.specs), len(self.specs))

    def finished(self) -> int:
        """How often it came to the end of an attack on a batch since it began."""
        batches = [spec.limit * spec.draws for spec in self.specs]
        return (
            round(sum(min(count, most) for count in self.kept().done.values() for most in batches))
            - self._finished
        )


def groups_in_order(shares: Sequence[Share]) -> list[Group]:
    """Cells that may share a call, within each share; a call that was cut stands where the first
    of its cells does."""
    groups: list[Group] = []
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
                Group(job, tuple(group), has_parts(job.folder, [cell.spec for cell in group]))
            )
            taken |= {(job.name, cell.spec.id) for cell in group}
    return groups


def _is_free(folder: Path, cell: Cell) -> bool:
    """Whether no other run works on a cell at the moment."""
    with claim(folder, cell.spec.id) as ours:
        return ours


def _learnt(folder: Path) -> frozenset[tuple[str, int]]:
    """The fits in a folder, finished or not, each with when it was written."""
    found = set()
    for path in folder.glob("fits/*"):
        with contextlib.suppress(OSError):  # a checkpoint that another run has just removed
            found.add((path.name, path.stat().st_mtime_ns))
    return frozenset(found)


@dataclass(frozen=True)
class Watch:
    """Looks at the folders that processes work on, and says how many records there are."""

    allowance: Allowance
    folders: Sequence[Path]
    display: Display

    def until_all_end(self, started: Sequence[BaseProcess]) -> None:
        """Returns when no process is left, or when half of the reserve is gone too."""
        shown = self._records()
        progress = Progress(total=round(self.allowance.seconds))
        with self.display.watch(f"{len(started)} processes, seconds", progress):
            while (
                any(process.is_alive() for process in started)
                and self.allowance.left > -self.allowance.reserve / 2
            ):
                time.sleep(min(LOOK, self.allowance.reserve / 10))
                progress.done = min(
                    progress.total, round(self.allowance.clock() - self.allowance.began)
                )
                if (now := self._records()) > shown:
                    shown = now
                    self.display.say(
                        f"{shown} records are there;"
                        f" {write_duration(max(0.0, self.allowance.left))} left."
                    )
        died = [process for process in started if process.exitcode]
        if died:
            self.display.say(
                f"{len(died)} of {len(started)} processes died; what they left waits for the next"
                " run."
            )

    def _records(self) -> int:
        return sum(1 for folder in self.folders for _ in folder.glob(RECORD))


def _summary(
    cells: Sequence[tuple[Job, Cell]],
    folders: Mapping[str, Folder],
    before: set[tuple[str, str]],
    broken: set[tuple[str, str]],
    pace: Pace,
    allowance: Allowance,
) -> Summary:
    """Read off the folders, whoever worked there."""
    ran: list[tuple[Job, CellResult]] = []
    failed: list[tuple[Job, CellResult]] = []
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
        record = folders[job.name].record(cell)
        if record is not None:
            ran.append((job, record))
        elif failure.exists():
            failed.append((job, CellResult(cell, None, failure)))
        else:
            waiting.append(
                Waiting(job, cell, pace.seconds(cell.spec), cell.spec.id in begun[job.name])
            )
    spent = allowance.clock() - allowance.began
    return Summary(tuple(ran), tuple(failed), tuple(waiting), len(before), len(broken), spent)
