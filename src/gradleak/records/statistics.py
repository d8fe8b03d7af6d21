"""Means with honest intervals: exact for yes/no outcomes, bootstrapped over client batches
otherwise; a metric's values as a score, their interval beside the blind guess's.

Of very many examples there are sums and histograms: means and intervals stay right, single examples
are gone.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradleak.records.schema import Score

Floats = NDArray[np.float64]

CELLS_AT_ONCE = 2_000_000  # resampled clusters drawn in one go: 16 MB of indices
SAME = 1e-12  # cluster means this close are one value


@dataclass(frozen=True)
class Interval:
    """A mean over `n` values and the ends of its confidence interval."""

    mean: float
    low: float
    high: float
    n: int


def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """The exact interval of a success rate (Clopper & Pearson 1934)."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"Cannot have {successes} successes in {n} trials.")
    from scipy.special import betaincinv  # here, since most commands draw no interval

    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(betaincinv(successes, n - successes + 1, tail))
    high = 1.0 if successes == n else float(betaincinv(successes + 1, n - successes, 1 - tail))
    return Interval(successes / n, low, high, n)


def bootstrap_mean(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The percentile bootstrap of the mean; whole clusters (client batches) are redrawn, since
    their members share one attack."""
    sums, sizes = _by_cluster(_check(values), clusters)
    generator = np.random.default_rng(seed)
    rows = max(1, CELLS_AT_ONCE // len(sums))
    means = np.empty(resamples)
    for start in range(0, resamples, rows):
        part = means[start : start + rows]
        drawn = generator.integers(len(sums), size=(len(part), len(sums)))
        part[:] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(sums.sum() / sizes.sum()), float(low), float(high), int(sizes.sum()))


def interval(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, confidence: float = 0.95
) -> Interval:
    """The interval that fits the values: Clopper-Pearson for independent yes/no outcomes, the
    bootstrap otherwise."""
    checked = _check(values)
    _, sizes = _by_cluster(checked, clusters)
    if bool(np.isin(checked, (0.0, 1.0)).all()) and bool((sizes == 1).all()):
        return clopper_pearson(int(checked.sum()), len(checked), confidence)
    return _bootstrap_or_widen(
        checked, clusters, confidence, (0.0, 1.0) if _is_fraction(checked) else None
    )


def paired_difference(
    a: Sequence[float],
    b: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> Interval:
    """The mean of a - b over the same examples, with the bootstrap interval of the paired
    differences."""
    if len(a) != len(b):
        raise ValueError(f"Paired values must come in pairs, not {len(a)} and {len(b)}.")
    first, second = _check(a), _check(b)
    bounds = (-1.0, 1.0) if _is_fraction(first) and _is_fraction(second) else None
    return _bootstrap_or_widen(first - second, clusters, confidence, bounds)


def _bootstrap_or_widen(
    values: Floats,
    clusters: Sequence[Hashable] | None,
    confidence: float,
    bounds: tuple[float, float] | None,
) -> Interval:
    """Clusters that all have one mean would give a bootstrap interval of zero width, which a
    finite sample never earns."""
    sums, sizes = _by_cluster(values, clusters)
    if bounds is None or np.ptp(sums / sizes) > SAME:
        return _widen_to_t(
            bootstrap_mean(values.tolist(), clusters, confidence), len(sums), confidence, bounds
        )
    # With E = "a new cluster lies below c" (or above c), seen 0 times in n: P(E) <=
    # Clopper-Pearson's upper end, and the mean moves at most (c - lower) P(E) down or (upper - c)
    # P(E) up. At c = 0 or 1 this is Clopper-Pearson itself.
    mean, unseen = float(values.mean()), clopper_pearson(0, len(sums), confidence).high
    low, high = mean - (mean - bounds[0]) * unseen, mean + (bounds[1] - mean) * unseen
    return Interval(mean, low, high, len(values))


def _widen_to_t(
    found: Interval, clusters: int, confidence: float, bounds: tuple[float, float] | None
) -> Interval:
    """A percentile interval is too narrow in small samples: stretched to a t interval's width
    (Hesterberg 2015, section 4.3)."""
    if clusters < 2:
        return found
    from scipy.special import stdtrit

    # Ten thousand degrees of freedom stand for the normal law, by which a bootstrap interval goes.
    few, many = (
        float(stdtrit(freedom, 0.5 + confidence / 2)) for freedom in (clusters - 1, 10_000)
    )
    factor = math.sqrt(clusters / (clusters - 1)) * few / many
    least, most = bounds or (-math.inf, math.inf)
    return Interval(
        found.mean,
        max(found.mean - (found.mean - found.low) * factor, least),
        min(found.mean + (found.high - found.mean) * factor, most),
        found.n,
    )


def _by_cluster(values: Floats, clusters: Sequence[Hashable] | None) -> tuple[Floats, Floats]:
    """The sum and the number of the values of each cluster."""
    if clusters is None:
        return values, np.ones_like(values)
    if len(clusters) != len(values):
        raise ValueError(
            f"Every value needs its cluster: {len(values)} values, {len(clusters)} clusters."
        )
    places = {cluster: place for place, cluster in enumerate(dict.fromkeys(clusters))}
    index = np.array([places[cluster] for cluster in clusters])
    return np.bincount(index, weights=values).astype(np.float64), np.bincount(index).astype(
        np.float64
    )


def _check(values: Sequence[float]) -> Floats:
    checked = np.asarray(values, dtype=np.float64)
    if checked.size == 0:
        raise ValueError("An interval needs at least one value.")
    if not np.isfinite(checked).all():
        raise ValueError("An interval needs finite values; leave out examples that have none.")
    return checked


def _is_fraction(values: Floats) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


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

    def interval(self) -> Interval:
        """Clopper-Pearson's for independent yes/no outcomes, as for few examples; the normal one
        over batches otherwise."""
        if self.yes_or_no and self.n == self.clusters:  # every example is a batch of its own
            return clopper_pearson(round(self.total), self.n)
        mean = self.total / self.n
        spread = max(0.0, self.squares - 2 * mean * self.products + mean**2 * self.sizes)
        error = NORMAL * math.sqrt(spread * self.clusters / max(1, self.clusters - 1)) / self.n
        least, most = (0.0, 1.0) if self.low >= 0 and self.high <= 1 else (-math.inf, math.inf)
        return Interval(mean, max(least, mean - error), min(most, mean + error), self.n)


def tally(values: Sequence[float | None], clusters: Sequence[Hashable]) -> Tally | None:
    """Over the examples that have a value; none where none has one."""
    sums: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        if value is not None:
            sums.setdefault(cluster, []).append(value)
    there = np.array([value for value in values if value is not None])
    if not sums:
        return None
    groups = [(math.fsum(inside), len(inside)) for inside in sums.values()]
    # Fractions have one range, so that histograms of them add up bin by bin.
    low, high = (0.0, 1.0) if _is_fraction(there) else (float(there.min()), float(there.max()))
    bins, _ = np.histogram(there, BINS, (low, high))
    return Tally(
        n=len(there),
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
    bins = zip(_move_bins(one, low, high), _move_bins(other, low, high), strict=True)
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
        bins=tuple(a + b for a, b in bins),
    )


def add_all(
    one: Mapping[str, Tally | None], other: Mapping[str, Tally | None]
) -> dict[str, Tally | None]:
    """The same for tallies by name."""
    return {name: add(one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other])}


def _move_bins(one: Tally, low: float, high: float) -> list[int]:
    if (one.low, one.high) == (low, high):
        return list(one.bins)
    middles = one.low + (np.arange(len(one.bins)) + 0.5) * (one.high - one.low) / len(one.bins)
    return [int(count) for count in np.histogram(middles, BINS, (low, high), weights=one.bins)[0]]


# One value an example; none where the metric does not apply or is not known
Column = Sequence[float | None]


def beside_blind(
    ours: Column,
    blind: Column,
    clusters: Sequence[Hashable],
    unit: str,
    direction: str,
    n: int | None = None,
    blind_guesses: int = 1,
) -> Score:
    """Over the examples that have a value. What a blind guess gets is left open where that of
    none of them is known."""
    rows = zip(ours, clusters, blind, strict=True)
    kept = [(value, cluster, theirs) for value, cluster, theirs in rows if value is not None]
    known = [(theirs, cluster) for _, cluster, theirs in kept if theirs is not None]
    found, chance = (
        interval([value for value, _ in pairs], [cluster for _, cluster in pairs])
        if pairs
        else None
        for pairs in ([(value, cluster) for value, cluster, _ in kept], known)
    )
    return score_of(found, chance, unit, direction, n, blind_guesses)


def score_of(
    found: Interval | None,
    chance: Interval | None,
    unit: str,
    direction: str,
    n: int | None = None,
    blind_guesses: int = 1,
) -> Score:
    """Puts an interval and that of blind guesses into a score; none stands for no value."""
    if found is None:
        return Score(None, None, None, None, None, None, unit, direction, 0)
    mean, low, high = (
        (None, None, None) if chance is None else (chance.mean, chance.low, chance.high)
    )
    return Score(
        *(found.mean, found.low, found.high, mean, low, high, unit, direction),
        found.n if n is None else n,
        blind_guesses,
    )


def gain_of(score: Score) -> float:
    """How much more leaks than a blind guess gives away, whichever direction that is."""
    more = (score.mean or 0.0) - (score.blind or 0.0)
    return more if score.direction == "higher" else -more


def measure_gain(
    ours: Column, theirs: Column, clusters: Sequence[Hashable] | None, direction: str
) -> Interval | None:
    """How much more leaks in the first column than in the second, example by example; none where
    no example has a value in both."""
    rows = zip(ours, theirs, range(len(ours)) if clusters is None else clusters, strict=True)
    pairs = [(one, other, place) for one, other, place in rows if None not in (one, other)]
    if not pairs:
        return None
    first, second, places = zip(*pairs, strict=True)
    more, less = (first, second) if direction == "higher" else (second, first)
    return paired_difference(more, less, None if clusters is None else places)
