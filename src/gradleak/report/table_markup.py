"""Templates filled in; tables in HTML, in Markdown and as CSV."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
TABLE = """
<table{% if name %} id="{{ name }}"{% endif %}{% if stacked %} class="stack"{% endif %}>
{#- -#}
<thead><tr>
{%- for column in columns -%}
<th scope="col"{% if column.is_number %} class="number"{% endif %}>{{ column.name }}</th>
{%- endfor -%}
</tr></thead><tbody>
{%- for row in rows -%}
<tr><th scope="row">{{ row[0] }}</th>
{%- for text in row[1:] %}{% set column = columns[loop.index] -%}
<td{% if column.is_number %} class="number"{% endif %}
{%- if stacked %} data-label="{{ column.name }}"{% endif %}>{{ text }}</td>
{%- endfor -%}
</tr>
{%- endfor -%}
</tbody></table>
""".strip()


def render(template: str, **known: Any) -> Markup:
    """Fills in a template; what is not marked as HTML is escaped."""
    return Markup(ENVIRONMENT.from_string(template).render(known))


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
    return render(TABLE, columns=columns, rows=rows, stacked=stacked, name=name)


def draw_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table, and an empty one."""
    for row in (head, ["---"] * len(head), *rows):
        cells = (text.replace("|", "\\|").replace("\n", " ") for text in row)
        yield f"| {' | '.join(cells)} |"
    yield ""


def write_csv_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Writes a table for programs."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([head, *rows])
    return file.getvalue()
