"""Gaussian noise on every coordinate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update


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
    noisy = {}
    for name, tensor in update.tensors.items():
        noise = torch.stack(
            [torch.randn(tensor.shape[1:], generator=generator) for generator in generators]
        )
        noisy[name] = tensor + std * noise.to(tensor)
    return Update(noisy, update.per_example)
