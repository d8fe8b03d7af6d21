"""Where private batches come from."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.core.registry import Component, Medium
from gradleak.core.specs import resolve

# Ranges of places in a selection, counted from 0, such as 200-299; none: every place
Rows = tuple[str, ...]


class Dataset(Component, ABC):
    """A source of private examples."""

    medium: ClassVar[Medium] = "text"
    made_up: ClassVar[bool] = False  # nobody's data: may be shown on a terminal without asking
    is_public: ClassVar[bool] = False  # anyone can get it: what is published may name its rows
    added_later: ClassVar[frozenset[str]] = frozenset({"rows"})
    rows: Rows = ()  # a field of every data set

    @abstractmethod
    def load(self, count: int | None = None) -> list[Example]:
        """The first `count` examples of the selection, or of its chosen `rows`, or all; each
        knows its row of the split."""

    def remarks(self) -> tuple[str, ...]:
        """How the data was read, where that is not plain, and how many rows were left out:
        sentences without any of its text."""
        return ()

    def without_bad_rows(self) -> "Dataset":
        """The same data, less the rows that cannot be used."""
        raise GradleakError(
            f"{self.name} has no rows that cannot be used: --skip-bad is for files of your own."
        )

    def public(self) -> "Dataset | None":
        """Like data that an attacker may have: a split of its own where the data has one; none
        where there is no such split."""
        return None


def as_dataset(described: Any) -> Dataset:
    """The data set that a line or a mapping describes."""
    found = resolve("dataset", described)
    assert isinstance(found, Dataset)
    return found
