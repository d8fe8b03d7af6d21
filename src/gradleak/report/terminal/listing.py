"""Many records in one table: a folder's, or the cells of a study."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from gradleak.records.judgement import judge_summary, leading_metric, list_flags_beside
from gradleak.records.schema import Record
from gradleak.records.store import Summary
from gradleak.report.naming import Labels, write_component, write_defenses
from gradleak.report.numbers import MISSING, write_interval, write_number
from gradleak.report.terminal.console import (
    build_table,
    fits,
    number_columns,
    split_to_fit,
    text_columns,
)

CELL_METRICS = (
    *(
        "rouge1",
        "rouge2",
        "rougeL",
        "exact_match",
        "rouge1_legacy",
        "rouge2_legacy",
        "rougeL_legacy",
    ),
    *("mse", "psnr", "ssim", "lpips", "lpips_legacy"),
)


@dataclass(frozen=True)
class CellRow:
    """A cell of a study: its value on each axis, and its record or why there is none."""

    axes: Mapping[str, str]
    record: Record | None
    note: str = ""


def print_folder(console: Console, summaries: Sequence[tuple[str, Summary]]) -> None:
    """Prints the records of a folder, by file name.

    They stand in a table where it fits the width, else one below the other.
    """
    table = build_folder_table(summaries)
    if fits(console, table):
        console.print(table)
        return
    labels = Labels([summary.record for _, summary in summaries])
    for place, (name, summary) in enumerate(summaries):
        record = summary.record
        metric = leading_metric(record.worst_case)
        if place:
            console.print()
        console.print(Text(name, style="bold"), soft_wrap=True)
        for line in (
            f"{', '.join(_describe_record(record, labels))}, n = {record.data.examples}",
            f"worst {metric} {_write_score(record, metric, between=', ')}",
            f"flags: {', '.join(_list_flags(summary)) or 'none'}",
        ):
            console.print(Padding(line, (0, 0, 0, 2)))


def _list_flags(summary: Summary) -> list[str]:
    return list(list_flags_beside(judge_summary(summary), summary.record))


def _describe_record(record: Record, labels: Labels) -> tuple[str, str, str, str]:
    """Names target, data, defense and attacks, these with the fields by which records differ."""
    spec = record.spec
    return (
        record.target.name,
        write_component(spec.get("data")),
        write_defenses(spec.get("defenses")),
        ", ".join(labels.attack(attack.spec) for attack in record.attacks.values()),
    )


def build_folder_table(summaries: Sequence[tuple[str, Summary]]) -> Table:
    """Builds a table of the records of a folder, by file name."""
    records = [summary.record for _, summary in summaries]
    leading = [leading_metric(record.worst_case) for record in records]
    labels = Labels(records)
    table = build_table(
        Column("record", overflow="fold", no_wrap=True),
        *text_columns("target", "data", "defense", "attacks"),
        Column("n", justify="right"),
        *number_columns(f"worst {' or '.join(dict.fromkeys(leading))}"),
        Column("flags", no_wrap=True),
    )
    for (name, summary), metric in zip(summaries, leading, strict=True):
        table.add_row(
            name,
            *_describe_record(summary.record, labels),
            str(summary.record.data.examples),
            _write_score(summary.record, metric),
            "\n".join(_list_flags(summary)) or "none",
            end_section=True,
        )
    return table


def build_cell_tables(console: Console, rows: Sequence[CellRow]) -> Iterator[Table]:
    """Builds a row for each cell, with as many metrics side by side as fit.

    It has the worst case over a cell's attacks, blind below it.
    """
    present = {name for row in rows if row.record for name in row.record.worst_case}
    metrics = [name for name in CELL_METRICS if name in present] or ["rouge1"]
    axes = list(dict.fromkeys(axis for row in rows for axis in row.axes))

    def build(chosen: Sequence[str]) -> Table:
        table = build_table(*text_columns(*(axes or ["cell"])), *number_columns(*chosen))
        for row in rows:
            names = [row.axes.get(axis, MISSING) for axis in axes] or ["1"]
            table.add_row(*names, *(_write_cell(row, metric) for metric in chosen))
        return table

    return split_to_fit(console, metrics, build)


def _write_cell(row: CellRow, metric: str) -> str:
    return row.note if row.record is None else _write_score(row.record, metric)


def _write_score(record: Record, metric: str, between: str = "\n") -> str:
    score = record.worst_case.get(metric)
    return (
        MISSING
        if score is None
        else f"{write_interval(score)}{between}blind {write_number(score.blind, score.unit)}"
    )
