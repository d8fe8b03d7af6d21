"""Many records in one table: a folder's, or the cells of a study."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from gradleak.records.judgement import judge_record, leading_metric, raised_beside
from gradleak.records.schema import Record
from gradleak.report.layout import fitting, plain_table
from gradleak.report.numbers import MISSING, mean_and_interval, number
from gradleak.report.terminal import chain, line

CELL_METRICS = (
    *("rouge1", "rouge2", "rougeL", "exact_match", "rouge1_legacy", "rouge2_legacy", "rougeL_legacy"),
    *("mse", "psnr", "ssim", "lpips", "lpips_legacy"),
)


@dataclass(frozen=True)
class Row:
    """A cell of a study: its value on each axis, and its record or why there is none."""

    axes: Mapping[str, str]
    record: Record | None
    note: str = ""


def folder_table(records: Sequence[tuple[str, Record]]) -> Table:
    """The records of a folder, by file name."""
    table = plain_table()
    for name in ("record", "target", "data", "defense", "attacks"):
        table.add_column(name, overflow="fold", no_wrap=name == "record")
    table.add_column("n", justify="right")
    leading = [leading_metric(record.worst_case) for _, record in records]
    table.add_column(f"worst {' or '.join(dict.fromkeys(leading))}", justify="right", no_wrap=True)
    table.add_column("flags", no_wrap=True)
    for (name, record), metric in zip(records, leading, strict=True):
        spec = record.spec
        described = (line(spec.get("data")), chain(spec.get("defenses")), ", ".join(record.attacks))
        flags = "\n".join(raised_beside(judge_record(record), record)) or "none"
        score = _score(record, metric)
        table.add_row(name, record.target.name, *described, str(record.data.examples), score, flags, end_section=True)
    return table


def cell_tables(console: Console, rows: Sequence[Row]) -> Iterator[Table]:
    """One row a cell, as many metrics side by side as fit; the worst case over a cell's attacks, blind below it."""
    present = {name for row in rows if row.record for name in row.record.worst_case}
    metrics = [name for name in CELL_METRICS if name in present] or ["rouge1"]
    axes = list(dict.fromkeys(axis for row in rows for axis in row.axes))

    def build(chosen: Sequence[str]) -> Table:
        table = plain_table()
        for axis in axes or ["cell"]:
            table.add_column(axis, overflow="fold")
        for metric in chosen:
            table.add_column(metric, justify="right", no_wrap=True)
        for row in rows:
            names = [row.axes.get(axis, MISSING) for axis in axes] or ["1"]
            table.add_row(*names, *(_cell(row, metric) for metric in chosen))
        return table

    yield from fitting(console, metrics, build)


def _cell(row: Row, metric: str) -> str:
    return row.note if row.record is None else _score(row.record, metric)


def _score(record: Record, metric: str) -> str:
    score = record.worst_case.get(metric)
    return MISSING if score is None else f"{mean_and_interval(score)}\nblind {number(score.blind, score.unit)}"
