"""Where private batches come from."""

from abc import ABC, abstractmethod
from typing import ClassVar

from gradleak.core.batch import Example
from gradleak.core.registry import Component, Medium


class Dataset(Component, ABC):
    """A source of private examples."""

    medium: ClassVar[Medium] = "text"
    made_up: ClassVar[bool] = False  # nobody's data: may be shown on a terminal without asking

    @abstractmethod
    def load(self, count: int | None = None) -> list[Example]:
        """The first `count` examples of the selection, or all of them."""

    def public(self) -> "Dataset | None":
        """Like data that an attacker may have: a split of its own where the data has one; none where there is no such split."""
        return None
