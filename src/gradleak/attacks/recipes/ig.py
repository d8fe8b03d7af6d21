"""Inverting Gradients: cosine distance and total variation, on pixels."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gradleak.attacks.gradient_matching.picture_search import (
    PictureMatchingAttack,
    PictureSearch,
    StandardisedPixels,
    choose_pictures,
    lay_out_pictures,
)
from gradleak.attacks.search.descent import Drops, RowAdam
from gradleak.attacks.search.hypotheses import Source
from gradleak.core.attack import Bench, Reconstruction
from gradleak.core.observation import Observation
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
        search = PictureSearch(rows, self.minimised, bench)
        render = StandardisedPixels(rows)
        start = rows.draw(bench, rows.examples * rows.target.hidden_size)
        found = search.run(
            render, start, RowAdam(self.learning_rate, Drops(self.steps)), self.steps, signed=True
        )
        return choose_pictures(rows, render, found, observations, began)
