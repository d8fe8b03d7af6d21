"""How often each sentence of a guess was in the batch, in whole numbers.

Gradients of one sentence with all labels, each weighted as the model predicts it, cancel. So what
is seen of a sentence's labels is known only up to that weighting, and a sentence that is there
twice with two labels can look like a part of one. All whole numbers that fit are counted: a guess
is proven only where the sentences (whatever their labels) are the same in all of them.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.certificate.contributions import Contributions
from gradleak.matching.linear_algebra import find_eigenvectors, orthonormalise, solve_least_squares
from gradleak.matching.precision import backward_error_bound

CLEAR = 3.0  # floors: what is further away than this does not fit, what is nearer might
NOT_LARGER = 1.01  # clipping scales down; a little is left to rounding
MOST_COUNTS = 2  # ways to count that are looked for: with a second one nothing is proven
MOST_LABELLINGS = 2000  # ways to label copies of one sentence that are tried


@dataclass(frozen=True)
class Occurrences:
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
        """Returns the weight of every column in the update."""
        flat = [number for row in self.numbers for number in row]
        return torch.tensor(flat, dtype=torch.float64) * self.scale / self.size


class Counting:
    """Whole numbers for the columns of one guess, for a batch of a known size."""

    def __init__(self, columns: Contributions, size: int, scaled: bool) -> None:
        self.columns, self.size, self.scaled = columns, size, scaled
        # Of each sentence [labels, labels − 1]
        self.turns = [_find_visible_directions(row) for row in columns.predicted]
        # All columns by what can be seen of them
        wide: Tensor = torch.block_diag(*self.turns)  # type: ignore[no-untyped-call]
        self.wide, self.scale = wide, 1.0
        self._solve()
        if scaled:  # floors are as large as the gradient is, which is known only now
            self.scale = self._find_largest_scale()
            self._solve()
        ways = [way for total in range(size + 1) for way in list_labellings(total, columns.labels)]
        self.every = torch.tensor(ways, dtype=torch.float64)  # [ways, labels]: how often each label
        self.spreads = self._measure_spreads()

    def find_counts(self) -> list[Occurrences]:
        """Finds ways to count that fit and differ in their totals, best first, two at most."""
        found: dict[tuple[int, ...], Occurrences] = {}
        for scale in self._list_scales():
            for count in self._count_at(scale):
                best = found.get(count.totals, count)
                found[count.totals] = min(best, count, key=self._measure_misfit)
        return sorted(found.values(), key=self._measure_misfit)[:MOST_COUNTS]

    @property
    def least(self) -> float:
        """The misfit where shares need not be whole numbers: no way to count can have much less."""
        return self.columns.measure_misfit(self.wide @ torch.cat(self.found), self.scale)

    def _measure_misfit(self, count: Occurrences) -> float:
        return self.columns.measure_misfit(count.shares(), count.scale)

    def _solve(self) -> None:
        """Finds the weights of columns that explain most, each tensor counting in its floors."""
        # The normal equations: minimise Σ_tensors ‖G − Σ s g‖²/floor² in the directions that show.
        weights = 1 / self.columns.compute_floors(self.scale).square()
        products = torch.einsum("t,tij->ij", weights, self.columns.products)
        self.normal = self.wide.mT @ products @ self.wide
        wanted = self.wide.mT @ (weights @ self.columns.along)
        cutoff = backward_error_bound(len(self.normal), torch.float64)
        solution = solve_least_squares(self.normal, wanted[:, None], cutoff).solution[:, 0]
        self.found = list(torch.split(solution, [turn.shape[1] for turn in self.turns]))

    def _find_largest_scale(self) -> float:
        """Finds the largest factor by which the update can have been scaled down.

        Beyond it one copy of each sentence, with one label, would be larger than what is seen.
        """
        least = [torch.linalg.vector_norm(turn, dim=1).min() for turn in self.turns]
        pairs = zip(self.found, least, strict=True)
        return min(1.0, max(float(seen.norm()) / (float(one) / self.size) for seen, one in pairs))

    def _measure_spreads(self) -> list[Float[Tensor, "_ _"]]:
        """Returns by sentence a matrix W with ‖W·(found − true)‖ ≤ 1 at the truth.

        The sum of squares over tensors, each in its floors, is at the truth at most their number.
        It rises from the least squares solution by the quadratic form of the normal matrix, whose
        inverse's block says how far one sentence can be off.
        """
        values, vectors = find_eigenvectors(self.normal)
        floor = backward_error_bound(len(values), torch.float64) * float(values.max())
        inverse = (vectors / values.clamp_min(floor)) @ vectors.mT
        reach = CLEAR**2 * len(self.columns.names)
        found, start = [], 0
        for turn in self.turns:
            stop = start + turn.shape[1]
            values, vectors = find_eigenvectors(inverse[start:stop, start:stop] * reach)
            # W = Λ^(−1/2) Vᵀ of the block's covariance: one unit long is as far as floors allow.
            found.append(vectors.mT / values.clamp_min(1e-300).sqrt()[:, None])
            start = stop
        return found

    def _measure_distances(self, sentence: int, scale: float) -> Float[Tensor, "ways"]:
        """Measures how far each way to label copies is from what is seen; up to one fits."""
        seen = self.every @ self.turns[sentence] * (scale / self.size)
        apart = (seen - self.found[sentence]) @ self.spreads[sentence].mT
        found: Tensor = torch.linalg.vector_norm(apart, dim=-1)
        return found

    def _list_scales(self) -> list[float]:
        """Lists factors that the update may have been scaled down by.

        They are those that make the clearest sentence a whole number.
        """
        if not self.scaled:
            return [1.0]
        pairs = zip(self.spreads, self.found, strict=True)
        clear = [float((spread @ seen).norm()) for spread, seen in pairs]
        sentence = max(range(len(clear)), key=clear.__getitem__)
        wanted = self.every @ self.turns[sentence] / self.size
        # The factor by which each whole number of copies would come nearest to what is seen
        scales = (wanted @ self.found[sentence]) / wanted.square().sum(1).clamp_min(1e-300)
        possible = [scale for scale in scales.tolist() if 0 < scale < NOT_LARGER]
        nearest = {scale: self._measure_distances(sentence, scale).min() for scale in possible}
        return [scale for scale, distance in nearest.items() if distance <= 1]

    def _count_at(self, scale: float) -> Iterator[Occurrences]:
        """Yields ways to count at one scale, with totals that add up to the batch's size."""
        totals = self.every.sum(1).long().tolist()
        options: list[dict[int, tuple[int, ...]]] = []
        for sentence in range(len(self.turns)):
            distances = self._measure_distances(sentence, scale)
            nearest: dict[int, int] = {}
            for way in (distances <= 1).nonzero()[:, 0].tolist():
                best = nearest.get(totals[way])
                if best is None or distances[way] < distances[best]:
                    nearest[totals[way]] = way
            options.append(
                {total: tuple(self.every[way].long().tolist()) for total, way in nearest.items()}
            )
        for numbers in itertools.islice(_choose_totals(options, self.size), MOST_COUNTS):
            yield Occurrences(numbers, scale)


def list_labellings(total: int, labels: int) -> list[tuple[int, ...]]:
    """Lists all ways to give so many copies of a sentence labels.

    Where there are too many, all copies have one label.
    """
    if math.comb(total + labels - 1, labels - 1) > MOST_LABELLINGS:
        return [tuple(total * (label == one) for label in range(labels)) for one in range(labels)]
    # Stars and bars: a way to label copies is a choice of where the bars between labels stand.
    bars = itertools.combinations(range(total + labels - 1), labels - 1)
    return [
        tuple(
            stop - start - 1
            for start, stop in itertools.pairwise((-1, *places, total + labels - 1))
        )
        for places in bars
    ]


def _find_visible_directions(predicted: Float[Tensor, "labels"]) -> Float[Tensor, "labels seen"]:
    """Finds orthonormal directions beside the one in which gradients cancel.

    A language model has only one direction.
    """
    if len(predicted) == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    # Orthonormal columns, the first along the prediction: the others are all that shows beside it.
    whole = torch.cat([predicted[:, None], torch.eye(len(predicted), dtype=torch.float64)], dim=1)
    return orthonormalise(whole)[:, 1:]


def _choose_totals(
    options: list[dict[int, tuple[int, ...]]], size: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields one option of each sentence, with totals that add up to the size.

    Dead ends are known beforehand, so that nothing is tried in vain.
    """
    reachable: list[set[int]] = [{0}]  # totals that the last so many can add up to
    for option in reversed(options):
        reachable.append(
            {total + rest for total in option for rest in reachable[-1] if total + rest <= size}
        )

    def go(place: int, left: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if place == len(options):
            yield ()
            return
        for total, numbers in options[place].items():
            if left - total in reachable[len(options) - place - 1]:
                yield from ((numbers, *rest) for rest in go(place + 1, left - total))

    return go(0, size) if size in reachable[-1] else iter(())
