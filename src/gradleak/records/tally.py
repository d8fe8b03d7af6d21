"""Scores of very many examples as sums and histograms: means and intervals stay right, single
examples are gone."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradleak.records.statistics import Interval, clopper_pearson

BINS = 200
NORMAL = 1.959964  # of 95 %


@dataclass(frozen=True)
class Tally:
    """One metric's values: how many, the sums over client batches that a mean and its interval
    need, and how they are spread."""

    n: int
    clusters: int  # client batches; the sums below run over them
    total: float
    squares: float  # of each batch's sum
    products: float  # of each batch's sum and its size
    sizes: float  # squared
    yes_or_no: bool  # every value is 0 or 1
    low: float  # of the histogram
    high: float
    bins: tuple[int, ...]

    @property
    def independent(self) -> bool:
        """Whether every example is a batch of its own."""
        return self.n == self.clusters

    def interval(self) -> Interval:
        """Clopper-Pearson's for independent yes/no outcomes, as for few examples; the normal one
        over batches otherwise."""
        if self.yes_or_no and self.independent:
            return clopper_pearson(round(self.total), self.n)
        mean = self.total / self.n
        spread = max(0.0, self.squares - 2 * mean * self.products + mean**2 * self.sizes)
        error = NORMAL * math.sqrt(spread * self.clusters / max(1, self.clusters - 1)) / self.n
        low, high = mean - error, mean + error
        inside = self.low >= 0 and self.high <= 1
        return Interval(
            mean, max(0.0, low) if inside else low, min(1.0, high) if inside else high, self.n
        )


def tally(values: Sequence[float | None], clusters: Sequence[Hashable]) -> Tally | None:
    """Over the examples that have a value; none where none has one."""
    kept = [
        (value, cluster)
        for value, cluster in zip(values, clusters, strict=True)
        if value is not None
    ]
    if not kept:
        return None
    sums: dict[Hashable, list[float]] = {}
    for value, cluster in kept:
        sums.setdefault(cluster, []).append(value)
    groups = [(math.fsum(inside), len(inside)) for inside in sums.values()]
    there = np.array([value for value, _ in kept])
    # Fractions have one range, so that histograms of them add up bin by bin.
    low, high = (
        (0.0, 1.0)
        if there.min() >= 0 and there.max() <= 1
        else (float(there.min()), float(there.max()))
    )
    bins, _ = np.histogram(there, BINS, (low, high))
    return Tally(
        n=len(kept),
        clusters=len(groups),
        total=math.fsum(there),
        squares=math.fsum(total**2 for total, _ in groups),
        products=math.fsum(total * size for total, size in groups),
        sizes=math.fsum(size**2 for _, size in groups),
        yes_or_no=bool(np.isin(there, (0.0, 1.0)).all()),
        low=low,
        high=high,
        bins=tuple(bins.tolist()),
    )


def add(one: Tally | None, other: Tally | None) -> Tally | None:
    """Both together: sums are exact; bins of other ranges are put where their middles lie."""
    if one is None or other is None:
        return one or other
    low, high = min(one.low, other.low), max(one.high, other.high)
    bins = [
        a + b for a, b in zip(_rebinned(one, low, high), _rebinned(other, low, high), strict=True)
    ]
    return Tally(
        n=one.n + other.n,
        clusters=one.clusters + other.clusters,
        total=one.total + other.total,
        squares=one.squares + other.squares,
        products=one.products + other.products,
        sizes=one.sizes + other.sizes,
        yes_or_no=one.yes_or_no and other.yes_or_no,
        low=low,
        high=high,
        bins=tuple(bins),
    )


def add_all(
    one: Mapping[str, Tally | None], other: Mapping[str, Tally | None]
) -> dict[str, Tally | None]:
    """The same for tallies by name."""
    return {name: add(one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other])}


def _rebinned(one: Tally, low: float, high: float) -> list[int]:
    if (one.low, one.high) == (low, high):
        return list(one.bins)
    middles = one.low + (np.arange(len(one.bins)) + 0.5) * (one.high - one.low) / len(one.bins)
    return [int(count) for count in np.histogram(middles, BINS, (low, high), weights=one.bins)[0]]
