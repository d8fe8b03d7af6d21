"""Means with honest intervals: exact for yes/no outcomes, bootstrapped over client batches
otherwise."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    sums, sizes = _by_cluster(_checked(values), clusters)
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
    checked = _checked(values)
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
    first, second = _checked(a), _checked(b)
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
        return _expanded(
            bootstrap_mean(values.tolist(), clusters, confidence), len(sums), confidence, bounds
        )
    # With E = "a new cluster lies below c" (or above c), seen 0 times in n: P(E) <=
    # Clopper-Pearson's upper end, and the mean moves at most (c - lower) P(E) down or (upper - c)
    # P(E) up. At c = 0 or 1 this is Clopper-Pearson itself.
    mean, unseen = float(values.mean()), clopper_pearson(0, len(sums), confidence).high
    low, high = mean - (mean - bounds[0]) * unseen, mean + (bounds[1] - mean) * unseen
    return Interval(mean, low, high, len(values))


def _expanded(
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
    low, high = (
        found.mean - (found.mean - found.low) * factor,
        found.mean + (found.high - found.mean) * factor,
    )
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return Interval(found.mean, low, high, found.n)


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


def _checked(values: Sequence[float]) -> Floats:
    checked = np.asarray(values, dtype=np.float64)
    if checked.size == 0:
        raise ValueError("An interval needs at least one value.")
    if not np.isfinite(checked).all():
        raise ValueError("An interval needs finite values; leave out examples that have none.")
    return checked


def _is_fraction(values: Floats) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())
