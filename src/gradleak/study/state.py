"""How far a run is, read off its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradleak.audit.outcomes import begun_calls
from gradleak.records.run_folder import PlannedCell, last_line, read_plan
from gradleak.records.summary import RECORD, read_summary
from gradleak.study.plan import FAILED

SAMPLE = 500  # records


@dataclass(frozen=True)
class State:
    """Cells by what became of them."""

    cells: tuple[PlannedCell, ...]
    finished: tuple[PlannedCell, ...]
    failed: tuple[tuple[PlannedCell, str], ...]  # with the last line of the traceback
    begun: tuple[PlannedCell, ...]  # parts are there, the record is not
    waiting: tuple[PlannedCell, ...]
    beside: int  # records of no planned cell
    seconds: float  # that attacks took in the finished cells, about

    @property
    def seconds_left(self) -> float | None:
        """If the others take as long as the finished ones did."""
        left = len(self.begun) + len(self.waiting)
        return self.seconds / len(self.finished) * left if self.finished else None


def read_state(run: Path) -> State:
    """The state of a folder of records."""
    there = {path.stem: path for path in run.glob(RECORD)}
    plan: Sequence[PlannedCell] = read_plan(run) or [PlannedCell(name, {"record": name}) for name in sorted(there)]
    planned = {cell.id for cell in plan}
    broken = {path.name.removesuffix(FAILED): path for path in run.glob(f"*{FAILED}")}
    parts = {path.name[:16] for path in run.glob("parts/*")} | {one for call in begun_calls(run) for one in call}
    rest = [cell for cell in plan if cell.id not in there]
    failed = tuple((cell, last_line(broken[cell.id])) for cell in rest if cell.id in broken)
    waiting = [cell for cell in rest if cell.id not in broken]
    finished = tuple(cell for cell in plan if cell.id in there)
    return State(
        cells=tuple(plan),
        finished=finished,
        failed=failed,
        begun=tuple(cell for cell in waiting if cell.id in parts),
        waiting=tuple(cell for cell in waiting if cell.id not in parts),
        beside=len(there.keys() - planned),
        seconds=_all_seconds([there[cell.id] for cell in finished]),
    )


def _all_seconds(paths: Sequence[Path]) -> float:
    """Of very many records some are read, and stand for the others."""
    read = paths[:: max(1, len(paths) // SAMPLE)]
    return sum(map(_seconds, read)) / max(1, len(read)) * len(paths)


def _seconds(path: Path) -> float:
    return sum(attack.cost.seconds for attack in read_summary(path).record.attacks.values())
