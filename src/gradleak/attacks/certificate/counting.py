"""How often each sentence of a guess was in the batch: whole numbers whose gradients make up what was seen.

Gradients of one sentence with all labels, each weighted as the model predicts it, cancel. So what is seen of a sentence's labels
is known only up to that weighting, and a sentence that is there twice with two labels can look like a part of one. All whole
numbers that fit are counted: a guess is proven only where the sentences (whatever their labels) are the same in all of them.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.certificate.columns import Columns
from gradleak.matching.linear_algebra import find_eigenvectors, orthonormalise, solve_least_squares
from gradleak.matching.rounding import backward_error_bound

CLEAR = 3.0  # floors: what is further away than this does not fit, what is nearer might
NOT_LARGER = 1.01  # clipping scales down; a little is left to rounding
MOST_LABELLINGS = 2000  # ways to label copies of one sentence that are tried


@dataclass(frozen=True)
class Count:
    """How often each column is in the batch, and the factor by which the update was scaled down."""

    numbers: tuple[tuple[int, ...], ...]  # by sentence, by label
    scale: float = 1.0

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, self.numbers))

    @property
    def size(self) -> int:
        return sum(self.totals)

    def shares(self) -> Float[Tensor, "columns"]:
        """The weight of every column in the update."""
        flat = [number for row in self.numbers for number in row]
        return torch.tensor(flat, dtype=torch.float64) * self.scale / self.size


class Counting:
    """Whole numbers for the columns of one guess, for a batch of a known size."""

    def __init__(self, columns: Columns, size: int, scaled: bool) -> None:
        self.columns, self.size, self.scaled = columns, size, scaled
        self.turns = [_beside(row) for row in columns.predicted]  # [labels, labels − 1] of each sentence
        # All columns by what can be seen of them
        wide: Tensor = torch.block_diag(*self.turns)  # type: ignore[no-untyped-call]
        self.wide, self.scale = wide, 1.0
        self._solve()
        if scaled:  # floors are as large as the gradient is, which is known only now
            self.scale = self._largest_scale()
            self._solve()
        ways = [way for total in range(size + 1) for way in labellings(total, columns.labels)]
        self.every = torch.tensor(ways, dtype=torch.float64)  # [ways, labels]: how often each label
        self.spreads = self._spreads()

    def counts(self, most: int = 2) -> list[Count]:
        """Ways to count that fit, with different totals, at most so many; the first of them fits best."""
        found: dict[tuple[int, ...], Count] = {}
        for scale in self._scales():
            for count in self._at(scale, most):
                if count.totals not in found or self._misfit(count) < self._misfit(found[count.totals]):
                    found[count.totals] = count
        return sorted(found.values(), key=self._misfit)[:most]

    @property
    def least(self) -> float:
        """The misfit where shares need not be whole numbers: no way to count can have much less."""
        return self.columns.misfit(self.wide @ torch.cat(self.found), self.scale)

    def _misfit(self, count: Count) -> float:
        return self.columns.misfit(count.shares(), count.scale)

    def _solve(self) -> None:
        """Finds what is seen of every sentence when all together explain most, each tensor counting in its floors."""
        weights = 1 / self.columns.floors(self.scale).square()
        self.normal = self.wide.mT @ torch.einsum("t,tij->ij", weights, self.columns.products) @ self.wide
        wanted = self.wide.mT @ (weights @ self.columns.along)
        cutoff = backward_error_bound(len(self.normal), torch.float64)
        solution = solve_least_squares(self.normal, wanted[:, None], cutoff).solution[:, 0]
        self.found = list(torch.split(solution, [turn.shape[1] for turn in self.turns]))

    def _largest_scale(self) -> float:
        """The update cannot have been scaled by more than makes one copy of each sentence, with one label, as seen."""
        single = [float(torch.linalg.vector_norm(turn, dim=1).min()) / self.size for turn in self.turns]
        sizes = [float(seen.norm()) for seen in self.found]
        return min(1.0, max(size / one for size, one in zip(sizes, single, strict=True)))

    def _spreads(self) -> list[Float[Tensor, "_ _"]]:
        """By sentence a matrix W with ‖W·(found − true)‖ at most one where the truth is within its floors.

        The sum of squares over tensors, each in its floors, is at the truth at most their number; it rises from the least
        squares solution by the quadratic form of the normal matrix, whose inverse's block says how far one sentence can be off.
        """
        values, vectors = find_eigenvectors(self.normal)
        floor = backward_error_bound(len(values), torch.float64) * float(values.max())
        inverse = (vectors / values.clamp_min(floor)) @ vectors.mT
        reach = CLEAR**2 * len(self.columns.names)
        found, start = [], 0
        for turn in self.turns:
            stop = start + turn.shape[1]
            values, vectors = find_eigenvectors(inverse[start:stop, start:stop] * reach)
            found.append(vectors.mT / values.clamp_min(1e-300).sqrt()[:, None])
            start = stop
        return found

    def _distances(self, sentence: int, scale: float) -> Float[Tensor, "ways"]:
        """How far every way to label any number of copies is from what is seen of a sentence; up to one fits."""
        seen = self.every @ self.turns[sentence] * (scale / self.size)
        found: Tensor = torch.linalg.vector_norm((seen - self.found[sentence]) @ self.spreads[sentence].mT, dim=-1)
        return found

    def _scales(self) -> list[float]:
        """Factors that the update may have been scaled down by: whatever makes the clearest sentence a whole number."""
        if not self.scaled:
            return [1.0]
        pairs = zip(self.spreads, self.found, strict=True)
        clear = [float((spread @ seen).norm()) for spread, seen in pairs]
        sentence = max(range(len(clear)), key=clear.__getitem__)
        wanted = self.every @ self.turns[sentence] / self.size
        scales = (wanted @ self.found[sentence]) / wanted.square().sum(1).clamp_min(1e-300)
        possible = [scale for scale in scales.tolist() if 0 < scale < NOT_LARGER]
        return [scale for scale in dict.fromkeys(possible) if bool((self._distances(sentence, scale) <= 1).any())]

    def _at(self, scale: float, most: int) -> Iterator[Count]:
        """Ways to count at one scale: totals that add up to the batch's size, each sentence with labels that fit."""
        totals = self.every.sum(1).long().tolist()
        options: list[dict[int, tuple[int, ...]]] = []
        for sentence in range(len(self.turns)):
            distances = self._distances(sentence, scale)
            nearest: dict[int, int] = {}
            for way in (distances <= 1).nonzero()[:, 0].tolist():
                best = nearest.get(totals[way])
                if best is None or distances[way] < distances[best]:
                    nearest[totals[way]] = way
            options.append({total: tuple(self.every[way].long().tolist()) for total, way in nearest.items()})
        for numbers in itertools.islice(_summing(options, self.size), most):
            yield Count(numbers, scale)


def labellings(total: int, labels: int) -> list[tuple[int, ...]]:
    """All ways to give so many copies of a sentence labels; where there are too many, those with one label for all."""
    if math.comb(total + labels - 1, labels - 1) > MOST_LABELLINGS:
        return [tuple(total * (label == one) for label in range(labels)) for one in range(labels)]
    bars = itertools.combinations(range(total + labels - 1), labels - 1)
    return [tuple(stop - start - 1 for start, stop in itertools.pairwise((-1, *places, total + labels - 1))) for places in bars]


def _beside(predicted: Float[Tensor, "labels"]) -> Float[Tensor, "labels seen"]:
    """Orthonormal directions beside the one in which gradients cancel; of a language model the only one."""
    if len(predicted) == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    whole = torch.cat([predicted[:, None], torch.eye(len(predicted), dtype=torch.float64)], dim=1)
    return orthonormalise(whole)[:, 1:]


def _summing(options: list[dict[int, tuple[int, ...]]], size: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """One option of each, totals adding up to the size. Dead ends are known beforehand, so that nothing is tried in vain."""
    reachable: list[set[int]] = [{0}]  # totals that the last so many can add up to
    for option in reversed(options):
        reachable.append({total + rest for total in option for rest in reachable[-1] if total + rest <= size})

    def go(place: int, left: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if place == len(options):
            yield ()
            return
        for total, numbers in options[place].items():
            if left - total in reachable[len(options) - place - 1]:
                yield from ((numbers, *rest) for rest in go(place + 1, left - total))

    return go(0, size) if size in reachable[-1] else iter(())
