"""An observed matrix gradient as two thin factors: without noise its rank is at most the number
of tokens."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.matching.linear_algebra import orthonormalise
from gradleak.matching.rounding import gradient_difference


@dataclass(frozen=True, eq=False)
class Thin:
    """G = left · rightᵀ."""

    left: Float[Tensor, "*lead outputs rank"]
    right: Float[Tensor, "*lead inputs rank"]

    def rows(self, kept: slice) -> "Thin":
        """The observations of a slice (second axis, after the tensors)."""
        return Thin(self.left[:, kept], self.right[:, kept])

    def take(self, places: Int[Tensor, "some"]) -> "Thin":
        """Some of the observations."""
        return Thin(self.left[:, places], self.right[:, places])


def thin_factors(gradients: Float[Tensor, "*lead outputs inputs"]) -> Thin | None:
    """Thin factors by a randomised range finder, exact to rounding, or none where the rank is too
    large for them to pay.

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
