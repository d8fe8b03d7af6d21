"""Attacks several audits in one call: what differs between them is only the secrets and what was seen of them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradleak.attacks.blind import Blind, draw_beside
from gradleak.audit.beliefs import Beliefs, open_beliefs
from gradleak.audit.calls import batches_in_a_call
from gradleak.audit.client import batch_name, compute, look, protect, update_norm
from gradleak.audit.display import Display
from gradleak.audit.findings import finding_records
from gradleak.audit.fits import Fits
from gradleak.audit.made_up import make_up
from gradleak.audit.noise import Ratios, noise_ratios
from gradleak.audit.objectives import objectives
from gradleak.audit.outcomes import Outcome, Parts
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Bench, Progress, Scale
from gradleak.core.batch import PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.memory import limit_by_default, measured_peak, memory_left
from gradleak.core.observation import Fact, Observation
from gradleak.core.parts import Part
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.records.schema import FindingRecord

# Bytes of visible updates held at once on a CPU; attacks take some times as much. Four times this was no faster (tag, MiniLM, 32
# updates: 98 s of CPU time against 93), and what is held at once is lost at once where a run is killed.
UPDATES_IN_MEMORY = 2**30
BLIND = ("blind", "draw")  # guesses beside an attack's: the likeliest, and one drawn for it
COPIES = 5  # times its updates that an attack holds: as sent, as seen, stacked, as factors and on their way (4 were measured)


@dataclass(eq=False)
class Member:
    """One audit of several, its secrets (once for each draw), and what came of it."""

    spec: AuditSpec
    private: Sequence[PrivateBatch]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)  # by _names
    findings: list[FindingRecord] = field(default_factory=list)
    noise: list[Ratios] = field(default_factory=list)  # of every batch
    refusal: GradleakError | None = None  # why it cannot be attacked
    remarks: tuple[str, ...] = ()  # how its data was read

    def visible(self, target: Target) -> tuple[Part, ...]:
        return tuple(target.part(name) for name in self.spec.view.visible(target))


@dataclass(frozen=True, eq=False)
class SharedBench(Bench):
    """A bench on which every member's observation of a batch has the stream it would have in an audit of its own."""

    by_index: tuple[Streams, ...] = ()

    def streams_of(self, observation: Observation) -> Streams:
        return self.by_index[observation.index]


def attackers_streams(audits: Sequence[tuple[AuditSpec, int]], root: Streams) -> tuple[Streams, ...]:
    """The stream of every observation of audits that have so many batches; each takes as many places as the longest."""
    stride = max(count for _, count in audits)
    return tuple(
        root.child("observation", *batch_name(spec, index)) if index < count else root
        for spec, count in audits
        for index in range(stride)
    )


def _names(key: str) -> list[str]:
    """What the outcomes of one attack, and those beside them, are called."""
    return [key, *(f"{kind} of {key}" for kind in BLIND)]


class Together:
    """Audits that share target, attacks, prior, seed and knowledge; their batches are attacked a group at a time."""

    def __init__(
        self,
        members: Sequence[Member],
        target: Target,
        parts: Parts,
        display: Display,
        beliefs: Beliefs | None = None,
        memory: int | None = None,
    ) -> None:
        self.members, self.target, self.parts, self.display = members, target, parts, display
        self.shared = members[0].spec
        self.beliefs = beliefs or open_beliefs(self.shared, target)
        self.stride = max(len(member.private) for member in members)
        self.root = Streams.root("attacker", self.shared.seed)
        self.streams = attackers_streams([(member.spec, len(member.private)) for member in members], self.root)
        self.memory = memory  # bytes the process may hold on the device; none: most of what is free when an attack starts
        self.peak_memory: int | None = None
        self.fits = Fits(self.shared, target, self.beliefs.words, parts.out, display, memory)  # of what learns: it runs alone

    def attack_all(self) -> None:
        """Gives every member that can be attacked its outcomes and findings, and every other its refusal.

        First every attack on every batch, and only then the objectives at the truth: an attack may keep what it is shown.
        """
        attacks = self.shared.attack_keys()
        for member in self.members:
            member.outcomes = {name: [] for key in attacks for name in _names(key)}
        size = self._batches_at_once()
        groups = [range(start, min(start + size, self.stride)) for start in range(0, self.stride, size)]
        observations: list[Observation] = []
        for group in groups:
            observations = self._observe(group)
            for place, (key, attack) in enumerate(attacks.items()):
                for call in self._calls(attack, group):
                    seen = [one for one in observations if self._turn(one) in call]
                    self._run(key, attack, seen, f"{place}-{call.start}-{call.stop}")
        for group in reversed(groups):  # the last is still at hand; others are computed again, since not all may fit in memory
            seen = observations if group is groups[-1] else [one for *_, one in self._look(group)]
            for key, attack in attacks.items():
                self._compare(key, attack, [one for one in seen if self._member(one).refusal is None])

    def _calls(self, attack: Attack, group: range) -> list[range]:
        """Turns of a group that are attacked in one call: a part, and what is lost where it is cut.

        A time limit is one for the whole group, which it ends early enough.
        """
        width = len(self.members)
        turns = range(group.start * width, group.stop * width)
        size = len(turns)
        if self.shared.time_limit is None:
            size = min(size, batches_in_a_call(attack, self.target, [one for member in self.members for one in member.private]))
        if size > width:
            size -= size % width  # whole batches of all audits, where there is room for one
        return [range(start, min(start + size, turns.stop)) for start in range(turns.start, turns.stop, size)]

    def _turn(self, observation: Observation) -> int:
        """When it is attacked: the first batch of every audit, then the second."""
        member, batch = divmod(observation.index, self.stride)
        return batch * len(self.members) + member

    def _observe(self, batches: range) -> list[Observation]:
        """What is seen in all audits, with what is noted of it; a member is refused here or never."""
        observations = []
        for member, computed, seen in self._look(batches):
            batch = seen.index % self.stride
            own = replace(seen, index=batch)
            try:
                self._try_out(own)
            except GradleakError as error:
                member.refusal = error
                continue
            member.findings += finding_records([own], member.private)
            member.noise.append(noise_ratios(member.spec, self.target, member.private[batch], computed, batch))
            observations.append(seen)
        return [one for one in observations if self._member(one).refusal is None]

    def _look(self, batches: range) -> Iterator[tuple[Member, Update, Observation]]:
        """What each client computes and what is seen of it; an index says member and batch, so that none is there twice."""
        for batch in batches:
            computed: dict[tuple[object, ...], Update] = {}  # once for all defenses and views of one secret
            sent: dict[tuple[object, ...], Update] = {}
            for place, member in enumerate(self.members):
                if batch >= len(member.private) or member.refusal is not None:
                    continue
                spec, private = member.spec, member.private[batch]
                per_example = bool(spec.defenses) and spec.defenses[0].wants_per_example
                alike, key = (id(private), spec.protocol, per_example), (id(private), spec.protocol, spec.defenses)
                try:
                    if alike not in computed:
                        computed[alike] = compute(spec, self.target, private, batch)
                    if key not in sent:
                        sent[key] = protect(spec, computed[alike], batch)
                    seen = look(spec, self.target, private, sent[key], batch)
                except GradleakError as error:
                    member.refusal = error
                    continue
                yield member, computed[alike], replace(seen, index=place * self.stride + batch)

    def _try_out(self, seen: Observation) -> None:
        """Lets attacks refuse what they can do nothing with: beside others, which they can use, they would not notice.

        They are tried on a batch that is made up: the true one is nothing to show to an attack that has yet to run.
        """
        if seen.index == 0:
            for attack in self.shared.attacks:
                limited = self._limited(attack, seen)
                attack.objective([limited], [make_up(limited, self._bench())])

    def _run(self, key: str, attack: Attack, observations: Sequence[Observation], part: str) -> None:
        """Adds the attack's outcomes on these observations to their settings: computed, or as an earlier run left them."""
        if not observations:
            return
        outcomes = self.parts.load(part, (1 + len(BLIND)) * len(observations))
        if outcomes is None:
            ready = self.fits.ready(key, attack)
            limited = [self._limited(attack, one) for one in observations]
            outcomes = self._attack(key, ready, limited, self.parts.checkpoint(part))
            self.parts.save(part, outcomes)
        for place, name in enumerate(_names(key)):
            for number, observation in enumerate(observations, start=place * len(observations)):
                self._member(observation).outcomes[name].append(outcomes[number])

    def _attack(self, key: str, attack: Attack, observations: Sequence[Observation], checkpoint: Path | None) -> list[Outcome]:
        """The attack's outcomes, then those of BLIND with the same knowledge."""
        bench = replace(self._bench(), checkpoint=checkpoint)
        watched = self.display.watch(f"{key} on {len(observations)} batches", bench.progress)
        with watched, measured_peak(self.target.device) as peak:
            found = attack.reconstruct(observations, bench)
        if peak.bytes is not None:
            self.peak_memory = max(self.peak_memory or 0, peak.bytes)
        unwatched = replace(bench, progress=Progress(), deadline=None, checkpoint=None)
        blind = Blind().reconstruct(observations, unwatched)
        drawn = draw_beside(attack, observations, unwatched)
        norms = [update_norm(observation) for observation in observations]
        guesses = (*found, *blind, *drawn)
        return [Outcome(one, norm) for one, norm in zip(guesses, norms * 3, strict=True)]

    def _compare(self, key: str, attack: Attack, observations: Sequence[Observation]) -> None:
        """Adds to the attack's outcomes its objective at guess and truth. It is cheap, so that parts on disk do without."""
        if not observations:
            return
        limited = [self._limited(attack, one) for one in observations]
        held = [(self._member(one).outcomes[key], one.index % self.stride) for one in observations]
        found = [outcomes[batch].reconstruction for outcomes, batch in held]
        secrets = [self._secret(one) for one in observations]
        ready = self.fits.ready(key, attack)
        at_guess, at_truth = objectives(ready, limited, secrets, found, self.beliefs.words)
        for (outcomes, batch), one, guess, truth in zip(held, limited, at_guess, at_truth, strict=True):
            scale = ready.objective_scale(one) if truth is not None else Scale()
            outcomes[batch] = replace(outcomes[batch], objective_at_guess=guess, objective_at_truth=truth, scale=scale)

    def _bench(self) -> SharedBench:
        """A fresh one; the time of the attack begins with it."""
        deadline = None if self.shared.time_limit is None else time.monotonic() + self.shared.time_limit
        words, pictures = self.beliefs.words, self.beliefs.pictures
        memory = self.memory or limit_by_default(self.target.device)
        return SharedBench(self.root, words, deadline=deadline, pictures=pictures, memory=memory, by_index=self.streams)

    def _limited(self, attack: Attack, observation: Observation) -> Observation:
        return observation.limited_to(self.shared.told(attack) | {Fact.DEFENSE})

    def _member(self, observation: Observation) -> Member:
        return self.members[observation.index // self.stride]

    def _secret(self, observation: Observation) -> PrivateBatch:
        return self._member(observation).private[observation.index % self.stride]

    def _batches_at_once(self) -> int:
        """How many batches of each member fit in memory: attacks may lay out all with every tensor that any of them shows."""
        visible: dict[str, int] = {}
        for member in self.members:
            try:
                visible |= {part.name: part.size for part in member.visible(self.target)}
            except GradleakError as error:
                member.refusal = error
        each = max(1, len(self.members) * sum(visible.values()) * self.target.dtype.itemsize)
        left = memory_left(self.memory, self.target.device)
        if self.target.device.type == "cuda":
            return max(1, int(left / 4 / each))
        count = max(1, UPDATES_IN_MEMORY // each)
        fits = max(1, int(left / COPIES / each))
        return count if fits >= count else 2 ** (fits.bit_length() - 1)  # a power of two: a few bytes change nothing
