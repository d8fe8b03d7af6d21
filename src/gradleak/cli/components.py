"""`gradleak list`: what there is to put together."""

from typing import Annotated

import typer

from gradleak.cli.command import KINDS, ComponentEntry, open_terminal, read_index, read_plugins
from gradleak.core.errors import GradleakError, did_you_mean


def complete_kind(incomplete: str) -> list[str]:
    """The kinds that a shell may complete a word to."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def list_components(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=", ".join(KINDS) + ". [the kinds themselves]", autocompletion=complete_kind
        ),
    ] = None,
) -> None:
    """Lists components of a kind with their fields and papers; without a kind, the kinds with
    the names of each."""
    if kind is None:
        print_kinds()
        return
    chosen = KINDS.get(kind, kind)
    if chosen not in KINDS.values():
        raise GradleakError(
            f"Unknown kind {kind!r}{did_you_mean(kind, list(KINDS))} Kinds: {', '.join(KINDS)}."
        )
    print_components(chosen)


def print_kinds() -> None:
    """Every kind with the names of its components."""
    from gradleak.report.terminal.console import build_table

    table = build_table()
    table.add_column("kind", no_wrap=True)
    table.add_column("names")
    for kinds, kind in KINDS.items():
        names = [*read_index()[kind], *read_plugins(kind)]
        table.add_row(kinds, ", ".join(names), end_section=True)
    console = open_terminal()
    console.print(table)
    console.print("\nFields, defaults and papers: gradleak list attacks, and so on.")


def print_components(kind: str) -> None:
    """The components of one kind, one below the other: a table of so many fields would be cut at
    80 columns."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = open_terminal()
    for name, entry in {**read_index()[kind], **read_plugins(kind)}.items():
        lines = {"fields": write_fields(entry), "requires": entry.requires, "paper": entry.cites}
        grid = Table.grid(padding=(0, 2))
        for title, text in lines.items():
            if text:
                grid.add_row(Text(title, style="dim"), text)
        described = Text.assemble((name, "bold"), "  ", entry.summary)
        for place, line in enumerate(described.wrap(console, console.width - 2)):
            line.rstrip()
            console.print(Padding(line, (0, 0, 0, 2 if place else 0)))
        if grid.row_count:
            console.print(Padding(grid, (0, 0, 0, 2)))
        console.print()


def write_fields(entry: ComponentEntry) -> str:
    """`steps=2500, seed (required)`."""
    return ", ".join(
        f"{name} (required)" if value is None else f"{name}={value}"
        for name, value in entry.fields.items()
    )
