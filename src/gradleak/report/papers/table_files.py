"""Filled tables as Markdown, CSV and LaTeX."""

import csv
import io
import shlex
from collections.abc import Iterator, Sequence

from gradleak.report.numbers import write_interval, write_number
from gradleak.report.papers.paper_tables import Filled, Line
from gradleak.report.table_markup import draw_markdown_table

NOT_RUN = "not run"
NOT_SCORED = "not scored"
LATEX = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "_": r"\_",
        "#": r"\#",
        "σ": r"$\sigma$",
        "Δ": r"$\Delta$",
        "±": r"$\pm$",
    }
)
BERT_BASE = ("target=bert-base-uncased",)  # in whose places MiniLM-L6 stands here
CSV_HEAD = (
    *("table", "row", "column", "metric", "ours", "low", "high", "blind", "n", "paper"),
    *("target", "seed", "machine", "date", "record"),
)


def write_tables_markdown(filled: Sequence[Filled], command: str) -> str:
    """Writes one table after the other; ours with a 95 % interval, theirs as printed."""
    lines = [
        "# The papers' tables, ours beside theirs",
        "",
        (
            f"Written by `{command}`. Ours: mean [95 % interval]; blind: the same knowledge without"
            " the update; fractions in %."
        ),
        "",
    ]
    return "\n".join([*lines, *write_sections(filled)])


def write_sections(filled: Sequence[Filled]) -> Iterator[str]:
    """Writes a heading, what was run, the table, and how to run the rest."""
    for one in filled:
        yield from (f"## {one.table.title}", "", f"{one.table.paper}. {one.count_in_words}", "")
        if one.table.note:
            yield from (one.table.note, "")
        yield from draw_markdown_table(
            [*_list_head(one), *_list_nearest_head(one)],
            [[*_list_row(one, line), *_list_nearest(one, line)] for line in one.lines],
        )
        if one.run < one.places and one.table.studies:
            yield from (*_list_commands(one), "")


def _list_commands(one: Filled) -> Iterator[str]:
    """Lists how to run what is missing: with what is at hand, and with weights to be fetched."""
    runs = [f"gradleak run studies/{name}.yaml" for name in one.table.studies]
    yield "What was not run: " + ", ".join(f"`{run}`" for run in runs) + "."
    lacking = dict.fromkeys(
        tuple(line.hub) for line in one.paper_lines if line.hub and line.record is None
    )
    fetched = [*([BERT_BASE] if one.stood_for else []), *lacking]
    if fetched:
        yield "On the paper's own models, whose weights have to be fetched:"
        yield ""
        yield from (f"    {runs[0]} {_write_options(fields)}" for fields in fetched)


def _write_options(fields: Sequence[str]) -> str:
    return " ".join(f"--set {shlex.quote(field)}" for field in fields)


def _list_nearest_head(one: Filled) -> list[str]:
    return ["paper, TinyBERT-6"] if any(line.nearest for line in one.lines) else []


def _list_nearest(one: Filled, line: Line) -> list[str]:
    """Lists theirs on TinyBERT-6, of six layers as MiniLM-L6: nearer to ours than BERT-base."""
    texts = [" / ".join(f"{value:g}" for value in line.nearest) if line.nearest else ""]
    return texts if _list_nearest_head(one) else []


def write_latex(filled: Sequence[Filled]) -> str:
    """Writes a tabular for each, without a package but the ones everybody has."""
    parts = []
    for one in filled:
        columns = "ll" + "r" * (2 * len(one.table.metrics) + 2) + "l"
        rows = [_list_head(one), *(_list_row(one, line) for line in one.lines)]
        body = [" & ".join(text.translate(LATEX) for text in row) + r" \\" for row in rows]
        head = [
            r"\begin{table}",
            rf"\caption{{{one.table.title.translate(LATEX)}}}",
            rf"\label{{tab:{one.table.name}}}",
        ]
        rules = [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\hline",
            body[0],
            r"\hline",
            *body[1:],
            r"\hline",
        ]
        parts.append("\n".join([*head, *rules, r"\end{tabular}", r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def write_csv(filled: Sequence[Filled]) -> str:
    """Writes a line for each number, for programs."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for one in filled:
        for line in one.lines:
            for place, (printed, _) in enumerate(one.table.metrics):
                writer.writerow(
                    [one.table.name, line.row, line.column, printed, *_list_numbers(line, place)]
                )
    return file.getvalue()


def _list_numbers(line: Line, place: int) -> list[object]:
    score, record = line.ours[place], line.record
    theirs = line.theirs[place] if line.theirs else ""
    if score is None or record is None:
        return [
            NOT_RUN if record is None else NOT_SCORED,
            "",
            "",
            "",
            "",
            theirs,
            "",
            "",
            "",
            "",
            "",
        ]
    scale = 100 if score.unit == "fraction" else 1
    values = [
        "" if value is None else round(scale * value, 4)
        for value in (score.mean, score.low, score.high, score.blind)
    ]
    machine = record.machine.get("name", record.machine.get("device", ""))
    seed = record.spec.get("seed", "")
    return [
        *values,
        score.n,
        theirs,
        record.target.name,
        seed,
        machine,
        record.created[:10],
        record.id,
    ]


def _list_head(one: Filled) -> list[str]:
    pairs = [text for printed, _ in one.table.metrics for text in (printed, f"{printed} (paper)")]
    return ["row", "column", *pairs, "blind", "n", "our target, seed, date"]


def _list_row(one: Filled, line: Line) -> list[str]:
    texts = [line.row, line.column]
    for place, score in enumerate(line.ours):
        if line.record is None:
            texts.append(NOT_RUN)
        else:
            texts.append(
                NOT_SCORED if score is None or score.mean is None else write_interval(score)
            )
        texts.append(f"{line.theirs[place]:g}" if line.theirs else "–")
    if line.record is None:
        return [*texts, "", "", ""]
    blind = " / ".join(
        "–" if score is None else write_number(score.blind, score.unit) for score in line.ours
    )
    seed = line.record.spec.get("seed", "–")
    return [
        *texts,
        blind,
        str(line.n),
        f"{line.record.target.name}, {seed}, {line.record.created[:10]}",
    ]
