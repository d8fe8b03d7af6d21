"""Where a search begins."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.passes import rows_in_passes
from gradleak.attacks.gradient_matching.problems import Rows
from gradleak.core.attack import Bench
from gradleak.core.streams import Streams
from gradleak.matching import Matcher


class Start(ABC):
    """Gives the first embeddings of every row, each from the stream of its own observation."""

    @abstractmethod
    def embeddings(self, rows: Rows, bench: Bench, matcher: Matcher) -> Float[Tensor, "rows examples tokens hidden"]:
        """The first embeddings, padding included."""


@dataclass(frozen=True)
class TwoStep(Start):
    """The best of many Gaussian draws, then the best of as many orders of it, scaled to the words' size (LAMP, section 5)."""

    tries: int = 500

    def embeddings(self, rows: Rows, bench: Bench, matcher: Matcher) -> Float[Tensor, "rows examples tokens hidden"]:
        frame = rows.target.embed(rows.frame)
        drawn = best_of(rows, matcher, lambda row: self._draws(rows, bench, row), self.tries)
        drawn = torch.where(rows.fixed[..., None], frame, drawn)
        ordered = best_of(rows, matcher, lambda row: self._orders(rows, bench, row, drawn[row]), self.tries)
        norms = ordered.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return torch.where(rows.fixed[..., None], frame, ordered / norms * rows.target.vocabulary.mean_norm)

    def _draws(self, rows: Rows, bench: Bench, row: int) -> Float[Tensor, "tries examples tokens hidden"]:
        drawn = torch.zeros(self.tries, *rows.mask.shape[1:], rows.target.hidden_size)
        stream = _stream(rows, bench, row)
        for place, length in enumerate(rows.problems[row].hypothesis.lengths):
            size = (self.tries, length, drawn.shape[-1])
            drawn[:, place, :length] = torch.randn(size, generator=stream.child("draws", place).generator())
        return drawn.to(rows.target.device, rows.target.dtype)

    def _orders(self, rows: Rows, bench: Bench, row: int, best: Tensor) -> Float[Tensor, "tries examples tokens hidden"]:
        stream = _stream(rows, bench, row)
        ordered = best.expand(self.tries, *best.shape).clone()
        for place, fixed in enumerate(rows.fixed[row].cpu()):
            free = (~fixed).nonzero()[:, 0]
            keys = torch.rand(self.tries, len(free), generator=stream.child("orders", place).generator())
            keys[0] = torch.arange(len(free))  # the first order is the one it has
            ordered[:, place, free.to(best.device)] = best[place][free[keys.argsort(1)].to(best.device)]
        return ordered


def best_of(
    rows: Rows, matcher: Matcher, candidates: Callable[[int], Tensor], count: int
) -> Float[Tensor, "rows examples tokens hidden"]:
    """For every row the candidate of the smallest distance; candidates are made a few rows at a time, special tokens in place."""
    frame = rows.target.embed(rows.frame)

    def piece(kept: slice) -> Tensor:
        made = torch.stack([candidates(row) for row in range(kept.start, kept.stop)])
        made = torch.where(rows.fixed[kept, None, :, :, None], frame[kept, None], made)
        best = matcher.distances(rows.batch(made, kept), kept).argmin(1)
        return made[torch.arange(len(best), device=best.device), best]

    return rows_in_passes(rows, count).run(piece, len(rows.problems))


def _stream(rows: Rows, bench: Bench, row: int) -> Streams:
    problem = rows.problems[row]
    return bench.streams_of(problem.observation).child("start", problem.number)


@dataclass(frozen=True)
class OneGaussian(Start):
    """One draw from the standard normal distribution, unscaled (DLG, TAG as in LAMP's released code)."""

    def embeddings(self, rows: Rows, bench: Bench, matcher: Matcher) -> Float[Tensor, "rows examples tokens hidden"]:
        drawn = torch.zeros(*rows.mask.shape, rows.target.hidden_size)
        for row, problem in enumerate(rows.problems):
            stream = _stream(rows, bench, row)
            # Drawn at the problem's own size: the numbers do not depend on who shares the pass.
            for place, length in enumerate(problem.hypothesis.lengths):
                drawn[row, place, :length] = torch.randn(length, drawn.shape[-1], generator=stream.child(place).generator())
        return drawn.to(rows.target.device, rows.target.dtype)
