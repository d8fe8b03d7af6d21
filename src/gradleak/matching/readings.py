"""How an entry of a candidate's gradient is held against the one that was seen, after what a
defense did to it."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Reading(ABC):
    """The entries a defense left, and what they still say of the gradient."""

    # Entries are not all alike, so that gradients have to be built
    entrywise: ClassVar[bool] = True

    @abstractmethod
    def residual(self, gradients: Tensor, observed: Tensor) -> Tensor:
        """What speaks against a candidate, entry by entry; its slope in the gradient is one
        wherever it is not zero."""

    @abstractmethod
    def angles(
        self, residual_squares: Tensor, inner: Tensor, squares: Tensor, observed_squares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The two sums of a distance that needs no entries, from sums of residual², g·G, g² and
        G² over all of them."""


class Whole(Reading):
    """Every entry is the gradient's, up to noise: g − G."""

    entrywise = False

    def residual(self, gradients: Tensor, observed: Tensor) -> Tensor:
        return gradients - observed

    def angles(
        self, residual_squares: Tensor, inner: Tensor, squares: Tensor, observed_squares: Tensor
    ) -> tuple[Tensor, Tensor]:
        return inner, squares


class Surviving(Reading):
    """Zeros are no values: only the others are compared (Learning to Invert, appendix A.1)."""

    def residual(self, gradients: Tensor, observed: Tensor) -> Tensor:
        return (gradients - observed) * (observed != 0)

    def angles(
        self, residual_squares: Tensor, inner: Tensor, squares: Tensor, observed_squares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """g·G as it is, and g² over the survivors: Σ(g − G)² + 2 Σ g·G − Σ G² there."""
        return inner, (residual_squares + 2 * inner - observed_squares).clamp_min(0)


class Signs(Reading):
    """Only signs are known: an entry of the wrong sign speaks against a candidate by its size
    (appendix A.1, equation 3)."""

    def residual(self, gradients: Tensor, observed: Tensor) -> Tensor:
        return gradients * (gradients * observed < 0)

    def angles(
        self, residual_squares: Tensor, inner: Tensor, squares: Tensor, observed_squares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The square of what has the wrong sign, and of everything."""
        return residual_squares, squares


WHOLE = Whole()
