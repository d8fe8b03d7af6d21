"""Numbers as people read them: in percent, intervals in brackets, a dash for what is missing."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands load this before they know that they need a record
    from gradleak.records.schema import Score
    from gradleak.records.statistics import Interval

MISSING = "-"


def write_number(value: float | None, unit: str) -> str:
    """Writes one value; fractions as percentages without the sign."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{100 * value:z.1f}" if unit == "fraction" else f"{value:z.3g}"  # z: nothing reads -0.0


def write_interval(score: "Score") -> str:
    """Writes a score with its interval: `45.2 [30.1, 60.3]`."""
    mean = write_number(score.mean, score.unit)
    if mean == MISSING or score.low is None or score.high is None:
        return mean
    return f"{mean} [{write_number(score.low, score.unit)}, {write_number(score.high, score.unit)}]"


def write_blind(score: "Score") -> str:
    """Writes what the blind guess gets; of several the best counts, and their number is said."""
    several = f" (best of {score.blind_guesses})" if score.blind_guesses > 1 else ""
    return write_number(score.blind, score.unit) + several


def write_gain(score: "Score") -> str:
    """Writes how much more leaks than the blind attack gets, with its sign."""
    if score.mean is None or score.blind is None:
        return MISSING
    more = score.mean - score.blind if score.direction == "higher" else score.blind - score.mean
    text = write_number(more, score.unit)
    return text if text == MISSING or float(text) <= 0 else f"+{text}"


def write_difference(found: "Interval", unit: str) -> str:
    """Writes `+4.1 [-3.2, 11.5]`."""
    mean, low, high = (write_number(value, unit) for value in (found.mean, found.low, found.high))
    return f"{'+' if found.mean > 0 else ''}{mean} [{low}, {high}]"


def write_count(count: int, one: str, many: str) -> str:
    """Writes `1 batch` or `3 batches`."""
    return f"{count} {one if count == 1 else many}"


def write_duration(seconds: float) -> str:
    """Writes seconds as `0.4 s`, `12 s`, `3 min 5 s` or `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
