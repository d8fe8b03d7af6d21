"""A metric's values as a score: their interval beside the blind guess's."""

from collections.abc import Hashable, Sequence

from gradleak.records.schema import Score
from gradleak.records.statistics import Interval, interval, paired_difference

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
    kept = [
        (value, cluster, theirs)
        for value, cluster, theirs in zip(ours, clusters, blind, strict=True)
        if value is not None
    ]
    if not kept:
        return Score(None, None, None, None, None, None, unit, direction, 0)
    found = interval([value for value, _, _ in kept], [cluster for _, cluster, _ in kept])
    known = [(theirs, cluster) for _, cluster, theirs in kept if theirs is not None]
    chance = (
        interval([theirs for theirs, _ in known], [cluster for _, cluster in known])
        if known
        else None
    )
    mean, low, high = (
        (None, None, None) if chance is None else (chance.mean, chance.low, chance.high)
    )
    return Score(
        found.mean,
        found.low,
        found.high,
        mean,
        low,
        high,
        unit,
        direction,
        len(kept) if n is None else n,
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
    pairs = [
        (first, second, place)
        for place, (first, second) in enumerate(zip(ours, theirs, strict=True))
        if first is not None and second is not None
    ]
    if not pairs:
        return None
    more, less, places = zip(*pairs, strict=True)
    if direction != "higher":
        more, less = less, more
    return paired_difference(
        more, less, None if clusters is None else [clusters[place] for place in places]
    )
