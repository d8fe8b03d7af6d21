"""A study's YAML as cells: lists are axes, cases are crossed with them, and all that is wrong is said at once."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gradleak.audit.spec import FIELDS, AuditSpec
from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.registry import did_you_mean

ALIASES = {"attack": "attacks", "defense": "defenses", "metric": "metrics"}
ONE_VALUE = ("metrics", "know", "defenses")  # a flat list is one set or one chain; a list of lists is an axis
NAME = re.compile(r"[\w.-]*\w[\w.-]*")  # becomes a folder
# So that a field can be judged on its own: without it the default attack would be refused for what it is not told.
BESIDE = {"know": {"attacks": ["blind"]}}

Axes = dict[str, list[Any]]


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
    """The study a YAML file describes, with fields replaced (`field=value`); everything wrong with it is said in one error."""
    plain = _mapping(path) | dict(_change(change) for change in changes)
    name = str(plain.pop("name", path.stem))
    if not NAME.fullmatch(name):
        raise GradleakError(f"{path}: name {name!r} becomes a folder: use letters, digits, dots, dashes and underscores.")
    cases = _cases(path, plain.pop("cases", None))
    grids = {case: _axes(path, {**plain, **changed}) for case, changed in cases.items()}
    problems = list(dict.fromkeys(problem for axes in grids.values() for problem in _bad_values(axes)))
    cells, more = _resolve(grids) if not problems else ([], [])
    problems += more or list(_bad_data(cells))
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise GradleakError(f"{path} has {count}; nothing was run.\n" + "\n".join(f"  {problem}" for problem in problems))
    return Study(name, tuple({cell.spec.id: cell for cell in reversed(cells)}.values())[::-1])  # of twins the first


def _mapping(path: Path) -> dict[str, Any]:
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise GradleakError(f"Cannot read {path}: {reason}. Name the YAML file of a study.") from error
    except yaml.YAMLError as error:
        raise GradleakError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(plain, dict):
        raise GradleakError(f"{path} must be a mapping such as 'attacks: [tag, dlg]', not {type(plain).__name__}.")
    return {str(key): value for key, value in plain.items()}


def _change(written: str) -> tuple[str, Any]:
    field, equals, value = written.partition("=")
    if not equals:
        raise GradleakError(f"Cannot read --set {written!r}: write --set field=value, such as --set limit=10.")
    try:
        return field.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise GradleakError(f"Cannot read the value of --set {written!r}: {' '.join(str(error).split())}.") from error


def _cases(path: Path, written: Any) -> dict[str, dict[str, Any]]:
    """Fields that change together, by the name of the case; one without a name where there are no cases."""
    if written is None:
        return {"": {}}
    if not isinstance(written, dict) or not written or not all(isinstance(fields, dict) for fields in written.values()):
        raise GradleakError(
            f"{path}: cases must name the fields each one changes, such as 'noise: {{defenses: gaussian_noise}}'."
        )
    return {str(case): {str(field): value for field, value in fields.items()} for case, fields in written.items()}


def _axes(path: Path, plain: Mapping[str, Any]) -> Axes:
    """The values of each field; the first field varies slowest."""
    known = ["name", "cases", *FIELDS, *ALIASES]
    axes: Axes = {}
    for written, value in plain.items():
        field = ALIASES.get(written, written)
        if field not in FIELDS:
            raise GradleakError(
                f"{path}: a study has no field {written!r}{did_you_mean(written, known)} Fields: {', '.join(known)}."
            )
        if field in axes:
            raise GradleakError(f"{path}: {field!r} is given twice (as {written!r} too); keep one.")
        axes[field] = _values(field, value)
        if not axes[field]:
            raise GradleakError(f"{path}: {written} is an empty list; give it at least one value or leave it out.")
    return axes


def _values(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    if field in ONE_VALUE and not any(isinstance(item, list) for item in value):
        return [value]
    return value


def _bad_values(axes: Axes) -> Iterator[str]:
    """What is wrong with single values, whatever the others are."""
    beside = _target_of(axes)
    for field, values in axes.items():
        for value in values:
            try:
                AuditSpec.from_plain({**beside, **BESIDE.get(field, {}), field: value})
            except GradleakError as error:
                yield f"{field}: {error}"


def _target_of(axes: Axes) -> dict[str, Any]:
    """A target to judge other fields beside: whether an attack or data set fits depends on texts or pictures."""
    for target in axes.get("target", []):
        try:
            AuditSpec.from_plain({"target": target})
        except GradleakError:
            continue
        return {"target": target}
    return {}


def _resolve(grids: Mapping[str, Axes]) -> tuple[list[Cell], list[str]]:
    """All cells, and what is wrong with combinations."""
    cells: list[Cell] = []
    problems: list[str] = []
    combinations = [(case, one) for case, axes in grids.items() for one in itertools.product(*axes.values())]
    for case, combination in combinations:
        axes, named = grids[case], {"case": case} if case else {}
        setting = dict(zip(axes, combination, strict=True))
        varying = named | {field: _label(value) for field, value in setting.items() if len(axes[field]) > 1}
        try:
            cells.append(Cell(varying, AuditSpec.from_plain(setting)))
        except GradleakError as error:
            where = ", ".join(f"{field}={value}" for field, value in varying.items()) or "every cell"
            problems.append(f"{where}: {error}")
    return cells, problems


def _bad_data(cells: Sequence[Cell]) -> Iterator[str]:
    """Files that are missing or too short are found now, not hours later. Each is read once."""
    needed: dict[Dataset, int] = {}
    for cell in cells:
        examples = cell.spec.limit * cell.spec.batch_size
        needed[cell.spec.data] = max(examples, needed.get(cell.spec.data, 0))
    for data, examples in needed.items():
        try:
            data.load(examples)
        except GradleakError as error:
            yield f"data: {error}"


def _label(value: Any) -> str:
    """A value as a person would write it."""
    if isinstance(value, dict):
        fields = ",".join(f"{key}={item}" for key, item in value.items() if key != "name")
        return str(value.get("name", "?")) + (f":{fields}" if fields else "")
    if isinstance(value, list):
        return " + ".join(_label(item) for item in value) or "none"
    return str(value)
