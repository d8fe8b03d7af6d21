"""Tables in HTML, in Markdown and as CSV."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Column:
    """A column of an HTML table; numbers stand at its right edge."""

    name: str
    is_number: bool = False


def number_columns(*names: str) -> list[Column]:
    """Returns columns that hold numbers."""
    return [Column(name, is_number=True) for name in names]


def draw_html_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Markup]],
    *,
    stacked: bool = True,
    name: str = "",
) -> Markup:
    """Draws a table whose first column names the rows.

    On a phone the cells of a stacked table stand below one another, each with its column's name.
    """
    look = Markup(' id="{}"').format(name) if name else Markup("")
    look += Markup(' class="stack"') if stacked else Markup("")
    head = Markup("").join(_draw_head(column) for column in columns)
    body = Markup("").join(_draw_row(columns, row, stacked) for row in rows)
    return Markup("<table{}><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(
        look, head, body
    )


def _draw_head(column: Column) -> Markup:
    number = Markup(' class="number"') if column.is_number else Markup("")
    return Markup('<th scope="col"{}>{}</th>').format(number, column.name)


def _draw_row(columns: Sequence[Column], row: Sequence[str | Markup], stacked: bool) -> Markup:
    cells = [Markup('<th scope="row">{}</th>').format(row[0])]
    for column, text in zip(columns[1:], row[1:], strict=True):
        look = Markup(' class="number"') if column.is_number else Markup("")
        look += Markup(' data-label="{}"').format(column.name) if stacked else Markup("")
        cells.append(Markup("<td{}>{}</td>").format(look, text))
    return Markup("<tr>{}</tr>").format(Markup("").join(cells))


def draw_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table, and an empty one."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(_escape_cell(text) for text in row)} |"
    yield ""


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write_csv_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Writes a table for programs."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([head, *rows])
    return file.getvalue()
