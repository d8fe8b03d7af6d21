"""Clipping, Gaussian noise, and differential privacy: both, with an ε that an accountant states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from gradleak.core.defense import Channel, Defense, Guarantee
from gradleak.core.errors import GradleakError
from gradleak.core.registry import Bounds, register
from gradleak.core.streams import Streams
from gradleak.core.update import Update, sum_over
from gradleak.defenses.accounting import gaussian_guarantees, refuse_accounting


@register("defense", "clipping")
@dataclass(frozen=True)
class Clipping(Defense):
    """Scales an update down to a largest norm over all its tensors. Directions stay: by itself
    it hides nothing but the size."""

    # The largest norm; inf: no clipping
    clip: Annotated[float, Bounds(above=True, infinite=True)] = 1.0

    def __post_init__(self) -> None:
        refuse_clip(self.clip)

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return clip_update(update, self.clip)

    def channel(self) -> Channel:
        return Channel(clip=finite(self.clip))


def clip_update(update: Update, clip: float) -> Update:
    """Every client's update (every example's, if per example) scaled down to a norm of at most
    that."""
    return update.scale((clip / update.whole_norms()).clamp(max=1.0))


def finite(clip: float) -> float | None:
    """The norm, or none where nothing is clipped."""
    return None if clip == float("inf") else clip


def refuse_clip(clip: float) -> None:
    if not clip > 0:
        raise ValueError(f"clip must be above 0, not {clip}.")


@register("defense", "gaussian_noise")
@dataclass(frozen=True)
class GaussianNoise(Defense):
    """Adds independent normal noise to every entry. Without clipping this bounds no ε: it is not
    differential privacy."""

    std: float = 0.001
    cites = "Zhu et al., NeurIPS 2019; LAMP Table 5"

    def __post_init__(self) -> None:
        if self.std < 0:
            raise ValueError(f"std must not be negative, not {self.std}.")

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return with_noise(update, self.std, rngs)

    def without_noise(self) -> Defense:
        return replace(self, std=0.0)

    def channel(self) -> Channel:
        return Channel(noise_std=self.std, randomised=self.std > 0)


def with_noise(update: Update, std: float, rngs: Sequence[Streams]) -> Update:
    """The update plus normal noise of that spread, of each client from its own stream."""
    generators = [rng.generator() for rng in rngs]

    def add_noise(tensor: Tensor) -> Tensor:
        drawn = [torch.randn(tensor.shape[1:], generator=generator) for generator in generators]
        return tensor + std * torch.stack(drawn).to(tensor)

    return Update(
        {name: add_noise(tensor) for name, tensor in update.tensors.items()}, update.per_example
    )


@register("defense", "dp_sgd")
@dataclass(frozen=True)
class DpSgd(Defense):
    """Clips every example's gradient over all trained tensors, takes the mean, adds Gaussian
    noise (their algorithm 1)."""

    # The largest norm of one example's gradient; inf: no clipping
    clip: Annotated[float, Bounds(above=True, infinite=True)] = 1.0
    noise_multiplier: float = 1.0  # noise on the sum of the batch, in units of clip
    sampling_rate: float = 0.01  # the chance of an example to be in a batch, and
    # How many batches there are: of the whole run, for its ε; one update does not depend on them
    steps: int = 1000
    delta: float = 1e-5
    cites = "Abadi et al., CCS 2016"

    def __post_init__(self) -> None:
        refuse_clip(self.clip)
        refuse_accounting(self.noise_multiplier, self.sampling_rate, self.steps, self.delta)
        if self.clip == float("inf") and self.noise_multiplier > 0:
            raise ValueError(
                "noise is a multiple of clip: give a finite one, or noise_multiplier=0."
            )

    @property
    def wants_per_example(self) -> bool:
        return True

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        if not update.per_example:
            raise GradleakError(
                "dp_sgd clips the gradient of each example and was given their mean: write it as"
                " the first defense."
            )
        small = clip_update(update, self.clip)
        examples = next(iter(small.tensors.values())).shape[1]
        mean = Update(
            {name: sum_over(tensor, 1) / examples for name, tensor in small.tensors.items()}
        )
        return with_noise(mean, self._noise_on_sum / examples, rngs)

    @property
    def _noise_on_sum(self) -> float:
        # No noise on an unclipped sum: 0, not 0·inf
        return self.noise_multiplier * self.clip if self.noise_multiplier else 0.0

    def without_noise(self) -> Defense:
        return replace(self, noise_multiplier=0.0)

    def channel(self) -> Channel:
        return Channel(
            noise_std_of_sum=self._noise_on_sum,
            clip=finite(self.clip),
            randomised=self.noise_multiplier > 0,
        )

    def guarantees(self) -> tuple[Guarantee, ...]:
        return gaussian_guarantees(
            "example", self.noise_multiplier, self.sampling_rate, self.steps, self.delta
        )


@register("defense", "client_dp")
@dataclass(frozen=True)
class ClientDp(Defense):
    """Clips a client's whole update and adds Gaussian noise on its own machine, as Flower's
    LocalDpMod does."""

    # LocalDpMod asks for ε and δ instead: its noise is noise_multiplier = sqrt(2 ln(1.25 / δ)) / ε,
    # with sensitivity = clip.
    clip: float = 1.0  # the largest norm of an update
    noise_multiplier: float = 1.0
    sampling_rate: float = 0.1  # the chance of a client to take part in a round, and
    steps: int = 100  # how many rounds there are: of the whole run, for its ε
    delta: float = 1e-5
    cites = "McMahan et al., ICLR 2018; noise on the client as in Flower's LocalDpMod"

    def __post_init__(self) -> None:
        refuse_clip(self.clip)
        refuse_accounting(self.noise_multiplier, self.sampling_rate, self.steps, self.delta)
        if self.clip == float("inf"):
            raise ValueError("noise is a multiple of clip: give a finite one.")

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return with_noise(clip_update(update, self.clip), self.noise_multiplier * self.clip, rngs)

    def without_noise(self) -> Defense:
        return replace(self, noise_multiplier=0.0)

    def channel(self) -> Channel:
        noise = self.noise_multiplier * self.clip
        return Channel(noise_std=noise, clip=self.clip, randomised=noise > 0)

    def guarantees(self) -> tuple[Guarantee, ...]:
        return gaussian_guarantees(
            "client", self.noise_multiplier, self.sampling_rate, self.steps, self.delta
        )


@register("defense", "central_dp")
@dataclass(frozen=True)
class CentralDp(Defense):
    """Noise the server adds to the sum of updates: protects from whoever gets the model, not
    from the server, who saw them."""

    noise_multiplier: float = 1.0  # in units of the clipping norm, which the server applies as well
    sampling_rate: float = 0.1  # the chance of a client to take part in a round, and
    steps: int = 100  # how many rounds there are
    delta: float = 1e-5
    cites = "McMahan et al., ICLR 2018"

    def __post_init__(self) -> None:
        refuse_accounting(self.noise_multiplier, self.sampling_rate, self.steps, self.delta)

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return update

    def channel(self) -> Channel:
        return Channel(after_server=True)

    def guarantees(self) -> tuple[Guarantee, ...]:
        """Towards those who see only the model; none of these holds against the server."""
        return gaussian_guarantees(
            "client", self.noise_multiplier, self.sampling_rate, self.steps, self.delta
        )
