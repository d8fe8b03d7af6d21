"""A study's YAML as cells: lists are axes, cases are crossed with them, and all that is wrong is
said at once; which cells are run, and which of them come first.

What a run sets out to do is kept beside its records, so that its state can be told without its
YAML.
"""

import contextlib
import fnmatch
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.core.specs import to_string
from gradleak.records.files import write_whole
from gradleak.records.run_folder import FILE, SCHEMA
from gradleak.study.axes import Axes, Problem, read_grids, read_yaml, refusal, sort_by_line

# So that a field can be judged on its own: without it the default attack would be refused for what
# it is not told.
BESIDE = {"know": {"attacks": ["blind"]}}
BETWEEN = " | "  # the parts of a kind; the attack is the last


@dataclass(frozen=True)
class Cell:
    """One audit of a study; `axes` says where it lies on the axes that have more than one value."""

    axes: Mapping[str, str]
    spec: AuditSpec

    @property
    def title(self) -> str:
        return ", ".join(f"{axis}={value}" for axis, value in self.axes.items()) or "the only cell"


@dataclass(frozen=True)
class Study:
    """A named grid."""

    name: str
    cells: tuple[Cell, ...]


def read_study(path: Path, changes: Sequence[str] = ()) -> Study:
    """The study a YAML file describes, with fields replaced (`field=value`); everything wrong
    with it is said in one error."""
    study, problems = examine(path, changes)
    if problems:
        raise refusal(path, problems)
    return study


def examine(path: Path, changes: Sequence[str] = ()) -> tuple[Study, list[Problem]]:
    """What a YAML file describes as far as it can be read, and all that is wrong with it, in the
    order of its lines."""
    written = read_grids(path, changes)
    problems = [*written.problems]
    problems += [problem for axes in written.grids.values() for problem in _bad_values(axes)]
    cells, wrong = ([], problems) if problems else _resolve(written.grids)
    # Of twins the first: the last one written stays, and so they are gone through from the end
    by_id = {cell.spec.id: cell for cell in reversed(cells)}
    return Study(written.name, tuple(by_id.values())[::-1]), sort_by_line(wrong)


def _bad_values(axes: Axes) -> Iterator[Problem]:
    """What is wrong with single values, whatever the others are."""
    beside = _target_of(axes)
    for field, values in axes.items():
        for value in values:
            try:
                AuditSpec.from_plain({**beside, **BESIDE.get(field, {}), field: value.plain})
            except GradleakError as error:
                yield Problem(value.line, f"{field}: {error}")


def _target_of(axes: Axes) -> dict[str, Any]:
    """A target to judge other fields beside: what fits may depend on it."""
    for target in axes.get("target", []):
        with contextlib.suppress(GradleakError):
            AuditSpec.from_plain({"target": target.plain})
            return {"target": target.plain}
    return {}


def _resolve(grids: Mapping[str, Axes]) -> tuple[list[Cell], list[Problem]]:
    """All cells, and what is wrong with combinations or with their data."""
    cells: list[Cell] = []
    problems: list[Problem] = []
    needed: dict[Dataset, tuple[int, int | None]] = {}
    combinations = [
        (case, one) for case, axes in grids.items() for one in itertools.product(*axes.values())
    ]
    for case, combination in combinations:
        axes, named = grids[case], {"case": case} if case else {}
        setting = dict(zip(axes, combination, strict=True))
        varying = named | {
            field: _label(value.plain) for field, value in setting.items() if len(axes[field]) > 1
        }
        try:
            spec = AuditSpec.from_plain({field: value.plain for field, value in setting.items()})
        except GradleakError as error:
            where = (
                ", ".join(f"{field}={value}" for field, value in varying.items()) or "every cell"
            )
            lines = [
                value.line
                for field, value in setting.items()
                if len(axes[field]) > 1 or field == "attacks"
            ]
            problems.append(Problem(next(filter(None, reversed(lines)), None), f"{where}: {error}"))
            continue
        cells.append(Cell(varying, spec))
        most = max(spec.limit * spec.batch_size, needed.get(spec.data, (0, None))[0])
        needed[spec.data] = (most, setting["data"].line if "data" in setting else None)
    return cells, problems + list(_bad_data(needed))


def _bad_data(needed: Mapping[Dataset, tuple[int, int | None]]) -> Iterator[Problem]:
    """Files that are missing or too short are found now, not hours later. Each is read once."""
    for data, (examples, line) in needed.items():
        try:
            data.load(examples)
        except GradleakError as error:
            yield Problem(line, f"data: {error}")


def _label(value: Any) -> str:
    """A value as a person would write it."""
    if isinstance(value, dict):
        fields = ",".join(f"{key}={item}" for key, item in value.items() if key != "name")
        return str(value.get("name", "?")) + (f":{fields}" if fields else "")
    if isinstance(value, list):
        return " + ".join(_label(item) for item in value) or "none"
    return str(value)


def write_plan(folder: Path, study: Study) -> None:
    """Writes down the cells of the whole study, whatever part of it is run now; the last command's
    study stands."""
    cells = [
        {
            "id": cell.spec.id,
            "axes": dict(cell.axes),
            "kinds": {key: kind for key, (kind, _) in kinds_of(cell.spec).items()},
            "batches": cell.spec.limit * cell.spec.draws,
        }
        for cell in study.cells
    ]
    plain = {"schema": SCHEMA, "name": study.name, "cells": cells}
    write_whole(folder / FILE, json.dumps(plain, ensure_ascii=False) + "\n")


def kinds_of(spec: AuditSpec) -> dict[str, tuple[str, Attack]]:
    """What the time of each attack of an audit depends on, and the attack, by its key."""
    return {key: (kind_of(spec, attack), attack) for key, attack in spec.attack_keys().items()}


def kind_of(spec: AuditSpec, attack: Attack) -> str:
    """What the time a batch takes depends on, on one line. The strength of a defense is not in it,
    nor the view."""
    return BETWEEN.join(
        (
            to_string(spec.target),
            to_string(spec.data),
            to_string(spec.protocol),
            " ".join(defense.name for defense in spec.defenses),
            str(spec.batch_size),
            to_string(attack),
        )
    )


ENTRY = ("study", "where")
SHAPE = "'- study: lamp_table1' or '- {study: lamp_table1, where: {attacks: [dlg]}}'"


def choose_cells(cells: Sequence[Cell], wanted: Iterable[str]) -> list[Cell]:
    """Returns the cells on these values (`attacks=lamp*`): any of those given for one axis,
    and on every axis that is named."""
    chosen: dict[str, list[str]] = {}
    axes = list_axes(cells)
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
        if not any(any_fits(value, [pattern]) for value in values):
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


def list_axes(cells: Iterable[Cell]) -> list[str]:
    """The axes that any cell lies on, each once."""
    return list(dict.fromkeys(axis for cell in cells for axis in cell.axes))


def any_fits(value: str, patterns: Sequence[str]) -> bool:
    """Whether a value on an axis is one of these, or fits one of these patterns."""
    return any(value == pattern or fnmatch.fnmatchcase(value, pattern) for pattern in patterns)


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
        if name not in ENTRY:
            raise GradleakError(
                f"{place} has no field {name!r}{did_you_mean(str(name), list(ENTRY))} Write"
                f" {SHAPE}."
            )
    where = plain.get("where") or {}
    if not isinstance(where, dict) or any(
        isinstance(value, dict) or value == [] for value in where.values()
    ):
        raise GradleakError(f"{place}: where must give axes their values: write {SHAPE}.")
    patterns = {
        str(axis): tuple(map(str, value if isinstance(value, list) else [value]))
        for axis, value in where.items()
    }
    return PriorityEntry(plain["study"], patterns)


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
            axes = ", ".join(list_axes(job.cells)) or "none, it is one cell"
            unused.append(f"No cell is {entry}. Axes of this study: {axes}.")
        chosen = tuple(
            cell
            for cell in job.cells
            if entry.matches(cell) and (job.name, cell.spec.id) not in taken
        )
        taken |= {(job.name, cell.spec.id) for cell in chosen}
        if chosen:
            shares.append(Share(job, chosen))
    return shares, unused
