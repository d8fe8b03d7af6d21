"""From a row with named columns to an example: which column is the text, which the label, which
spans are secret."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradleak.core.batch import ClassNumber, Example
from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.datasets.rows import Row

WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")  # 1.0 is what spreadsheets and pandas make of a 1
PLACES = 12  # lines that are named for each kind of problem


@dataclass(frozen=True)
class TextColumns:
    """Which columns to read. `source` names the data in errors; `marked`: a "secrets" column may
    mark spans of the text."""

    source: str
    text: str
    label: str | None
    marked: bool = False
    # Names of the classes 0, 1, …; none: labels are numbers, or names that the target knows
    labels: tuple[str, ...] = ()
    skip_bad: bool = False  # leave out rows that cannot be used

    def examples(self, rows: Sequence[Row]) -> list[Example]:
        """One example a row. Rows that cannot be used are refused, all at once, or left out
        where that is asked for."""
        good, bad = self.sort(rows)
        if bad and not self.skip_bad:
            raise GradleakError(
                f"{self.source}: {_share_of(len(bad), len(rows))} cannot be used.\n"
                + "\n".join(f"  {line}" for line in list_problems(bad))
                + "\nMend or remove them, or leave them out: add --skip-bad, or skip_bad=true to"
                " the fields of the data."
            )
        if not good:
            raise GradleakError(f"{self.source}: no row can be used. {list_problems(bad)[0]}.")
        return good

    def describe_left_out(self, rows: Sequence[Row]) -> tuple[str, ...]:
        """How many rows are left out and why, in a sentence; nothing where none are."""
        bad = self.sort(rows)[1] if self.skip_bad else []
        return (
            (
                (
                    f"{_share_of(len(bad), len(rows))} cannot be used and were left out:"
                    f" {'; '.join(list_problems(bad))}."
                ),
            )
            if bad
            else ()
        )

    def sort(self, rows: Sequence[Row]) -> tuple[list[Example], list[Row]]:
        """Rows as examples, and those that cannot be used with what is wrong with each."""
        self._refuse_columns(rows)
        good: list[Example] = []
        bad: list[Row] = []
        for number, row in enumerate(rows):
            try:
                good.append(self._example(row, number))
            except _Unfit as problem:
                bad.append(Row(row.where, {}, str(problem)))
        return good, bad

    def _refuse_columns(self, rows: Sequence[Row]) -> None:
        """A column that no row has is one problem, not as many as there are rows."""
        readable = [row for row in rows if not row.problem]
        for field, column in (("text", self.text), ("label", self.label)):
            if (
                column is not None
                and readable
                and all(column not in row.values for row in readable)
            ):
                there = [str(name) for name in readable[0].values]
                otherwise = ", or label=null for no labels" if field == "label" else ""
                raise GradleakError(
                    f"{self.source}, {readable[0].where}: no column"
                    f" {column!r}{did_you_mean(column, there)} Columns:"
                    f" {', '.join(there) or 'none'}. Choose with {field}=…{otherwise}."
                )

    def _example(self, row: Row, number: int) -> Example:
        if row.problem:
            raise _Unfit(row.problem)
        text = self._cell(row, self.text)
        if text is None or (isinstance(text, str) and not text.strip()):
            raise _Unfit("the text is empty")
        if not isinstance(text, str):
            raise _Unfit(f"the text must be a string, not {type(text).__name__}")
        label = None if self.label is None else self._label(self._cell(row, self.label))
        secrets = _secrets(row, text) if self.marked else ()
        return Example(text, label, secrets, row=number, where=f"{self.source}, {row.where}")

    def _cell(self, row: Row, column: str) -> Any:
        if column not in row.values:
            raise _Unfit(f"no column {column!r}")
        return row.values[column]

    def _label(self, value: Any) -> int | str:
        written = (
            str(value).strip()
            if isinstance(value, (str, int, float)) and not isinstance(value, bool)
            else None
        )
        if value is None or written == "":
            raise _Unfit("the label is empty")
        if written is None or (isinstance(value, float) and not value.is_integer()):
            raise _Unfit(
                f"the label must be a whole number or a name, not {written or type(value).__name__}"
            )
        number = int(written.split(".")[0]) if WHOLE.fullmatch(written) else None
        if not self.labels:
            return written if number is None else number
        name = written if written in self.labels or number is None else str(number)
        if name not in self.labels:
            # not which it is: a wrong column may hold whole private texts, and this goes into
            # records
            raise _Unfit(f"the label is none of labels=[{','.join(self.labels)}]; case counts")
        return ClassNumber(self.labels.index(name))


class _Unfit(Exception):
    """Why a row cannot be used: a sentence without its end, and without anything of the row's
    text."""


def list_problems(bad: Iterable[Row]) -> list[str]:
    """`lines 4, 9 and 12: the text is empty`, one for each kind of problem, in the order of the
    file."""
    places: dict[str, list[str]] = {}
    for row in bad:
        places.setdefault(row.problem, []).append(row.where)
    return [f"{_join_places(where)}: {problem}" for problem, where in places.items()]


def _join_places(where: Sequence[str]) -> str:
    """`lines 4, 9 and 12` of `line 4`, `line 9` and `line 12`."""
    if len(where) == 1:
        return where[0]
    unit = where[0].split()[0]
    numbers = [place.split()[-1] for place in where]
    if len(numbers) > PLACES:
        numbers = [*numbers[:PLACES], f"{len(numbers) - PLACES} more"]
    return f"{unit}s {', '.join(numbers[:-1])} and {numbers[-1]}"


def _share_of(bad: int, of: int) -> str:
    return f"{bad} of {of} rows" if of > 1 else "its only row"


def _secrets(row: Row, text: str) -> tuple[tuple[int, int], ...]:
    spans = row.values.get("secrets") or []
    if not isinstance(spans, list) or not all(_is_span(span, len(text)) for span in spans):
        form = f"a list of [start, end] with 0 <= start < end <= {len(text)}, the text's length"
        raise _Unfit(f"secrets must be {form}")  # the value may be the secret itself
    return tuple((start, end) for start, end in spans)


def _is_span(span: Any, length: int) -> bool:
    if (
        not isinstance(span, list)
        or len(span) != 2
        or not all(type(offset) is int for offset in span)
    ):
        return False
    start, end = span
    return bool(0 <= start < end <= length)
