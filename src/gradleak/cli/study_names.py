"""The names in a study, checked against the index of components before any library is loaded."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradleak.cli.index import check_line, read_index
from gradleak.core.errors import GradleakError
from gradleak.core.registry import list_registered, unknown_component, unknown_field
from gradleak.study.axes import Problem, in_order, read_grids, read_yaml, refusal

# Fields of a study that hold components, and of which kind
KINDS = {
    **{kind: kind for kind in ("target", "protocol", "view", "prior")},
    **{"data": "dataset", "public": "dataset"},
    **{f"{kind}s": kind for kind in ("attack", "defense", "metric")},
}
REST = "\n  Values, files and combinations are looked at when these are mended."


def check_names(paths: Sequence[Path], changes: Sequence[str]) -> None:
    """Refuses studies with a misspelt name or field. All else is left to whoever reads them in
    full."""
    refused = [str(error) for path in paths if (error := _refusal(path, changes)) is not None]
    if refused:
        raise GradleakError("\n".join(refused))


def _refusal(path: Path, changes: Sequence[str]) -> GradleakError | None:
    if isinstance(read_yaml(path, "a study")[0], list):
        return None  # a priority list
    written = read_grids(path, changes)
    values = [
        (field, value)
        for axes in written.grids.values()
        for field in axes.keys() & KINDS.keys()
        for value in axes[field]
    ]
    misspelt = [
        Problem(value.line, f"{field}: {error}")
        for field, value in values
        for error in _misspelt(KINDS[field], value.plain)
    ]
    if not misspelt and not written.problems:
        return None
    return refusal(path, in_order([*written.problems, *misspelt]), REST)


def _misspelt(kind: str, described: Any) -> Iterator[GradleakError]:
    """What no component is called, in a line, a mapping or a list of them."""
    if isinstance(described, list):
        for one in described:
            yield from _misspelt(kind, one)
        return
    try:
        if isinstance(described, str):
            check_line(kind, described)
        elif isinstance(described, dict):
            _check_mapping(kind, described)
    except GradleakError as error:
        yield error


def _check_mapping(kind: str, described: dict[Any, Any]) -> None:
    name, known = described.get("name"), read_index()[kind]
    if not isinstance(name, str) or name in list_registered(kind):
        # Without a name it is refused later, and what a program registered is looked at then
        return
    if name not in known:
        raise unknown_component(kind, name, known)
    for field in described:
        if field != "name" and field not in known[name].fields:
            raise unknown_field(kind, name, str(field), list(known[name].fields))
