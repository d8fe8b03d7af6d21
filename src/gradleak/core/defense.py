"""What a client does to its update before it leaves."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.core.registry import Component
from gradleak.core.streams import Streams
from gradleak.core.update import Update


class Survivors(StrEnum):
    """Which entries of an update still carry information, and whether the server can tell."""

    ALL = "all"
    SEEN = "seen"  # the others are exactly zero in what arrives
    HIDDEN = "hidden"  # others were set to zero, and something after that covers it


@dataclass(frozen=True)
class Channel:
    """What a defense does to the information in an update. Attacks adapt to this, never to a
    defense's name."""

    noise_std: float = 0.0  # of Gaussian noise on every entry that arrives
    # From one number that can be sent to the next, as a share of it, at a power of 2
    rounding: float = 0.0
    smallest_step: float = 0.0  # the same between the numbers nearest to zero, in absolute terms
    # Weights are sent and their difference is seen: the standard deviation of what their own digits
    # leave of it, in units of the last digit of each
    weight_rounding: float = 0.0
    noise_std_of_sum: float = 0.0  # the same, put on the sum over a batch of which the mean is sent
    survivors: Survivors = Survivors.ALL
    signs_only: bool = False
    # Between zero and the largest entry; rounded at random, right in the mean
    quantisation_levels: int | None = None
    quantisation_bucket: int | None = None  # entries of a tensor, in order, that share a largest
    # The norm above which an update (an example's, in DP-SGD) is scaled down, by nobody knows how
    # much
    clip: float | None = None
    randomised: bool = False  # another draw gives another update
    # Done by the server itself, after it has seen the update: no protection from it
    after_server: bool = False

    @property
    def clear(self) -> bool:
        """Whether what arrives is the update itself, as far as the weights' digits hold it."""
        return self.only_scaled and not self.rounding and self.clip is None

    @property
    def exact(self) -> bool:
        """Whether what arrives is the update up to its size, to the last digit."""
        return self.only_scaled and not self.rounding and not self.weight_rounding

    @property
    def only_scaled(self) -> bool:
        """Whether what arrives is the update up to its size and rounding."""
        return self.every_entry and not self.noisy

    @property
    def every_entry(self) -> bool:
        """Whether every entry that arrives is the gradient's, up to its size, rounding and
        Gaussian noise."""
        return (
            self.survivors is Survivors.ALL
            and not self.signs_only
            and self.quantisation_levels is None
        )

    @property
    def noisy(self) -> bool:
        return self.noise_std > 0 or self.noise_std_of_sum > 0

    @property
    def kind(self) -> "Channel":
        """The same but for how much: what an attack does about it is the same for all channels
        of a kind."""
        return replace(
            self,
            noise_std=float(self.noise_std > 0),
            noise_std_of_sum=float(self.noise_std_of_sum > 0),
            weight_rounding=float(self.weight_rounding > 0),
            clip=None if self.clip is None else 1.0,
        )

    def noise_std_for(self, batch_size: int) -> float:
        """The noise on every entry of what arrives from a batch of that size."""
        return math.hypot(self.noise_std, self.noise_std_of_sum / batch_size)

    def errors(
        self,
        tensor: Float[Tensor, "*shape"],
        batch_size: int,
        weights: Float[Tensor, "*shape"] | None = None,
    ) -> Float[Tensor, "*shape"]:
        """The standard deviation of every entry of an update that was seen: noise, rounding spread
        evenly over a step, and what the digits of the weights it was subtracted from leave."""
        steps = self.rounding * tensor.abs().log2().floor().exp2()
        squares = (
            steps.clamp_min(self.smallest_step).square() / 12 + self.noise_std_for(batch_size) ** 2
        )
        if self.weight_rounding and weights is not None:
            left = self.weight_rounding * measure_spacing(weights - tensor)
            squares = squares + left.to(squares).square()
        return squares.sqrt()

    def then(self, after: "Channel") -> "Channel":
        """Both in turn; of two roundings the coarser counts.

        Noise, or another's rounding, after entries were set to zero hides which they were.
        """
        survivors = after.survivors
        if self.survivors is not Survivors.ALL and survivors is not Survivors.SEEN:
            survivors = (
                Survivors.HIDDEN
                if after.noisy or self.survivors is Survivors.HIDDEN
                else self.survivors
            )
        return Channel(
            noise_std=math.hypot(self.noise_std, after.noise_std),
            noise_std_of_sum=math.hypot(self.noise_std_of_sum, after.noise_std_of_sum),
            rounding=max(self.rounding, after.rounding),
            smallest_step=max(self.smallest_step, after.smallest_step),
            weight_rounding=math.hypot(self.weight_rounding, after.weight_rounding),
            survivors=survivors,
            signs_only=self.signs_only or after.signs_only,
            quantisation_levels=(
                self.quantisation_levels
                if after.quantisation_levels is None
                else after.quantisation_levels
            ),
            quantisation_bucket=after.quantisation_bucket or self.quantisation_bucket,
            clip=self.clip if after.clip is None else after.clip,
            randomised=self.randomised or after.randomised,
            after_server=self.after_server or after.after_server,
        )


def measure_spacing(weights: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """How far each weight is from the next number that can be held."""
    sizes = weights.detach().double().abs().clamp_min(1e-30)
    return torch.finfo(weights.dtype).eps * sizes.log2().floor().exp2()


@dataclass(frozen=True)
class Guarantee:
    """One reading of a defense as (ε, δ)-differential privacy, and who says so."""

    reading: str  # "one release" or "whole run"
    protects: str  # "example" or "client": what may be added or removed
    accountant: str
    epsilon: float | None  # none where the accountant fails at this noise
    delta: float
    epsilon_in_words: str = ""  # where it is no finite number: what it is instead, a colon, and why


@dataclass(frozen=True)
class Sampling:
    """A training run of a noised mean: what takes part in each step is drawn anew."""

    noise_multiplier: float  # of the largest contribution
    rate: float  # the chance to take part in a step
    steps: int


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

    def without_noise(self) -> "Defense":
        """The same defense with its Gaussian noise left out: what the noise hides."""
        return self

    def guarantees(self) -> tuple[Guarantee, ...]:
        """What it proves; nothing, unless it is differential privacy."""
        return ()

    def sampling(self) -> Sampling | None:
        """The run that it is part of, where it is differential privacy."""
        return None


def want_each_example(defenses: Sequence[Defense]) -> bool:
    """Whether the first defense wants each example's gradient; only the first can."""
    return bool(defenses) and defenses[0].wants_per_example


def protect_in_turn(defenses: Sequence[Defense], update: Update, rngs: Sequence[Streams]) -> Update:
    """Applies defenses in the order written, each with streams of its own."""
    for place, defense in enumerate(defenses):
        update = defense.protect(update, [rng.child("defense", place) for rng in rngs])
    return update


def channel_of(defenses: Sequence[Defense]) -> Channel:
    """What defenses in the order written do together."""
    channel = Channel()
    for defense in defenses:
        channel = channel.then(defense.channel())
    return channel


def refuse_wrong_order(defenses: Sequence[Defense]) -> None:
    """A defense that wants each example's gradient can only be the first: after another there is
    one update a client."""
    late = next((defense for defense in defenses[1:] if defense.wants_per_example), None)
    if late is not None:
        raise GradleakError(
            f"{late.name} needs the gradient of each example and must be the first defense: write"
            " it first."
        )
