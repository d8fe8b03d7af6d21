"""Observations under label hypotheses and restarts, as rows that a search moves together."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.search.hypotheses import MOST, Source, label_hypotheses
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target


@dataclass(frozen=True)
class Row:
    """One observation, the labels assumed of it, and a number that names its random stream."""

    observation: Observation
    labels: tuple[int, ...]
    number: int

    def streams(self, bench: Bench) -> Streams:
        """The same whoever shares the batch."""
        return bench.streams_of(self.observation).child("start", self.number)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows whose batches have one size."""

    target: Target
    rows: tuple[Row, ...]
    labels: Int[Tensor, "rows examples"]

    @property
    def examples(self) -> int:
        return int(self.labels.shape[1])

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a picture; asked once, since a graph cannot record a probe's way to the card."""
        _, channels, height, width = self.target.probe(1, 1).pixels.shape  # type: ignore[union-attr]
        return int(channels), int(height), int(width)

    @property
    def observations(self) -> list[Observation]:
        return [row.observation for row in self.rows]

    def batch(self, pixels: Float[Tensor, "rows examples channels height width"], kept: slice = slice(None)) -> Batch:
        """Pictures of some rows as a batch [observations, 1 candidate, examples, …]."""
        return Batch.of_pixels(pixels[:, None], self.labels[kept, None])

    def take(self, places: Int[Tensor, "some"]) -> "Rows":
        """Some of the rows."""
        return Rows(self.target, tuple(self.rows[place] for place in places.tolist()), self.labels[places])

    def draw(self, bench: Bench, *shape: int) -> Float[Tensor, "rows *shape"]:
        """Standard normal numbers, each row's from its own stream."""
        drawn = [torch.randn(shape, generator=row.streams(bench).generator()) for row in self.rows]
        return torch.stack(drawn).to(self.target.device, self.target.dtype)


def required(labels: Source) -> frozenset[Fact]:
    """What an attack on pictures has to be told."""
    return frozenset({Fact.BATCH_SIZE, Fact.LABELS}) if labels == "known" else frozenset({Fact.BATCH_SIZE})


def lay_out(observations: Sequence[Observation], labels: Source, restarts: int) -> Rows:
    """Every observation under every hypothesis, `restarts` times each."""
    rows = []
    for observation in observations:
        assumed = [found for found in label_hypotheses(observation, labels) if found is not None]
        if len(assumed) > MOST:
            raise GradleakError(f"Enumerating gives {len(assumed)} combinations of labels, more than {MOST}: use labels=derived.")
        pairs = [(found, start) for found in assumed for start in range(restarts)]
        rows += [Row(observation, found, number) for number, (found, _) in enumerate(pairs)]
    target = observations[0].target
    return Rows(target, tuple(rows), torch.tensor([row.labels for row in rows], device=target.device))
