"""Which cells of studies are run, and which of them come first.

Cells are chosen by their values on the axes. Those of several studies are ordered by a small YAML
list, or as the studies are named.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.study.axes import read_yaml
from gradleak.study.cells import Cell

FIELDS = ("study", "where")
SHAPE = "'- study: lamp_table1' or '- {study: lamp_table1, where: {attacks: [dlg]}}'"


def choose_cells(cells: Sequence[Cell], wanted: Iterable[str]) -> list[Cell]:
    """Returns the cells on these values (`attacks=lamp*`): any of those given for one axis,
    and on every axis that is named."""
    chosen: dict[str, list[str]] = {}
    axes = list(dict.fromkeys(axis for cell in cells for axis in cell.axes))
    for written in wanted:
        axis, equals, pattern = written.partition("=")
        if not equals:
            raise GradleakError(
                f"Cannot read --only {written!r}: write --only axis=value, such as --only"
                " attacks='lamp*'."
            )
        if axis not in axes:
            raise GradleakError(
                f"No axis {axis!r}{did_you_mean(axis, axes)} Axes:"
                f" {', '.join(axes) or 'none, it is one cell'}."
            )
        values = list(dict.fromkeys(cell.axes[axis] for cell in cells if axis in cell.axes))
        if not any(_fits(value, pattern) for value in values):
            raise GradleakError(f"No cell has {axis}={pattern}. Its values: {'; '.join(values)}.")
        chosen.setdefault(axis, []).append(pattern)
    fit = [
        cell
        for cell in cells
        if all(any_fits(cell.axes.get(axis, ""), patterns) for axis, patterns in chosen.items())
    ]
    if not fit:
        raise GradleakError("No cell lies on all these values at once: leave one --only out.")
    return fit


def any_fits(value: str, patterns: Sequence[str]) -> bool:
    """Whether a value on an axis is one of these, or fits one of these patterns."""
    return any(_fits(value, pattern) for pattern in patterns)


def _fits(value: str, pattern: str) -> bool:
    return value == pattern or fnmatch.fnmatchcase(value, pattern)


@dataclass(frozen=True)
class Job:
    """A study that is to be run: those of its cells that were chosen, and the folder of its
    records."""

    name: str
    folder: Path
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class PriorityEntry:
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


def read_priority(path: Path) -> list[PriorityEntry]:
    """The entries of a priority list, the most urgent first."""
    plain, _ = read_yaml(path, "a priority list")
    if not isinstance(plain, list):
        raise GradleakError(
            f"The priority list {path} must be a list with entries such as {SHAPE}."
        )
    return [
        _entry(item, f"PriorityEntry {number} of the priority list {path}")
        for number, item in enumerate(plain, start=1)
    ]


def _entry(plain: Any, place: str) -> PriorityEntry:
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
    return PriorityEntry(
        plain["study"], {str(axis): _patterns(value) for axis, value in where.items()}
    )


def _patterns(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)


def share_by_priority(
    jobs: Sequence[Job], entries: Sequence[PriorityEntry]
) -> tuple[list[Share], list[str]]:
    """All cells by priority, each once, those of no entry last; and a sentence for each entry that
    no cell answers.

    An entry of a study that is not run here says nothing: a list serves commands that name some of
    its studies.
    """
    shares: list[Share] = []
    unused: list[str] = []
    taken: set[tuple[str, str]] = set()
    by_name = {job.name: job for job in jobs}
    for entry in [*entries, *(PriorityEntry(job.name, {}) for job in jobs)]:
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
