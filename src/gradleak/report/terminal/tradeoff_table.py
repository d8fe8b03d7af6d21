"""A trade-off on a terminal."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradleak.report.numbers import mean_and_interval, number
from gradleak.report.pictures.tradeoff_chart import (
    NONE,
    Point,
    Tradeoff,
    conclusions,
    epsilon_text,
    gain_text,
    heading,
    utility_text,
)
from gradleak.report.terminal.console import fitting, plain_table

Column = tuple[str, Callable[[Point], str]]


def print_tradeoff(console: Console, tradeoff: Tradeoff) -> None:
    """A row a setting, in the order asked for; then what may be concluded."""
    fraction = tradeoff.points[0].leak.unit == "fraction"
    percent = ", leak in %" if fraction else ""
    console.print(Text(f"Trade-off: {tradeoff.metric} against {tradeoff.utility}{percent}", style="bold"))
    for line in heading(tradeoff):
        console.print(line, style="dim")
    console.print()
    for table in fitting(console, _columns(tradeoff), lambda columns: _table(tradeoff, columns)):
        console.print(table)
        console.print()
    for sentence in conclusions(tradeoff):
        console.print(sentence)


def _columns(tradeoff: Tradeoff) -> list[Column]:
    names = [tradeoff.utility, *(name for name in ("mcc", "f1", "accuracy") if name != tradeoff.utility)]
    with_epsilon = any(epsilon_text(point) != NONE for point in tradeoff.points)
    return [
        ("gain", gain_text),
        ("verdict", lambda point: point.verdict),
        *((name, _utility(name)) for name in names[:1]),
        (tradeoff.metric, lambda point: mean_and_interval(point.leak)),
        ("blind", lambda point: number(point.leak.blind, point.leak.unit)),
        *((name, _utility(name)) for name in names[1:]),
        *([("whole run", epsilon_text)] if with_epsilon else []),
    ]


def _utility(name: str) -> Callable[[Point], str]:
    return lambda point: utility_text(point.utility[name])


def _table(tradeoff: Tradeoff, columns: Sequence[Column]) -> Table:
    table = plain_table()
    table.add_column("", no_wrap=True)
    table.add_column("defense", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for place, point in enumerate(tradeoff.points, start=1):
        style = "green" if tradeoff.meets(point) else ""
        mark = "*" if point is tradeoff.weakest else " "
        table.add_row(f"{place}{mark}", point.defense, *(draw(point) for _, draw in columns), style=style)
    return table
