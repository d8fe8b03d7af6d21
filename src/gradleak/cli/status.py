"""`gradleak status`: how far a run is."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.command import open_terminal
from gradleak.records.files import RecordError
from gradleak.report.numbers import write_count, write_duration

if TYPE_CHECKING:
    from gradleak.study import RunState

SHOWN = 10


def status(
    run: Annotated[
        Path, typer.Argument(help="The folder of a study's records, such as runs/lamp_table1.")
    ],
) -> None:
    """Says how many cells of a run are finished, failed, begun and waiting, and about how long
    the rest will take."""
    from gradleak.study import read_state

    if not run.is_dir():
        raise RecordError(f"{run} is not a folder. Name the folder a study wrote its records into.")
    state = read_state(run)
    if not state.cells:
        raise RecordError(
            f"{run} holds neither a study nor records. Name the folder a study wrote its records"
            " into."
        )
    console = open_terminal()
    console.print(
        f"{len(state.cells)} cells: {len(state.finished)} finished, {len(state.failed)} failed,"
        f" {len(state.begun)} begun, {len(state.waiting)} waiting."
    )
    if state.beside:
        console.print(f"{state.beside} records beside these, of other settings.")
    for reason, count in Counter(reason for _, reason in state.outdated).items():
        have = "has a record" if count == 1 else "have records"
        console.print(
            f"{count} of the waiting cells {have}, of an older attack ({reason}): to be run again."
        )
    if state.finished:
        console.print(f"Attacks took {write_duration(state.seconds)} so far.")
    if state.left:
        console.print(foretell(state))
    for cell, error in state.failed[:SHOWN]:
        console.print(f"failed: {cell.title} ({cell.id}): {error}", soft_wrap=True)
    if len(state.failed) > SHOWN:
        console.print(f"… and {len(state.failed) - SHOWN} more.")
    if state.failed:
        console.print("gradleak run with --retry-failed tries them again.")


def foretell(state: "RunState") -> str:
    """How long the rest will take, from finished cells with the same attacks; and of how many
    cells that cannot be told."""
    told = len(state.left) - len(state.unforetold)
    cells, others = (write_count(count, "cell", "cells") for count in (told, len(state.unforetold)))
    about = f"Attacks in {cells} left may take about {write_duration(state.seconds_left)}"
    if not state.unforetold:
        return f"{about}, by finished cells with the same attacks."
    attacks = ", ".join(state.unknown_attacks[:SHOWN])
    why = (
        f"none with {attacks} has finished"
        if attacks
        else "the plan is of an older version; gradleak run writes a new one"
    )
    cannot = f"of {others} it cannot be told, since {why}."
    return f"{about}; {cannot}" if told else f"How long the rest takes cannot be told, since {why}."
