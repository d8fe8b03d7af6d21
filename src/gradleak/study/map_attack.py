"""One attack on one update seen through many views: every view of every client batch is a row of the same call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradleak.attacks.blind import Blind
from gradleak.audit.client import update_norm
from gradleak.audit.display import Display
from gradleak.audit.objectives import objectives
from gradleak.audit.outcomes import Outcome
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Bench, Progress, Reconstruction
from gradleak.core.batch import Batch, PrivateBatch
from gradleak.core.defense import protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Knowledge, Observation, Round, check_update
from gradleak.core.prior import PriorSpec
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.core.view import View
from gradleak.study.map_cells import MapCell, batches_at_once

Seen = Mapping[MapCell, Sequence[Observation]]


def send(spec: AuditSpec, target: Target, private: PrivateBatch, index: int) -> Update:
    """All that one client sends, whatever is seen of it: computed once, from the stream it has in every audit."""
    per_example = bool(spec.defenses) and spec.defenses[0].wants_per_example
    stream = Streams.root("client", spec.seed).child("batch", index)
    update = spec.protocol.update(target, private.batch[None], per_example=per_example, rngs=[stream])
    return protect_in_turn(spec.defenses, update, [stream])


def look(spec: AuditSpec, target: Target, private: PrivateBatch, sent: Update, view: View, index: int) -> Observation:
    """What the server has of that update through one view, and the granted facts; the visible tensors are copies."""
    seen = view.show(target, sent).detached_clone()
    check_update(target, seen, "The update of a batch")
    knows = Knowledge(
        labels=None if target.labels_are_tokens else private.batch.labels.detach().clone(),
        lengths=private.lengths,
        batch_size=len(private.examples),
        defenses=spec.defenses,
    )
    return Observation(index, (Round(target, seen),), knows.limited_to(spec.granted), spec.protocol)


@dataclass(frozen=True, eq=False)
class SharedBench(Bench):
    """A bench on which all views of one client batch draw from its one stream, as they would in audits of their own."""

    batches: int = 1

    def streams_of(self, observation: Observation) -> Streams:
        return self.streams.child("observation", observation.index % self.batches)


class MapAttack:
    """Attacks cells together; `refused` says why some cannot be."""

    def __init__(self, spec: AuditSpec, target: Target, private: Sequence[PrivateBatch], display: Display) -> None:
        self.spec, self.target, self.private, self.display = spec, target, private, display
        self.attack: Attack = spec.attacks[0]
        if not isinstance(spec.prior, PriorSpec):
            raise GradleakError("A leak map is of text models: audit pictures with --layers and --modules instead.")
        self.prior = spec.prior.open(target)
        self.refused: dict[MapCell, str] = {}
        self.blind: dict[int, Reconstruction] = {}  # by client batch: it is the same whatever is seen
        self.peak_memory: int | None = None

    def outcomes(self, cells: Sequence[MapCell]) -> dict[MapCell, list[Outcome]]:
        """One outcome for each client batch, of every cell that can be attacked."""
        found: dict[MapCell, list[Outcome]] = {cell: [] for cell in cells}
        size = batches_at_once(self.target, cells)
        for start in range(0, len(self.private), size):
            seen = self.observe(cells, range(start, min(start + size, len(self.private))))
            for cell, outcomes in self._attack(seen).items():
                found[cell] += outcomes
        return {cell: outcomes for cell, outcomes in found.items() if cell not in self.refused}

    def observe(self, cells: Sequence[MapCell], batches: Sequence[int]) -> Seen:
        """The same updates through the view of each cell; an observation's index says cell and batch, so that none is twice."""
        seen: dict[MapCell, list[Observation]] = {cell: [] for cell in cells}
        for batch in batches:
            sent = send(self.spec, self.target, self.private[batch], batch)
            for place, cell in enumerate(cells):
                index = place * len(self.private) + batch
                try:
                    one = look(self.spec, self.target, self.private[batch], sent, cell.spec.view, index)
                    if not seen[cell]:
                        self._try_out(one)
                    seen[cell].append(one)
                except GradleakError as error:
                    self.refused.setdefault(cell, str(error))
        return {cell: observations for cell, observations in seen.items() if cell not in self.refused}

    def _try_out(self, observation: Observation) -> None:
        """Lets the attack refuse a view it can do nothing with: beside others, whose tensors it can use, it would not notice."""
        self.attack.objective([observation], [self._secret(observation)])

    def _attack(self, seen: Seen) -> dict[MapCell, list[Outcome]]:
        told = self.spec.told(self.attack) | {Fact.DEFENSE}
        limited = {cell: [one.limited_to(told) for one in observations] for cell, observations in seen.items()}
        rows = [one for observations in limited.values() for one in observations]
        found = self._reconstruct(rows) if rows else []
        guesses, truths = objectives(self.attack, rows, [self._secret(one) for one in rows], found)
        norms = [update_norm(one) for one in rows]
        every = iter([Outcome(*four) for four in zip(found, guesses, truths, norms, strict=True)])
        return {cell: [next(every) for _ in observations] for cell, observations in limited.items()}

    def _reconstruct(self, rows: Sequence[Observation]) -> list[Reconstruction]:
        progress, streams = Progress(), Streams.root("attacker", self.spec.seed)
        bench = SharedBench(streams, self.prior, progress, batches=len(self.private))
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
        with self.display.watch(f"{self.attack.name} on {len(rows)} views", progress):
            found = self.attack.reconstruct(rows, bench)
        if self.target.device.type == "cuda":
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated(self.target.device))
        fresh = {one.index % len(self.private): one for one in rows if one.index % len(self.private) not in self.blind}
        self.blind |= dict(zip(fresh, Blind().reconstruct(list(fresh.values()), bench), strict=True))
        return found

    def _secret(self, observation: Observation) -> Batch:
        return self.private[observation.index % len(self.private)].batch
