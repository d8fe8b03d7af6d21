"""Laws of the alignment."""

import itertools
import random

import pytest

from gradleak.core.metric import Text
from gradleak.metrics.alignment import align
from gradleak.metrics.texts import f_measure


def sentence(text: str, ids: tuple[int, ...] = ()) -> Text:
    return Text(text, "", ids)


def test_a_shuffled_batch_is_put_back_in_order() -> None:
    secrets = [sentence(text) for text in ("the cat sat", "dogs bark loudly", "it rains")]
    order = [2, 0, 1]
    assert align(secrets, [secrets[place] for place in order]) == [
        order.index(place) for place in range(3)
    ]


def test_the_whole_batch_decides_not_the_first_best() -> None:
    secrets = [sentence("a b"), sentence("a b c")]
    assert align(secrets, [sentence("a b c"), sentence("x y b")]) == [1, 0]


def test_no_assignment_has_a_higher_total_than_the_one_found() -> None:
    draw = random.Random(0)
    for _ in range(10):
        secrets, guesses = (
            [sentence(" ".join(draw.choices("abcdef", k=draw.randint(1, 5)))) for _ in range(4)]
            for _ in range(2)
        )
        overlaps = [
            [f_measure("rouge1", secret.text, guess.text) for guess in guesses]
            for secret in secrets
        ]
        totals = {
            order: sum(overlaps[row][order[row]] for row in range(4))
            for order in itertools.permutations(range(4))
        }
        assert totals[tuple(align(secrets, guesses))] == pytest.approx(
            max(totals.values()), abs=1e-5
        )


def test_ties_go_to_the_larger_overlap_of_tokens() -> None:
    secrets = [sentence("?", (1, 2)), sentence("!", (3, 4))]
    assert align(secrets, [sentence("", (3, 9)), sentence("", (9, 2))]) == [1, 0]


def test_every_guess_is_used_and_missing_ones_are_marked() -> None:
    secrets = [sentence("a"), sentence("b"), sentence("c")]
    assert align(secrets, [sentence("b")]) == [-1, 0, -1]
    assert align(secrets, []) == [-1, -1, -1]


def test_of_more_guesses_than_secrets_the_best_are_taken() -> None:
    assert align([sentence("a")], [sentence("x"), sentence("y"), sentence("a")]) == [2]
    assert align([], [sentence("a")]) == []
