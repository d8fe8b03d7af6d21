"""How far a run is, read off its folder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gradleak.attacks  # noqa: F401  (registers them)
from gradleak.audit.outcomes import KEPT, begun_calls
from gradleak.core.attack import Attack
from gradleak.core.registry import list_registered
from gradleak.records.run_folder import FAILED_SUFFIX, PlannedCell, last_line, read_plan
from gradleak.records.schema import Record
from gradleak.records.store import RECORD, read_summary
from gradleak.study.pace import Pace, attack_of, sum_by_kind

SAMPLE = 50  # records of one kind that are read for their time, and stand for the others


@dataclass(frozen=True)
class RunState:
    """Cells by what became of them."""

    cells: tuple[PlannedCell, ...]
    finished: tuple[PlannedCell, ...]
    failed: tuple[tuple[PlannedCell, str], ...]  # with the last line of the traceback
    begun: tuple[PlannedCell, ...]  # parts are there, the record is not
    waiting: tuple[PlannedCell, ...]
    # Those of the waiting that have a record of an older attack, with which
    outdated: tuple[tuple[PlannedCell, str], ...]
    beside: int  # records of no planned cell
    seconds: float  # that attacks took in the finished cells, about
    pace: Pace  # what they took for a batch

    @property
    def left(self) -> tuple[PlannedCell, ...]:
        return (*self.begun, *self.waiting)

    @property
    def seconds_left(self) -> float:
        """What attacks will take in the cells of which that can be foretold, from finished cells
        with the same attacks."""
        return sum(
            seconds for cell in self.left if (seconds := _foretold(cell, self.pace)) is not None
        )

    @property
    def unforetold(self) -> tuple[PlannedCell, ...]:
        """Cells with an attack that no finished cell has."""
        return tuple(cell for cell in self.left if _foretold(cell, self.pace) is None)

    @property
    def unknown_attacks(self) -> tuple[str, ...]:
        """The attacks of which no time is known yet."""
        unknown = (
            attack_of(kind)
            for cell in self.unforetold
            for kind in cell.kinds.values()
            if self.pace.seconds_alike(kind) is None
        )
        return tuple(dict.fromkeys(unknown))


def read_state(run: Path) -> RunState:
    """The state of a folder of records."""
    there = {path.stem: path for path in run.glob(RECORD)}
    plan: Sequence[PlannedCell] = read_plan(run) or [
        PlannedCell(name, {"record": name}) for name in sorted(there)
    ]
    broken = {path.name.removesuffix(FAILED_SUFFIX): path for path in run.glob(f"*{FAILED_SUFFIX}")}
    parts = {path.parent.name[:16] for path in run.glob(f"parts/*/{KEPT}")} | {
        one for call in begun_calls(run) for one in call
    }
    answered = [cell for cell in plan if cell.id in there]
    newer = _newer_versions()
    sample = answered if newer else _sample(answered)
    read = {cell.id: read_summary(there[cell.id]).record for cell in sample}
    older = {name: attack for name, record in read.items() if (attack := _older(record, newer))}
    rest = [cell for cell in plan if cell.id not in there or cell.id in older]
    failed = tuple((cell, last_line(broken[cell.id])) for cell in rest if cell.id in broken)
    waiting = [cell for cell in rest if cell.id not in broken]
    finished = tuple(cell for cell in answered if cell.id not in older)
    timed = [cell for cell in finished if cell.id in read]
    seconds = sum(
        attack.cost.seconds for cell in timed for attack in read[cell.id].attacks.values()
    )
    return RunState(
        cells=tuple(plan),
        finished=finished,
        failed=failed,
        begun=tuple(cell for cell in waiting if cell.id in parts),
        waiting=tuple(cell for cell in waiting if cell.id not in parts),
        outdated=tuple((cell, older[cell.id]) for cell in waiting if cell.id in older),
        beside=len(there.keys() - {cell.id for cell in plan}),
        seconds=seconds / max(1, len(timed)) * len(finished),
        pace=_pace(timed, read),
    )


def _pace(cells: Sequence[PlannedCell], records: Mapping[str, Record]) -> Pace:
    """What each attack took for a batch, of each kind."""
    took = sum_by_kind(
        (kind, records[cell.id].attacks[key].cost.seconds, cell.batches)
        for cell in cells
        for key, kind in cell.kinds.items()
    )
    return Pace(
        measured={kind: seconds / max(1, batches) for kind, (seconds, batches) in took.items()}
    )


def _foretold(cell: PlannedCell, pace: Pace) -> float | None:
    """What attacks take in a cell; none where no such attack has come to its end, or an older
    plan does not name it."""
    each = [pace.seconds_alike(kind) for kind in cell.kinds.values()]
    return None if None in each or not each else cell.batches * sum(filter(None, each))


def _sample(cells: Sequence[PlannedCell]) -> Iterable[PlannedCell]:
    """Some cells of each kind, from all over the plan."""
    alike: dict[tuple[str, ...], list[PlannedCell]] = {}
    for cell in cells:
        alike.setdefault(tuple(cell.kinds.values()), []).append(cell)
    return (cell for group in alike.values() for cell in group[:: max(1, len(group) // SAMPLE)])


def _newer_versions() -> dict[str, int]:
    """Attacks whose answers have changed since their first version, so that there may be records
    of an older one."""
    return {
        name: attack.version
        for name, attack in list_registered("attack").items()
        if issubclass(attack, Attack) and attack.version > 1
    }


def _older(record: Record, newer: Mapping[str, int]) -> str:
    """The first attack whose version is not the record's, with both; empty where there is none."""
    for attack in record.attacks.values():
        name = attack.spec["name"]
        if name in newer and attack.version != newer[name]:
            return f"{name} version {attack.version}, now {newer[name]}"
    return ""
