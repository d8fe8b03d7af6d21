"""From a row with named columns to an example: which column is the text, which the label, which spans are secret."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.core.registry import did_you_mean
from gradleak.datasets.rows import Row


@dataclass(frozen=True)
class Columns:
    """Which columns to read. `source` names the data in errors; `marked`: a "secrets" column may mark spans of the text."""

    source: str
    text: str
    label: str | None
    marked: bool = False

    def examples(self, rows: Iterable[Row]) -> list[Example]:
        """One example a row; the first bad row is refused by its line."""
        return [self._example(row, number) for number, row in enumerate(rows)]

    def _example(self, row: Row, number: int) -> Example:
        text = self._cell(row, "text", self.text)
        if text is None or (isinstance(text, str) and not text.strip()):
            raise GradleakError(f"{self.source}, {row.where}: the text is empty; remove the line.")
        if not isinstance(text, str):
            raise GradleakError(f"{self.source}, {row.where}: the text must be a string, not {type(text).__name__}.")
        label = None if self.label is None else self._label(row, self._cell(row, "label", self.label))
        return Example(text, label, self._secrets(row, text) if self.marked else (), row=number)

    def _cell(self, row: Row, field: str, column: str) -> Any:
        if column not in row.values:
            there = ", ".join(map(str, row.values)) or "none"
            otherwise = ", or label=null for no labels" if field == "label" else ""
            near = did_you_mean(column, [str(name) for name in row.values])
            raise GradleakError(
                f"{self.source}, {row.where}: no column {column!r}{near} Columns: {there}. Choose with {field}=…{otherwise}."
            )
        return row.values[column]

    def _label(self, row: Row, value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            return int(value)
        shown = repr(value)[:40]  # a wrong column may hold whole private texts
        raise GradleakError(
            f"{self.source}, {row.where}: the label must be a whole number, not {shown}; number the classes from 0."
        )

    def _secrets(self, row: Row, text: str) -> tuple[tuple[int, int], ...]:
        spans = row.values.get("secrets") or []
        if not isinstance(spans, list) or not all(_is_span(span, len(text)) for span in spans):
            form = f"a list of [start, end] with 0 <= start < end <= {len(text)}, the text's length"
            raise GradleakError(f"{self.source}, {row.where}: secrets must be {form}.")  # the value may be the secret itself
        return tuple((start, end) for start, end in spans)


def _is_span(span: Any, length: int) -> bool:
    if not isinstance(span, list) or len(span) != 2 or not all(type(offset) is int for offset in span):
        return False
    start, end = span
    return bool(0 <= start < end <= length)
