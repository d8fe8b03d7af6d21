"""A study's YAML as cells: lists are axes, cases are crossed with them, and all that is wrong is
said at once.

What a run sets out to do is kept beside its records, so that its state can be told without its
YAML.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_string
from gradleak.records.files import write_whole
from gradleak.records.run_folder import FILE, SCHEMA
from gradleak.study.axes import Axes, Problem, read_grids, refusal, sort_by_line

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
    cells: list[Cell] = []
    if not problems:
        cells, problems = _resolve(written.grids)
    by_id = {cell.spec.id: cell for cell in reversed(cells)}  # of twins the first
    return Study(written.name, tuple(by_id.values())[::-1]), sort_by_line(problems)


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
    defenses = " ".join(defense.name for defense in spec.defenses)
    parts = (
        to_string(spec.target),
        to_string(spec.data),
        to_string(spec.protocol),
        defenses,
        str(spec.batch_size),
        to_string(attack),
    )
    return BETWEEN.join(parts)
