"""Records that differ in the attack alone, together: what a defense has to withstand is the
worst of all attacks run on it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count

from gradleak.records.schema import AttackRecord, Record, Score
from gradleak.records.statistics import beside_blind, gain_of
from gradleak.records.store import Column, Columns, Summary

# Fields of a spec that leave the client alone
OF_THE_ATTACKER = ("attacks", "prior", "metrics", "time_limit", "know")


Scored = tuple[AttackRecord, Columns]


@dataclass(frozen=True)
class Ran:
    """One attack of one record."""

    key: str
    attack: AttackRecord
    columns: Columns
    source: Summary

    def find_in(self, whole: Record) -> AttackRecord:
        """Returns this attack in its whole record, with the examples and searches a summary
        lacks."""
        attacks = self.source.record.attacks.items()
        return whole.attacks[next(key for key, one in attacks if one is self.attack)]


@dataclass(frozen=True, eq=False)
class Setting:
    """One client, and every attack that was run on it."""

    summaries: tuple[Summary, ...]

    @property
    def record(self) -> Record:
        """The first record: what all share stands in it."""
        return self.summaries[0].record

    @cached_property
    def attacks(self) -> list[Ran]:
        """All attacks, each under a key of its own."""
        found: dict[str, Ran] = {}
        for summary in self.summaries:
            for key, attack in summary.record.attacks.items():
                short = f"{key} ({summary.id[:6]})"
                # Of copies none may hide another
                names = chain((key, short), (f"{short} {copy}" for copy in count(2)))
                name = next(name for name in names if name not in found)
                found[name] = Ran(name, attack, summary.columns[key], summary)
        return list(found.values())

    def metrics(self) -> list[str]:
        """Metrics that every attack was scored by."""
        if len(self.summaries) == 1:
            return list(self.record.worst_case)
        return [
            name
            for name in self.record.worst_case
            if all(name in ran.columns.values for ran in self.attacks)
        ]

    def values(self, metric: str) -> tuple[Column, Column, list[int]]:
        """For every example the most that attacks, and blind guesses, got of it; its secret
        batch."""
        scored = self._scored_by(metric)
        clusters = [batch % self.record.data.batches for batch in scored[0][1].batches]
        return *worst_values(scored, metric, self.first_score(metric).direction), clusters

    def _scored_by(self, metric: str) -> list[Scored]:
        return [(one.attack, one.columns) for one in self.attacks if metric in one.columns.values]

    def first_score(self, metric: str) -> Score:
        """The metric in the first record that was scored by it: its unit and direction are
        everybody's."""
        return next(
            one.record.worst_case[metric]
            for one in self.summaries
            if metric in one.record.worst_case
        )

    def mean(self, metric: str) -> float | None:
        """The worst case without its interval: quick."""
        if len(self.summaries) == 1:
            return self.first_score(metric).mean
        there = [value for value in self.values(metric)[0] if value is not None]
        return sum(there) / len(there) if there else None

    def worst(self, metric: str) -> Score:
        """The worst case over all attacks."""
        known = self.first_score(metric)
        if len(self.summaries) == 1:
            return known
        score = worst_score(
            *(self._scored_by(metric), metric, self.values(metric)[2]),
            *(known.unit, known.direction),
        )
        return score if score.n else known

    def choose_quote(self, metric: str) -> Score:
        """What is told of a setting that leaks: the worst case, if it is above as many blind
        guesses.

        Where their best comes up to it, the attack that gains most by itself.
        """
        worst = self.worst(metric)
        alone = [ran.attack.scores[metric] for ran in self.attacks if metric in ran.attack.scores]
        return worst if gain_of(worst) > 0 else max([worst, *alone], key=gain_of)

    def merge(self) -> Record:
        """One record of all attacks, as if one audit had run them."""
        if len(self.summaries) == 1:
            return self.record
        flags = {flag.name: flag for one in self.summaries for flag in one.record.flags}
        return replace(
            self.record,
            attacks={ran.key: ran.attack for ran in self.attacks},
            worst_case={metric: self.worst(metric) for metric in self.metrics()},
            flags=tuple(flags.values()),
        )


def settings_of(summaries: Sequence[Summary]) -> list[Setting]:
    """Records grouped by client and data, in the order of their first."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        spec = summary.record.spec
        fixed = {field: spec[field] for field in spec if field not in OF_THE_ATTACKER}
        key = json.dumps([fixed, summary.record.data.hash], sort_keys=True)
        groups.setdefault(key, []).append(summary)
    return [Setting(tuple(group)) for group in groups.values()]


def looks(attack: AttackRecord) -> bool:
    """Whether an attack looks at the update: all do but the blind one."""
    return attack.spec.get("name") != "blind"


def drop_blind(attacks: Sequence[Scored]) -> Sequence[Scored]:
    """The attacks that a worst case is over: those that look, where there are any."""
    return [one for one in attacks if looks(one[0])] or attacks


def worst_values(attacks: Sequence[Scored], metric: str, direction: str) -> tuple[Column, Column]:
    """For every example the most that any of the attacks got of it, and that blind guesses did."""
    columns = [one.values[metric] for _, one in drop_blind(attacks)]
    return most(columns, direction), most(blind_columns(attacks, metric), direction)


def blind_columns(attacks: Sequence[Scored], metric: str) -> list[Column]:
    """The blind guesses that a worst case over attacks is held against: one for each attack.

    The pick among attacks is made with the truth in hand, and so is that among blind guesses: the
    plain one, and one draw more for every attack after the first. Where attacks are told different
    things, the plain one of each counts. Published results hold no draws, only plain guesses.
    """
    columns = [one for _, one in drop_blind(attacks)]
    plain = [one.blind[metric] for one in columns]
    draws = [one.draws[metric] for one in columns[1:] if metric in one.draws]
    different = [one for place, one in enumerate(plain) if one not in plain[:place]]
    return different + [one for one in draws if any(value is not None for value in one)]


def worst_score(
    attacks: Sequence[Scored],
    metric: str,
    clusters: Sequence[int],
    unit: str,
    direction: str,
) -> Score:
    """The worst case over attacks as a score."""
    guesses = len(blind_columns(attacks, metric))
    ours, blind = worst_values(attacks, metric, direction)
    return beside_blind(ours, blind, clusters, unit, direction, blind_guesses=guesses)


def most(columns: Sequence[Column], direction: str) -> Column:
    """For every example the value that leaks most; none where no column has one."""
    if len(columns) == 1:
        return columns[0]
    best = max if direction == "higher" else min
    return [
        best((value for value in row if value is not None), default=None)
        for row in zip(*columns, strict=True)
    ]
