"""The terminal: its width, the look of tables, and tables cut so that they fit it."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

PIPED_WIDTH = 100  # columns, where there is no terminal to ask
Item = TypeVar("Item")


def open_console(to_stderr: bool = False) -> Console:
    """Opens the terminal, or plain text of a fixed width where output is piped."""
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(
        stderr=to_stderr,
        width=None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_indented(console: Console, mark: str, sentence: str) -> None:
    """Prints a sentence behind a mark: on a terminal the lines under it begin where it does, and
    elsewhere it is one line, which can be searched for."""
    if not console.is_terminal:
        console.print(f"{mark}{sentence}", soft_wrap=True)
        return
    console.print(indent(Text(mark), sentence))


def indent(mark: Text, sentence: str) -> Table:
    """Builds a mark with a sentence behind it, whose lines begin one below the other."""
    grid = Table.grid(Column(no_wrap=True), Column(overflow="fold"))
    grid.add_row(mark, sentence)
    return grid


def build_table(*columns: Column | str) -> Table:
    """Builds a table without rows in the house's look."""
    return Table(
        *columns,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_edge=False,
        header_style="bold",
    )


def text_columns(*names: str) -> list[Column]:
    """Returns columns whose texts go on in the next line."""
    return [Column(name, overflow="fold") for name in names]


def number_columns(*names: str) -> list[Column]:
    """Returns columns whose numbers stand at the right edge, each in one line."""
    return [Column(name, justify="right", no_wrap=True) for name in names]


def split_to_fit(
    console: Console, items: Sequence[Item], build: Callable[[Sequence[Item]], Table]
) -> Iterator[Table]:
    """Builds as few tables as hold all items, each with as many of them as fit the width."""
    rest = list(items)
    while rest:
        count = len(rest)
        while count > 1 and not fits(console, build(rest[:count])):
            count -= 1
        yield build(rest[:count])
        rest = rest[count:]


def fits(console: Console, table: Table) -> bool:
    """Whether a table fits the width without a broken line."""
    # A table measures no wider than it is allowed to be
    unlimited = console.options.update(max_width=10_000)
    return console.measure(table, options=unlimited).maximum <= console.width
