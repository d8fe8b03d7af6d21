"""`gradleak check`: a study looked at before it is run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.options import Device, option

if TYPE_CHECKING:
    from gradleak.study.cells import Cell


def check(
    spec: Annotated[Path, typer.Argument(help="YAML of a study.")],
    change: Annotated[
        list[str] | None, option("Replace a field of the file: --set limit=10.", "--set")
    ] = None,
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
    from collections import Counter

    from gradleak.cli.study_names import check_names

    check_names([spec], change or ())  # a typo is told before the libraries below are loaded
    from gradleak.cli.options import resolve_device
    from gradleak.core.errors import GradleakError
    from gradleak.report.terminal.console import open_console
    from gradleak.study.cells import read_study
    from gradleak.targets import hub_ids

    if seconds < 0:
        raise GradleakError(f"--seconds must be 0 or more, not {seconds:g}.")
    where = resolve_device(device)
    study = read_study(spec, change or ())
    console = open_console()
    examples = sum(cell.spec.limit * cell.spec.batch_size for cell in study.cells)
    count = "1 cell" if len(study.cells) == 1 else f"{len(study.cells)} cells"
    console.print(
        f"{study.name}: {count}, {examples} examples to attack. Every name and field resolves, and"
        " the data is there."
    )
    if unseen := hub_ids(cell.spec.target for cell in study.cells):
        console.print(
            f"Not looked up: {', '.join(unseen)}. No folder has that name, so it is taken for an id"
            " of the hub."
        )
    axes = {
        axis: Counter(cell.axes[axis] for cell in study.cells if axis in cell.axes)
        for axis in _axes(study.cells)
    }
    for axis, values in axes.items():
        console.print(f"  {axis}: {'; '.join(values)}", soft_wrap=True)
    if seconds:
        _estimate(study.cells, where, seconds)
    console.print("Nothing was run.")


def _axes(cells: "tuple[Cell, ...]") -> list[str]:
    return list(dict.fromkeys(axis for cell in cells for axis in cell.axes))


def _estimate(cells: "tuple[Cell, ...]", device: str, seconds: float) -> None:
    from gradleak.report.numbers import write_duration
    from gradleak.report.terminal.console import build_table, open_console
    from gradleak.study.pace import peak_memory, probe_cells

    found = list(probe_cells(cells, device, seconds))
    table = build_table()
    for name in ("target", "attack", "defense", "batch size", "batches", "a batch", "all"):
        table.add_column(
            name,
            overflow="fold",
            justify="left" if name in ("target", "attack", "defense") else "right",
        )
    for one in found:
        about = "" if one.whole else "~"
        times = (
            [one.problem, ""]
            if one.problem
            else [about + write_duration(one.seconds_each), about + write_duration(one.seconds)]
        )
        table.add_row(
            one.target, one.attack, one.defense, str(one.batch_size), str(one.batches), *times
        )
    console = open_console()
    console.print(table)
    console.print(
        f"\nAbout {write_duration(sum(one.seconds for one in found))} on {device} in one process;"
        f" peak memory here {peak_memory(device) / 2**30:.1f} GiB. ~ stretched from {seconds:g} s"
        " of progress as if no search ended early and every further try was needed."
    )
