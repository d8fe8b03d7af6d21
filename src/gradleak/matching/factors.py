"""An observed matrix gradient as factors: without noise its rank is at most the number of tokens.

`thin_factors` has two factors for many products with a matrix. `row_factor` has the rows alone, as
few as the rank: S·Vᵀ of the singular value decomposition.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.matching.linear_algebra import (
    bring_to_unit_size,
    find_eigenvectors,
    orthonormalise,
    require_finite,
)
from gradleak.matching.precision import gradient_difference


@dataclass(frozen=True, eq=False)
class Thin:
    """G = left · rightᵀ."""

    left: Float[Tensor, "*lead outputs rank"]
    right: Float[Tensor, "*lead inputs rank"]

    def take(self, places: slice | Int[Tensor, "some"]) -> "Thin":
        """Returns some of the observations (the second axis, after the tensors)."""
        return Thin(self.left[:, places], self.right[:, places])


def thin_factors(gradients: Float[Tensor, "*lead outputs inputs"]) -> Thin | None:
    """Returns thin factors by a randomised range finder, exact to rounding, or none where the rank
    is too large for them to pay.

    The draws only choose a basis; they come from a fixed seed so that the factors are the same
    every time.
    """
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = gradients.shape[-2:]
    # Thin pays while rank · (outputs + inputs) stays well under outputs · inputs.
    most = outputs * inputs // (2 * (outputs + inputs))
    width = min(16, most)
    norms = torch.linalg.matrix_norm(gradients)
    if not bool(norms.isfinite().all()):
        return None
    while 0 < width <= most:
        # Images of random vectors span the matrix's columns, if it has no more directions.
        probe = torch.randn(inputs, width, generator=generator).to(gradients)
        basis = orthonormalise(gradients @ probe)
        core = basis.mT @ gradients
        missed = torch.linalg.matrix_norm(gradients - basis @ core)
        # What is projected on the basis and back goes through sums over the outputs and the basis.
        # A random basis two wider than the rank makes at most √(width − 1) of the rest it cannot
        # show (Halko, Martinsson & Tropp 2011, Theorem 10.5).
        tolerance = math.sqrt(max(1, width - 1)) * gradient_difference(
            [outputs, width, width], gradients.dtype
        )
        if bool((missed <= tolerance * norms).all()):
            return Thin(basis, core.mT.contiguous())
        width += max(1, width // 2)
    return None


def row_factor(
    matrix: Float[Tensor, "*lead outputs inputs"],
) -> tuple[Float[Tensor, "*lead rank"], Float[Tensor, "*lead rank inputs"]]:
    """Returns singular values, falling, and as many orthonormal rows.

    Both are in double precision and on the CPU. Rows of value zero are arbitrary. They come from
    the eigenvectors of the smaller Gram matrix, which is quicker than a decomposition of the matrix
    itself (GPUs are slow at that), and true down to 1e-8 of the largest singular value, where
    float32 gradients end.
    """
    wide, scale = bring_to_unit_size(require_finite(matrix, "row factors").cpu())
    if wide.shape[-2] >= wide.shape[-1]:
        squares, vectors = find_eigenvectors(wide.mT @ wide)
        return squares.flip(-1).clamp_min(0).sqrt() * scale[..., 0], vectors.flip(-1).mT
    squares, vectors = find_eigenvectors(wide @ wide.mT)
    values = squares.flip(-1).clamp_min(0).sqrt() * scale[..., 0]
    rows = vectors.flip(-1).mT @ wide
    return values, rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(1e-300)


def signal_shares(
    values: Float[Tensor, "*lead rank"], shape: tuple[int, int], noise_std: float, rounding: float
) -> Float[Tensor, "*lead rank"]:
    """Says how much of each singular value's square is signal: nothing under the edge of noise of
    that size, or of rounding."""
    # The edge: σ(√m + √n), as in precision.py (Davidson & Szarek 2001)
    floor = torch.maximum(
        rounding * values[..., :1],
        values.new_tensor(noise_std * (math.sqrt(shape[0]) + math.sqrt(shape[1]))),
    )
    return (1 - (floor / values.clamp_min(1e-300)).square()).clamp_min(0)
