"""What to minimise, how to read entries and how much to trust each tensor, given what a defense did
to the update: by its channel, never by its name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Survivors
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching.distances import LEAST_SIGNAL, TINY, Distance

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

    contents = {name: getattr(batch, name) for name in ("ids", "embeddings", "pixels")}
    given = {name: spread(content) for name, content in contents.items() if content is not None}
    return Batch(mask=spread(batch.mask), labels=spread(batch.labels), **given)
