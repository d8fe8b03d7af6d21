"""The search loop for pictures: numbers that render to pictures move until these' gradient fits.

At the end stand the attacks that are this loop: on pixels, and on the numbers of a generator.
"""

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.gradient_matching.slopes import RECORDED, SlopesInPieces
from gradleak.attacks.search.descent import Drops, RowAdam
from gradleak.attacks.search.hypotheses import MOST_HYPOTHESES, Source, list_labels
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction, Trace
from gradleak.core.batch import Batch, picture_of
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.prior import Generator
from gradleak.core.registry import Count, Medium, Rate, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching import Matcher, for_observations
from gradleak.matching.chunking import BESIDE, Chunks, pieces, refuse_without_room
from gradleak.matching.distances import WholeCosine

ROWS_AT_ONCE = {"cpu": 16, "cuda": 256}  # where memory allows
LOSS_EVERY = 50  # steps between entries of the loss trace
SHOW_EVERY_SECONDS = 0.5
# Of pixels around one half: IG's steps and its total variation are in numbers of standard deviation
# one.
PIXEL_SPREAD = 0.25

Numbers = Float[Tensor, "rows numbers"]
Images = Float[Tensor, "rows examples channels height width"]


@dataclass(frozen=True)
class PictureRow:
    """One observation, the labels assumed of it, and a number that names its random stream."""

    observation: Observation
    labels: tuple[int, ...]
    number: int

    def streams(self, bench: Bench) -> Streams:
        """Returns its streams: the same whoever shares the batch."""
        return bench.streams_of(self.observation).child("start", self.number)


@dataclass(frozen=True, eq=False)
class PictureRows:
    """Rows whose batches have one size."""

    target: Target
    rows: tuple[PictureRow, ...]
    labels: Int[Tensor, "rows examples"]

    @property
    def examples(self) -> int:
        return int(self.labels.shape[1])

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a picture."""
        # Asked once, since a graph cannot record a probe's way to the card.
        pixels = self.target.probe(1, 1).pixels
        assert pixels is not None
        _, channels, height, width = pixels.shape
        return int(channels), int(height), int(width)

    @property
    def observations(self) -> list[Observation]:
        return [row.observation for row in self.rows]

    def batch(self, pixels: Images, kept: slice = slice(None)) -> Batch:
        """Returns pictures of some rows as [observations, 1 candidate, examples, …]."""
        return Batch.of_pixels(pixels[:, None], self.labels[kept, None])

    def take(self, places: Int[Tensor, "some"]) -> "PictureRows":
        """Returns some of the rows."""
        rows = tuple(self.rows[place] for place in places.tolist())
        return PictureRows(self.target, rows, self.labels[places])

    def draw(self, bench: Bench, *shape: int) -> Float[Tensor, "rows *shape"]:
        """Returns standard normal numbers, each row's from its own stream."""
        generators = [row.streams(bench).generator() for row in self.rows]
        drawn = [torch.randn(shape, generator=generator) for generator in generators]
        return torch.stack(drawn).to(self.target.device, self.target.dtype)

    def find_best(self, losses: Float[Tensor, "rows"]) -> Int[Tensor, "observations"]:
        """Returns for every observation the row of the lowest loss, in the rows' order."""
        best: dict[int, int] = {}
        for place, row in enumerate(self.rows):
            index = row.observation.index
            if index not in best or losses[place] < losses[best[index]]:
                best[index] = place
        return torch.tensor(list(best.values()), device=losses.device)


def lay_out_pictures(
    observations: Sequence[Observation], labels: Source, restarts: int
) -> PictureRows:
    """Returns every observation under every hypothesis, `restarts` times each."""
    rows = []
    for observation in observations:
        assumed = [found for found in list_labels(observation, labels) if found is not None]
        if len(assumed) > MOST_HYPOTHESES:
            raise GradleakError(
                f"Enumerating gives {len(assumed)} combinations of labels, more than"
                f" {MOST_HYPOTHESES}: use labels=derived."
            )
        tries = [found for found in assumed for _ in range(restarts)]
        rows += [PictureRow(observation, found, number) for number, found in enumerate(tries)]
    target = observations[0].target
    return PictureRows(
        target, tuple(rows), torch.tensor([row.labels for row in rows], device=target.device)
    )


class Render(ABC):
    """What the numbers of a row stand for."""

    @abstractmethod
    def render(self, state: Numbers, kept: slice) -> Images:
        """Returns the pictures of some rows, differentiable in their numbers."""

    @abstractmethod
    def project(self, state: Numbers) -> Numbers:
        """Returns the nearest numbers that are allowed."""


@dataclass(frozen=True, eq=False)
class StandardisedPixels(Render):
    """The numbers are the pixels themselves, standardised, and stay between black and white."""

    rows: PictureRows

    def render(self, state: Numbers, kept: slice) -> Images:
        return state.view(len(state), self.rows.examples, *self.rows.shape) * PIXEL_SPREAD + 0.5

    def project(self, state: Numbers) -> Numbers:
        return state.clamp(-0.5 / PIXEL_SPREAD, 0.5 / PIXEL_SPREAD)


class PictureMatchingAttack(Attack):
    """Minimises a distance of gradients, as the defense leaves it, and total variation.

    Attacks that match the gradients of pictures have these fields.
    """

    medium: ClassVar[Medium] = "image"
    variation_weight: float
    labels: Source
    adaptive: bool

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset({Fact.BATCH_SIZE, *([Fact.LABELS] if self.labels == "known" else [])})

    def adapts_to(self, channel: Channel) -> bool:
        return self.adaptive

    def open_matcher(self, observations: Sequence[Observation]) -> Matcher:
        """Returns one cosine over all parameters together, as IG has it."""
        return for_observations(observations, WholeCosine(), adaptive=self.adaptive, unroll=False)

    def compute_losses(self, matcher: Matcher, batch: Batch, rows: slice) -> Float[Tensor, "rows"]:
        """Returns the loss of one candidate a row."""
        assert batch.pixels is not None
        losses = matcher.distances(batch, rows)[:, 0]
        if not self.variation_weight:
            return losses
        return losses + self.variation_weight * measure_variation(batch.pixels[:, 0])

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"]:
        matcher, device = self.open_matcher(observations), observations[0].target.device
        pixels = torch.stack([batch.pixels for batch in batches if batch.pixels is not None])
        labels = torch.stack([batch.labels for batch in batches])

        def piece(kept: slice) -> Tensor:
            batch = Batch.of_pixels(pixels[kept, None], labels[kept, None])
            return self.compute_losses(matcher, batch, kept).detach()

        # Done beside a search: what it may take does not come from the bench's memory.
        fitting = int(BESIDE / matcher.bytes(pixels.shape[1], 1))
        return Chunks(min(ROWS_AT_ONCE.get(device.type, 16), fitting)).run(piece, len(pixels))


def measure_variation(pixels: Images) -> Float[Tensor, "rows"]:
    """Returns the mean difference of neighbouring pixels, across and down, in standard deviations.

    Total variation is Rudin et al.'s (1992), as IG takes it.
    """
    down, across = pixels.diff(dim=-2).abs(), pixels.diff(dim=-1).abs()
    return (down.flatten(1).mean(1) + across.flatten(1).mean(1)) / PIXEL_SPREAD


@dataclass(frozen=True)
class BestPictures:
    """The best numbers of every row and how the search went."""

    state: Numbers
    losses: Float[Tensor, "rows"]
    trace: tuple[tuple[int, Tensor], ...]
    steps: int


class PictureSearch:
    """Moves the numbers of all rows by Adam and keeps the best of each row."""

    def __init__(self, rows: PictureRows, attack: PictureMatchingAttack, bench: Bench) -> None:
        self.rows, self.attack, self.bench = rows, attack, bench
        self.matcher = attack.open_matcher(rows.observations)
        device, each = rows.target.device, self.matcher.bytes(rows.examples, 1, slope=True)
        what = f"one step on {rows.examples} pictures"
        refuse_without_room("The search for pictures", each, bench, device, what)
        work = self.matcher.work(rows.examples, 1, slope=True)
        held = each * (RECORDED if device.type == "cuda" else 1)
        self.chunks = pieces(bench, device, held, work, ROWS_AT_ONCE.get(device.type, 16))

    def run(
        self, render: Render, start: Numbers, optimiser: RowAdam, steps: int, signed: bool
    ) -> BestPictures:
        """Takes the steps from a start; `signed` follows the signs of the slope only (IG)."""
        state = render.project(start.clone())
        moments = optimiser.begin(state)

        def compute_losses(numbers: Tensor, kept: slice) -> Tensor:
            batch = self.rows.batch(render.render(numbers, kept), kept)
            return self.attack.compute_losses(self.matcher, batch, kept)

        compute_slopes = SlopesInPieces(self.chunks, compute_losses)
        best, lowest = state.clone(), state.new_full((len(state),), torch.inf)
        trace, shown, taken = [], 0.0, 0
        for step in range(steps + 1):
            losses, slopes = compute_slopes(state)
            # The best by loss, not the last: steps along signs do not shrink by themselves.
            better = losses < lowest
            best = torch.where(better[:, None], state, best)
            lowest = torch.where(better, losses, lowest)
            if step % LOSS_EVERY == 0 or step == steps:
                trace.append((step, losses.cpu()))
            if time.monotonic() - shown > SHOW_EVERY_SECONDS:
                shown = time.monotonic()
                self.bench.progress.report(step, steps, float(lowest.mean()))
            if step == steps or self.bench.out_of_time:
                break
            moments.step(state, slopes.sign() if signed else slopes)
            state, taken = render.project(state), step + 1
        return BestPictures(best, lowest, tuple(trace), taken)


@torch.no_grad()
def choose_pictures(
    rows: PictureRows,
    render: Render,
    found: BestPictures,
    observations: Sequence[Observation],
    began: float,
) -> list[Reconstruction]:
    """Returns for every observation the pictures of the row of the lowest loss."""
    tries = len(rows.rows) // len(observations)
    cost = Cost((time.monotonic() - began) / len(observations), found.steps * tries)
    best: dict[int, Reconstruction] = {}
    for place in rows.find_best(found.losses).tolist():
        pixels = render.render(found.state[place : place + 1], slice(place, place + 1))[0]
        losses = tuple((step, float(losses[place])) for step, losses in found.trace)
        best[rows.rows[place].observation.index] = Reconstruction(
            sentences=(),
            pictures=tuple(picture_of(one) for one in pixels),
            loss=float(found.losses[place]),
            labels=rows.rows[place].labels,
            trace=Trace(losses=losses),
            cost=cost,
        )
    return [best[observation.index] for observation in observations]


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
