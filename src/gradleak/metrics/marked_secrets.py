"""Did the marked spans come out? One phone number leaked in a poor sentence is still a leak."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar

from gradleak.core.metric import Metric, Pair
from gradleak.core.registry import register


@register("metric", "secret_recall")
@dataclass(frozen=True)
class SecretRecall(Metric):
    """The share of a sentence's marked spans that occur in the guess."""

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [_mean_over_spans(pair, lambda span, guess: float(span in guess)) for pair in pairs]


@register("metric", "secret_edit_distance")
@dataclass(frozen=True)
class SecretEditDistance(Metric):
    """The share of a marked span's letters to edit to find it in the guess: 0 is found, 1 is
    nothing in common."""

    direction: ClassVar[str] = "lower"

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [
            _mean_over_spans(pair, lambda span, guess: edits_to_nearest(span, guess) / len(span))
            for pair in pairs
        ]


def normalise(text: str) -> str:
    """Letters and digits only, case and accents folded: WordPiece moves spaces and punctuation,
    uncased models drop the rest."""
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in decomposed if letter.isalnum())


def edits_to_nearest(span: str, text: str) -> int:
    """The least Levenshtein distance of the span to any substring of the text (Sellers 1980)."""
    above = [0] * (len(text) + 1)  # the substring may begin anywhere at no cost
    for row, letter in enumerate(span, start=1):
        edits = [row]
        for column, other in enumerate(text, start=1):
            edits.append(
                min(above[column - 1] + (letter != other), above[column] + 1, edits[-1] + 1)
            )
        above = edits
    return min(above)  # and end anywhere


def _mean_over_spans(pair: Pair, value: Callable[[str, str], float]) -> float | None:
    """None where nothing is marked, or nothing with a letter or digit in it."""
    guess = normalise(pair.texts[1].text)
    spans = [span for span in map(normalise, pair.marked) if span]
    return mean(value(span, guess) for span in spans) if spans else None
