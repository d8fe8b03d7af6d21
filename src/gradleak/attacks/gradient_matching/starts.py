"""Where a search begins."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.search.descent import RowAdam, WarmUp
from gradleak.attacks.search.search_rows import Rows, SearchProblem, score_in_passes
from gradleak.core.attack import Bench
from gradleak.core.streams import Streams
from gradleak.matching import Matcher
from gradleak.matching.chunking import ROOM

# Tries drawn at once: a multiple of what the generator fills together, so that blocks are as one
# long draw.
BLOCK = 16
# Texts with free labels searched together: a step of so many fills a GPU, and its recorded pieces
# stay within what is planned for them.
MOST_FREE = 512
# Tensors of all numbers held at once: now, best and special ones, slopes, two moments, and what a
# step makes of them.
TENSORS_HELD = 10

Numbers = Float[Tensor, "rows examples tokens width"]


class Start(ABC):
    """Gives the first embeddings of every row, each from the stream of its own observation."""

    @abstractmethod
    def draw(self, rows: Rows, bench: Bench, matcher: Matcher) -> Numbers:
        """Returns the first embeddings, padding included."""


@dataclass(frozen=True)
class TwoStep(Start):
    """The best of many Gaussian draws, then the best of as many orders of it (LAMP, section 5).

    The result is scaled to the words' size.
    """

    tries: int = 500

    def draw(self, rows: Rows, bench: Bench, matcher: Matcher) -> Numbers:
        streams = [name_stream(rows, bench, row) for row in range(len(rows.problems))]
        draws = [Draws(rows, row, stream) for row, stream in enumerate(streams)]

        def order_one(row: int, some: slice) -> Tensor:
            return self._draw_orders(rows, row, streams[row], drawn[row], some)

        drawn = choose_best(
            rows, bench, matcher, lambda row, some: draws[row].take(some), self.tries
        )
        ordered = choose_best(rows, bench, matcher, order_one, self.tries)
        norms = ordered.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        scaled = ordered / norms * rows.target.vocabulary.mean_norm
        return torch.where(rows.fixed[..., None], rows.target.embed(rows.frame), scaled)

    def _draw_orders(
        self, rows: Rows, row: int, stream: Streams, best: Tensor, some: slice
    ) -> Float[Tensor, "some _ _ hidden"]:
        ordered = best.expand(some.stop - some.start, *best.shape).clone()
        for place, fixed in enumerate(rows.fixed[row].cpu()):
            free = (~fixed).nonzero()[:, 0]
            generator = stream.child("orders", place).generator()
            keys = torch.rand(self.tries, len(free), generator=generator)
            keys[0] = torch.arange(len(free))  # the first order is the one it has
            chosen = free[keys[some].argsort(1)].to(best.device)
            ordered[:, place, free.to(best.device)] = best[place][chosen]
        return ordered


class Draws:
    """Gaussian embeddings of one row's sentences, the same however many are asked for at once."""

    def __init__(self, rows: Rows, row: int, stream: Streams) -> None:
        self.rows, self.row, self.stream = rows, row, stream
        self.next = 0  # the try that follows those drawn and given away
        # What is drawn and not given away:
        self.left = torch.zeros(0, *rows.mask.shape[1:], rows.target.hidden_size)
        self.generators = self._begin()

    def take(self, some: slice) -> Float[Tensor, "some examples tokens hidden"]:
        """Returns the tries of a slice; slices that follow one another draw nothing twice."""
        if some.start != self.next:
            self.next, self.left, self.generators = 0, self.left[:0], self._begin()
            if some.start:
                self.take(slice(0, some.start))
        count, blocks = some.stop - some.start, [self.left]
        while sum(map(len, blocks)) < count:
            blocks.append(self._draw_block())
        drawn = torch.cat(blocks)
        self.left = drawn[count:].clone()
        self.next = some.stop
        return drawn[:count].to(self.rows.target.device, self.rows.target.dtype)

    def _begin(self) -> list[torch.Generator]:
        count = len(self.rows.problems[self.row].hypothesis.lengths)
        return [self.stream.child("draws", place).generator() for place in range(count)]

    def _draw_block(self) -> Float[Tensor, "block examples tokens hidden"]:
        drawn = torch.zeros(BLOCK, *self.rows.mask.shape[1:], self.rows.target.hidden_size)
        for place, length in enumerate(self.rows.problems[self.row].hypothesis.lengths):
            size = (BLOCK, length, drawn.shape[-1])
            drawn[:, place, :length] = torch.randn(size, generator=self.generators[place])
        return drawn


def choose_best(
    rows: Rows, bench: Bench, matcher: Matcher, draw: Callable[[int, slice], Tensor], count: int
) -> Numbers:
    """Returns for every row the candidate of the smallest distance, special tokens in place.

    Candidates are made as they are tried. It is the first where time ends before any was tried.
    """
    frame = rows.target.embed(rows.frame)
    best = torch.stack([draw(row, slice(0, 1))[0] for row in range(len(rows.problems))])
    lowest = torch.full((len(best),), torch.inf, device=best.device, dtype=best.dtype)

    def piece(kept: slice, some: slice) -> Tensor:
        made = torch.stack([draw(row, some) for row in range(kept.start, kept.stop)])
        made = torch.where(rows.fixed[kept, None, :, :, None], frame[kept, None], made)
        distances = matcher.distances(rows.batch(made, kept), kept).detach()
        nearest, place = distances.min(1)
        better = nearest < lowest[kept]
        chosen = made[torch.arange(len(made), device=made.device), place]
        best[kept] = torch.where(better[:, None, None, None], chosen, best[kept])
        lowest[kept] = torch.where(better, nearest, lowest[kept])
        return distances

    score_in_passes(bench, rows, matcher, piece, count)
    return torch.where(rows.fixed[..., None], frame, best)


def name_stream(rows: Rows, bench: Bench, row: int) -> Streams:
    """Returns the stream of a row's start: the same whoever shares the pass."""
    problem = rows.problems[row]
    return bench.streams_of(problem.observation).child("start", problem.number)


@dataclass(frozen=True)
class OneGaussian(Start):
    """One draw from the normal distribution: a standard one, or a small one that is cut off.

    The standard one is that of DLG, and of TAG as in LAMP's released code. Where labels are free,
    their logits are drawn after the embeddings of a place.
    """

    std: float = 1.0
    largest: float | None = None  # larger numbers are cut off there

    def draw(self, rows: Rows, bench: Bench, matcher: Matcher) -> Numbers:
        drawn = torch.zeros(*rows.mask.shape, rows.width)
        for row, problem in enumerate(rows.problems):
            stream = name_stream(rows, bench, row)
            # Drawn at the problem's own size: numbers do not depend on who shares the pass.
            for place, length in enumerate(problem.hypothesis.lengths):
                generator = stream.child(place).generator()
                numbers = torch.randn(length, drawn.shape[-1], generator=generator)
                drawn[row, place, :length] = numbers
        drawn *= self.std
        if self.largest is not None:
            drawn.clamp_(-self.largest, self.largest)
        return drawn.to(rows.target.device, rows.target.dtype)


@dataclass(frozen=True)
class FreeLabels:
    """How a language model's labels begin and move as numbers of their own.

    A text's words are then read off what it is said to predict. A label tied to the embedding of
    its place (`search_rows.soften_tokens`) has next to no slope once it is near a word, and among
    tens of thousands of words a search ends at the first it meets. Learning to Invert's baseline
    (TAG, after its released code) gives every place a logit for each word instead and moves these
    beside the embeddings; the labels are their softmax. Predictions show through most of the
    gradient, so that labels are found soon, whatever the embeddings do.
    """

    start: Start
    optimiser: RowAdam

    @staticmethod
    def as_released(steps: int, learning_rate: float) -> "FreeLabels":
        """Returns the released numbers.

        The rate rises over a twentieth of the steps, then falls to zero; slopes are clipped to one.
        """
        return FreeLabels(
            OneGaussian(std=0.1, largest=0.1), RowAdam(learning_rate, WarmUp(steps), clip_norm=1.0)
        )

    def plan_rows(self, problems: Sequence[SearchProblem], bench: Bench) -> int:
        """Returns how many problems may be searched together.

        A logit for every word of every place is much where words are many.
        """
        target = problems[0].observation.target
        lengths = [problem.hypothesis.lengths for problem in problems]
        places = max(len(one) * max(one) for one in lengths)
        numbers = places * (target.hidden_size + target.classes)
        bytes_a_row = TENSORS_HELD * numbers * target.dtype.itemsize
        return max(1, min(MOST_FREE, int(ROOM * bench.memory_left(target.device) / bytes_a_row)))
