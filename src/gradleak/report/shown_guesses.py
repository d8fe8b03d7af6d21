"""Which secrets and guesses are shown, and which words of a guess give the secret away."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import TypeVar

from rich.text import Text

from gradleak.records.png import PREFIX
from gradleak.records.schema import Record

Secrets = Mapping[tuple[int, int], str]  # text by batch and position, of those that may be shown
SecretsOf = Callable[[Record], Secrets]  # the private texts of a record, where they are at hand
Item = TypeVar("Item")
WORD = re.compile(r"[^\W_]+")  # as the honest ROUGE metrics cut texts


class WordMark(Enum):
    """What a guessed word is, and how it is drawn."""

    PAIR = "green"  # right, next to the right neighbour
    WORD = "yellow"  # right, elsewhere
    WRONG = "dim"


def mark_words(secret: str, guess: str) -> list[tuple[str, WordMark]]:
    """Marks the words of a guess, in order.

    A word of the secret is spent on one word of the guess, as in ROUGE.
    """
    known, guessed = split_words(secret), split_words(guess)
    if known == guessed:
        return [(word, WordMark.PAIR) for word in guessed]  # a secret of one word has no pairs
    marks = [WordMark.WRONG] * len(guessed)
    pairs_left = Counter(pairwise(known))
    for place, pair in enumerate(pairwise(guessed)):
        if pairs_left[pair] > 0:
            pairs_left[pair] -= 1
            marks[place] = marks[place + 1] = WordMark.PAIR
    words_left = Counter(known)
    words_left.subtract(
        word for word, mark in zip(guessed, marks, strict=True) if mark is WordMark.PAIR
    )
    for place, word in enumerate(guessed):
        if marks[place] is WordMark.WRONG and words_left[word] > 0:
            words_left[word] -= 1
            marks[place] = WordMark.WORD
    return list(zip(guessed, marks, strict=True))


def colour_words(secret: str, guess: str) -> Text:
    """Colours the words of a guess, which is otherwise as it was written."""
    text = Text(make_printable(guess), style=WordMark.WRONG.value)
    for found, (_, mark) in zip(
        WORD.finditer(text.plain), mark_words(secret, text.plain), strict=True
    ):
        text.stylize(
            "not dim " + mark.value if mark is not WordMark.WRONG else mark.value,
            found.start(),
            found.end(),
        )
    return text


def make_printable(text: str) -> str:
    """Takes control characters out: a text under audit must not be able to drive the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def split_words(text: str) -> list[str]:
    """Splits a text into words, in small letters."""
    return [word.lower() for word in WORD.findall(text)]


def find_kept_secrets(record: Record) -> Secrets:
    """Finds the private texts that the record itself holds."""
    return {(one.batch, one.position): one.text for one in record.secrets if one.text is not None}


def find_hashes(record: Record) -> dict[tuple[int, int], str]:
    """Returns the keyed hash of every private text, by batch and position."""
    return {(one.batch, one.position): one.hash for one in record.secrets}


def is_picture(content: str | None) -> bool:
    """Whether a secret or a guess is a picture, which a record holds as a data URI."""
    return content is not None and content.startswith(PREFIX)


def choose_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Chooses at most so many of the items, at even distances."""
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]
