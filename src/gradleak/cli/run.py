"""`gradleak run`: a grid of audits from a YAML file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.options import Memory, Out, option

ENGINES = ("local", "ray")

if TYPE_CHECKING:
    from gradleak.study.grid import CellResult


def run(
    spec: Annotated[Path, typer.Argument(help="YAML with the fields of an audit; a list is an axis of the grid.")],
    out: Out = Path("runs"),
    device: Annotated[
        str, option("cpu, cuda, cuda:N, or auto: a GPU where there is one; with commas, one for each worker. [auto]")
    ] = "auto",
    memory: Memory = None,
    workers: Annotated[
        int | None, option("Processes that share the cells, each on its own device. [one for each device]", minimum=1)
    ] = None,
    change: Annotated[
        list[str] | None, option("Replace a field of the file: --set limit=10. Repeat for several.", "--set")
    ] = None,
    only: Annotated[
        list[str] | None, option("Run the cells on this value of an axis: --only 'attacks=lamp*'. Repeat for several.")
    ] = None,
    limit_cells: Annotated[int | None, option("Run the first cells of the grid only.", minimum=1)] = None,
    engine: Annotated[str, option("local, or ray: the cells are shared out over a Ray cluster. [local]")] = "local",
    address: Annotated[
        str | None, option("Of the Ray cluster: auto, or host:port. [a cluster of this machine's own, ended with the run]")
    ] = None,
    retry_failed: Annotated[bool, option("Run cells again that failed before.", "--retry-failed")] = False,
) -> None:
    """Audits every cell of a grid, one record each. Cells that have a record already are skipped, and cells that failed.

    A flat list under attacks is an axis; under metrics, know and defenses it is one value, and a list of lists an axis.
    Under cases stand names and the fields each one changes; every case is crossed with the axes.
    """
    from gradleak.cli.device import resolve_device, resolve_memory
    from gradleak.core.errors import GradleakError
    from gradleak.report.layout import open_console
    from gradleak.report.live import TerminalDisplay
    from gradleak.study.cells import read_study
    from gradleak.study.engine import run_on
    from gradleak.study.plan import only as chosen
    from gradleak.study.plan import write_plan
    from gradleak.study.ray_engine import Cluster, run_on_ray

    study = read_study(spec, change or ())
    cells = chosen(study.cells, only or ())[:limit_cells]
    if engine not in ENGINES:
        raise GradleakError(f"Unknown engine {engine!r}. Use --engine {' or '.join(ENGINES)}.")
    if address is not None and engine != "ray":
        raise GradleakError("--address is of a Ray cluster: add --engine ray, or leave it out.")
    display = TerminalDisplay(open_console(to_stderr=True), show_guesses=all(cell.spec.data.made_up for cell in study.cells))
    write_plan(out / study.name, study)
    folder = out / study.name
    if engine == "ray":
        cluster = Cluster(address, device, workers, resolve_memory(memory))
        results = run_on_ray(cells, folder, cluster, display, retry=retry_failed)
    else:
        devices = [resolve_device(word.strip()) for word in device.split(",")]
        most = resolve_memory(memory)
        results = run_on(devices, workers or len(devices), cells, folder, display, retry=retry_failed, memory=most)
    print_results(results, out / study.name)


def print_results(results: "list[CellResult]", folder: Path) -> None:
    """One row a cell; failed ones are named again at the end."""
    from gradleak.core.errors import RunFailed
    from gradleak.report.layout import open_console
    from gradleak.report.listing import Row, cell_tables

    console = open_console()
    rows = [Row(result.cell.axes, result.record, "" if result.record else "failed") for result in results]
    for table in cell_tables(console, rows):
        console.print(table)
        console.print()
    console.print("Worst case over the attacks of a cell, in %: mean [95 % interval], the blind attack below.", style="dim")
    console.print(f"Records: {folder}", soft_wrap=True)
    failures = [str(result.failure) for result in results if result.failure]
    if failures:
        raise RunFailed(f"{len(failures)} of {len(results)} cells failed; their tracebacks are in {', '.join(failures)}.")
