"""Examples to tune on: never a test selection, and split so that the two stages of tuning have
no text in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows, as_dataset
from gradleak.core.errors import GradleakError
from gradleak.core.registry import register
from gradleak.core.specs import defaults, to_dict
from gradleak.datasets.selection import take

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
        dealt = _different(data.load(total), _test_examples(data))
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
        everything = count is None and not self.rows
        return (
            part
            if everything
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


def _different(examples: Sequence[Example], seen: Sequence[Example]) -> list[Example]:
    """By length, without texts that are among `seen` or came before; case and spacing make no
    difference, as to most models."""
    known = {_bare(example.text) for example in seen}
    kept = []
    for example in sorted(examples, key=lambda example: len(example.text)):
        if _bare(example.text) not in known:
            known.add(_bare(example.text))
            kept.append(example)
    return kept


def _bare(text: str) -> str:
    return " ".join(text.casefold().split())
