"""What a client does to its update before it leaves."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gradleak.core.registry import Component
from gradleak.core.streams import Streams
from gradleak.core.update import Update


@dataclass(frozen=True)
class Channel:
    """What a defense does to the information in an update. Attacks adapt to this, never to a defense's name."""

    noise_std: float = 0.0


class Defense(Component, ABC):
    """Changes updates, each client independently and from its own random stream."""

    @property
    def wants_per_example(self) -> bool:
        """Whether it needs one gradient an example (DP-SGD does)."""
        return False

    @abstractmethod
    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        """The update that leaves; one stream a client."""

    @abstractmethod
    def channel(self) -> Channel:
        """What the server may know of what was done."""


def protect_in_turn(defenses: Sequence[Defense], update: Update, rngs: Sequence[Streams]) -> Update:
    """Applies defenses in the order written, each with streams of its own."""
    for place, defense in enumerate(defenses):
        update = defense.protect(update, [rng.child("defense", place) for rng in rngs])
    return update
