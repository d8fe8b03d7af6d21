"""Distances between gradients, written over a few sums per tensor so that no gradient has to be
built for most of them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

# Of what was seen, squared: less than that cannot be told from the spread of the noise's own norm
LEAST_SIGNAL = 1e-3
# Keeps the root of a vanishing squared norm differentiable; far below any real gradient's
TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the entries of each tensor: of g·G and g² (`angles`), or of |g − G|² and |g − G|
    (`residuals`)."""

    first: Float[Tensor, "observations candidates tensors"]
    second: Float[Tensor, "observations candidates tensors"]
    observed_squared: Float[Tensor, "observations tensors"]
    # Zero where a tensor is not seen or carries no signal
    weights: Float[Tensor, "observations tensors"]
    noise_squared: Float[Tensor, "observations tensors"]  # how much of G² is noise, as expected
    signal_squared: Float[Tensor, "observations tensors"]  # and how much is the gradient's


class Distance(ABC):
    """How far a candidate's gradient is from the observed one."""

    # Needs the entries of the difference, hence the gradient itself
    residuals: ClassVar[bool] = False
    by_certainty: ClassVar[bool] = False  # weighs tensors by how much of them is signal
    sees_size: ClassVar[bool] = False  # of the gradient; otherwise it cancels

    @abstractmethod
    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        """Returns the distance from the sums of all tensors."""

    def for_signs(self) -> "Distance":
        """Returns what to minimise where only signs were sent."""
        return WrongSignSquares() if self.sees_size else WrongSigns()

    def for_noise(self) -> "Distance":
        """Returns what to minimise under Gaussian noise of one size on every entry."""
        return self

    def for_random_rounding(self) -> "Distance":
        """Returns what to minimise where entries were rounded up or down at random."""
        return self

    def of_nothing(
        self, squares: Float[Tensor, "*some"], absolutes: Float[Tensor, "*some"]
    ) -> Float[Tensor, "*some"]:
        """Returns the distance of a candidate without gradient, from the sums of G² and of |G|:
        one, where the observed size cancels."""
        return squares if self.sees_size else torch.ones_like(squares)

    def for_any_size(self) -> "Distance":
        """Returns what to minimise where the update was scaled down by an unknown factor."""
        return self


@dataclass(frozen=True)
class Cosine(Distance):
    """Mean over tensors of 1 − cos (Geiping et al. 2020; LAMP)."""

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        return _mean_of_cosines(sums, sums.observed_squared)

    def for_noise(self) -> Distance:
        return SureCosine()

    def for_random_rounding(self) -> Distance:
        # What rounding added is only guessed; SureCosine would have to know it.
        return WeighedCosine()


@dataclass(frozen=True)
class WeighedCosine(Distance):
    """Mean over tensors of 1 − cos, each weighed by how surely its cosine can be told through
    errors whose size is only guessed.

    Norms are as seen: taken off, a guess that is too large would make wrong candidates fit better
    than perfectly.
    """

    by_certainty = True

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        return _mean_of_cosines(sums, sums.observed_squared)


@dataclass(frozen=True)
class SureCosine(Distance):
    """Mean over tensors of 1 − cos, each weighed by how surely its cosine can be told through the
    noise.

    The observed norm is mostly noise, so that of a typical gradient stands in its place.
    """

    by_certainty = True

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        return _mean_of_cosines(sums, sums.signal_squared)


@dataclass(frozen=True)
class WholeCosine(Distance):
    """1 − cos over all tensors together, known noise taken off the observed norm: for pictures.

    A cosine for each tensor lets those that drown count as much as the others.
    """

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        weights = sums.weights[:, None]
        inner, squares = (sums.first * weights).sum(-1), (sums.second * weights).sum(-1)
        # ‖G‖² is ‖g‖² + ‖noise‖² in the mean: of mostly noise less than nothing may be left.
        observed = (sums.observed_squared * sums.weights).sum(-1)
        signal = torch.maximum(
            observed - (sums.noise_squared * sums.weights).sum(-1), LEAST_SIGNAL * observed
        )
        return 1 - inner / (squares.clamp_min(TINY).sqrt() * signal.clamp_min(TINY).sqrt()[:, None])


@dataclass(frozen=True)
class SquaredL2(Distance):
    """Σ ‖g − G‖² (DLG), less the noise that is known. The LAMP paper writes the norm; its code,
    and DLG's, take the square."""

    sees_size = True

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        # ‖g − G‖² = ‖g‖² − 2 g·G + ‖G‖²
        squares = (
            sums.second - 2 * sums.first + (sums.observed_squared - sums.noise_squared)[:, None]
        )
        return (squares * sums.weights[:, None]).sum(-1)

    def for_any_size(self) -> Distance:
        return ScaledL2()


@dataclass(frozen=True)
class L2L1(Distance):
    """Σ ‖g − G‖² + l1_weight · ‖g − G‖₁ (TAG), less the square of the noise that is known."""

    l1_weight: float = 0.01
    residuals = True
    sees_size = True

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        squares = sums.first - sums.noise_squared[:, None]
        return ((squares + self.l1_weight * sums.second) * sums.weights[:, None]).sum(-1)

    def of_nothing(
        self, squares: Float[Tensor, "*some"], absolutes: Float[Tensor, "*some"]
    ) -> Float[Tensor, "*some"]:
        return squares + self.l1_weight * absolutes

    def for_any_size(self) -> Distance:
        return ScaledL2()  # of absolute differences the best factor has no closed form


@dataclass(frozen=True)
class ScaledL2(Distance):
    """Σ ‖a·g − G‖² at the best factor a between 0 and 1, one for all tensors: what clipping
    leaves of a distance."""

    sees_size = True

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        weights = sums.weights[:, None]
        inner, squares = (sums.first * weights).sum(-1), (sums.second * weights).sum(-1)
        # Least squares in a: clipping only ever scales down, so that a is at most one.
        factor = (inner / squares.clamp_min(TINY)).clamp(0, 1)
        observed = ((sums.observed_squared - sums.noise_squared) * sums.weights).sum(-1)[:, None]
        return factor.square() * squares - 2 * factor * inner + observed


@dataclass(frozen=True)
class WrongSigns(Distance):
    """Mean over tensors of the share of g² that has the wrong sign.

    Learning to Invert (appendix A.1, equation 3) replaces the cosine by Σ of squares with the wrong
    sign, which a candidate without any gradient minimises; the share does not fall with the size,
    just as the cosine does not.
    """

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        weights = sums.weights[:, None]
        # Through Signs the two sums are of squares with the wrong sign, and of all squares.
        return (sums.first / sums.second.clamp_min(TINY) * weights).sum(-1) / weights.sum(-1)


@dataclass(frozen=True)
class WrongSignSquares(Distance):
    """Σ of squares with the wrong sign, each tensor's gradient scaled to the size of the signs: the
    same share, by entries.

    Appendix A.1 of Learning to Invert leaves the size as it is (and adds TAG's absolute values). A
    candidate without gradient is then perfect: on the tiny target DLG fell to ROUGE-1 2 under it,
    from 12 when it took signs for values.
    """

    sees_size = True

    def combine(self, sums: Statistics) -> Float[Tensor, "observations candidates"]:
        shares = sums.first / sums.second.clamp_min(TINY)
        return (shares * (sums.observed_squared * sums.weights)[:, None]).sum(-1)


def _mean_of_cosines(
    sums: Statistics, squared: Float[Tensor, "observations tensors"]
) -> Float[Tensor, "observations candidates"]:
    """Returns the weighed mean over tensors of 1 − cos, with these for the squared norms of what
    was observed."""
    # Roots before the product, which would underflow where a tensor's entries were all set to zero
    norms = sums.second.clamp_min(TINY).sqrt() * squared.clamp_min(TINY).sqrt()[:, None]
    weights = sums.weights[:, None]
    return ((1 - sums.first / norms) * weights).sum(-1) / weights.sum(-1)
