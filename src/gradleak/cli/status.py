"""`gradleak status`: how far a run is."""

from pathlib import Path
from typing import Annotated

import typer

SHOWN = 10


def status(run: Annotated[Path, typer.Argument(help="The folder of a study's records, such as runs/lamp_table1.")]) -> None:
    """Says how many cells of a run are finished, failed, begun and waiting, and about how long the rest will take."""
    from gradleak.records.errors import RecordError
    from gradleak.report.layout import open_console
    from gradleak.report.numbers import duration
    from gradleak.study.state import read_state

    if not run.is_dir():
        raise RecordError(f"{run} is not a folder. Name the folder a study wrote its records into.")
    state = read_state(run)
    if not state.cells:
        raise RecordError(f"{run} holds neither a study nor records. Name the folder a study wrote its records into.")
    console = open_console()
    parts = [f"{len(state.finished)} finished", f"{len(state.failed)} failed", f"{len(state.begun)} begun"]
    console.print(f"{len(state.cells)} cells: {', '.join(parts)}, {len(state.waiting)} waiting.")
    if state.beside:
        console.print(f"{state.beside} records beside these, of other settings.")
    left = state.seconds_left
    if left:
        console.print(f"Attacks took {duration(state.seconds)} so far; the rest may take about {duration(left)}.")
    for cell, error in state.failed[:SHOWN]:
        console.print(f"failed: {cell.title} ({cell.id}): {error}", soft_wrap=True)
    if len(state.failed) > SHOWN:
        console.print(f"… and {len(state.failed) - SHOWN} more.")
    if state.failed:
        console.print("gradleak run with --retry-failed tries them again.")
