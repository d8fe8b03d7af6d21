"""Inverting Gradients: cosine distance and total variation, on pixels or a generator's numbers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.picture_search import (
    Images,
    Numbers,
    PictureMatchingAttack,
    PictureRows,
    PictureSearch,
    Render,
    StandardisedPixels,
    choose_pictures,
    lay_out_pictures,
)
from gradleak.attacks.search.descent import Drops, RowAdam
from gradleak.attacks.search.hypotheses import Source
from gradleak.core.attack import Bench, Reconstruction
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.prior import Generator
from gradleak.core.registry import Count, Rate, register


@register("attack", "ig")
@dataclass(frozen=True)
class InvertingGradients(PictureMatchingAttack):
    """Moves pixels until their gradient points as the observed one does, and smooths them (IG)."""

    cites = (
        "Geiping et al., NeurIPS 2020; through defenses as in Learning to Invert (Wu et al. 2022),"
        " appendix A.1"
    )

    steps: Count = 4800  # as released; its paper takes 24,000
    learning_rate: Rate = 0.1  # a tenth of it after 3/8, 5/8 and 7/8 of the steps
    variation_weight: float = 0.1  # of total variation; as released
    restarts: int = 1
    labels: Source = "known"
    adaptive: bool = True  # to a defense that is known; false: the naive attack

    def __post_init__(self) -> None:
        if self.steps < 1 or self.restarts < 1:
            raise ValueError(
                f"steps and restarts count from 1; they are {self.steps} and {self.restarts}."
            )

    @property
    def passes(self) -> int:
        return self.restarts * self.steps

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        began = time.monotonic()
        rows = lay_out_pictures(observations, self.labels, self.restarts)
        render, optimiser = StandardisedPixels(rows), RowAdam(self.learning_rate, Drops(self.steps))
        start = rows.draw(bench, rows.examples * rows.target.hidden_size)
        search = PictureSearch(rows, self, bench)
        found = search.run(render, start, optimiser, self.steps, signed=True)
        return choose_pictures(rows, render, found, observations, began)


# Standard deviations: numbers further out than this make pictures of nothing.
MOST_SPREAD = 3.0


@dataclass(frozen=True, eq=False)
class Latents(Render):
    """The numbers are those the generator makes pictures of."""

    rows: PictureRows
    generator: Generator

    def render(self, state: Numbers, kept: slice) -> Images:
        return self.generator.pictures(
            state.view(len(state), self.rows.examples, self.generator.latents)
        )

    def project(self, state: Numbers) -> Numbers:
        return state.clamp(-MOST_SPREAD, MOST_SPREAD)


@dataclass(frozen=True, eq=False)
class GeneratorWeights(Render):
    """The numbers are the generator's own weights, another set for each row; its input is fixed."""

    generator: Generator
    latents: Float[Tensor, "rows examples latents"]

    def render(self, state: Numbers, kept: slice) -> Images:
        return self.generator.pictures(self.latents[kept], state)

    def project(self, state: Numbers) -> Numbers:
        return state


@register("attack", "gi_gip")
@dataclass(frozen=True)
class GenerativePrior(PictureMatchingAttack):
    """Searches the numbers from which a generator makes the picture, then its weights.

    The generator is made by `gradleak prior pictures` and given by --prior generator:path=….
    """

    cites = (
        "Jeon et al., NeurIPS 2021; through defenses as in Learning to Invert (Wu et al. 2022),"
        " appendix A.1"
    )

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

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        began = time.monotonic()
        generator = bench.prior
        if not isinstance(generator, Generator):
            raise GradleakError(
                "gi_gip needs a generator: make one with gradleak prior pictures, add --prior"
                " generator:path=…."
            )
        rows = lay_out_pictures(observations, self.labels, self.restarts)
        latents = Latents(rows, generator)
        start = rows.draw(bench, rows.examples * generator.latents)
        optimiser = RowAdam(self.latent_learning_rate, Drops(self.latent_steps))
        found = PictureSearch(rows, self, bench).run(
            latents, start, optimiser, self.latent_steps, signed=False
        )
        if not self.weight_steps:
            return choose_pictures(rows, latents, found, observations, began)
        kept = rows.find_best(found.losses)
        best = rows.take(kept)
        weights = GeneratorWeights(
            generator, found.state[kept].view(len(kept), rows.examples, generator.latents)
        )
        optimiser = RowAdam(self.weight_learning_rate, Drops(self.weight_steps))
        copies = generator.weights.expand(len(kept), -1).contiguous()
        moved = PictureSearch(best, self, bench).run(
            weights, copies, optimiser, self.weight_steps, signed=False
        )
        return choose_pictures(best, weights, moved, observations, began)
