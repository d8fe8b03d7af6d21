"""Laws of the token metrics."""

import pytest

from gradleak.core.metric import Pair, Text
from gradleak.metrics.texts import BagF1, ExactMatch, NeighboursFound, TokenAccuracy, WordsFound


def pair(secret: tuple[int, ...], guess: tuple[int, ...]) -> Pair:
    return Pair(Text("", "", secret), Text("", "", guess))


@pytest.mark.parametrize("metric", [ExactMatch(), TokenAccuracy(), BagF1()])
def test_the_secret_itself_scores_one_and_strangers_zero(
    metric: ExactMatch | TokenAccuracy | BagF1,
) -> None:
    assert metric.values(
        [pair((1, 2, 3), (1, 2, 3)), pair((1, 2, 3), (4, 5, 6)), pair((1, 2), ())]
    ) == [1.0, 0.0, 0.0]


def test_a_permutation_keeps_the_bag_only() -> None:
    pairs = [pair((1, 2, 3), (2, 1, 3))]
    assert ExactMatch().values(pairs) == [0.0] and BagF1().values(pairs) == [1.0]
    assert TokenAccuracy().values(pairs) == [pytest.approx(1 / 3)]


def test_a_longer_guess_is_not_exact_and_not_a_better_bag() -> None:
    pairs = [pair((1, 2), (1, 2, 9, 9))]
    assert ExactMatch().values(pairs) == [0.0]
    assert TokenAccuracy().values(pairs) == [1.0]
    assert BagF1().values(pairs) == [pytest.approx(2 / 3)]


def test_repetitions_count_once_each() -> None:
    assert BagF1().values([pair((1, 1, 2), (1, 2, 2))]) == [pytest.approx(2 / 3)]


def test_a_shift_by_one_is_wrong_at_every_position() -> None:
    assert TokenAccuracy().values([pair((1, 2, 3), (0, 1, 2))]) == [0.0]


def test_an_empty_secret_has_no_tokens_to_get_right() -> None:
    assert TokenAccuracy().values([pair((), (1,))]) == [None] == BagF1().values([pair((), ())])


def test_words_and_neighbours_are_found_in_any_guess_of_the_batch() -> None:
    secret, aligned = Text("", "", (1, 2, 3, 2)), Text("", "", (3, 2, 9))
    other = Text("", "", (1, 2, 7))
    (alone,) = WordsFound().values([Pair(secret, aligned)])
    (beside,) = WordsFound().values([Pair(secret, aligned, (), (aligned, other))])
    assert (alone, beside) == (pytest.approx(2 / 3), 1.0)
    (pairs,) = NeighboursFound().values([Pair(secret, aligned, (), (aligned, other))])
    assert pairs == pytest.approx(2 / 3)  # 1 2 and 3 2, not 2 3


def test_a_text_of_one_token_has_no_neighbours() -> None:
    assert NeighboursFound().values([pair((1,), (1,))]) == [None]
    assert WordsFound().values([pair((), (1,))]) == [None]
