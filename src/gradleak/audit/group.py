"""Attacks several audits in one call: what differs between them is only the secrets and what was
seen of them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradleak.attacks.blind import Blind, draw_beside
from gradleak.audit.client import (
    AuditInput,
    batch_name,
    compute,
    hand_over,
    look,
    protect,
    update_norm,
)
from gradleak.audit.objectives import make_up, objectives
from gradleak.audit.outcomes import AttackOutcomes, AuditResult, CallParts, Outcome
from gradleak.audit.ready import Fits, Opened
from gradleak.audit.record import finding_records, noise_ratios
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Bench, Display, Progress, Scale
from gradleak.core.batch import PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.memory import limit_by_default, measured_peak, memory_left
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update

# Bytes of visible updates held at once on a CPU; attacks take some times as much. Four times this
# was no faster (tag, MiniLM, 32 updates: 98 s of CPU time against 93), and what is held at once is
# lost at once where a run is killed.
UPDATES_IN_MEMORY = 2**30
# Times its updates that an attack holds: as sent, as seen, stacked, as factors and on their way (4
# were measured)
COPIES = 5
SECONDS = 60.0  # that a call may be foretold to take, since an interruption costs a call
# Operations a second. They are given, not measured, so that the same audit makes the same calls
# wherever and however often it is run: who shares a call changes the last bits of what an attack
# computes. LAMP on MiniLM does 8e10 on one core with AVX-512 and 7.5e12 on an H200; older
# processors half of it.
SPEED = {"cpu": 5e10, "cuda": 1e13}
AT_LEAST = {"cuda": 16}  # a GPU takes about as long for one batch as for some
OPERATIONS = 6  # for a parameter and a position: forward, and twice as many back
POSITIONS_OF_A_PICTURE = 100  # how often a convolution uses a parameter, about
# Parameters that are read, not multiplied with
LOOKED_UP = ("word_embedding", "position_embedding")


@dataclass(frozen=True, eq=False)
class SharedBench(Bench):
    """A bench on which every member's observation of a batch has the stream it would have in an
    audit of its own."""

    by_index: tuple[Streams, ...] = ()

    def streams_of(self, observation: Observation) -> Streams:
        return self.by_index[observation.index]


def attackers_streams(
    audits: Sequence[tuple[AuditSpec, int]], root: Streams
) -> tuple[Streams, ...]:
    """The stream of every observation of audits that have so many batches; each takes as many
    places as the longest."""
    stride = max(count for _, count in audits)
    return tuple(
        root.child("observation", *batch_name(spec, index)) if index < count else root
        for spec, count in audits
        for index in range(stride)
    )


class AuditGroup:
    """Audits that share target, attacks, prior, seed and knowledge; their batches are attacked a
    group at a time."""

    def __init__(
        self,
        members: Sequence[AuditInput],
        opened: Opened,
        parts: CallParts,
        display: Display,
        memory: int | None = None,
    ) -> None:
        self.members, self.parts, self.display = members, parts, display
        self.target, self.opened = opened.target, opened
        self.shared = members[0].spec
        names = self.shared.attack_keys()
        self.results = [
            AuditResult({name: AttackOutcomes() for name in names}, refusal=member.refusal)
            for member in members
        ]
        self.stride = max(len(member.private) for member in members)
        self.root = Streams.root("attacker", self.shared.seed)
        self.streams = attackers_streams(
            [(member.spec, len(member.private)) for member in members], self.root
        )
        # Bytes the process may hold on the device; none: most of what is free when an attack starts
        self.memory = memory
        self.peak_memory: int | None = None
        self.fits = Fits(self.shared, opened, parts.out, display, memory)

    def attack_all(self) -> None:
        """Fills the results: of members that can be attacked their outcomes, of others why not.

        First every attack runs on every batch, and only then objectives are taken at the truth:
        an attack may keep what it is shown.
        """
        size = self._count_batches_at_once()
        groups = [
            range(start, min(start + size, self.stride)) for start in range(0, self.stride, size)
        ]
        observations: list[Observation] = []
        for group in groups:
            observations = self._observe(group)
            for place, (key, attack) in enumerate(self.shared.attack_keys().items()):
                for call in self._plan_calls(attack, group):
                    seen = [one for one in observations if self._turn_of(one) in call]
                    self._run(key, attack, seen, f"{place}-{call.start}-{call.stop}")
        # The last group is still at hand; others are computed again: not all may fit in memory.
        for group in reversed(groups):
            seen = observations if group is groups[-1] else [one for *_, one in self._look(group)]
            for key, attack in self.shared.attack_keys().items():
                self._compare(key, attack, self._without_refused(seen))

    def _count_batches_at_once(self) -> int:
        """Returns how many batches of each member fit in memory.

        Attacks may lay out all of them with every tensor that any of them shows.
        """
        visible: dict[str, int] = {}
        for member, result in zip(self.members, self.results, strict=True):
            try:
                visible |= {part.name: part.size for part in member.visible(self.target)}
            except GradleakError as error:
                result.refusal = error
        entries = len(self.members) * sum(visible.values())
        return batches_in_memory(entries * self.target.dtype.itemsize, self.memory, self.target)

    def _plan_calls(self, attack: Attack, group: range) -> list[range]:
        """Returns the turns of a group that are attacked in one call, which is lost where it is
        cut.

        A time limit is one for the whole group, which it ends early enough.
        """
        width = len(self.members)
        turns = range(group.start * width, group.stop * width)
        size = len(turns)
        if self.shared.time_limit is None:
            private = [one for member in self.members for one in member.private]
            size = min(size, batches_in_a_call(attack, self.target, private))
        if size > width:
            size -= size % width  # whole batches of all audits, where there is room for one
        return [
            range(start, min(start + size, turns.stop))
            for start in range(turns.start, turns.stop, size)
        ]

    def _turn_of(self, observation: Observation) -> int:
        """Returns when it is attacked: the first batch of every audit, then the second."""
        member, batch = self._place_of(observation)
        return batch * len(self.members) + member

    def _observe(self, batches: range) -> list[Observation]:
        """Returns what is seen in all audits and notes what it says; a member is refused here or
        never."""
        observations = []
        for place, computed, seen in self._look(batches):
            member, result = self.members[place], self.results[place]
            batch = seen.index % self.stride
            own = replace(seen, index=batch)
            try:
                self._try_out(own)
            except GradleakError as error:
                result.refusal = error
                continue
            result.findings += finding_records([own], member.private)
            private = member.private[batch]
            result.noise.append(noise_ratios(member.spec, self.target, private, computed, batch))
            observations.append(seen)
        return self._without_refused(observations)

    def _look(self, batches: range) -> Iterator[tuple[int, Update, Observation]]:
        """Yields a member's place, what its client computes, and what is seen of that.

        The index of an observation says member and batch, so that none is there twice.
        """
        for batch in batches:
            # Computed once for all defenses and views of one secret, and sent once for all views
            computed: dict[tuple[object, ...], Update] = {}
            sent: dict[tuple[object, ...], Update] = {}
            for place, member in enumerate(self.members):
                if batch >= len(member.private) or self.results[place].refusal is not None:
                    continue
                spec, private = member.spec, member.private[batch]
                per_example = bool(spec.defenses) and spec.defenses[0].wants_per_example
                alike = (id(private), spec.protocol, per_example)
                key = (id(private), spec.protocol, spec.defenses)
                try:
                    if alike not in computed:
                        computed[alike] = compute(spec, self.target, private, batch)
                    if key not in sent:
                        sent[key] = protect(spec, computed[alike], batch)
                    seen = look(spec, self.target, private, sent[key], batch)
                except GradleakError as error:
                    self.results[place].refusal = error
                    continue
                yield place, computed[alike], replace(seen, index=place * self.stride + batch)

    def _try_out(self, seen: Observation) -> None:
        """Lets attacks refuse what they can do nothing with; beside others they would not notice.

        They are tried on a batch that is made up: the true one is nothing to show to an attack
        that has yet to run.
        """
        if seen.index == 0:
            for attack in self.shared.attacks:
                limited = hand_over(self.shared, attack, seen)
                attack.objective([limited], [make_up(limited, self._make_bench())])

    def _run(self, key: str, attack: Attack, seen: Sequence[Observation], part: str) -> None:
        """Adds the attack's outcomes on these observations: computed, or left by an earlier run."""
        if not seen:
            return
        outcomes = self.parts.load(part, AttackOutcomes.KINDS * len(seen))
        if outcomes is None:
            outcomes = self._attack(
                key,
                self.fits.ready(key, attack),
                [hand_over(self.shared, attack, one) for one in seen],
                self.parts.checkpoint(part),
            )
            self.parts.save(part, outcomes)
        for number, observation in enumerate(seen):
            self._result_of(observation).attacks[key].add(*outcomes[number :: len(seen)])

    def _attack(
        self, key: str, attack: Attack, seen: Sequence[Observation], checkpoint: Path | None
    ) -> list[Outcome]:
        """Returns the attack's outcomes, then those of the blind guesses with the same knowledge,
        the likeliest and the drawn ones."""
        bench = replace(self._make_bench(), checkpoint=checkpoint)
        watched = self.display.watch(f"{key} on {len(seen)} batches", bench.progress)
        with watched, measured_peak(self.target.device) as peak:
            found = attack.reconstruct(seen, bench)
        if peak.bytes is not None:
            self.peak_memory = max(self.peak_memory or 0, peak.bytes)
        unwatched = replace(bench, progress=Progress(), deadline=None, checkpoint=None)
        blind = Blind().reconstruct(seen, unwatched)
        # What learnt has no name of its own, by which to draw
        guesses = (*found, *blind, *draw_beside(self.shared.attack_keys()[key], seen, unwatched))
        norms = [update_norm(observation) for observation in seen]
        return [Outcome(one, norm) for one, norm in zip(guesses, norms * 3, strict=True)]

    def _compare(self, key: str, attack: Attack, seen: Sequence[Observation]) -> None:
        """Adds the objective at guess and truth. It is cheap, so that parts on disk do without."""
        if not seen:
            return
        limited = [hand_over(self.shared, attack, one) for one in seen]
        held = [(self._result_of(one).attacks[key].found, one.index % self.stride) for one in seen]
        found = [outcomes[batch].reconstruction for outcomes, batch in held]
        secrets = [
            self.members[member].private[batch] for member, batch in map(self._place_of, seen)
        ]
        ready = self.fits.ready(key, attack)
        values = objectives(ready, limited, secrets, found, self.opened.prior)
        for (outcomes, batch), one, guess, truth in zip(held, limited, *values, strict=True):
            outcomes[batch] = replace(
                outcomes[batch],
                objective_at_guess=guess,
                objective_at_truth=truth,
                scale=ready.objective_scale(one) if truth is not None else Scale(),
            )

    def _make_bench(self) -> SharedBench:
        """Returns a fresh one; the time of the attack begins with it."""
        limit = self.shared.time_limit
        return SharedBench(
            self.root,
            self.opened.prior,
            deadline=None if limit is None else time.monotonic() + limit,
            memory=self.memory or limit_by_default(self.target.device),
            by_index=self.streams,
        )

    def _without_refused(self, seen: Sequence[Observation]) -> list[Observation]:
        return [one for one in seen if self._result_of(one).refusal is None]

    def _place_of(self, observation: Observation) -> tuple[int, int]:
        """Returns the numbers of its member and of its batch."""
        return divmod(observation.index, self.stride)

    def _result_of(self, observation: Observation) -> AuditResult:
        return self.results[self._place_of(observation)[0]]


def batches_in_memory(bytes_each: int, memory: int | None, target: Target) -> int:
    """Returns how many batches fit in memory at once, of which so many bytes are seen each; at
    least one."""
    each, left = max(1, bytes_each), memory_left(memory, target.device)
    if target.device.type == "cuda":
        return max(1, int(left / 4 / each))
    count = max(1, UPDATES_IN_MEMORY // each)
    fits = max(1, int(left / COPIES / each))
    # A power of two: a few bytes change nothing
    return count if fits >= count else 2 ** (fits.bit_length() - 1)


def batches_in_a_call(attack: Attack, target: Target, private: Sequence[PrivateBatch]) -> int:
    """How many of these batches an attack takes in a minute, by the passes it says it makes; at
    least one."""
    kind = target.device.type
    operations = (
        attack.passes * OPERATIONS * _count_multiplied(target) * max(map(_count_positions, private))
    )
    fit = int(SECONDS * SPEED.get(kind, SPEED["cpu"]) / max(1, operations))
    return max(fit, AT_LEAST.get(kind, 1))


def _count_multiplied(target: Target) -> int:
    """The parameters that every position is multiplied with."""
    looked_up = (
        set()
        if target.labels_are_tokens
        else {part.name for part in target.parts if part.module in LOOKED_UP}
    )
    return sum(value.numel() for name, value in target.parameters.items() if name not in looked_up)


def _count_positions(private: PrivateBatch) -> int:
    positions = int(private.batch.mask.sum())
    return positions if private.batch.pixels is None else POSITIONS_OF_A_PICTURE * positions
