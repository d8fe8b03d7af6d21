"""What a run set out to do, kept beside its records, so that its state can be told without its
YAML."""

import fnmatch
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.records.files import write_whole
from gradleak.records.run_folder import FAILED_SUFFIX, FILE, SCHEMA
from gradleak.study.cells import Cell, Study
from gradleak.study.pace import kinds_of

FAILED = FAILED_SUFFIX


def write_plan(folder: Path, study: Study) -> None:
    """The cells of the whole study, whatever part of it is run now; the last command's study
    stands."""
    cells = [
        {
            "id": cell.spec.id,
            "axes": dict(cell.axes),
            "kinds": {key: kind for key, (kind, _) in kinds_of(cell.spec).items()},
            "batches": cell.spec.limit * cell.spec.draws,
        }
        for cell in study.cells
    ]
    write_whole(
        folder / FILE,
        json.dumps({"schema": SCHEMA, "name": study.name, "cells": cells}, ensure_ascii=False)
        + "\n",
    )


def only(cells: Sequence[Cell], wanted: Iterable[str]) -> list[Cell]:
    """The cells on these values (`attacks=lamp*`): any of those given for one axis, and on every
    axis that is named."""
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
