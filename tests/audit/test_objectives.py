"""Which sentence of a guess stands beside which secret."""

import torch

from gradleak.audit.objectives import beside_the_secret
from gradleak.core.attack import Reconstruction
from gradleak.core.batch import Batch


def test_right_sentences_stand_where_the_secret_has_them_and_others_fill_the_rest() -> None:
    ids = torch.tensor([[2, 5, 3, 0], [2, 6, 7, 3], [2, 8, 3, 0]])
    secret = Batch(ids=ids, mask=ids > 0, labels=torch.tensor([0, 1, 0]))
    guess = Reconstruction(sentences=((2, 9, 3), (2, 5, 3), (2, 6, 7, 3)))
    assert beside_the_secret(guess, secret) == [1, 2, 0]
    assert beside_the_secret(Reconstruction(sentences=((2, 6, 7, 3),)), secret) == [0]
