"""What tuning searches: ranges of an attack's numbers, and the combinations drawn from them."""

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradleak.audit.spec import read
from gradleak.core.attack import Attack
from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.core.specs import list_fields, to_dict
from gradleak.core.streams import Streams

DECADE = 10.0
DIGITS = 3  # of drawn values, so that the winning line can be read and pasted
FORM = "--range learning_rate=0.001:0.5:log"
_RANGE = re.compile(r"\s*(\w+)\s*=([^:]+):([^:]+?)(?::\s*(log|linear))?\s*")
_WRITTEN = re.compile(r"[:,]\s*(\w+)\s*=")


@dataclass(frozen=True)
class Range:
    """Where a field's values are drawn from, evenly or evenly in the logarithm."""

    field: str
    low: float
    high: float
    log: bool

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise GradleakError(
                f"The range of {self.field} must go from a number to a larger one, not from"
                f" {self.low:g} to {self.high:g}; to hold it at one value, use --set"
                f" {self.field}=…."
            )
        if self.log and self.low <= 0:
            raise GradleakError(
                f"The range of {self.field} begins at {self.low:g}, where there is no logarithm:"
                " use :linear."
            )

    @staticmethod
    def between(field: str, low: float, high: float) -> "Range":
        """Logarithmic where it spans more than a decade."""
        return Range(field, low, high, log=0 < low * DECADE < high)

    def draw(self, streams: Streams) -> float:
        """A value, rounded, inside the range."""
        share = torch.rand((), dtype=torch.float64, generator=streams.generator()).item()
        if self.log:
            value = math.exp(
                math.log(self.low) + share * (math.log(self.high) - math.log(self.low))
            )
        else:
            value = self.low + share * (self.high - self.low)
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


# LAMP, supplement D: its λ is the learning rate, γ the decay, α_lm the prior's weight, α_reg the
# norm's and α_tag that of L1. Fields an attack does not have are left out: our tag and dlg have no
# decay, which is what LAMP's authors chose for them.
LEARNING_RATE = Range.between("learning_rate", 0.001, 0.5)
DECAY = Range.between("decay", 0.8, 1.0)
L1_WEIGHT = Range.between("l1_weight", 1e-5, 1e2)
DEFAULT_RANGES: Mapping[str, tuple[Range, ...]] = {
    "lamp_cos": (
        Range.between("prior_weight", 0.05, 0.2),
        Range.between("norm_weight", 0.01, 1.0),
        LEARNING_RATE,
        DECAY,
    ),
    # Relative to the gradient's size; the paper searches 30 to 240 and 10 to 100 on BERT-base (with
    # relative=false)
    "lamp_l2l1": (
        Range.between("prior_weight", 0.01, 0.5),
        Range.between("norm_weight", 0.01, 1.0),
        LEARNING_RATE,
        DECAY,
        L1_WEIGHT,
    ),
    "tag": (LEARNING_RATE, DECAY, L1_WEIGHT),
    "dlg": (LEARNING_RATE, DECAY),
}


def read_range(written: str) -> Range:
    """`learning_rate=0.001:0.5:log`; without the last part the scale follows from the span."""
    found = _RANGE.fullmatch(written)
    try:
        field, low, high, scale = found.groups() if found else ("", "", "", "")
        between = Range.between(field, float(low), float(high))
    except ValueError as error:
        raise GradleakError(
            f"Cannot read --range {written!r}: write field=low:high, with :log or not, as in"
            f" {FORM}."
        ) from error
    return dataclasses.replace(between, log=scale == "log") if scale else between


def written_fields(line: str) -> frozenset[str]:
    """Names of the fields a one-line spec gives a value to."""
    return frozenset(_WRITTEN.findall(line))


def ranges_for(attack: Attack, held: frozenset[str], given: Sequence[Range]) -> tuple[Range, ...]:
    """The attack's default ranges without fields that are held, then those given, which replace
    and add."""
    for wanted in given:
        _refuse_unknown(attack, wanted.field)
    numbers = _number_types(attack)
    usual = [
        one
        for one in DEFAULT_RANGES.get(attack.name, ())
        if one.field in numbers and one.field not in held
    ]
    chosen = {one.field: one for one in [*usual, *given]}
    if not chosen:
        raise GradleakError(
            f"There is nothing to tune in {attack.name}: add a range, such as {FORM}."
        )
    return tuple(chosen.values())


def combinations(
    attack: Attack, ranges: Sequence[Range], count: int, streams: Streams
) -> list[Attack]:
    """The attack as it is, then others with drawn values; each value has a stream of its own, so
    more do not change the first."""
    drawn = [
        _changed(
            attack,
            {
                one.field: one.draw(streams.child("combination", number, one.field))
                for one in ranges
            },
        )
        for number in range(1, count)
    ]
    return list(dict.fromkeys([attack, *drawn]))


def _refuse_unknown(attack: Attack, field: str) -> None:
    numbers = _number_types(attack)
    if field in numbers:
        return
    listed = f"Numbers: {', '.join(numbers) or 'none'}."
    if field in to_dict(attack):
        raise GradleakError(
            f"{field} of attack {attack.name!r} is not a number and has no range. {listed}"
        )
    raise GradleakError(
        f"attack {attack.name!r} has no field {field!r}{did_you_mean(field, list(numbers))}"
        f" {listed}"
    )


def _changed(attack: Attack, values: Mapping[str, float]) -> Attack:
    types = _number_types(attack)
    whole = {
        field: round(value) if types[field] is int else value for field, value in values.items()
    }
    return read("attack", {**to_dict(attack), **whole}, Attack)


def _number_types(attack: Attack) -> dict[str, type]:
    hints = typing.get_type_hints(type(attack))
    fields = [field.name for field in list_fields(type(attack))]
    return {name: hints[name] for name in fields if hints[name] in (int, float)}
