"""Clipping, and Gaussian noise on every coordinate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import Bounds, register
from gradleak.core.streams import Streams
from gradleak.core.update import Update


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
