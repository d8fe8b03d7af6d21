"""`gradleak tune`: the numbers of an attack, searched on sentences that no figure is reported
on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.command import (
    Device,
    Memory,
    PriorName,
    TargetName,
    open_display,
    open_terminal,
    option,
    refuse_failures,
    resolve_device,
    resolve_memory,
)
from gradleak.report.numbers import MISSING, write_difference, write_interval, write_number

if TYPE_CHECKING:
    from rich.table import Table

    from gradleak.study import Tuned, Tuning


def tune(
    attack: Annotated[
        str, typer.Argument(help="Attack to tune, such as lamp_cos; fields written here are held.")
    ],
    data: Annotated[
        str,
        option(
            "Tuning sentences: a name or a file. cola and its like are taken with"
            " selection=lamp_tune."
        ),
    ],
    target: TargetName = "minilm",
    combinations: Annotated[
        int, option("Combinations to try, the attack's defaults first. [50]", minimum=1)
    ] = 50,
    coarse: Annotated[int, option("Sentences all combinations are tried on. [10]", minimum=1)] = 10,
    best: Annotated[int, option("Combinations that go on to the fine stage. [10]", minimum=1)] = 10,
    fine: Annotated[int, option("Other sentences, which decide. [20]", minimum=2)] = 20,
    hold: Annotated[
        list[str] | None, option("Hold a field of the attack: --set steps=300. Repeat.", "--set")
    ] = None,
    search: Annotated[
        list[str] | None,
        option(
            "Search a field: --range learning_rate=0.001:0.5:log, or :linear. Repeat. [LAMP's"
            " supplement D]",
            "--range",
        ),
    ] = None,
    metric: Annotated[str, option("What decides. [rouge2]")] = "rouge2",
    view: Annotated[str, option("Which part of the update is seen. [everything]")] = "everything",
    prior: PriorName = "auto",
    seed: Annotated[int, option("Of the combinations, and of the audits' random streams. [0]")] = 0,
    device: Device = "auto",
    memory: Memory = None,
    out: Annotated[Path, option("Folder for records and tuning.json. [runs/tune]")] = Path(
        "runs/tune"
    ),
) -> None:
    """Searches an attack's numbers in two stages, as LAMP's authors did: many combinations on few
    sentences, the best on others.

    Every combination and stage is an audit with a record; the same command again takes those that
    are there.
    """
    from gradleak.study import Effort, plan_tuning, read_range
    from gradleak.study import tune as search_numbers

    line = attack + "".join(
        f"{',' if ':' in attack or place else ':'}{field}" for place, field in enumerate(hold or ())
    )
    effort = Effort(combinations, coarse, best, fine)
    settings = {"target": target, "data": data, "view": view, "prior": prior, "seed": seed}
    planned = plan_tuning(line, [read_range(one) for one in search or ()], effort, metric, settings)
    display = open_display(show_guesses=planned.base.data.made_up)
    if planned.effort != effort:
        display.say(
            f"{data} has fewer examples: {planned.effort.coarse} serve the coarse stage,"
            f" {planned.effort.fine} the fine one."
        )
    print_tuned(
        planned,
        search_numbers(planned, out, resolve_device(device), display, resolve_memory(memory)),
        out,
    )


def print_tuned(planned: "Tuning", tuned: "Tuned", folder: Path) -> None:
    """The combinations that went on, the winner as a line to paste, and how far to trust it."""
    console = open_terminal()
    console.print(build_ranking_table(tuned))
    console.print()
    console.print(
        f"{tuned.metric}: mean [95 % interval]; gain: over the defaults, sentence by sentence.",
        style="dim",
    )
    console.print(planned.where_to_report(), style="dim")
    console.print(tuned.verdict)
    console.print(f"Winner: {tuned.winner}", soft_wrap=True)
    console.print(f"Ranking: {folder / 'tuning.json'}", soft_wrap=True)
    refuse_failures("audits", tuned.failures)


def build_ranking_table(tuned: "Tuned") -> "Table":
    """Builds a row for each combination of the fine stage, best first."""
    from gradleak.report.terminal.console import build_table

    table = build_table()
    table.add_column("", no_wrap=True)
    for one in tuned.ranges:
        # narrow: an attack has up to five
        table.add_column(one.field.replace("_", "_\n"), justify="right", overflow="fold")
    for name in ("coarse", "fine", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, ranked in enumerate(tuned.ranked, start=1):
        if ranked.fine is not None:
            gain = None if ranked.is_default else ranked.gain
            table.add_row(
                "defaults" if ranked.is_default else str(place),
                *(f"{value:g}" for value in ranked.values.values()),
                write_number(ranked.coarse.mean, ranked.coarse.unit),
                write_interval(ranked.fine),
                MISSING if gain is None else write_difference(gain, ranked.fine.unit),
            )
    return table
