"""Sums in a fixed order: the same bits on every processor, in whatever company a row is summed.

A library's sum may take a row alone in another order than among others, and every processor has its
own blocks. Additions entry by entry are rounded by the standard in one way only, so halves are
folded onto each other until one entry is left: the order follows from the length alone, and errors
grow with its logarithm (pairwise summation, Higham 2002, §4.2).
"""

import torch
from jaxtyping import Float
from torch import Tensor

PIECE = 2**18  # entries of a row that are in double precision at a time


def sum_squares(tensor: Tensor, axes: int) -> Float[Tensor, "..."]:
    """The sum of squares over all but the first axes, in double precision, in a fixed order."""
    rows = tensor.detach().reshape(*tensor.shape[:axes], -1)
    total = torch.zeros(rows.shape[:-1], dtype=torch.float64, device=rows.device)
    for piece in torch.split(rows, PIECE, dim=-1):
        total = total + _folded(piece.double().square())
    return total


def sum_over(tensor: Tensor, axis: int) -> Tensor:
    """The sum over one axis, one entry of it after the other."""
    first, *others = tensor.unbind(axis)
    total = first
    for other in others:
        total = total + other
    return total


def _folded(values: Float[Tensor, "... entries"]) -> Float[Tensor, "..."]:
    while (count := values.shape[-1]) > 1:
        half = (count + 1) // 2
        values = torch.cat(
            [values[..., : count - half] + values[..., half:], values[..., count - half : half]],
            dim=-1,
        )
    return values.sum(-1)  # of one entry, or of none
