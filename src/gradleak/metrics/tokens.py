"""Comparing token ids, special ones removed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gradleak.core.metric import Metric, Pair, Text
from gradleak.core.registry import register


@register("metric", "exact_match")
@dataclass(frozen=True)
class ExactMatch(Metric):
    """1 where every token is right and in its place, 0 otherwise."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [float(secret.ids == guess.ids) for secret, guess in (pair.texts for pair in pairs)]


@register("metric", "token_accuracy")
@dataclass(frozen=True)
class TokenAccuracy(Metric):
    """The share of the secret's positions that hold the right token in the guess."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [
            accuracy(secret.ids, guess.ids) if secret.ids else None
            for secret, guess in (pair.texts for pair in pairs)
        ]


@register("metric", "bag_f1")
@dataclass(frozen=True)
class BagF1(Metric):
    """F1 of the tokens as a bag: which ones and how often, in any order."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [
            bag_overlap(secret.ids, guess.ids) if secret.ids else None
            for secret, guess in (pair.texts for pair in pairs)
        ]


@register("metric", "words_found")
@dataclass(frozen=True)
class WordsFound(Metric):
    """The share of the secret's different tokens that stand in any guess of its batch."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [_share_found(_runs(pair.texts[0], 1), pair, 1) for pair in pairs]


@register("metric", "neighbours_found")
@dataclass(frozen=True)
class NeighboursFound(Metric):
    """The share of the secret's different pairs of neighbouring tokens that are neighbours in any
    guess of its batch."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [_share_found(_runs(pair.texts[0], 2), pair, 2) for pair in pairs]


def accuracy(secret: Sequence[int], guess: Sequence[int]) -> float:
    """Right tokens at the same position, of the secret's; tokens past either end are no match."""
    return sum(true == guessed for true, guessed in zip(secret, guess, strict=False)) / len(secret)


def bag_overlap(secret: Sequence[int], guess: Sequence[int]) -> float:
    """2 · common / (tokens of both), with repetitions; 0 where both are empty."""
    common = (Counter(secret) & Counter(guess)).total()
    return 2 * common / max(1, len(secret) + len(guess))


def _share_found(wanted: set[tuple[int, ...]], pair: Pair, length: int) -> float | None:
    guesses = pair.around or (pair.texts[1],)
    found = set().union(*(_runs(guess, length) for guess in guesses))
    return len(wanted & found) / len(wanted) if wanted else None


def _runs(text: Text, length: int) -> set[tuple[int, ...]]:
    """Every run of so many tokens, once."""
    return set(zip(*(text.ids[start:] for start in range(length)), strict=False))
