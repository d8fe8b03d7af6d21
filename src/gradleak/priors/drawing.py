"""Words drawn at random from what a prior believes, the same on every processor."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def pick(
    weights: Float[Tensor, "rows words"], shares: Float[Tensor, "rows"]
) -> Int[Tensor, "rows"]:
    """Returns for each row the word at which the sum of the weights so far passes a share of the
    whole.

    A share that was drawn evenly between 0 and 1 picks each word by its weight. torch.multinomial
    draws other words where the processor has other instructions; here only the sums may differ,
    in their last bits.
    """
    sums = weights.cpu().double().cumsum(-1)
    sought = shares.double()[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, sought, right=True)[:, 0]
