"""What the server can see of an update, and everything the attacker has of one secret."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Defense, channel_of, protect_in_turn, want_each_example
from gradleak.core.errors import GradleakError
from gradleak.core.parts import Part
from gradleak.core.protocol import Protocol
from gradleak.core.registry import Component
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update


class View(Component, ABC):
    """Selects tensors of an update by name."""

    @abstractmethod
    def visible(self, target: Target) -> tuple[str, ...]:
        """Names of the tensors that are seen: of parameters, or of parts (`PARAMETER[query]`)
        where a slice is seen."""

    def show(self, target: Target, update: Update) -> Update:
        """What is seen of an update of whole parameters."""
        return update.cut(target.part(name) for name in self.visible(target))


class Fact(StrEnum):
    """One thing the threat model may grant."""

    LABELS = "labels"
    LENGTHS = "lengths"
    BATCH_SIZE = "batch_size"
    DEFENSE = "defense"


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What the threat model grants; what is not granted is absent."""

    # classes; those of a language model are the secret and never granted
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

    def limit_to(self, facts: Iterable[Fact]) -> "Knowledge":
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
    """One exchange: the model state that was sent out and what was seen of the update that came
    back (clients axis of size 1)."""

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

    @property
    def channel(self) -> Channel:
        """What was done to the update, as far as the attacker knows: by the digits of weights where
        these are sent, and by known defenses."""
        sent = self.protocol.channel(self.knows.batch_size or 1)
        return sent.then(channel_of(self.knows.defenses or ()))

    def errors(self, name: str) -> Float[Tensor, "*shape"]:
        """The standard deviation of what a known channel leaves on every entry of a tensor."""
        part = self.target.part(name)
        weights = part.of(self.target.parameters[part.parameter])
        size = self.knows.batch_size or 1
        return self.channel.errors(self.update.tensors[name][0], size, weights)

    @property
    def noise_std(self) -> float:
        """The known noise on every entry that was seen; of noise shared by a batch of unknown
        size, all of it."""
        return self.channel.noise_std_for(self.knows.batch_size or 1)

    @property
    def gradient_scale(self) -> float:
        """What to divide the update by to have the size of a gradient; of a batch of unknown
        size, as if it were one example."""
        return self.protocol.gradient_scale(self.knows.batch_size or 1)

    def simulate(self, batches: Batch, rngs: Sequence[Streams]) -> Update:
        """What clients holding `batches` [clients, examples, …] would have sent, as far as it can
        be seen.

        The same code as the client's, with the attacker's own randomness, and without dropout:
        another mask than the client's would only add noise.
        """
        defenses = self.knows.defenses or ()
        update = self.protocol.update(
            self.target, batches, per_example=want_each_example(defenses), rngs=rngs
        )
        return protect_in_turn(defenses, update, rngs).cut(self._seen_parts())

    def simulate_undefended(self, batches: Batch, rngs: Sequence[Streams]) -> Update:
        """The same before any defense: differentiable, and what a candidate is compared by."""
        return self.protocol.update(self.target, batches, rngs=rngs).cut(self._seen_parts())

    def _seen_parts(self) -> list[Part]:
        return [self.target.part(name) for name in self.update.tensors]

    def limit_to(self, facts: Iterable[Fact]) -> "Observation":
        """The same observation for an attacker who knows less."""
        return replace(self, knows=self.knows.limit_to(facts))


def check_update(target: Target, update: Update, called: str = "The update") -> None:
    """Refuses an update that cannot be this model's, by the tensor that does not fit, and one
    that says nothing at all."""
    for name, tensor in update.tensors.items():
        part = target.part(name)
        shape = tuple(tensor.shape[2 if update.per_example else 1 :])
        if shape != part.shape:
            raise GradleakError(
                f"{called} has {name} of shape {list(shape)}, which is {list(part.shape)} in this"
                " model: it was made with another one."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise GradleakError(
                f"{called} is not finite in {name}: the model or the protocol diverged. "
                "Check the weights for NaN, or use --dtype float64."
            )
    if not any(bool(tensor.any()) for tensor in update.tensors.values()):
        names = ", ".join(list(update.tensors)[:3]) + (" …" if len(update.tensors) > 3 else "")
        raise GradleakError(
            f"{called} is zero in all that is seen ({names}): nothing can be rebuilt from it."
            " Choose another view."
        )
