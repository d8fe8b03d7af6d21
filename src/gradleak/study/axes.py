"""What a study's YAML says: fields with their values and lines.

Nothing is opened, and no library loaded, to read it. Lists are axes, and cases stand beside them;
whether the values are right is for others to say.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.core.plugins import name_plugins


class Lines:
    """Line numbers of the keys and items of a file, from 1."""

    def __init__(self, text: str) -> None:
        self.root: Any = yaml.compose(text, Loader=yaml.SafeLoader)

    def at(self, *path: str | int) -> int | None:
        """The line of a key or item; of the last on the way that can be found."""
        node, line = self.root, None
        for step in path:
            found = _inside(node, step)
            if found is None:
                break
            line, node = found
        return line

    def twice(self) -> Iterator[tuple[int, str]]:
        """Keys that stand twice in one mapping: YAML takes the last and says nothing."""
        yield from _twice(self.root)


def _inside(node: Any, step: str | int) -> tuple[int, Any] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):
            if key.value == str(step):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line + 1, node.value[step]
    return None


def _twice(node: Any) -> Iterator[tuple[int, str]]:
    if isinstance(node, yaml.MappingNode):
        counts = Counter(key.value for key, _ in node.value)
        for key, value in node.value:
            if counts[key.value] > 1:
                counts[key.value] = 0
                yield key.start_mark.line + 1, str(key.value)
            yield from _twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _twice(item)


# The fields of an audit, which a test holds to AuditSpec's: that one loads torch
FIELDS = (
    *("target", "data", "attacks", "protocol", "view", "prior", "limit", "batch_size", "defenses"),
    *("know", "metrics", "draws", "seed", "dtype", "time_limit", "public", "truncate"),
)
ALIASES = {"attack": "attacks", "defense": "defenses", "metric": "metrics"}
ONE_VALUE = ("metrics", "know", "defenses")  # a flat list is one set or chain; of lists, an axis
NAME = re.compile(r"[\w.-]*\w[\w.-]*")  # becomes a folder

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
class Grids:
    """A study as it is written: the axes of each case, and what is wrong with its form."""

    name: str
    grids: Mapping[str, Axes]  # by case; one without a name where there are no cases
    problems: tuple[Problem, ...]


def read_grids(path: Path, changes: Sequence[str] = ()) -> Grids:
    """What a YAML file says, with fields replaced (`field=value`)."""
    plain, lines = _mapping(path)
    # Where each stands; those that are set stand nowhere
    given = {field: [field] for field in plain}
    replaced = dict(_change(change) for change in changes)
    plain |= replaced
    given |= {field: [] for field in replaced}
    problems = [Problem(line, f"{key!r} is given twice; keep one.") for line, key in lines.twice()]
    _load_plugins(path, plain.pop("plugins", None), lines, problems)
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
    return Grids(name, grids, tuple(problems))


def _load_plugins(path: Path, files: Any, lines: Lines, problems: list[Problem]) -> None:
    """Loads the files that a study names beside itself, so that its components are known."""
    if files is None:
        return
    named = files if isinstance(files, list) else [files]
    if not all(isinstance(one, str) for one in named):
        advice = "name Python files beside the study, as in plugins: [my_attack.py]."
        problems.append(Problem(lines.at("plugins"), f"plugins {files!r}: {advice}"))
        return
    try:
        name_plugins(path.parent / one for one in named)
    except GradleakError as error:
        problems.append(Problem(lines.at("plugins"), f"plugins: {error}"))


def sort_by_line(problems: Iterable[Problem]) -> list[Problem]:
    """Each problem once, by its line."""
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0)


def refusal(path: Path, problems: Sequence[Problem], more: str = "") -> GradleakError:
    """The error that tells all that is wrong with a study; `more`: what was not looked at."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    told = "".join(f"\n  {problem}" for problem in problems)
    return GradleakError(f"{path} has {count}; nothing was run.{told}{more}")


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
        raise GradleakError(
            f"{path} must be a mapping such as 'attacks: [tag, dlg]', not {type(plain).__name__}."
        )
    return {str(key): value for key, value in plain.items()}, Lines(text)


def _change(written: str) -> tuple[str, Any]:
    field, equals, value = written.partition("=")
    if not equals:
        raise GradleakError(
            f"Cannot read --set {written!r}: write --set field=value, such as --set limit=10."
        )
    try:
        return field.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise GradleakError(
            f"Cannot read the value of --set {written!r}: {' '.join(str(error).split())}."
        ) from error


def _cases(written: Any, lines: Lines, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Fields that change together, by the name of the case; one without a name where there are
    no cases."""
    if written is None:
        return {"": {}}
    if (
        not isinstance(written, dict)
        or not written
        or not all(isinstance(fields, dict) for fields in written.values())
    ):
        advice = "such as 'noise: {defenses: gaussian_noise}'."
        problems.append(
            Problem(lines.at("cases"), f"cases must name the fields each one changes, {advice}")
        )
        return {"": {}}
    return {
        str(case): {str(field): value for field, value in fields.items()}
        for case, fields in written.items()
    }


def _axes(
    plain: Mapping[str, Any], places: Mapping[str, list[str]], lines: Lines, problems: list[Problem]
) -> Axes:
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
            problems.append(
                Problem(line, f"{field!r} is given twice (as {written!r} too); keep one.")
            )
        elif value == [] and field not in ONE_VALUE:
            problems.append(
                Problem(
                    line, f"{written} is an empty list; give it at least one value or leave it out."
                )
            )
        elif isinstance(value, list) and (
            field not in ONE_VALUE or any(isinstance(item, list) for item in value)
        ):
            axes[field] = [
                Value(item, lines.at(*place, number) if place else None)
                for number, item in enumerate(value)
            ]
        else:
            axes[field] = [Value(value, line)]
    return axes
