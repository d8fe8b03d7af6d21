"""What a client does to its update before it leaves."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from gradleak.core.registry import Component
from gradleak.core.streams import Streams
from gradleak.core.update import Update


@dataclass(frozen=True)
class Channel:
    """What a defense does to the information in an update. Attacks adapt to this, never to a defense's name."""

    noise_std: float = 0.0
    rounding: float = 0.0  # from one number that can be sent to the next, as a share of it, at a power of 2
    smallest_step: float = 0.0  # the same between the numbers nearest to zero, in absolute terms

    @property
    def exact(self) -> bool:
        """Whether what is sent arrives as it was."""
        return self == Channel()

    def errors(self, tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The standard deviation of every entry of an update that was seen: noise, and rounding spread evenly over a step."""
        steps = self.rounding * tensor.abs().log2().floor().exp2()
        return (steps.clamp_min(self.smallest_step).square() / 12 + self.noise_std**2).sqrt()


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


def channel_of(defenses: Sequence[Defense]) -> Channel:
    """What a chain of defenses does together: noises add up, of several roundings the coarsest counts."""
    channels = [defense.channel() for defense in defenses]
    return Channel(
        noise_std=math.hypot(*(channel.noise_std for channel in channels)),
        rounding=max((channel.rounding for channel in channels), default=0.0),
        smallest_step=max((channel.smallest_step for channel in channels), default=0.0),
    )
