"""The table of scores: attacks side by side, each beside the blind one."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from gradleak.records.schema import Record, Score
from gradleak.report.layout import fitting, plain_table
from gradleak.report.numbers import MISSING, gain, mean_and_interval, number

Column = tuple[str, dict[str, Score]]
WORST = "worst case"


def score_tables(console: Console, record: Record) -> Iterator[Table]:
    """One table, or several where the attacks do not fit beside one another; the worst case comes last."""
    columns: list[Column] = [(name, attack.scores) for name, attack in record.attacks.items()]
    if len(columns) > 1:
        columns.append((WORST, record.worst_case))
    yield from fitting(console, columns, _table)


def _table(columns: Sequence[Column]) -> Table:
    table = plain_table()
    table.add_column("\nmetric")
    for name, _ in columns:
        table.add_column(f"{name}\nmean [95 %]", justify="right")
        table.add_column("\nblind", justify="right", style="dim")
        table.add_column("\ngain", justify="right")
    for metric in dict.fromkeys(metric for _, scores in columns for metric in scores):
        table.add_row(metric, *(text for _, scores in columns for text in _cells(scores.get(metric))))
    return table


def _cells(score: Score | None) -> tuple[str, str, str]:
    if score is None:
        return MISSING, MISSING, MISSING
    return mean_and_interval(score), number(score.blind, score.unit), gain(score)
