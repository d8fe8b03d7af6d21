"""Embeddings moved until their layer inputs lie in the span of what was seen: the published
rival of `energy`."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.energy.structure import find_structures
from gradleak.attacks.search.descent import RowAdam, StepDecay
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.attacks.search.search_rows import (
    Rows,
    SearchProblem,
    group_problems,
    lay_out,
    nearest_tokens,
    stack_batches,
)
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.parts import Part
from gradleak.core.registry import Count, Rate, register
from gradleak.matching.chunking import (
    FORWARD_AND_BACK,
    Chunks,
    cost_of,
    pieces,
    refuse_without_room,
)
from gradleak.matching.inputs import ModuleInputs, matrix_of, module_of, shared_linear_parts
from gradleak.matching.linear_algebra import decompose
from gradleak.matching.precision import signal_floor


class SpanDistance:
    """How far the layer inputs of candidates lie from the row spaces of the visible matrices, in
    the mean over tokens."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.target = observations[0].target
        self.parts = shared_linear_parts(observations)
        if not self.parts:
            raise GradleakError(
                "span_continuous needs the gradient of a weight matrix inside a transformer layer;"
                " none is visible."
            )
        self.inputs = ModuleInputs(self.target, self.parts)
        self.pass_cost = cost_of(self.target, self.inputs)
        self.structures = find_structures(self.target, self.parts)
        self.bases = [
            torch.stack([_basis(observation, part) for observation in observations])
            for part in self.parts
        ]
        self.shown = torch.stack([bases.any(-1).any(-1) for bases in self.bases], dim=1).to(
            self.target.dtype
        )

    def pieces(self, rows: Rows, bench: Bench) -> Chunks:
        """Returns pieces of rows of which a pass, and back, fits. The inputs of every matrix are
        compared, each with as many directions."""
        _, examples, tokens = rows.mask.shape
        directions = (
            examples * tokens * sum(bases.shape[1] + bases.shape[2] for bases in self.bases)
        )
        needed = (
            self.pass_cost.bytes(examples, tokens, FORWARD_AND_BACK)
            + 3 * self.pass_cost.element * directions
        )
        device, work = self.target.device, self.pass_cost.work(examples, tokens, 3)
        what = f"one step on this batch ({examples} texts of up to {tokens} tokens)"
        refuse_without_room("span_continuous", needed, bench, device, what)
        return pieces(bench, device, needed, work, len(rows.problems))

    def __call__(
        self, batch: Batch, rows: slice = slice(None)
    ) -> Float[Tensor, "observations candidates"]:
        inputs = self.inputs(batch)
        shares = []
        for part, structure, bases in zip(self.parts, self.structures, self.bases, strict=True):
            directions = structure.directions(inputs[module_of(part)], batch.mask)
            sizes = directions.square().sum(-1)
            inside = (directions @ bases[rows].mT[:, None]).square().sum(-1)
            live = (sizes > 0).to(sizes.dtype)
            # The mean over tokens of the squared sine between an input and the span
            shares.append(((1 - inside / sizes.clamp_min(1e-30)) * live).sum(-1) / live.sum(-1))
        weights = self.shown[rows] / self.shown[rows].sum(1, keepdim=True)
        # Only matrices that an observation shows count, each the same.
        return (torch.stack(shares, dim=-1) * weights[:, None]).sum(-1)


def _basis(observation: Observation, part: Part) -> Float[Tensor, "directions inputs"]:
    """Returns orthonormal rows that span what was seen; never more than there can be tokens, so
    that noise does not fill the space."""
    target = observation.target
    width = (
        part.shape[0]
        if target.module.get_parameter(part.parameter).shape == part.shape
        else part.shape[-1]
    )
    if part.name not in observation.update.tensors:
        return torch.zeros(width, part.shape[-1], device=target.device, dtype=target.dtype)
    matrix = matrix_of(target, part, observation.update.tensors[part.name])[0]
    found = decompose(matrix)
    count = len(found.values)
    most = sum(observation.knows.lengths) if observation.knows.lengths else count
    floor = signal_floor(matrix.shape[-1], matrix.dtype) * found.values[0]
    kept = (found.values > floor) & (torch.arange(count, device=floor.device) < most)
    scaled: Tensor = found.right * kept[:, None]
    return scaled.to(target.dtype)


@register("attack", "span_continuous")
@dataclass(frozen=True)
class SpanContinuous(Attack):
    """Moves embeddings towards the span of the visible matrices, then takes the nearest words;
    one backward pass a step."""

    cites = "after TIGER (2026)"

    steps: Count = 1000
    learning_rate: Rate = 0.03
    starts: Count = 4  # searches from different draws; the one whose words fit best counts
    norm_weight: float = 1.0  # of (mean embedding norm − mean word norm)²
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated

    @property
    def assumptions(self) -> Assumptions:
        return Assumptions("unused", self.lengths, longest=self.longest)

    @property
    def passes(self) -> int:
        return self.starts * self.steps

    @property
    def requires(self) -> frozenset[Fact]:
        return self.assumptions.requires

    def adapts_to(self, channel: Channel) -> bool:
        return channel.only_scaled

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        began = time.monotonic()
        found = defaultdict[int, list[Reconstruction]](list)
        for start in range(self.starts):
            if start and bench.out_of_time:
                break
            for group in group_problems(observations, self.assumptions, attempt=start):
                for problem, guess in zip(group, self._search(group, bench, start), strict=True):
                    found[problem.observation.index].append(guess)
        cost = Cost((time.monotonic() - began) / len(observations), self.steps * self.starts)
        best = [min(found[one.index], key=lambda guess: guess.loss or 0.0) for one in observations]
        return [Reconstruction(guess.sentences, loss=guess.loss, cost=cost) for guess in best]

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"]:
        with torch.no_grad():
            pairs = zip(observations, batches, strict=True)
            return torch.cat(
                [SpanDistance([seen])(stack_batches([batch]))[:, 0] for seen, batch in pairs]
            )

    def _search(
        self, group: Sequence[SearchProblem], bench: Bench, start: int
    ) -> list[Reconstruction]:
        rows = lay_out(group)
        distance = SpanDistance([problem.observation for problem in rows.problems])
        embeddings = _draw_start(rows, bench)
        chunks = distance.pieces(rows, bench)
        decay = StepDecay(0.89, max(1, self.steps // 20))
        state = RowAdam(self.learning_rate, decay).begin(embeddings)
        for step in range(self.steps):
            state.step(embeddings, self._slope(rows, distance, embeddings, chunks))
            embeddings = torch.where(
                rows.fixed[..., None], rows.target.embed(rows.frame), embeddings
            )
            bench.progress.report(start * self.steps + step + 1, self.steps * self.starts)
            if bench.out_of_time:
                break
        ids = nearest_tokens(rows, embeddings)
        with torch.no_grad():
            at_words = rows.target.embed(ids)[:, None]
            places = (slice(row, row + 1) for row in range(len(group)))
            losses = [float(distance(rows.batch(at_words[one], one), one)) for one in places]
        return [
            Reconstruction(rows.sentences(ids[row], row), loss=loss)
            for row, loss in enumerate(losses)
        ]

    def _slope(
        self, rows: Rows, distance: SpanDistance, embeddings: Tensor, chunks: Chunks
    ) -> Tensor:
        slopes, table = torch.zeros_like(embeddings), rows.target.vocabulary

        def piece(kept: slice) -> Tensor:
            leaf, mask = embeddings[kept].detach().requires_grad_(), rows.mask[kept]
            losses = distance(rows.batch(leaf[:, None], kept), kept)[:, 0]
            norms = leaf.square().sum(-1).add(1e-12).sqrt() * mask
            spread = (norms.sum((1, 2)) / mask.sum((1, 2)) - table.mean_norm).square()
            (slope,) = torch.autograd.grad((losses + self.norm_weight * spread).sum(), leaf)
            slopes[kept] = slope.nan_to_num_()
            return losses.detach()

        chunks.run(piece, len(embeddings))
        return slopes


def _draw_start(rows: Rows, bench: Bench) -> Float[Tensor, "rows examples tokens hidden"]:
    """Draws embeddings of the words' size for each row, from its own stream; special tokens stay in
    place."""
    drawn = torch.zeros(*rows.mask.shape, rows.target.hidden_size)
    for row, problem in enumerate(rows.problems):
        stream = bench.streams_of(problem.observation).child("span", problem.number)
        for place, length in enumerate(problem.hypothesis.lengths):
            drawn[row, place, :length] = torch.randn(
                length, drawn.shape[-1], generator=stream.child(place).generator()
            )
    norms = drawn.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    drawn = drawn / norms * rows.target.vocabulary.mean_norm
    frame = rows.target.embed(rows.frame)
    return torch.where(rows.fixed[..., None], frame, drawn.to(frame.device, frame.dtype))
