"""Comparing a secret with a guess."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradleak.core.picture import Picture
from gradleak.core.registry import Component, Medium


@dataclass(frozen=True)
class Sentence:
    """A text, or a picture, as metrics see it."""

    text: str  # special tokens removed
    legacy: str  # special tokens kept, as the LAMP code scores
    ids: tuple[int, ...]  # special tokens removed
    picture: Picture | None = None


@dataclass(frozen=True)
class Pair:
    """One private sentence and the guess that was aligned to it."""

    secret: Sentence
    guess: Sentence
    marked: tuple[str, ...] = ()  # the private spans of the secret, as text


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
