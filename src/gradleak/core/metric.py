"""Comparing a secret with a guess."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradleak.core.picture import Picture
from gradleak.core.registry import Component, Medium


@dataclass(frozen=True)
class Text:
    """A text as metrics see it."""

    text: str  # special tokens removed
    legacy: str  # special tokens kept, as the LAMP code scores
    ids: tuple[int, ...]  # special tokens removed


Content = Text | Picture


@dataclass(frozen=True)
class Pair:
    """One private text or picture and the guess that was aligned to it."""

    secret: Content
    guess: Content
    marked: tuple[str, ...] = ()  # the private spans of the secret, as text
    # All texts guessed of its batch: what is found at all is told by these, whatever was aligned
    around: tuple[Text, ...] = ()

    @property
    def texts(self) -> tuple[Text, Text]:
        """Secret and guess, where they are texts."""
        if isinstance(self.secret, Text) and isinstance(self.guess, Text):
            return self.secret, self.guess
        raise TypeError("this metric is of texts")

    @property
    def pictures(self) -> tuple[Picture, Picture]:
        """Secret and guess, where they are pictures."""
        if isinstance(self.secret, Picture) and isinstance(self.guess, Picture):
            return self.secret, self.guess
        raise TypeError("this metric is of pictures")


class Metric(Component, ABC):
    """One number a pair. Higher leaks more unless `direction` is "lower"."""

    medium: ClassVar[Medium] = "text"
    unit: ClassVar[str] = "fraction"  # between 0 and 1
    direction: ClassVar[str] = "higher"  # "higher" or "lower" leaks more
    # What a guess without the update scores: measured by the blind attack
    chance: ClassVar[str] = "blind"

    @abstractmethod
    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        """The value of each pair; none where it does not apply (no marked secret, say)."""
