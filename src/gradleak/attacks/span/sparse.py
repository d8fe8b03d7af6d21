"""Which of the words and positions that fit were there: the fewest that explain the gradient.

Where one word stands at two positions and two words at one, span alone cannot tell: an input is (nearly) the sum of a word's part
and a position's, so every word of the batch fits every position. But the gradient says how much of each direction there is, and
few pairs explain that: sparse Bayesian learning for many measurements (Wipf & Rao 2007) gives each pair a weight.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.span.row_space import RowSpace
from gradleak.matching.linear_algebra import factor_gram, find_triangle

STEPS = 80  # more gains nothing: what is left unclear stays so


def weights(
    space: RowSpace, coordinates: Float[Tensor, "pairs rank"], left: Float[Tensor, "outputs rank"] | None = None
) -> Float[Tensor, "pairs"]:
    """How much of the gradient, or of what is left of it, each pair explains when as few as possible do; the largest is one."""
    if left is None:
        return _few(coordinates.mT, torch.diag(space.strengths / space.strengths[0]))
    return _few(coordinates.mT, find_triangle(left / space.strengths[0]).mT)


def _few(atoms: Float[Tensor, "rank pairs"], measured: Float[Tensor, "rank measurements"]) -> Float[Tensor, "pairs"]:
    found = atoms.new_ones(atoms.shape[1])
    if len(found) <= len(atoms):
        return found  # independent: each is there
    for _ in range(STEPS):
        factor = factor_gram((atoms * found) @ atoms.mT, terms=len(found))
        leverage = found * torch.linalg.solve_triangular(factor, atoms, upper=False).square().sum(0)
        explained = found[:, None] * (atoms.mT @ torch.cholesky_solve(measured, factor))
        found = explained.square().sum(1) / leverage.clamp_min(1e-14)
        found = (found / found.max()).nan_to_num(0.0).clamp_min(1e-20)
    return found
