"""A setting's bracket on a terminal: rebuilt ≤ at most ≤ guaranteed, and the bits behind it."""

from rich.console import Console
from rich.padding import Padding

from gradleak.records.brackets import Bracket, list_brackets
from gradleak.records.schema import BoundRecord, Record
from gradleak.report.bracket_words import (
    describe_bounds,
    write_bound,
    write_rebuilt,
    write_without,
)
from gradleak.report.numbers import MISSING
from gradleak.report.terminal.console import build_table


def print_bracket(console: Console, record: Record) -> None:
    """Prints what no attack could do on a setting; nothing where that was not computed."""
    if record.bounds is None:
        return
    table = build_table()
    for title in ("", "rebuilt", "at most", "guaranteed", "without the update"):
        table.add_column(title, justify="right" if title else "left")
    for bracket in list_brackets(record):
        table.add_row(*list_cells(bracket))
    if table.row_count:  # where words are counted there is no share
        console.print(Padding(table, (0, 0, 0, 2)))
    for sentence in describe_bounds(record):
        console.print(f"  {sentence}", style="dim", soft_wrap=False)


def list_cells(bracket: Bracket) -> tuple[str, str, str, str, str]:
    """Returns one row: what is measured, then the three numbers, then chance."""
    guaranteed: BoundRecord | None = bracket.guaranteed
    return (
        bracket.of,
        write_rebuilt(bracket),
        write_bound(bracket.at_most),
        MISSING if guaranteed is None else write_bound(guaranteed),
        write_without(bracket.at_most),
    )
