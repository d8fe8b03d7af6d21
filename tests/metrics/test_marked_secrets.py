"""Laws of the marked secrets."""

import random

import pytest

from gradleak.core.metric import Pair, Text
from gradleak.metrics.texts import (
    SecretEditDistance,
    SecretRecall,
    edits_to_nearest,
    normalise,
)


def pair(guess: str, *marked: str) -> Pair:
    return Pair(Text("", "", ()), Text(guess, "", ()), marked)


def test_wordpiece_spacing_case_and_accents_do_not_hide_a_leak() -> None:
    pairs = [
        pair("call jose at + 49 - 151 / 23", "José", "+49-151/23"),
        pair("mail a . b @ c . de now", "A.B@c.de"),
    ]
    assert SecretRecall().values(pairs) == [1.0, 1.0]
    assert SecretEditDistance().values(pairs) == [0.0, 0.0]


def test_recall_is_the_share_of_marked_spans() -> None:
    assert SecretRecall().values([pair("alice paid", "Alice", "Bob")]) == [0.5]


@pytest.mark.parametrize("metric", [SecretRecall(), SecretEditDistance()])
def test_nothing_marked_gives_no_value(metric: SecretRecall | SecretEditDistance) -> None:
    assert metric.values([pair("anything"), pair("anything", "!?", "")]) == [None, None]


def test_one_wrong_digit_is_near_but_not_recalled() -> None:
    pairs = [pair("pin is 1294 today", "1234")]
    assert SecretRecall().values(pairs) == [0.0] and SecretEditDistance().values(pairs) == [0.25]


def test_an_empty_guess_is_as_far_as_can_be() -> None:
    assert SecretEditDistance().values([pair("", "1234"), pair("xyz", "1234")]) == [1.0, 1.0]
    assert SecretRecall().values([pair("", "1234")]) == [0.0]


def test_lower_leaks_more_for_distances() -> None:
    assert (SecretRecall.direction, SecretEditDistance.direction) == ("higher", "lower")


def test_normalising_twice_changes_nothing() -> None:
    for text in ("Straße 5", "ＡＢＣ", "naïve", "½ cup", "İstanbul"):
        assert normalise(normalise(text)) == normalise(text)


def _levenshtein(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(
        _levenshtein(a[1:], b[1:]) + (a[0] != b[0]),
        _levenshtein(a[1:], b) + 1,
        _levenshtein(a, b[1:]) + 1,
    )


def test_the_nearest_substring_is_that_of_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(40):
        span = "".join(draw.choices("ab", k=draw.randint(1, 3)))
        text = "".join(draw.choices("abc", k=draw.randint(0, 4)))
        windows = {
            text[start:end] for start in range(len(text) + 1) for end in range(start, len(text) + 1)
        }
        assert edits_to_nearest(span, text) == min(_levenshtein(span, window) for window in windows)
