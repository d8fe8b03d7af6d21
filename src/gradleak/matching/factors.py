"""An observed matrix gradient as two thin factors: without noise its rank is at most the number of tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
    """Thin factors by a randomised range finder, exact to rounding, or none where the rank is too large for them to pay.

    The draws only choose a basis; they come from a fixed seed so that the factors are the same every time.
    """
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = gradients.shape[-2:]
    # Thin pays while rank · (outputs + inputs) stays well under outputs · inputs.
    most = outputs * inputs // (2 * (outputs + inputs))
    width = min(16, most)
    tolerance = 50 * torch.finfo(gradients.dtype).eps
    norms = torch.linalg.matrix_norm(gradients)
    while 0 < width <= most:
        probe = torch.randn(inputs, width, generator=generator).to(gradients)
        basis = torch.linalg.qr(gradients @ probe).Q
        core = basis.mT @ gradients
        missed = torch.linalg.matrix_norm(gradients - basis @ core)
        if bool((missed <= tolerance * norms).all()):
            return Thin(basis, core.mT.contiguous())
        width += max(1, width // 2)
    return None
