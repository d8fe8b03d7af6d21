"""The search loop for pictures: numbers that render to pictures are moved until the pictures' gradient fits."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.slopes import RECORDED
from gradleak.attacks.pictures.rows import Rows
from gradleak.attacks.search.descent import Adam
from gradleak.core.attack import Bench, Cost, Reconstruction, Trace
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.pixels import picture_of
from gradleak.matching import Matcher, for_observations
from gradleak.matching.chunking import BESIDE, Chunks, pieces, refuse_without_room
from gradleak.matching.distances import WholeCosine
from gradleak.matching.graphs import Function, record

ROWS_AT_ONCE = {"cpu": 16, "cuda": 256}  # where memory allows
LOSS_EVERY = 50  # steps between entries of the loss trace
SHOW_EVERY_SECONDS = 0.5
PIXEL_SPREAD = 0.25  # of pixels around one half: IG's steps and its total variation are in numbers of standard deviation one


class Render(ABC):
    """What the numbers of a row stand for."""

    @abstractmethod
    def pixels(self, state: Float[Tensor, "rows numbers"], kept: slice) -> Float[Tensor, "rows examples channels height width"]:
        """The pictures of some rows, differentiable in their numbers."""

    @abstractmethod
    def project(self, state: Float[Tensor, "rows numbers"]) -> Float[Tensor, "rows numbers"]:
        """The nearest numbers that are allowed."""


@dataclass(frozen=True, eq=False)
class Pixels(Render):
    """The numbers are the pixels themselves, standardised, and stay between black and white."""

    rows: Rows

    def pixels(self, state: Float[Tensor, "rows numbers"], kept: slice) -> Float[Tensor, "rows examples channels height width"]:
        return state.view(len(state), self.rows.examples, *self.rows.shape) * PIXEL_SPREAD + 0.5

    def project(self, state: Float[Tensor, "rows numbers"]) -> Float[Tensor, "rows numbers"]:
        return state.clamp(-0.5 / PIXEL_SPREAD, 0.5 / PIXEL_SPREAD)


@dataclass(frozen=True)
class Objective:
    """What is minimised: a distance of gradients, as the defense leaves it, plus weighted total variation."""

    variation_weight: float
    adaptive: bool = True

    def matcher(self, observations: Sequence[Observation]) -> Matcher:
        # One cosine over all parameters together, as IG has it
        return for_observations(observations, WholeCosine(), adaptive=self.adaptive, unroll=False)

    def losses(self, matcher: Matcher, batch: Batch, rows: slice) -> Float[Tensor, "rows"]:
        """The loss of one candidate a row."""
        assert batch.pixels is not None
        losses = matcher.distances(batch, rows)[:, 0]
        return losses + self.variation_weight * total_variation(batch.pixels[:, 0]) if self.variation_weight else losses

    def at(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"]:
        """The same at given batches of pictures, all of one size."""
        matcher, device = self.matcher(observations), observations[0].target.device
        pixels = torch.stack([batch.pixels for batch in batches if batch.pixels is not None])
        labels = torch.stack([batch.labels for batch in batches])

        def piece(kept: slice) -> Tensor:
            return self.losses(matcher, Batch.of_pixels(pixels[kept, None], labels[kept, None]), kept).detach()

        each = matcher.bytes(pixels.shape[1], 1)
        return Chunks(min(ROWS_AT_ONCE.get(device.type, 16), int(BESIDE / each))).run(piece, len(pixels))


def total_variation(pixels: Float[Tensor, "rows examples channels height width"]) -> Float[Tensor, "rows"]:
    """Mean difference of neighbouring pixels, across and down, in standard deviations (Rudin et al. 1992, as IG takes it)."""
    down, across = pixels.diff(dim=-2).abs(), pixels.diff(dim=-1).abs()
    return (down.flatten(1).mean(1) + across.flatten(1).mean(1)) / PIXEL_SPREAD


@dataclass(frozen=True)
class Found:
    """The best numbers of every row and how the search went."""

    state: Float[Tensor, "rows numbers"]
    losses: Float[Tensor, "rows"]
    trace: tuple[tuple[int, Tensor], ...]
    steps: int


class PictureSearch:
    """Moves the numbers of all rows by Adam and keeps the best of each row."""

    def __init__(self, rows: Rows, objective: Objective, bench: Bench) -> None:
        self.rows, self.objective, self.bench = rows, objective, bench
        self.matcher = objective.matcher(rows.observations)
        device, each = rows.target.device, self.matcher.bytes(rows.examples, 1, slope=True)
        refuse_without_room("The search for pictures", each, bench, device, f"one step on {rows.examples} pictures")
        work, held = self.matcher.work(rows.examples, 1, slope=True), RECORDED if device.type == "cuda" else 1
        self.chunks = pieces(bench, device, held * each, work, ROWS_AT_ONCE.get(device.type, 16))

    def run(self, render: Render, start: Float[Tensor, "rows numbers"], optimiser: Adam, steps: int, signed: bool) -> Found:
        """Takes the steps from a start; `signed` follows the signs of the slope only (IG)."""
        state = render.project(start.clone())
        moments = optimiser.begin(state)
        recorded: dict[tuple[int, int], Function] = {}
        best, lowest = state.clone(), state.new_full((len(state),), torch.inf)
        trace, shown, taken = [], 0.0, 0
        for step in range(steps + 1):
            losses, slopes = self._slopes(render, state, recorded)
            better = losses < lowest
            best, lowest = torch.where(better[:, None], state, best), torch.where(better, losses, lowest)
            if step % LOSS_EVERY == 0 or step == steps:
                trace.append((step, losses.cpu()))
            if time.monotonic() - shown > SHOW_EVERY_SECONDS:
                shown = time.monotonic()
                self.bench.progress.report(step, steps, float(lowest.mean()))
            if step == steps or self.bench.out_of_time:
                break
            moments.step(state, slopes.sign() if signed else slopes)
            state, taken = render.project(state), step + 1
        return Found(best, lowest, tuple(trace), taken)

    def _slopes(self, render: Render, state: Tensor, recorded: dict[tuple[int, int], Function]) -> tuple[Tensor, Tensor]:
        slopes = torch.zeros_like(state)

        def piece(kept: slice) -> Tensor:
            losses, slopes[kept] = self._function(render, kept, state[kept], recorded)(state[kept])
            return losses.clone()

        losses = self.chunks.run(piece, len(state))
        return losses, slopes.nan_to_num_()

    def _function(self, render: Render, kept: slice, example: Tensor, recorded: dict[tuple[int, int], Function]) -> Function:
        def losses_and_slopes(values: Tensor) -> tuple[Tensor, Tensor]:
            leaf = values.detach().requires_grad_()
            losses = self.objective.losses(self.matcher, self.rows.batch(render.pixels(leaf, kept), kept), kept)
            return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]

        if example.device.type != "cuda":
            return losses_and_slopes
        key = (kept.start, kept.stop)
        if key not in recorded:
            recorded[key] = record(losses_and_slopes, example)
        return recorded[key]


@torch.no_grad()
def reconstructions(
    rows: Rows, render: Render, found: Found, observations: Sequence[Observation], began: float
) -> list[Reconstruction]:
    """For every observation the row of the lowest loss."""
    seconds = (time.monotonic() - began) / len(observations)
    best: dict[int, tuple[float, Reconstruction]] = {}
    for place, row in enumerate(rows.rows):
        loss = float(found.losses[place])
        if row.observation.index in best and best[row.observation.index][0] <= loss:
            continue
        pixels = render.pixels(found.state[place : place + 1], slice(place, place + 1))[0]
        guess = Reconstruction(
            sentences=(),
            pictures=tuple(picture_of(one) for one in pixels),
            loss=loss,
            labels=row.labels,
            trace=Trace(losses=tuple((step, float(losses[place])) for step, losses in found.trace)),
            cost=Cost(seconds, found.steps),
        )
        best[row.observation.index] = (loss, guess)
    tries = len(rows.rows) // len(observations)
    chosen = [best[observation.index][1] for observation in observations]
    return [replace(guess, cost=Cost(seconds, found.steps * tries)) for guess in chosen]
