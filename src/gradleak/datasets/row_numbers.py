"""Rows of a data set by their numbers: `200-299`, or `0-9` and `40`, counted from 0."""

from collections.abc import Sequence
from typing import TypeVar

from gradleak.core.errors import GradleakError

Chosen = TypeVar("Chosen")
FORM = "rows=200-299, or rows=[0-9,40,60-69], counted from 0"


def read_numbers(rows: Sequence[str]) -> list[int]:
    """The numbers that ranges name, both ends included, in the order in which they are written."""
    numbers: list[int] = []
    for piece in (piece for written in rows for piece in written.split(",")):
        first, dash, last = (word.strip() for word in piece.partition("-"))
        ends = [first, last if dash else first]
        if not all(end.isdecimal() and end.isascii() for end in ends) or int(ends[0]) > int(
            ends[1]
        ):
            raise GradleakError(f"Rows are written as {FORM}, not {', '.join(rows)!r}.")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    if len(set(numbers)) < len(numbers):
        raise GradleakError(f"rows={', '.join(rows)} names a row twice: name each once.")
    return numbers


def pick(examples: Sequence[Chosen], rows: Sequence[str], source: str) -> Sequence[Chosen]:
    """The examples at these places, all of them where none are named; `source` names the data in
    errors."""
    if not rows:
        return examples
    numbers = read_numbers(rows)
    beyond = max(numbers)
    if beyond >= len(examples):
        there = f"{len(examples)} rows, 0 to {len(examples) - 1}" if examples else "no rows"
        raise GradleakError(
            f"There is no row {beyond} in {source}, which has {there} in this selection: change"
            " rows=…."
        )
    return [examples[number] for number in numbers]
