"""Searches an attack's numbers on tuning sentences as LAMP's authors did.

Combinations are drawn from ranges, many are tried on few sentences and the best of them on others.
What is found says which did best, by how much over the defaults, and whether that can be told from
luck.
"""

import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradleak.audit.spec import AuditSpec, read
from gradleak.core.attack import Attack, Display
from gradleak.core.errors import GradleakError, RunFailed, did_you_mean
from gradleak.core.metric import Metric
from gradleak.core.specs import list_fields, to_dict, to_string
from gradleak.core.streams import Streams
from gradleak.datasets import TuningPart, resolve_dataset
from gradleak.datasets.selection import TEST, TUNE, Stage, for_tuning, selection_of
from gradleak.metrics import DEFAULT_METRICS
from gradleak.records.schema import Record, Score, now
from gradleak.records.statistics import Interval, measure_gain
from gradleak.study.cells import Cell
from gradleak.study.grid import CellResult, only_attack, run_cells, write_result

DECADE = 10.0
DIGITS = 3  # of drawn values, so that the winning line can be read and pasted
FORM = "--range learning_rate=0.001:0.5:log"
_RANGE = re.compile(r"\s*(\w+)\s*=([^:]+):([^:]+?)(?::\s*(log|linear))?\s*")
_WRITTEN = re.compile(r"[:,]\s*(\w+)\s*=")
FEWEST = 2  # sentences to decide on: one has no interval
SCHEMA = "gradleak.tuning/1"
FILE = "tuning.json"
Records = Mapping[Attack, Record]  # of one stage


@dataclass(frozen=True)
class SearchRange:
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
    def between(field: str, low: float, high: float) -> "SearchRange":
        """Logarithmic where it spans more than a decade."""
        return SearchRange(field, low, high, log=0 < low * DECADE < high)

    def draw(self, streams: Streams) -> float:
        """A value, rounded, inside the range."""
        share = torch.rand((), dtype=torch.float64, generator=streams.generator()).item()
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.exp(low + share * (high - low))
        else:
            value = self.low + share * (self.high - self.low)
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


# LAMP, supplement D: its λ is the learning rate, γ the decay, α_lm the prior's weight, α_reg the
# norm's and α_tag that of L1. Fields an attack does not have are left out: our tag and dlg have no
# decay, which is what LAMP's authors chose for them.
LEARNING_RATE = SearchRange.between("learning_rate", 0.001, 0.5)
DECAY = SearchRange.between("decay", 0.8, 1.0)
L1_WEIGHT = SearchRange.between("l1_weight", 1e-5, 1e2)
DEFAULT_RANGES: Mapping[str, tuple[SearchRange, ...]] = {
    "lamp_cos": (
        SearchRange.between("prior_weight", 0.05, 0.2),
        SearchRange.between("norm_weight", 0.01, 1.0),
        LEARNING_RATE,
        DECAY,
    ),
    # Relative to the gradient's size; the paper searches 30 to 240 and 10 to 100 on BERT-base (with
    # relative=false)
    "lamp_l2l1": (
        SearchRange.between("prior_weight", 0.01, 0.5),
        SearchRange.between("norm_weight", 0.01, 1.0),
        LEARNING_RATE,
        DECAY,
        L1_WEIGHT,
    ),
    "tag": (LEARNING_RATE, DECAY, L1_WEIGHT),
    "dlg": (LEARNING_RATE, DECAY),
}


def read_range(written: str) -> SearchRange:
    """`learning_rate=0.001:0.5:log`; without the last part the scale follows from the span."""
    found = _RANGE.fullmatch(written)
    try:
        field, low, high, scale = found.groups() if found else ("", "", "", "")
        between = SearchRange.between(field, float(low), float(high))
    except ValueError as error:
        raise GradleakError(
            f"Cannot read --range {written!r}: write field=low:high, with :log or not, as in"
            f" {FORM}."
        ) from error
    return replace(between, log=scale == "log") if scale else between


def read_written_fields(line: str) -> frozenset[str]:
    """Names of the fields a one-line spec gives a value to."""
    return frozenset(_WRITTEN.findall(line))


def ranges_for(
    attack: Attack, held: frozenset[str], given: Sequence[SearchRange]
) -> tuple[SearchRange, ...]:
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


def draw_combinations(
    attack: Attack, ranges: Sequence[SearchRange], count: int, streams: Streams
) -> list[Attack]:
    """The attack as it is, then others with drawn values; each value has a stream of its own, so
    more do not change the first."""
    types, plain = _number_types(attack), to_dict(attack)
    found = [attack]
    for number in range(1, count):
        drawn = {}
        for one in ranges:
            value = one.draw(streams.child("combination", number, one.field))
            drawn[one.field] = round(value) if types[one.field] is int else value
        found.append(read("attack", {**plain, **drawn}, Attack))
    return list(dict.fromkeys(found))


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


def _number_types(attack: Attack) -> dict[str, type]:
    hints = typing.get_type_hints(type(attack))
    names = [field.name for field in list_fields(type(attack))]
    return {name: hints[name] for name in names if hints[name] in (int, float)}


@dataclass(frozen=True)
class Effort:
    """How much is tried; the defaults are LAMP's (supplement D)."""

    combinations: int = 50  # the attack as it is, and drawn ones
    coarse: int = 10  # sentences all of them are tried on
    best: int = 10  # combinations that go on
    fine: int = 20  # other sentences, which decide


@dataclass(frozen=True)
class Tuning:
    """One search: the attack as it is and all else its audits share (`base`), and what is
    varied."""

    base: AuditSpec
    ranges: tuple[SearchRange, ...]
    metric: str
    effort: Effort

    @property
    def default(self) -> Attack:
        return self.base.attacks[0]

    @property
    def fields(self) -> list[str]:
        return [one.field for one in self.ranges]

    def attacks(self) -> list[Attack]:
        """The combinations; the first is the attack as it is."""
        return draw_combinations(
            self.default,
            self.ranges,
            self.effort.combinations,
            Streams.root("tuning", self.base.seed),
        )

    def part(self, stage: Stage) -> TuningPart:
        """The sentences of a stage."""
        return TuningPart(to_string(self.base.data), self.effort.coarse, self.effort.fine, stage)

    def cells(self, stage: Stage, attacks: Sequence[Attack]) -> list[Cell]:
        """One audit for each attack on the sentences of a stage."""
        part = self.part(stage)
        spec = replace(self.base, data=part, limit=len(part.load()))
        return [
            Cell(
                {field: f"{to_dict(attack)[field]:g}" for field in self.fields},
                replace(spec, attacks=(attack,)),
            )
            for attack in attacks
        ]

    def where_to_report(self) -> str:
        """What the sentences of this search must not be used for."""
        if selection_of(self.base.data) == TUNE:
            return (
                f"Tuned on sentences of selection={TUNE}; report on selection={TEST}, which shares"
                " none of them."
            )
        first = self.effort.coarse + self.effort.fine
        return (
            f"The first {first} examples of {to_string(self.base.data)} were tuned on: they must"
            " not be reported on."
        )


def plan_tuning(
    attack: str,
    given: Sequence[SearchRange],
    effort: Effort,
    metric: str,
    settings: Mapping[str, Any],
) -> Tuning:
    """A search from plain values; a field that the attack's line gives a value is held at it
    unless a range names it too."""
    default, line = read("attack", attack, Attack), str(settings["data"])
    ranges = ranges_for(default, read_written_fields(attack), given)
    judge = read("metric", metric, Metric)
    metrics = [*(name for name in DEFAULT_METRICS if name != judge.name), judge]
    data = for_tuning(resolve_dataset(line), "selection" in read_written_fields(line))
    base = AuditSpec.from_plain(
        {**settings, "attacks": [default], "data": data, "metrics": metrics}
    )
    tuning = Tuning(base, ranges, judge.name, _affordable(effort, len(data.load()), line))
    if len(tuning.part("coarse").load()) < 1 or len(tuning.part("fine").load()) < FEWEST:
        raise GradleakError(f"{line} has too few different texts to tune on.")
    return tuning


def _affordable(effort: Effort, available: int, line: str) -> Effort:
    """Fewer sentences in the same proportion where the data has fewer."""
    if available >= effort.coarse + effort.fine:
        return effort
    if available <= FEWEST:
        raise GradleakError(
            f"{line} holds {available} examples for tuning; at least {FEWEST + 1} are needed."
        )
    coarse = min(
        max(1, available * effort.coarse // (effort.coarse + effort.fine)), available - FEWEST
    )
    return replace(effort, coarse=coarse, fine=available - coarse)


@dataclass(frozen=True)
class Ranked:
    """One combination and how it did; those that went on have a `fine` score and its `gain` over
    the defaults."""

    attack: str  # one line
    values: dict[str, float]  # of the fields that are tuned
    is_default: bool
    coarse: Score
    coarse_record: str
    fine: Score | None = None
    fine_record: str | None = None
    gain: Interval | None = None  # of paired differences, positive where more leaks


@dataclass(frozen=True)
class Tuned:
    """What a search found; kept as tuning.json beside the records it comes from."""

    created: str
    attack: str  # as it was; the other lines too are what the command line takes
    target: str
    data: str
    metric: str
    seed: int
    effort: Effort
    ranges: tuple[SearchRange, ...]
    winner: str
    verdict: str
    ranked: tuple[Ranked, ...]
    failures: tuple[str, ...] = ()  # files that say why an audit has no record


def tune(
    tuning: Tuning, folder: Path, device: str, display: Display, memory: int | None = None
) -> Tuned:
    """Runs both stages, one record for each audit, and writes tuning.json; records that are
    there already are taken."""
    cells = tuning.cells("coarse", tuning.attacks())
    display.say(f"Coarse stage: {len(cells)} combinations on {cells[0].spec.limit} sentences")
    coarse = run_cells(cells, folder, device, display, memory=memory)
    best = best_first(_records(coarse), tuning.metric)[: tuning.effort.best]
    cells = tuning.cells("fine", list(dict.fromkeys([*best, tuning.default])))
    display.say(
        f"Fine stage: the best {len(best)}, and the defaults, on {cells[0].spec.limit} other"
        " sentences"
    )
    fine = run_cells(cells, folder, device, display, memory=memory)
    ranked = rank(_records(coarse), _records(fine), tuning.default, tuning.metric, tuning.fields)
    tuned = Tuned(
        created=now(),
        attack=to_string(tuning.default),
        target=to_string(tuning.base.target),
        data=to_string(tuning.base.data),
        metric=tuning.metric,
        seed=tuning.base.seed,
        effort=tuning.effort,
        ranges=tuning.ranges,
        winner=ranked[0].attack,
        verdict=verdict(ranked),
        ranked=ranked,
        failures=tuple(str(result.failure) for result in [*coarse, *fine] if result.failure),
    )
    write_result(folder / FILE, SCHEMA, tuned)
    return tuned


def _records(results: Sequence[CellResult]) -> dict[Attack, Record]:
    found = {
        result.cell.spec.attacks[0]: result.record
        for result in results
        if result.record is not None
    }
    if not found:
        raise RunFailed(
            f"All {len(results)} combinations failed; the traceback of the first is in"
            f" {results[0].failure}."
        )
    return found


def best_first(records: Records, metric: str) -> list[Attack]:
    """Attacks from the best score down; among equals the first drawn is first."""
    return sorted(records, key=lambda attack: _merit(records[attack], metric), reverse=True)


def rank(
    coarse: Records, fine: Records, default: Attack, metric: str, fields: Sequence[str]
) -> tuple[Ranked, ...]:
    """Those that went on by their fine score, then the others by their coarse one."""
    last = [attack for attack in best_first(coarse, metric) if attack not in fine]
    # Among equals, the coarse score
    earlier = {attack: fine[attack] for attack in best_first(coarse, metric) if attack in fine}
    return tuple(
        _rank(attack, coarse, fine, default, metric, fields)
        for attack in [*best_first(earlier, metric), *last]
    )


def verdict(ranked: Sequence[Ranked]) -> str:
    """One sentence on the winner against the defaults."""
    winner = ranked[0]
    if winner.is_default:
        return "The defaults come first: the search found nothing better."
    if winner.gain is None:
        return (
            "The defaults have no score on the fine sentences, so there is nothing to compare the"
            " winner with."
        )
    if winner.gain.low <= 0:
        return f"The winner is not distinguishable from the defaults at n = {winner.gain.n}."
    return (
        f"The winner leaks more than the defaults on n = {winner.gain.n} sentences; it was chosen"
        " on them, which flatters it."
    )


def _rank(
    attack: Attack,
    coarse: Records,
    fine: Records,
    default: Attack,
    metric: str,
    fields: Sequence[str],
) -> Ranked:
    gone_on = fine.get(attack)
    return Ranked(
        attack=to_string(attack),
        values={field: to_dict(attack)[field] for field in fields},
        is_default=attack == default,
        coarse=only_attack(coarse[attack]).scores[metric],
        coarse_record=coarse[attack].id,
        fine=only_attack(gone_on).scores[metric] if gone_on else None,
        fine_record=gone_on.id if gone_on else None,
        gain=_gain(gone_on, fine[default], metric) if gone_on and default in fine else None,
    )


def _gain(record: Record, reference: Record, metric: str) -> Interval | None:
    ours, theirs = (
        [example.values[metric] for example in only_attack(one).examples]
        for one in (record, reference)
    )
    return measure_gain(ours, theirs, None, only_attack(record).scores[metric].direction)


def _merit(record: Record, metric: str) -> float:
    score = only_attack(record).scores[metric]
    if score.mean is None:
        raise GradleakError(
            f"{metric} applies to none of the tuning sentences: choose another --metric."
        )
    return score.mean if score.direction == "higher" else -score.mean
