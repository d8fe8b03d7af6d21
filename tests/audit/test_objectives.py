"""Which sentence of a guess stands beside which secret, and which guesses are the secret."""

import torch

from gradleak.audit.objectives import beside_the_secret, is_right, sentences_of
from gradleak.core.attack import Reconstruction
from gradleak.core.batch import Batch, Example, PrivateBatch

IDS = torch.tensor([[2, 5, 3, 0], [2, 6, 7, 3], [2, 8, 3, 0]])
ROWS = ((2, 5, 3), (2, 6, 7, 3), (2, 8, 3))


def secret(mask: torch.Tensor) -> PrivateBatch:
    return PrivateBatch(
        Batch(ids=IDS, mask=mask, labels=torch.tensor([0, 1, 0])), (Example(""),) * 3, (3, 4, 3)
    )


def test_right_sentences_stand_where_the_secret_has_them_and_others_fill_the_rest() -> None:
    guess = Reconstruction(sentences=((2, 9, 3), (2, 5, 3), (2, 6, 7, 3)))
    assert beside_the_secret(guess, ROWS) == [1, 2, 0]
    assert beside_the_secret(Reconstruction(sentences=((2, 6, 7, 3),)), ROWS) == [0]


def test_padding_that_a_model_attends_to_is_no_part_of_a_sentence() -> None:
    assert (
        sentences_of(secret(IDS > 0)) == sentences_of(secret(torch.ones_like(IDS).bool())) == ROWS
    )


def test_a_guess_is_right_in_any_order_but_only_with_every_sentence_and_its_label() -> None:
    truth = secret(IDS > 0)
    assert is_right(Reconstruction(ROWS), truth) and is_right(Reconstruction(ROWS[::-1]), truth)
    assert is_right(Reconstruction(ROWS[::-1], labels=(0, 1, 0)), truth)
    assert not is_right(Reconstruction(ROWS, labels=(1, 0, 0)), truth) and not is_right(
        Reconstruction(ROWS[:2]), truth
    )
    assert not is_right(Reconstruction((*ROWS[:2], (2, 9, 3))), truth)
    assert not is_right(Reconstruction((*ROWS[:2], ROWS[0])), truth)
