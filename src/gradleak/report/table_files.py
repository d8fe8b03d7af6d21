"""Filled tables as Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Sequence

from gradleak.report.markdown import table as markdown_table
from gradleak.report.numbers import number
from gradleak.report.paper_tables import Filled, Line

NOT_RUN = "not run"
LATEX = str.maketrans({"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "σ": r"$\sigma$", "Δ": r"$\Delta$", "±": r"$\pm$"})


def markdown(filled: Sequence[Filled], command: str) -> str:
    """One table after the other; ours with a 95 % interval, theirs as printed."""
    lines = [
        "# The papers' tables, ours beside theirs",
        "",
        f"Written by `{command}`. Ours: mean [95 % interval]; fractions in %.",
        "",
    ]
    for one in filled:
        lines += [f"## {one.table.title}", "", f"{one.table.paper}. {_count(one)}", ""]
        lines += markdown_table(_head(one), [_row(one, line) for line in one.lines])
    return "\n".join(lines)


def latex(filled: Sequence[Filled]) -> str:
    """A tabular each, without a package but the ones everybody has."""
    parts = []
    for one in filled:
        columns = "ll" + "r" * (2 * len(one.table.metrics) + 1) + "l"
        rows = [_head(one), *(_row(one, line) for line in one.lines)]
        body = [" & ".join(text.translate(LATEX) for text in row) + r" \\" for row in rows]
        head = [r"\begin{table}", rf"\caption{{{one.table.title.translate(LATEX)}}}", rf"\label{{tab:{one.table.name}}}"]
        rules = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", body[0], r"\hline", *body[1:], r"\hline"]
        parts.append("\n".join([*head, *rules, r"\end{tabular}", r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def comma_separated(filled: Sequence[Filled]) -> str:
    """One line a number, for programs."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    head = ("table", "row", "column", "metric", "ours", "low", "high", "blind", "n", "paper", "target", "date", "record")
    writer.writerow(head)
    for one in filled:
        for line in one.lines:
            for place, (printed, _) in enumerate(one.table.metrics):
                writer.writerow([one.table.name, line.row, line.column, printed, *_numbers(line, place)])
    return file.getvalue()


def _numbers(line: Line, place: int) -> list[object]:
    score = line.ours[place]
    theirs = line.theirs[place] if line.theirs else ""
    if score is None or line.record is None:
        return [NOT_RUN if line.record is None else "not scored", "", "", "", "", theirs, "", "", ""]
    scale = 100 if score.unit == "fraction" else 1
    values = ["" if value is None else round(scale * value, 4) for value in (score.mean, score.low, score.high, score.blind)]
    return [*values, score.n, theirs, line.record.target.name, line.record.created[:10], line.record.id]


def _count(one: Filled) -> str:
    places = sum(bool(line.theirs) for line in one.lines)
    return f"{one.run} of {places} places were run."


def _head(one: Filled) -> list[str]:
    pairs = [text for printed, _ in one.table.metrics for text in (printed, f"{printed} (paper)")]
    return ["row", "column", *pairs, "n", "our target, date"]


def _row(one: Filled, line: Line) -> list[str]:
    texts = [line.row, line.column]
    for place, score in enumerate(line.ours):
        if line.record is None:
            texts.append(NOT_RUN)
        elif score is None or score.mean is None:
            texts.append("not scored")
        else:
            ends = f" [{number(score.low, score.unit)}, {number(score.high, score.unit)}]"
            texts.append(number(score.mean, score.unit) + ends)
        texts.append(f"{line.theirs[place]:g}" if line.theirs else "–")
    return [
        *texts,
        str(line.n) if line.record else "",
        f"{line.record.target.name}, {line.record.created[:10]}" if line.record else "",
    ]
