"""Trains an image classifier on pictures, for an audit to attack a model that knows its task."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradleak.core.batch import Batch, Example
from gradleak.core.streams import Streams
from gradleak.targets.image_classifier import ImageClassifier

PICTURES_AT_ONCE = 1000


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
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            losses.append(loss.detach())
        left = (time.monotonic() - began) / epoch * (settings.epochs - epoch)
        right = accuracy(target, others, weights)
        yield {
            "epoch": epoch,
            "loss": float(torch.stack(losses).mean()),
            "accuracy": right,
            "seconds_left": left,
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
