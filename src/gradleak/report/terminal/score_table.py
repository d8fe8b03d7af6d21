"""The table of scores: attacks side by side, each beside the blind one."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from gradleak.records.schema import Record, Score
from gradleak.report.numbers import MISSING, write_gain, write_interval, write_number
from gradleak.report.terminal.console import build_table, split_to_fit

Column = tuple[str, dict[str, Score]]
WORST = "worst case"
LEGACY = "_legacy"


def build_score_tables(console: Console, record: Record, full: bool = False) -> Iterator[Table]:
    """Builds as many tables as attacks need to fit side by side; the worst case is last."""
    columns: list[Column] = [(name, attack.scores) for name, attack in record.attacks.items()]
    if len(columns) > 1:
        columns.append((WORST, record.worst_case))
    left_out = set() if full else find_hidden(record)
    shown = [
        (name, {metric: score for metric, score in scores.items() if metric not in left_out})
        for name, scores in columns
    ]
    yield from split_to_fit(console, shown, _build_table)


def find_hidden(record: Record) -> set[str]:
    """Finds legacy metrics that stand beside the honest ones they repeat.

    They are for comparison with published tables, and shown on request.
    """
    metrics = {metric for attack in record.attacks.values() for metric in attack.scores}
    return {
        metric
        for metric in metrics
        if metric.endswith(LEGACY) and metric.removesuffix(LEGACY) in metrics
    }


def _build_table(columns: Sequence[Column]) -> Table:
    table = build_table()
    table.add_column("\nmetric")
    for name, _ in columns:
        table.add_column(f"{name}\nmean [95 %]", justify="right")
        table.add_column("\nblind", justify="right", style="dim")
        table.add_column("\ngain", justify="right")
    for metric in dict.fromkeys(metric for _, scores in columns for metric in scores):
        table.add_row(
            metric, *(text for _, scores in columns for text in _list_cells(scores.get(metric)))
        )
    return table


def _list_cells(score: Score | None) -> tuple[str, str, str]:
    if score is None:
        return MISSING, MISSING, MISSING
    return write_interval(score), write_number(score.blind, score.unit), write_gain(score)
