"""Gradient inversion with a generative image prior."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.pictures.rows import Rows, lay_out, required
from gradleak.attacks.pictures.search import Objective, PictureSearch, Render, reconstructions
from gradleak.attacks.search.descent import Adam, Drops
from gradleak.attacks.search.hypotheses import Source
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.prior import Generator
from gradleak.core.ranges import Count, Rate
from gradleak.core.registry import Medium, register

MOST = 3.0  # standard deviations: numbers further out than this make pictures of nothing


@dataclass(frozen=True, eq=False)
class Latents(Render):
    """The numbers are those the generator makes pictures of."""

    rows: Rows
    generator: Generator

    def pixels(self, state: Float[Tensor, "rows numbers"], kept: slice) -> Float[Tensor, "rows examples channels height width"]:
        return self.generator.pictures(state.view(len(state), self.rows.examples, self.generator.latents))

    def project(self, state: Float[Tensor, "rows numbers"]) -> Float[Tensor, "rows numbers"]:
        return state.clamp(-MOST, MOST)


@dataclass(frozen=True, eq=False)
class Weights(Render):
    """The numbers are the generator's own weights, another set for each row; what it makes pictures of is fixed."""

    generator: Generator
    latents: Float[Tensor, "rows examples latents"]

    def pixels(self, state: Float[Tensor, "rows numbers"], kept: slice) -> Float[Tensor, "rows examples channels height width"]:
        return self.generator.pictures(self.latents[kept], state)

    def project(self, state: Float[Tensor, "rows numbers"]) -> Float[Tensor, "rows numbers"]:
        return state


@register("attack", "gi_gip")
@dataclass(frozen=True)
class GenerativePrior(Attack):
    """Searches the numbers from which a generator (--prior generator:path=…) makes the picture, then the generator's weights."""

    medium: ClassVar[Medium] = "image"
    cites = "Jeon et al., NeurIPS 2021; through defenses as in Learning to Invert (Wu et al. 2022), appendix A.1"

    latent_steps: Count = 1000
    weight_steps: int = 3000
    latent_learning_rate: Rate = 0.05
    weight_learning_rate: Rate = 0.001
    variation_weight: float = 1e-4
    restarts: int = 4  # of the search for latents; the best of each observation goes on
    labels: Source = "known"
    adaptive: bool = True  # to a defense that is known; false: the naive attack

    def __post_init__(self) -> None:
        if self.latent_steps < 1 or self.weight_steps < 0 or self.restarts < 1:
            raise ValueError("latent_steps and restarts count from 1, weight_steps from 0.")

    @property
    def passes(self) -> int:
        return self.restarts * self.latent_steps + self.weight_steps

    @property
    def requires(self) -> frozenset[Fact]:
        return required(self.labels)

    def adapts_to(self, channel: Channel) -> bool:
        return self.adaptive

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        began = time.monotonic()
        generator = bench.pictures
        if not isinstance(generator, Generator):
            raise GradleakError("gi_gip needs a generator: make one with gradleak prior pictures, add --prior generator:path=….")
        rows = lay_out(observations, self.labels, self.restarts)
        latents, start = Latents(rows, generator), rows.draw(bench, rows.examples * generator.latents)
        optimiser = Adam(self.latent_learning_rate, Drops(self.latent_steps))
        found = PictureSearch(rows, self._objective, bench).run(latents, start, optimiser, self.latent_steps, signed=False)
        if not self.weight_steps:
            return reconstructions(rows, latents, found, observations, began)
        kept = _best_places(rows, found.losses)
        best = rows.take(kept)
        fixed = found.state[kept].view(len(kept), rows.examples, generator.latents)
        weights = Weights(generator, fixed)
        optimiser = Adam(self.weight_learning_rate, Drops(self.weight_steps))
        copies = generator.weights.expand(len(kept), -1).contiguous()
        moved = PictureSearch(best, self._objective, bench).run(weights, copies, optimiser, self.weight_steps, signed=False)
        return reconstructions(best, weights, moved, observations, began)

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"]:
        return self._objective.at(observations, batches)

    @property
    def _objective(self) -> Objective:
        return Objective(self.variation_weight, self.adaptive)


def _best_places(rows: Rows, losses: Float[Tensor, "rows"]) -> Tensor:
    """For every observation the row of the lowest loss, in the rows' order."""
    best: dict[int, int] = {}
    for place, row in enumerate(rows.rows):
        index = row.observation.index
        if index not in best or losses[place] < losses[best[index]]:
            best[index] = place
    return torch.tensor(list(best.values()), device=losses.device)
