"""Which examples of a data set are attacked: all in their order, chosen rows, or as LAMP's released
code picks them; and which are tuned on, none of them a test example.

What is tuned on is split so that the two stages of tuning have no text in common.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows, as_dataset
from gradleak.core.errors import GradleakError
from gradleak.core.registry import register
from gradleak.core.specs import defaults, to_dict

Chosen = TypeVar("Chosen")
Selection = Literal["all", "lamp_test", "lamp_tune"]

LAMP_SEED = 101
LAMP_TEST_SIZE = 1000  # what LAMP keeps for testing, however few of them are attacked
FORM = "rows=200-299, or rows=[0-9,40,60-69], counted from 0"


def select(
    examples: Sequence[Example],
    selection: Selection,
    count: int | None,
    source: str,
    rows: Sequence[str] = (),
) -> list[Example]:
    """The first `count` examples of the selection (None: as many as there are); `source` names the
    data in errors.

    `rows` are places of the whole selection: of lamp_tune, which otherwise depends on how many are
    asked for, of all there are.
    """
    if selection not in _SELECTIONS:
        raise GradleakError(
            f"Unknown selection {selection!r}; write one of {', '.join(_SELECTIONS)}."
        )
    chosen = _SELECTIONS[selection](examples, None if rows else count, source)
    return take(chosen, count, source, rows)


def take(
    examples: Sequence[Chosen], count: int | None, source: str, rows: Sequence[str] = ()
) -> list[Chosen]:
    """The first `count` examples in the order they have, or of the chosen rows."""
    chosen = pick(examples, rows, source)
    where = f"{source}, rows {','.join(rows)}" if rows else source
    return list(chosen[: _check_count(count, len(chosen), where)])


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


def lamp_test(examples: Sequence[Example], count: int | None, source: str) -> list[Example]:
    """The first `count` examples of LAMP's order, at most 1000 so that none of them is a tuning
    example."""
    available = min(LAMP_TEST_SIZE, len(examples))
    chosen = shuffled_indices(np.random.RandomState(LAMP_SEED), len(examples))[
        : _check_count(count, available, source)
    ]
    return [examples[index] for index in chosen]


def lamp_tune(examples: Sequence[Example], count: int | None, source: str) -> list[Example]:
    """`count` examples of all lengths, none of them a test example.

    What LAMP's test split leaves over is sorted by length in characters and cut into `count` equal
    chunks; the generator that shuffled goes on to draw one of each and to shuffle those, as in
    LAMP's released code (data_utils.py). Another `count` therefore gives other examples, not more
    of the same.
    """
    random = np.random.RandomState(LAMP_SEED)
    left_over = shuffled_indices(random, len(examples))[LAMP_TEST_SIZE:]
    wanted = _check_count(
        count, len(left_over), f"{source} (after the {LAMP_TEST_SIZE} kept for testing)"
    )
    by_length = sorted(left_over, key=lambda index: len(examples[index].text))
    chunk = len(by_length) // wanted
    chosen = [by_length[chunk * place + random.randint(0, chunk)] for place in range(wanted)]
    random.shuffle(chosen)
    return [examples[index] for index in chosen]


def shuffled_indices(random: np.random.RandomState, size: int) -> list[int]:
    """0 … size - 1 in the order of numpy's legacy generator, the one behind `np.random.seed`."""
    indices = list(range(size))
    random.shuffle(indices)
    return indices


def _check_count(count: int | None, available: int, source: str) -> int:
    if available == 0:
        raise GradleakError(
            f"There are no examples in {source} for this selection; use selection=all or more data."
        )
    if count is None:
        return available
    if count < 1:
        raise GradleakError(f"Cannot take {count} examples of {source}; ask for at least 1.")
    if count > available:
        raise GradleakError(
            f"{count} examples were asked of {source}, which has {available}; ask for {available}"
            " or fewer."
        )
    return count


_SELECTIONS: dict[str, Callable[[Sequence[Example], int | None, str], list[Example]]] = {
    "all": take,
    "lamp_test": lamp_test,
    "lamp_tune": lamp_tune,
}


TEST, TUNE = "lamp_test", "lamp_tune"
Stage = Literal["coarse", "fine"]


@register("dataset", "tuning_part")
@dataclass(frozen=True)
class TuningPart(Dataset):
    """One of two parts of a dataset, both of all lengths, for the stages of `gradleak tune`.

    The first `coarse + fine` examples are sorted by length and dealt out evenly: with 10 and 20,
    the middle one of every three is for the coarse stage. A text that occurs twice is dealt once;
    one that is also in LAMP's test selection, never.
    """

    data: str = "canaries"  # one line; a file is written file:path=…
    coarse: int = 10
    fine: int = 20
    stage: Stage = "coarse"
    rows: Rows = ()

    def __post_init__(self) -> None:
        if self.coarse < 1 or self.fine < 1:
            raise GradleakError(
                f"Both stages of tuning need examples; coarse is {self.coarse} and fine"
                f" {self.fine}."
            )

    def load(self, count: int | None = None) -> list[Example]:
        data = as_dataset(self.data)
        total = self.coarse + self.fine
        dealt = list(_different(data.load(total), _test_examples(data)))
        # Bresenham's line: `coarse` of each `total` places, evenly; the first term centres them
        chosen = [
            ((total + self.coarse) // 2 + place * self.coarse) % total < self.coarse
            for place in range(len(dealt))
        ]
        part = [
            example
            for example, is_coarse in zip(dealt, chosen, strict=True)
            if is_coarse == (self.stage == "coarse")
        ]
        return (
            part
            if count is None and not self.rows
            else take(part, count, f"the {self.stage} tuning part of {self.data}", self.rows)
        )

    def remarks(self) -> tuple[str, ...]:
        return as_dataset(self.data).remarks()


def for_tuning(data: Dataset, selection_written: bool) -> Dataset:
    """The data with its tuning selection; a test selection that was asked for, or data that
    includes one, is refused."""
    selection = selection_of(data)
    if selection == TEST and not selection_written:
        return as_dataset({**to_dict(data), "selection": TUNE})
    if selection == TEST or (selection == "all" and defaults(data)["selection"] == TEST):
        raise GradleakError(
            f"{data.name} with selection={selection} holds test sentences, and what is tuned on"
            f" them cannot be reported on them: use selection={TUNE}, or leave the selection out."
        )
    return data


def selection_of(data: Dataset) -> str | None:
    """The value of the `selection` field, for data that has one."""
    return to_dict(data).get("selection")


def _test_examples(data: Dataset) -> list[Example]:
    # The selections are apart by row, but CoLA and SST-2 hold some sentences twice
    return (
        as_dataset({**to_dict(data), "selection": TEST, "rows": []}).load()
        if selection_of(data) == TUNE
        else []
    )


def _different(examples: Sequence[Example], seen: Sequence[Example]) -> Iterator[Example]:
    """By length, without texts that are among `seen` or came before; case and spacing make no
    difference, as to most models."""
    known = {_bare(example.text) for example in seen}
    for example in sorted(examples, key=lambda example: len(example.text)):
        if _bare(example.text) not in known:
            known.add(_bare(example.text))
            yield example


def _bare(text: str) -> str:
    return " ".join(text.casefold().split())
