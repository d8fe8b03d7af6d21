"""Records that differ in the attack alone, together: what a defense has to withstand is the worst of all attacks run on it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count

from gradleak.records.flags import RaisedFlag
from gradleak.records.schema import AttackRecord, Record, Score
from gradleak.records.scores import beside_blind
from gradleak.records.statistics import Interval, paired_difference
from gradleak.records.summary import Column, Columns, Summary

OF_THE_ATTACKER = ("attacks", "prior", "metrics", "time_limit", "know")  # fields of a spec that leave the client alone


@dataclass(frozen=True)
class Ran:
    """One attack of one record."""

    key: str
    attack: AttackRecord
    columns: Columns
    source: Summary

    def find_in(self, whole: Record) -> AttackRecord:
        """Returns this attack in its whole record, with the examples and searches a summary lacks."""
        attacks = self.source.record.attacks
        return whole.attacks[next(key for key, one in attacks.items() if one is self.attack)]


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
                names = chain((key, short), (f"{short} {copy}" for copy in count(2)))  # of copies none may hide another
                name = next(name for name in names if name not in found)
                found[name] = Ran(name, attack, summary.columns[key], summary)
        return list(found.values())

    def metrics(self) -> list[str]:
        """Metrics that every attack was scored by."""
        if len(self.summaries) == 1:
            return list(self.record.worst_case)
        return [name for name in self.record.worst_case if all(name in ran.columns.values for ran in self.attacks)]

    def values(self, metric: str) -> tuple[Column, Column, list[int]]:
        """For every example the most that any attack got out of it, the most that a blind guess did, and its secret batch."""
        direction = self.known(metric).direction
        scored = [ran.columns for ran in self.attacks if metric in ran.columns.values]
        clusters = [batch % self.record.data.batches for batch in scored[0].batches]
        ours = most((columns.values[metric] for columns in scored), direction)
        return ours, most((columns.blind[metric] for columns in scored), direction), clusters

    def known(self, metric: str) -> Score:
        """The metric in the first record that was scored by it: its unit and direction are everybody's."""
        return next(one.record.worst_case[metric] for one in self.summaries if metric in one.record.worst_case)

    def mean(self, metric: str) -> float | None:
        """The worst case without its interval: quick."""
        if len(self.summaries) == 1:
            return self.known(metric).mean
        there = [value for value in self.values(metric)[0] if value is not None]
        return sum(there) / len(there) if there else None

    def worst(self, metric: str) -> Score:
        """The worst case over all attacks."""
        known = self.known(metric)
        if len(self.summaries) == 1:
            return known
        score = beside_blind(*self.values(metric), known.unit, known.direction)
        return score if score.n else known

    def gain(self, metric: str) -> Interval | None:
        """How much more leaks than a blind guess gives away, example by example."""
        ours, blind, clusters = self.values(metric)
        kept = [place for place, value in enumerate(ours) if value is not None and blind[place] is not None]
        if not kept:
            return None
        first, second = ([column[place] or 0.0 for place in kept] for column in (ours, blind))
        groups = [clusters[place] for place in kept]
        higher = self.known(metric).direction == "higher"
        return paired_difference(first, second, groups) if higher else paired_difference(second, first, groups)

    def merged(self) -> Record:
        """One record of all attacks, as if one audit had run them."""
        if len(self.summaries) == 1:
            return self.record
        flags: dict[str, RaisedFlag] = {flag.name: flag for one in self.summaries for flag in one.record.flags}
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
        fixed = {field: value for field, value in summary.record.spec.items() if field not in OF_THE_ATTACKER}
        key = json.dumps([fixed, summary.record.data.hash], sort_keys=True)
        groups.setdefault(key, []).append(summary)
    return [Setting(tuple(group)) for group in groups.values()]


def most(columns: Iterable[Column], direction: str) -> Column:
    """For every example the value that leaks most; none where no column has one."""
    every = list(columns)
    if len(every) == 1:
        return every[0]
    best = max if direction == "higher" else min
    return [best((value for value in row if value is not None), default=None) for row in zip(*every, strict=True)]
