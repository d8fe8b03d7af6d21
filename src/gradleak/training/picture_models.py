"""Trains on pictures: a classifier, for an audit to attack a model that knows its task, and a
generator of pictures, for an attack to begin from.

The generator learns as the decoder of a variational autoencoder (Kingma & Welling 2014), or against
an adversary that learns to tell its pictures from real ones (Goodfellow et al. 2014).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gradleak.core.batch import Batch, Example, pixels_of
from gradleak.core.errors import GradleakError
from gradleak.core.picture import Picture
from gradleak.core.streams import Streams
from gradleak.priors.picture_priors import FIRST_SIDE, GeneratorNetwork, save_generator
from gradleak.targets.image_classifier import ImageClassifier

PICTURES_AT_ONCE = 1000
How = Literal["decoder", "gan"]
RATES: dict[How, float] = {"decoder": 1e-3, "gan": 2e-4}
# Of the adversary's slope at real pictures: without it the two circle each other (Mescheder et al.
# 2018)
SLOPE_WEIGHT = 1.0
MOMENTS = (0.5, 0.99)  # of Adam: what was learnt of an opponent is soon out of date


@dataclass(frozen=True)
class ImageTraining:
    """Every choice that can change the weights; Adam, falling linearly to zero."""

    epochs: int
    batch_size: int
    learning_rate: float
    seed: int = 0


def train_image_classifier(
    settings: ImageTraining,
    target: ImageClassifier,
    training: Sequence[Example],
    evaluation: Sequence[Example],
    out: Path,
) -> Iterator[dict[str, float]]:
    """Trains copies of the target's weights and writes them; says after every epoch how often it
    is right on other pictures."""
    from safetensors.torch import save_file

    pictures, others = target.private_batch(training).batch, target.private_batch(evaluation).batch
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in target.parameters.items()
    }
    optimiser = torch.optim.Adam(list(weights.values()), settings.learning_rate)
    steps = settings.epochs * -(-len(training) // settings.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 1e-3, steps)
    order, began = Streams.root("image_classifier", settings.seed).generator(), time.monotonic()
    for epoch in range(1, settings.epochs + 1):
        losses = []
        for places in torch.split(
            torch.randperm(len(training), generator=order).to(target.device), settings.batch_size
        ):
            loss = target.losses(pictures[places], weights).mean()
            _move(optimiser, loss)
            schedule.step()
            losses.append(loss.detach())
        yield {
            "epoch": epoch,
            "loss": float(torch.stack(losses).mean()),
            "accuracy": accuracy(target, others, weights),
            "seconds_left": (time.monotonic() - began) / epoch * (settings.epochs - epoch),
        }
    save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, out)


@torch.no_grad()
def accuracy(target: ImageClassifier, batch: Batch, weights: dict[str, Tensor]) -> float:
    """The share of pictures whose own class has the highest score."""
    assert batch.pixels is not None
    right = 0
    for pixels, labels in zip(
        torch.split(batch.pixels, PICTURES_AT_ONCE),
        torch.split(batch.labels, PICTURES_AT_ONCE),
        strict=True,
    ):
        scores = torch.func.functional_call(target.module, weights, (pixels,))
        right += int((scores.argmax(1) == labels).sum())
    return right / len(batch.labels)


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


class Mirror(nn.Module):
    """The generator the other way round: a few numbers of a picture."""

    def __init__(
        self, shape: tuple[int, int, int], numbers: int, width: int, halvings: int
    ) -> None:
        super().__init__()
        inputs = [shape[0], *[width] * (halvings - 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, 4, 2, 1) for channels in inputs
        )
        self.last = nn.Linear((width if halvings else shape[0]) * FIRST_SIDE**2, numbers)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = pictures
        for convolution in self.convolutions:
            hidden = F.leaky_relu(convolution(hidden), 0.2)
        numbers: Tensor = self.last(hidden.flatten(1))
        return numbers


@dataclass(eq=False)
class Autoencoder:
    """The generator as a decoder, its encoder, and what trains both.

    The encoder gives mean and logarithm of the variance of the numbers a picture is made of.
    """

    network: GeneratorNetwork
    encoder: Mirror
    learning_rate: float
    pixel_spread: float

    def __post_init__(self) -> None:
        learnt = [*self.network.parameters(), *self.encoder.parameters()]
        self.optimiser = torch.optim.Adam(learnt, self.learning_rate)

    def step(self, pictures: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        """Lowers the negative bound of the likelihood; says the mean squared error of the
        pictures that were made."""
        mean, log_variance = self.encoder(pictures).chunk(2, dim=1)
        log_variance = log_variance.clamp(-10, 10)
        made = self.network(mean + (0.5 * log_variance).exp() * drawn)
        squares = (made - pictures).square()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        loss = (squares.flatten(1).sum(1) / (2 * self.pixel_spread**2) + divergence).mean()
        _move(self.optimiser, loss)
        return {"mse": squares.mean().detach()}


@dataclass(eq=False)
class Contest:
    """Generator and adversary, each with its own optimiser. The adversary gives one number: how
    real a picture looks."""

    network: GeneratorNetwork
    adversary: Mirror
    learning_rate: float

    def __post_init__(self) -> None:
        self.makes = torch.optim.Adam(self.network.parameters(), self.learning_rate, MOMENTS)
        self.tells = torch.optim.Adam(self.adversary.parameters(), self.learning_rate, MOMENTS)

    def step(self, pictures: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        """The adversary learns from real and made pictures, then the generator from the
        adversary; says what share it told."""
        real = pictures.detach().requires_grad_()
        real_scores = self.adversary(real)[:, 0]
        (slopes,) = torch.autograd.grad(real_scores.sum(), real, create_graph=True)
        with torch.no_grad():
            made = self.network(drawn)
        made_scores = self.adversary(made)[:, 0]
        loss = (F.softplus(-real_scores) + F.softplus(made_scores)).mean()
        loss = loss + 0.5 * SLOPE_WEIGHT * slopes.flatten(1).square().sum(1).mean()
        _move(self.tells, loss)
        _move(self.makes, F.softplus(-self.adversary(self.network(drawn))).mean())
        return {"told_apart": torch.cat([real_scores > 0, made_scores < 0]).float().mean()}


def _move(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()


def stack_pictures(examples: Sequence[Example]) -> Float[Tensor, "pictures channels height width"]:
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
    channels, height, width = map(int, mean.shape)
    shape = (channels, height, width)
    with torch.random.fork_rng(devices=[]):  # what the library draws is redrawn below
        network = GeneratorNetwork(shape, settings.latents, settings.width)
        halvings = len(network.convolutions)
        encoder = Mirror(shape, 2 * settings.latents, settings.width, halvings)
        adversary = Mirror(shape, 1, settings.width, halvings)
    for name, module in (("network", network), ("encoder", encoder), ("adversary", adversary)):
        _draw(module, streams.child(name))
        module.to(device)
    rate = RATES[settings.how] if settings.learning_rate is None else settings.learning_rate
    learner = (
        Contest(network, adversary, rate)
        if settings.how == "gan"
        else Autoencoder(network, encoder, rate, settings.pixel_spread)
    )
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


@torch.no_grad()
def _draw(module: nn.Module, streams: Streams) -> None:
    """He et al. (2015), each parameter from a stream of its own."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            parameter.zero_()
        else:
            drawn = torch.randn(parameter.shape, generator=streams.child(name).generator())
            parameter.copy_(drawn * (2 / parameter[0].numel()) ** 0.5)
