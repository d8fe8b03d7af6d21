"""Distances between gradients, written over a few sums per tensor so that no gradient has to be built for most of them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

TINY = 1e-30  # keeps the root of a vanishing squared norm differentiable; far below any real gradient's


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the entries of each tensor: of g·G and g² (`angles`), or of |g − G|² and |g − G| (`residuals`)."""

    first: Float[Tensor, "observations candidates tensors"]
    second: Float[Tensor, "observations candidates tensors"]
    observed_squared: Float[Tensor, "observations tensors"]
    weights: Float[Tensor, "observations tensors"]  # zero where a tensor is not seen or carries no signal


class Distance(ABC):
    """How far a candidate's gradient is from the observed one."""

    residuals: ClassVar[bool] = False  # needs the entries of the difference, hence the gradient itself

    @abstractmethod
    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        """The distance from the sums of all tensors."""


@dataclass(frozen=True)
class Cosine(Distance):
    """Mean over tensors of 1 − cos (Geiping et al. 2020; LAMP)."""

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        norms = (sums.second.clamp_min(TINY) * sums.observed_squared.clamp_min(TINY)[:, None]).sqrt()
        weights = sums.weights[:, None]
        return ((1 - sums.first / norms) * weights).sum(-1) / weights.sum(-1)


@dataclass(frozen=True)
class SquaredL2(Distance):
    """Σ ‖g − G‖² (DLG). The LAMP paper writes the norm; its code, and DLG's, take the square."""

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        squares = sums.second - 2 * sums.first + sums.observed_squared[:, None]
        return (squares * sums.weights[:, None]).sum(-1)


@dataclass(frozen=True)
class L2L1(Distance):
    """Σ ‖g − G‖² + l1_weight · ‖g − G‖₁ (TAG)."""

    l1_weight: float = 0.01
    residuals = True

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        return ((sums.first + self.l1_weight * sums.second) * sums.weights[:, None]).sum(-1)
