"""Which combination of a search did best, by how much over the defaults, and whether that can be
told from luck."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradleak.core.attack import Attack
from gradleak.core.errors import GradleakError
from gradleak.core.specs import to_dict, to_string
from gradleak.records.files import write_whole
from gradleak.records.plain import to_plain
from gradleak.records.schema import AttackRecord, Record, Score
from gradleak.records.statistics import Interval, paired_difference

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
