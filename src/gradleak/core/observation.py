"""Everything the attacker has of one secret, and nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from jaxtyping import Int
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Defense, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.protocol import Protocol
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update


class Fact(StrEnum):
    """One thing the threat model may grant."""

    LABELS = "labels"
    LENGTHS = "lengths"
    BATCH_SIZE = "batch_size"
    DEFENSE = "defense"


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What the threat model grants; what is not granted is absent."""

    labels: Int[Tensor, "examples"] | None = None
    lengths: tuple[int, ...] | None = None  # tokens of each example, special ones included
    batch_size: int | None = None
    defenses: tuple[Defense, ...] | None = None

    @property
    def facts(self) -> frozenset[Fact]:
        held = {
            Fact.LABELS: self.labels,
            Fact.LENGTHS: self.lengths,
            Fact.BATCH_SIZE: self.batch_size,
            Fact.DEFENSE: self.defenses,
        }
        return frozenset(fact for fact, value in held.items() if value is not None)

    def limited_to(self, facts: Iterable[Fact]) -> "Knowledge":
        """The same knowledge without the facts that are not named."""
        kept = frozenset(facts)
        return Knowledge(
            labels=self.labels if Fact.LABELS in kept else None,
            lengths=self.lengths if Fact.LENGTHS in kept else None,
            batch_size=self.batch_size if Fact.BATCH_SIZE in kept else None,
            defenses=self.defenses if Fact.DEFENSE in kept else None,
        )


@dataclass(frozen=True, eq=False)
class Round:
    """One exchange: the model state that was sent out and what was seen of the update that came back (clients axis of size 1)."""

    target: Target
    update: Update


@dataclass(frozen=True, eq=False)
class Observation:
    """What the server can see of one client's batch. Holds detached clones only."""

    index: int  # which secret of the audit this is; names the attacker's random stream
    rounds: tuple[Round, ...]
    knows: Knowledge
    protocol: Protocol

    @property
    def target(self) -> Target:
        return self.rounds[-1].target

    @property
    def update(self) -> Update:
        return self.rounds[-1].update

    @property
    def batch_size(self) -> int:
        if self.knows.batch_size is None:
            raise GradleakError("This attack needs the batch size; add --know batch_size.")
        return self.knows.batch_size

    def simulate(self, batches: Batch, rngs: Sequence[Streams]) -> Update:
        """What clients holding `batches` [clients, examples, …] would have sent, as far as it can be seen.

        The same code as the client's, with the attacker's own randomness.
        """
        defenses = self.knows.defenses or ()
        per_example = bool(defenses) and defenses[0].wants_per_example
        update = self.protocol.update(self.target, batches, per_example=per_example)
        return protect_in_turn(defenses, update, rngs).select(self.update.tensors)

    def limited_to(self, facts: Iterable[Fact]) -> "Observation":
        """The same observation for an attacker who knows less."""
        return replace(self, knows=self.knows.limited_to(facts))
