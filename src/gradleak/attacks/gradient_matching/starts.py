"""Where a search begins."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.search.passes import scored_in_passes
from gradleak.attacks.search.rows import Rows
from gradleak.core.attack import Bench
from gradleak.core.streams import Streams
from gradleak.matching import Matcher

BLOCK = 16  # tries drawn at once: a multiple of what the generator fills together, so that blocks are as one long draw


class Start(ABC):
    """Gives the first embeddings of every row, each from the stream of its own observation."""

    @abstractmethod
    def embeddings(self, rows: Rows, bench: Bench, matcher: Matcher) -> Float[Tensor, "rows examples tokens hidden"]:
        """The first embeddings, padding included."""

    @property
    def most_passes(self) -> int:
        """How often candidates are scored for them."""
        return 0


@dataclass(frozen=True)
class TwoStep(Start):
    """The best of many Gaussian draws, then the best of as many orders of it, scaled to the words' size (LAMP, section 5)."""

    tries: int = 500

    @property
    def most_passes(self) -> int:
        return 2

    def embeddings(self, rows: Rows, bench: Bench, matcher: Matcher) -> Float[Tensor, "rows examples tokens hidden"]:
        frame = rows.target.embed(rows.frame)
        draws = [Draws(rows, row, _stream(rows, bench, row)) for row in range(len(rows.problems))]
        drawn = best_of(rows, bench, matcher, lambda row, some: draws[row].take(some), self.tries)
        drawn = torch.where(rows.fixed[..., None], frame, drawn)
        ordered = best_of(rows, bench, matcher, lambda row, some: self._orders(rows, bench, row, drawn[row], some), self.tries)
        norms = ordered.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return torch.where(rows.fixed[..., None], frame, ordered / norms * rows.target.vocabulary.mean_norm)

    def _orders(self, rows: Rows, bench: Bench, row: int, best: Tensor, some: slice) -> Float[Tensor, "some _ _ hidden"]:
        stream = _stream(rows, bench, row)
        ordered = best.expand(some.stop - some.start, *best.shape).clone()
        for place, fixed in enumerate(rows.fixed[row].cpu()):
            free = (~fixed).nonzero()[:, 0]
            keys = torch.rand(self.tries, len(free), generator=stream.child("orders", place).generator())
            keys[0] = torch.arange(len(free))  # the first order is the one it has
            ordered[:, place, free.to(best.device)] = best[place][free[keys[some].argsort(1)].to(best.device)]
        return ordered


class Draws:
    """Gaussian embeddings of one row's sentences, some tries at a time; the same however many are asked for at once."""

    def __init__(self, rows: Rows, row: int, stream: Streams) -> None:
        self.rows, self.row, self.stream = rows, row, stream
        self.next = 0  # the try that follows those drawn and given away
        self.left = torch.zeros(0, *rows.mask.shape[1:], rows.target.hidden_size)  # drawn and not given away
        self.generators = self._from_the_first()

    def take(self, some: slice) -> Float[Tensor, "some examples tokens hidden"]:
        """The tries of a slice; slices that follow one another draw nothing twice."""
        if some.start != self.next:
            self.next, self.left, self.generators = 0, self.left[:0], self._from_the_first()
            if some.start:
                self.take(slice(0, some.start))
        count, blocks = some.stop - some.start, [self.left]
        while sum(map(len, blocks)) < count:
            blocks.append(self._block())
        drawn = torch.cat(blocks)
        self.left = drawn[count:].clone()
        self.next = some.stop
        return drawn[:count].to(self.rows.target.device, self.rows.target.dtype)

    def _from_the_first(self) -> list[torch.Generator]:
        count = len(self.rows.problems[self.row].hypothesis.lengths)
        return [self.stream.child("draws", place).generator() for place in range(count)]

    def _block(self) -> Float[Tensor, "block examples tokens hidden"]:
        drawn = torch.zeros(BLOCK, *self.rows.mask.shape[1:], self.rows.target.hidden_size)
        for place, length in enumerate(self.rows.problems[self.row].hypothesis.lengths):
            size = (BLOCK, length, drawn.shape[-1])
            drawn[:, place, :length] = torch.randn(size, generator=self.generators[place])
        return drawn


def best_of(
    rows: Rows, bench: Bench, matcher: Matcher, candidates: Callable[[int, slice], Tensor], count: int
) -> Float[Tensor, "rows examples tokens hidden"]:
    """For every row the candidate of the smallest distance, the first where time ends before any was tried.

    Candidates are made as they are tried, special tokens in place.
    """
    frame = rows.target.embed(rows.frame)
    best = torch.stack([candidates(row, slice(0, 1))[0] for row in range(len(rows.problems))])
    lowest = torch.full((len(best),), torch.inf, device=best.device, dtype=best.dtype)

    def piece(kept: slice, some: slice) -> Tensor:
        made = torch.stack([candidates(row, some) for row in range(kept.start, kept.stop)])
        made = torch.where(rows.fixed[kept, None, :, :, None], frame[kept, None], made)
        distances = matcher.distances(rows.batch(made, kept), kept).detach()
        nearest, place = distances.min(1)
        better = nearest < lowest[kept]
        chosen = made[torch.arange(len(made), device=made.device), place]
        best[kept] = torch.where(better[:, None, None, None], chosen, best[kept])
        lowest[kept] = torch.where(better, nearest, lowest[kept])
        return distances

    scored_in_passes(bench, rows, matcher, piece, count)
    return torch.where(rows.fixed[..., None], frame, best)


def _stream(rows: Rows, bench: Bench, row: int) -> Streams:
    problem = rows.problems[row]
    return bench.streams_of(problem.observation).child("start", problem.number)


@dataclass(frozen=True)
class OneGaussian(Start):
    """One draw from the normal distribution: the standard one (DLG, TAG as in LAMP's released code), or a small one, cut off.

    Where labels are free, their logits are drawn after the embeddings of a place.
    """

    std: float = 1.0
    largest: float | None = None  # larger numbers are cut off there

    def embeddings(self, rows: Rows, bench: Bench, matcher: Matcher) -> Float[Tensor, "rows examples tokens width"]:
        drawn = torch.zeros(*rows.mask.shape, rows.width)
        for row, problem in enumerate(rows.problems):
            stream = _stream(rows, bench, row)
            # Drawn at the problem's own size: the numbers do not depend on who shares the pass.
            for place, length in enumerate(problem.hypothesis.lengths):
                drawn[row, place, :length] = torch.randn(length, drawn.shape[-1], generator=stream.child(place).generator())
        drawn *= self.std
        if self.largest is not None:
            drawn.clamp_(-self.largest, self.largest)
        return drawn.to(rows.target.device, rows.target.dtype)
