"""`gradleak check`: a study looked at before it is run; its names are checked against the index of
components before any library is loaded."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.command import (
    Change,
    Device,
    check_line,
    open_terminal,
    option,
    read_index,
    resolve_device,
)
from gradleak.core.errors import GradleakError
from gradleak.core.registry import list_registered, unknown_component, unknown_field
from gradleak.report.numbers import write_count, write_duration

if TYPE_CHECKING:
    from rich.console import Console

    from gradleak.study.cells import Cell

# Fields of a study that hold components, and of which kind
FIELDS = {
    **{kind: kind for kind in ("target", "protocol", "view", "prior")},
    **{"data": "dataset", "public": "dataset"},
    **{f"{kind}s": kind for kind in ("attack", "defense", "metric")},
}
REST = "\n  Values, files and combinations are looked at when these are mended."


def check(
    spec: Annotated[Path, typer.Argument(help="YAML of a study.")],
    change: Change = None,
    device: Device = "auto",
    seconds: Annotated[
        float,
        option("Tries each attack so long on a few batches, to estimate time; 0 tries none. [3]"),
    ] = 3.0,
) -> None:
    """Resolves every name and field of a study, counts its cells, estimates time and memory. Runs
    nothing.

    All problems are reported at once, each with its line number.
    """
    check_names([spec], change or ())  # a typo is told before the libraries below are loaded
    from gradleak.report.terminal.console import print_indented
    from gradleak.study.cells import list_axes, read_study
    from gradleak.targets import hub_ids

    if seconds < 0:
        raise GradleakError(f"--seconds must be 0 or more, not {seconds:g}.")
    where = resolve_device(device)
    study = read_study(spec, change or ())
    console = open_terminal()
    examples = sum(cell.spec.limit * cell.spec.batch_size for cell in study.cells)
    console.print(
        f"{study.name}: {write_count(len(study.cells), 'cell', 'cells')}, {examples} examples to"
        " attack. Every name and field resolves, and the data is there."
    )
    if unseen := hub_ids(cell.spec.target for cell in study.cells):
        console.print(
            f"Not looked up: {', '.join(unseen)}. No folder has that name, so it is taken for an id"
            " of the hub."
        )
    for axis in list_axes(study.cells):
        values = dict.fromkeys(cell.axes[axis] for cell in study.cells if axis in cell.axes)
        print_indented(console, f"  {axis}: ", "; ".join(values))
    if seconds:
        _print_estimate(console, study.cells, where, seconds)
    console.print("Nothing was run.")


def _print_estimate(
    console: "Console", cells: "tuple[Cell, ...]", device: str, seconds: float
) -> None:
    from gradleak.report.terminal.console import build_table
    from gradleak.study.pace import peak_memory, probe_cells

    found = list(probe_cells(cells, device, seconds))
    table = build_table()
    for name in ("target", "attack", "defense"):
        table.add_column(name, overflow="fold")
    for name in ("batch size", "batches", "a batch", "all"):
        table.add_column(name, overflow="fold", justify="right")
    for one in found:
        about = "" if one.whole else "~"
        times = [about + write_duration(time) for time in (one.seconds_each, one.seconds)]
        table.add_row(
            *(one.target, one.attack, one.defense, str(one.batch_size), str(one.batches)),
            *([one.problem, ""] if one.problem else times),
        )
    console.print(table)
    stretched = (
        f" ~ stretched from {seconds:g} s of progress as if no search ended early and every"
        " further try was needed."
    )
    console.print(
        f"\nAbout {write_duration(sum(one.seconds for one in found))} on {device} in one process;"
        f" peak memory here {peak_memory(device) / 2**30:.1f} GiB."
        f"{'' if all(one.whole or one.problem for one in found) else stretched}"
    )


def check_names(paths: Sequence[Path], changes: Sequence[str]) -> None:
    """Refuses studies with a misspelt name or field. All else is left to whoever reads them in
    full."""
    refused = [str(error) for path in paths if (error := _refusal(path, changes)) is not None]
    if refused:
        raise GradleakError("\n".join(refused))


def _refusal(path: Path, changes: Sequence[str]) -> GradleakError | None:
    from gradleak.study.axes import Problem, read_grids, read_yaml, refusal, sort_by_line

    if isinstance(read_yaml(path, "a study")[0], list):
        return None  # a priority list
    written = read_grids(path, changes)
    values = [
        (field, value)
        for axes in written.grids.values()
        for field in axes.keys() & FIELDS.keys()
        for value in axes[field]
    ]
    misspelt = [
        Problem(value.line, f"{field}: {error}")
        for field, value in values
        for error in _misspelt(FIELDS[field], value.plain)
    ]
    problems = sort_by_line([*written.problems, *misspelt])
    return refusal(path, problems, REST) if problems else None


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
