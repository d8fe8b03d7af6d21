"""Searches an attack's numbers on tuning sentences as LAMP's authors did.

Many combinations are tried on few sentences and the best of them on others. What is found says
which did best, by how much over the defaults, and whether that can be told from luck.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradleak.audit.display import Display
from gradleak.audit.spec import AuditSpec, read
from gradleak.core.attack import Attack
from gradleak.core.errors import GradleakError, RunFailed
from gradleak.core.metric import Metric
from gradleak.core.specs import to_dict, to_string
from gradleak.core.streams import Streams
from gradleak.datasets import TuningPart, resolve_dataset
from gradleak.datasets.tuning_part import TEST, TUNE, Stage, for_tuning, selection_of
from gradleak.metrics import DEFAULT_METRICS
from gradleak.records.files import write_whole
from gradleak.records.plain import to_plain
from gradleak.records.schema import AttackRecord, Record, Score, now
from gradleak.records.statistics import Interval, paired_difference
from gradleak.study.cells import Cell
from gradleak.study.grid import CellResult, run_cells
from gradleak.study.ranges import Range, combinations, ranges_for, written_fields

SCHEMA = "gradleak.tuning/1"
FILE = "tuning.json"
Records = Mapping[Attack, Record]  # of one stage


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
        _ranked(attack, coarse, fine, default, metric, fields)
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


def write_ranking(folder: Path, ranking: object) -> Path:
    """Writes tuning.json whole or not at all."""
    text = (
        json.dumps(
            {"schema": SCHEMA, **to_plain(ranking)}, indent=1, ensure_ascii=False, allow_nan=False
        )
        + "\n"
    )
    write_whole(folder / FILE, text)
    return folder / FILE


def _ranked(
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
        coarse=_only(coarse[attack]).scores[metric],
        coarse_record=coarse[attack].id,
        fine=_only(gone_on).scores[metric] if gone_on else None,
        fine_record=gone_on.id if gone_on else None,
        gain=_gain(gone_on, fine[default], metric) if gone_on and default in fine else None,
    )


def _gain(record: Record, reference: Record, metric: str) -> Interval:
    pairs = zip(_values(record, metric), _values(reference, metric), strict=True)
    both = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    ours, theirs = [pair[0] for pair in both], [pair[1] for pair in both]
    higher = _only(record).scores[metric].direction == "higher"
    return paired_difference(ours, theirs) if higher else paired_difference(theirs, ours)


def _merit(record: Record, metric: str) -> float:
    score = _only(record).scores[metric]
    if score.mean is None:
        raise GradleakError(
            f"{metric} applies to none of the tuning sentences: choose another --metric."
        )
    return score.mean if score.direction == "higher" else -score.mean


def _values(record: Record, metric: str) -> list[float | None]:
    return [example.values[metric] for example in _only(record).examples]


def _only(record: Record) -> AttackRecord:
    (attack,) = record.attacks.values()
    return attack


FEWEST = 2  # sentences to decide on: one has no interval


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
    ranges: tuple[Range, ...]
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
        return combinations(
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
        return [Cell(self._title(attack), replace(spec, attacks=(attack,))) for attack in attacks]

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

    def _title(self, attack: Attack) -> dict[str, str]:
        return {field: f"{to_dict(attack)[field]:g}" for field in self.fields}


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
    ranges: tuple[Range, ...]
    winner: str
    verdict: str
    ranked: tuple[Ranked, ...]
    failures: tuple[str, ...] = ()  # files that say why an audit has no record


def plan_tuning(
    attack: str, given: Sequence[Range], effort: Effort, metric: str, settings: Mapping[str, Any]
) -> Tuning:
    """A search from plain values; a field that the attack's line gives a value is held at it
    unless a range names it too."""
    default, line = read("attack", attack, Attack), str(settings["data"])
    ranges = ranges_for(default, written_fields(attack), given)
    judge = read("metric", metric, Metric)
    metrics = [*(name for name in DEFAULT_METRICS if name != judge.name), judge]
    data = for_tuning(resolve_dataset(line), "selection" in written_fields(line))
    base = AuditSpec.from_plain(
        {**settings, "attacks": [default], "data": data, "metrics": metrics}
    )
    tuning = Tuning(base, ranges, judge.name, _affordable(effort, len(data.load()), line))
    if len(tuning.part("coarse").load()) < 1 or len(tuning.part("fine").load()) < FEWEST:
        raise GradleakError(f"{line} has too few different texts to tune on.")
    return tuning


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
    tuned = _tuned(tuning, coarse, fine)
    write_ranking(folder, tuned)
    return tuned


def _tuned(tuning: Tuning, coarse: Sequence[CellResult], fine: Sequence[CellResult]) -> Tuned:
    ranked = rank(_records(coarse), _records(fine), tuning.default, tuning.metric, tuning.fields)
    return Tuned(
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
