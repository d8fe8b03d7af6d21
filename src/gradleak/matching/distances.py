"""Distances between gradients, written over a few sums per tensor so that no gradient has to be
built for most of them; and which of them fits what a defense did to the update.

What to minimise, how to read entries and how much to trust each tensor follow from a defense's
channel, never from its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Survivors
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.target import Target

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


# Inverse variance of a tensor's cosine from which on more certainty hardly gives it more weight
SURE = 300.0
USUALLY = 0.5  # how far a tensor's square may be from what it usually is, as a share
LEAST_USUAL = 0.1  # of what is usual


class Reading(ABC):
    """The entries a defense left, and what they still say of the gradient."""

    # Entries are not all alike, so that gradients have to be built
    entrywise: ClassVar[bool] = True

    @abstractmethod
    def residual(self, gradients: Tensor, observed: Tensor) -> Tensor:
        """Returns what speaks against a candidate, entry by entry; its slope in the gradient is one
        wherever it is not zero."""

    @abstractmethod
    def angles(
        self, residual_squares: Tensor, inner: Tensor, squares: Tensor, observed_squares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the two sums of a distance that needs no entries, from sums of residual², g·G, g²
        and G² over all of them."""


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
        """Returns g·G as it is, and g² over the survivors: Σ(g − G)² + 2 Σ g·G − Σ G² there."""
        return inner, (residual_squares + 2 * inner - observed_squares).clamp_min(0)


class Signs(Reading):
    """Only signs are known: an entry of the wrong sign speaks against a candidate by its size
    (appendix A.1, equation 3)."""

    def residual(self, gradients: Tensor, observed: Tensor) -> Tensor:
        return gradients * (gradients * observed < 0)

    def angles(
        self, residual_squares: Tensor, inner: Tensor, squares: Tensor, observed_squares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the square of what has the wrong sign, and of everything."""
        return residual_squares, squares


WHOLE = Whole()


def common_channel(observations: Sequence[Observation]) -> Channel:
    """Returns the kind of what is known to have been done to all of these."""
    kinds = {observation.channel.kind for observation in observations}
    if len(kinds) > 1:
        raise GradleakError(
            "Observations under different kinds of defenses cannot be attacked in one pass."
        )
    return kinds.pop()


def adapt(distance: Distance, channel: Channel) -> tuple[Distance, Reading]:
    """Returns the distance and the reading that fit the channel."""
    if channel.signs_only:
        return distance.for_signs(), Signs()
    # Clipping comes first: what a clip leaves of a distance is then fitted to noise or rounding.
    fitting = distance if channel.clip is None else distance.for_any_size()
    if channel.noisy:
        fitting = fitting.for_noise()
    elif channel.quantisation_levels is not None:
        fitting = fitting.for_random_rounding()
    return fitting, Surviving() if channel.survivors is Survivors.SEEN else WHOLE


def noise_squares(
    observed: Float[Tensor, "observations entries"],
    noise_stds: Float[Tensor, "observations"],
    only_survivors: bool,
) -> Float[Tensor, "observations"]:
    """Returns the expected square of such errors in a tensor: of its entries, or of those that were
    not set to zero."""
    entries = (observed != 0).sum(1) if only_survivors else observed.shape[1]
    return entries * noise_stds.square()


def rounding_stds(
    observed: Float[Tensor, "observations entries"], levels: int, only_survivors: bool
) -> Float[Tensor, "observations"]:
    """Returns what rounding at random is likely to have added to every entry of a tensor, or to
    those that were not set to zero.

    It is right in the mean, so |entries| are as large as they were; double-exponential ones have
    twice that, squared. No entry was moved by more than half a step in the mean square.
    """
    entries = (observed != 0).sum(1).clamp_min(1) if only_survivors else observed.shape[1]
    # E e² = 2 (E |e|)² of double-exponential entries; what is above that, rounding added.
    added = observed.square().sum(1) / entries - 2 * (observed.abs().sum(1) / entries).square()
    return added.clamp_min(0).minimum((observed.abs().amax(1) / (2 * levels)).square()).sqrt()


def certainties(
    signal_squared: Float[Tensor, "observations tensors"],
    stds: Float[Tensor, "observations tensors"],
) -> Float[Tensor, "observations tensors"]:
    """Returns weights of tensors: all alike where noise is small, as their signal where it is
    large."""
    # Noise of spread σ moves a cosine with a unit vector by σ/‖g‖: its variance is σ²/‖g‖².
    variances = stds.square() / signal_squared.clamp_min(torch.finfo(signal_squared.dtype).tiny)
    return 1 / (1 + SURE * variances)


def likely_signal(
    ordinary: Float[Tensor, "observations tensors"],
    observed: Float[Tensor, "observations tensors"],
    noise: Float[Tensor, "observations tensors"],
    stds: Float[Tensor, "observations tensors"],
) -> Float[Tensor, "observations tensors"]:
    """Returns the gradient's part of every tensor's square: what is seen less the noise, as far as
    that is sure; else what is usual.

    Usual squares are taken in the shares that ordinary examples have, of the size that is seen in
    all tensors together.
    """
    total = observed.sum(1, keepdim=True)
    signal = torch.maximum(total - noise.sum(1, keepdim=True), LEAST_SIGNAL * total)
    usual = ordinary / ordinary.sum(1, keepdim=True).clamp_min(TINY) * signal
    # The variance of Σ(g + n)²: 2σ⁴ an entry for the noise's square, 4σ²‖g‖² for its product with g
    spread_of_direct = 2 * noise * stds.square() + 4 * usual * stds.square()
    spread_of_usual = (USUALLY * usual).square()
    # Each of the two estimates weighs by the inverse of its variance.
    trust = spread_of_usual / (spread_of_usual + spread_of_direct).clamp_min(TINY)
    return torch.maximum(trust * (observed - noise) + (1 - trust) * usual, LEAST_USUAL * usual)


def ordinary_candidates(target: Target, observations: int) -> Batch:
    """Returns the model's ordinary examples, each a candidate by itself for every observation."""
    batch = target.ordinary()
    if target.labels_are_tokens and batch.ids is not None:
        batch = replace(batch, labels=batch.ids)  # a language model learns its own text

    def spread(part: Tensor) -> Tensor:
        return part[None, :, None].expand(observations, -1, 1, *part.shape[1:])

    parts = {one.name: getattr(batch, one.name) for one in fields(batch)}
    return Batch(**{name: spread(part) for name, part in parts.items() if part is not None})
