"""Which cells of several studies come first: a small YAML list, or the order in which the
studies are named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.study.axes import read_yaml
from gradleak.study.cells import Cell
from gradleak.study.plan import any_fits

FIELDS = ("study", "where")
SHAPE = "'- study: lamp_table1' or '- {study: lamp_table1, where: {attacks: [dlg]}}'"


@dataclass(frozen=True)
class Job:
    """A study that is to be run: those of its cells that were chosen, and the folder of its
    records."""

    name: str
    folder: Path
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Entry:
    """A line of a priority list: a study, or those of its cells that lie on these values
    (patterns as of `run --only`)."""

    study: str
    where: Mapping[str, tuple[str, ...]]

    def matches(self, cell: Cell) -> bool:
        return all(
            axis in cell.axes and any_fits(cell.axes[axis], patterns)
            for axis, patterns in self.where.items()
        )

    def __str__(self) -> str:
        values = ", ".join(
            f"{axis}={' or '.join(patterns)}" for axis, patterns in self.where.items()
        )
        return f"{self.study} where {values}" if values else self.study


@dataclass(frozen=True)
class Share:
    """Cells of one study that come one after another."""

    job: Job
    cells: tuple[Cell, ...]


def is_priority_list(path: Path) -> bool:
    """Whether a file holds a list, as no study does."""
    try:
        return isinstance(read_yaml(path, "a study")[0], list)
    except GradleakError:
        return False  # reading it as a study will say what is wrong


def read_priority(path: Path) -> list[Entry]:
    """The entries of a priority list, the most urgent first."""
    plain, _ = read_yaml(path, "a priority list")
    if not isinstance(plain, list):
        raise GradleakError(
            f"The priority list {path} must be a list with entries such as {SHAPE}."
        )
    return [
        _entry(item, f"Entry {number} of the priority list {path}")
        for number, item in enumerate(plain, start=1)
    ]


def _entry(plain: Any, place: str) -> Entry:
    if not isinstance(plain, dict) or not isinstance(plain.get("study"), str):
        raise GradleakError(f"{place} names no study: write {SHAPE}.")
    for name in plain:
        if name not in FIELDS:
            raise GradleakError(
                f"{place} has no field {name!r}{did_you_mean(str(name), list(FIELDS))} Write"
                f" {SHAPE}."
            )
    where = plain.get("where") or {}
    if not isinstance(where, dict) or any(
        isinstance(value, dict) or value == [] for value in where.values()
    ):
        raise GradleakError(f"{place}: where must give axes their values: write {SHAPE}.")
    return Entry(plain["study"], {str(axis): _patterns(value) for axis, value in where.items()})


def _patterns(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)


def in_order(jobs: Sequence[Job], entries: Sequence[Entry]) -> tuple[list[Share], list[str]]:
    """All cells by priority, each once, those of no entry last; and a sentence for each entry that
    no cell answers.

    An entry of a study that is not run here says nothing: a list serves commands that name some of
    its studies.
    """
    shares: list[Share] = []
    unused: list[str] = []
    taken: set[tuple[str, str]] = set()
    by_name = {job.name: job for job in jobs}
    for entry in [*entries, *(Entry(job.name, {}) for job in jobs)]:
        job = by_name.get(entry.study)
        if job is None:
            continue
        if not any(map(entry.matches, job.cells)):
            axes = list(dict.fromkeys(axis for cell in job.cells for axis in cell.axes))
            unused.append(
                f"No cell is {entry}. Axes of this study:"
                f" {', '.join(axes) or 'none, it is one cell'}."
            )
        chosen = tuple(
            cell
            for cell in job.cells
            if entry.matches(cell) and (job.name, cell.spec.id) not in taken
        )
        taken |= {(job.name, cell.spec.id) for cell in chosen}
        if chosen:
            shares.append(Share(job, chosen))
    return shares, unused
