"""The rows of a matrix as few as its rank: S·Vᵀ of its singular value decomposition.

By the eigenvectors of the smaller Gram matrix in double precision, on the CPU: quicker than a
decomposition of the matrix itself (which GPUs are slow at), and true down to 1e-8 of the largest
singular value, where float32 gradients end.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.matching.linear_algebra import bring_to_unit_size, find_eigenvectors, require_finite


def row_factor(
    matrix: Float[Tensor, "*lead outputs inputs"],
) -> tuple[Float[Tensor, "*lead rank"], Float[Tensor, "*lead rank inputs"]]:
    """Singular values, falling, and as many orthonormal rows; those of value zero are arbitrary.
    Double precision, on the CPU."""
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
    """How much of each singular value's square is signal: nothing under the edge of noise of
    that size, or of rounding."""
    floor = torch.maximum(
        rounding * values[..., :1],
        values.new_tensor(noise_std * (math.sqrt(shape[0]) + math.sqrt(shape[1]))),
    )
    return (1 - (floor / values.clamp_min(1e-300)).square()).clamp_min(0)
