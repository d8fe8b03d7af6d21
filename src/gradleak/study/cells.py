"""A study's YAML as cells: lists are axes, cases are crossed with them, and all that is wrong is said at once."""

import contextlib
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
from gradleak.study.yaml_lines import Lines

ALIASES = {"attack": "attacks", "defense": "defenses", "metric": "metrics"}
ONE_VALUE = ("metrics", "know", "defenses")  # a flat list is one set or one chain; a list of lists is an axis
NAME = re.compile(r"[\w.-]*\w[\w.-]*")  # becomes a folder
# So that a field can be judged on its own: without it the default attack would be refused for what it is not told.
BESIDE = {"know": {"attacks": ["blind"]}}

Axes = dict[str, list["Value"]]


@dataclass(frozen=True)
class Value:
    """One value of a field, and the line it stands in; none where the command line set it."""

    plain: Any
    line: int | None


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a study."""

    line: int | None
    text: str

    def __str__(self) -> str:
        return self.text if self.line is None else f"line {self.line}: {self.text}"


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
    study, problems = examine(path, changes)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise GradleakError(f"{path} has {count}; nothing was run.\n" + "\n".join(f"  {problem}" for problem in problems))
    return study


def examine(path: Path, changes: Sequence[str] = ()) -> tuple[Study, list[Problem]]:
    """What a YAML file describes as far as it can be read, and all that is wrong with it, in the order of its lines."""
    plain, lines = _mapping(path)
    given = {field: [field] for field in plain}  # where each field stands; those that are set stand nowhere
    replaced = dict(_change(change) for change in changes)
    plain |= replaced
    given |= {field: [] for field in replaced}
    problems = [Problem(line, f"{key!r} is given twice; keep one.") for line, key in lines.twice()]
    name = str(plain.pop("name", path.stem))
    if not NAME.fullmatch(name):
        advice = "use letters, digits, dots, dashes and underscores."
        problems.append(Problem(lines.at("name"), f"name {name!r} becomes a folder: {advice}"))
    cases = _cases(plain.pop("cases", None), lines, problems)
    grids = {}
    for case, fields in cases.items():
        changed = {field: value for field, value in fields.items() if field not in replaced}
        places = {**given, **{field: ["cases", case, field] for field in changed}}
        grids[case] = _axes({**plain, **changed}, places, lines, problems)
    problems += [problem for axes in grids.values() for problem in _bad_values(axes)]
    cells: list[Cell] = []
    if not problems:
        cells, problems = _resolve(grids)
    ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0)
    return Study(name, tuple({cell.spec.id: cell for cell in reversed(cells)}.values())[::-1]), ordered  # of twins the first


def read_yaml(path: Path, of: str) -> tuple[Any, str]:
    """What a YAML file holds, and its text; `of`: whose file it should be."""
    try:
        text = path.read_text(encoding="utf-8")
        return yaml.safe_load(text), text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise GradleakError(f"Cannot read {path}: {reason}. Name the YAML file of {of}.") from error
    except yaml.YAMLError as error:
        raise GradleakError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error


def _mapping(path: Path) -> tuple[dict[str, Any], Lines]:
    plain, text = read_yaml(path, "a study")
    if not isinstance(plain, dict):
        raise GradleakError(f"{path} must be a mapping such as 'attacks: [tag, dlg]', not {type(plain).__name__}.")
    return {str(key): value for key, value in plain.items()}, Lines(text)


def _change(written: str) -> tuple[str, Any]:
    field, equals, value = written.partition("=")
    if not equals:
        raise GradleakError(f"Cannot read --set {written!r}: write --set field=value, such as --set limit=10.")
    try:
        return field.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise GradleakError(f"Cannot read the value of --set {written!r}: {' '.join(str(error).split())}.") from error


def _cases(written: Any, lines: Lines, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Fields that change together, by the name of the case; one without a name where there are no cases."""
    if written is None:
        return {"": {}}
    if not isinstance(written, dict) or not written or not all(isinstance(fields, dict) for fields in written.values()):
        advice = "such as 'noise: {defenses: gaussian_noise}'."
        problems.append(Problem(lines.at("cases"), f"cases must name the fields each one changes, {advice}"))
        return {"": {}}
    return {str(case): {str(field): value for field, value in fields.items()} for case, fields in written.items()}


def _axes(plain: Mapping[str, Any], places: Mapping[str, list[str]], lines: Lines, problems: list[Problem]) -> Axes:
    """The values of each field; the first field varies slowest."""
    known = ["name", "cases", *FIELDS, *ALIASES]
    axes: Axes = {}
    for written, value in plain.items():
        field, place = ALIASES.get(written, written), places[written]
        line = lines.at(*place) if place else None
        if field not in FIELDS:
            advice = f"{did_you_mean(written, known)} Fields: {', '.join(known)}."
            problems.append(Problem(line, f"a study has no field {written!r}{advice}"))
        elif field in axes:
            problems.append(Problem(line, f"{field!r} is given twice (as {written!r} too); keep one."))
        elif value == [] and field not in ONE_VALUE:
            problems.append(Problem(line, f"{written} is an empty list; give it at least one value or leave it out."))
        elif _is_axis(field, value):
            axes[field] = [Value(item, lines.at(*place, number) if place else None) for number, item in enumerate(value)]
        else:
            axes[field] = [Value(value, line)]
    return axes


def _is_axis(field: str, value: Any) -> bool:
    return isinstance(value, list) and not (field in ONE_VALUE and not any(isinstance(item, list) for item in value))


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
    combinations = [(case, one) for case, axes in grids.items() for one in itertools.product(*axes.values())]
    for case, combination in combinations:
        axes, named = grids[case], {"case": case} if case else {}
        setting = dict(zip(axes, combination, strict=True))
        varying = named | {field: _label(value.plain) for field, value in setting.items() if len(axes[field]) > 1}
        try:
            spec = AuditSpec.from_plain({field: value.plain for field, value in setting.items()})
        except GradleakError as error:
            where = ", ".join(f"{field}={value}" for field, value in varying.items()) or "every cell"
            lines = [value.line for field, value in setting.items() if len(axes[field]) > 1 or field == "attacks"]
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
