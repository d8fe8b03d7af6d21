"""Trains a generator of pictures: as the decoder of a variational autoencoder (Kingma & Welling
2014), or a GAN."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.core.picture import Picture
from gradleak.core.pixels import pixels_of
from gradleak.core.streams import Streams
from gradleak.priors.generator import FIRST_SIDE, GeneratorNetwork, save_generator
from gradleak.training.adversary import Adversary, Contest

How = Literal["decoder", "gan"]
RATES: dict[How, float] = {"decoder": 1e-3, "gan": 2e-4}


@dataclass(frozen=True)
class GeneratorTraining:
    """Every choice that can change the generator."""

    latents: int = 128
    width: int = 64
    epochs: int = 30
    batch_size: int = 256
    learning_rate: float | None = None  # none: RATES, by how it is trained
    how: How = "decoder"
    # Standard deviation that a pixel is believed to have around what is made
    pixel_spread: float = 0.1
    seed: int = 0


@runtime_checkable
class Learns(Protocol):
    """One way of training a generator."""

    def step(self, pictures: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        """Learns from real pictures and numbers drawn for as many; says how it went."""


class Encoder(nn.Module):
    """The generator's mirror: mean and logarithm of the variance of the numbers a picture is
    made of."""

    def __init__(
        self, shape: tuple[int, int, int], latents: int, width: int, doublings: int
    ) -> None:
        super().__init__()
        inputs = [shape[0], *[width] * (doublings - 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, 4, 2, 1) for channels in inputs
        )
        self.last = nn.Linear((width if doublings else shape[0]) * FIRST_SIDE**2, 2 * latents)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        hidden = pictures
        for convolution in self.convolutions:
            hidden = F.leaky_relu(convolution(hidden), 0.2)
        mean, log_variance = self.last(hidden.flatten(1)).chunk(2, dim=1)
        return mean, log_variance.clamp(-10, 10)


def stacked(examples: Sequence[Example]) -> Float[Tensor, "pictures channels height width"]:
    """Pictures as numbers between 0 and 1."""
    pictures = [one.content for one in examples if isinstance(one.content, Picture)]
    if len(pictures) < 2:
        raise GradleakError(
            f"A generator learns from pictures, and this data holds {len(pictures)}: use cifar10 or"
            " shapes."
        )
    return torch.stack([pixels_of(picture) for picture in pictures])


def train_generator(
    settings: GeneratorTraining,
    pictures: Float[Tensor, "pictures channels height width"],
    out: Path,
    device: torch.device,
) -> Iterator[dict[str, float]]:
    """Trains and writes the generator; says after every epoch how far off its pictures are, and
    how long is left."""
    streams = Streams.root("generator", settings.seed)
    mean = pictures.mean(0)
    channels, height, width = (int(size) for size in mean.shape)
    with torch.random.fork_rng(devices=[]):  # what the library draws is redrawn below
        network = GeneratorNetwork((channels, height, width), settings.latents, settings.width)
        halvings = len(network.convolutions)
        encoder = Encoder((channels, height, width), settings.latents, settings.width, halvings)
        adversary = Adversary((channels, height, width), settings.width, halvings)
    for name, module in (("network", network), ("encoder", encoder), ("adversary", adversary)):
        _draw(module, streams.child(name))
        module.to(device)
    rate = RATES[settings.how] if settings.learning_rate is None else settings.learning_rate
    decoder = Autoencoder(network, encoder, rate, settings.pixel_spread)
    learner: Learns = Contest(network, adversary, rate) if settings.how == "gan" else decoder
    order, noise = streams.child("order").generator(), streams.child("noise").generator()
    pictures, began = pictures.to(device), time.monotonic()
    for epoch in range(1, settings.epochs + 1):
        told: list[dict[str, Tensor]] = []
        for places in torch.split(
            torch.randperm(len(pictures), generator=order).to(device), settings.batch_size
        ):
            drawn = torch.randn(len(places), settings.latents, generator=noise).to(device)
            told.append(learner.step(pictures[places], drawn))
        left = (time.monotonic() - began) / epoch * (settings.epochs - epoch)
        means = {name: float(torch.stack([one[name] for one in told]).mean()) for name in told[0]}
        yield {"epoch": epoch, "of": settings.epochs, **means, "seconds_left": left}
    save_generator(out, network, settings.latents, mean)


@dataclass(eq=False)
class Autoencoder:
    """The generator as a decoder, its encoder, and what trains both."""

    network: GeneratorNetwork
    encoder: Encoder
    learning_rate: float
    pixel_spread: float

    def __post_init__(self) -> None:
        learnt = [*self.network.parameters(), *self.encoder.parameters()]
        self.optimiser = torch.optim.Adam(learnt, self.learning_rate)

    def step(self, pictures: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        """Lowers the negative bound of the likelihood; says the mean squared error of the
        pictures that were made."""
        mean, log_variance = self.encoder(pictures)
        made = self.network(mean + (0.5 * log_variance).exp() * drawn)
        squares = (made - pictures).square()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        loss = (squares.flatten(1).sum(1) / (2 * self.pixel_spread**2) + divergence).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return {"mse": squares.mean().detach()}


@torch.no_grad()
def _draw(module: nn.Module, streams: Streams) -> None:
    """He et al. (2015), each parameter from a stream of its own."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            parameter.zero_()
        else:
            drawn = torch.randn(parameter.shape, generator=streams.child(name).generator())
            parameter.copy_(drawn * (2 / parameter[0].numel()) ** 0.5)
