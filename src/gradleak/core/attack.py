"""An attack turns observations into reconstructions; some learn first, from data of their own."""

import time
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch, Example
from gradleak.core.defense import Channel, Defense
from gradleak.core.errors import GradleakError
from gradleak.core.memory import memory_left
from gradleak.core.observation import Fact, Observation, View
from gradleak.core.picture import Picture
from gradleak.core.prior import AnyPrior, Prior, prior_of_texts
from gradleak.core.protocol import Protocol
from gradleak.core.registry import Component, Medium
from gradleak.core.specs import to_dict
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec

TokenIds = tuple[int, ...]  # of one sentence, special ones included
Sentences = tuple[TokenIds, ...]
# What an objective may be off by, as a share of the sums it is made of. Those are sums of up to 1e8
# products in float32 (unit roundoff 6e-8): taken in blocks, as every library does, they are off by
# about log2(1e8) = 27 roundoffs; one is held against another: 3e-6; and the gradients in the
# products carry some roundoffs themselves.
ROUNDING = 1e-5

# Of one attack of several: it came to its end, its time was up before, it would not begin, it ended
# with an error, or there was no time to begin.
Fate = Literal["ran", "cut", "refused", "failed", "no_time"]


@dataclass(frozen=True)
class Trace:
    """How a search went: the objective and the guess at some steps."""

    losses: tuple[tuple[int, float], ...] = ()
    guesses: tuple[tuple[int, Sentences], ...] = ()


@dataclass(frozen=True)
class Cost:
    """What one reconstruction took. Observations attacked together share the wall clock: each
    carries its part."""

    seconds: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class Scale:
    """What an objective is counted in, and by how much two of them may differ for no reason but
    rounding."""

    unit: str = ""  # "nats" of a likelihood, "log" of a distance; a distance itself has none
    rounding: float = ROUNDING


@dataclass(frozen=True)
class Stage:
    """What one attack of several made of an observation."""

    attack: str
    sentences: Sentences
    certified: bool
    cost: Cost
    fate: Fate = "ran"
    reason: str = ""  # for any other fate, in a sentence

    @property
    def has_guess(self) -> bool:
        return self.fate in ("ran", "cut")


@dataclass(frozen=True)
class Reconstruction:
    """The guess for one observation: token ids of each sentence, special ones included; or its
    pictures."""

    sentences: Sentences
    certified: bool = False  # the update itself proves the guess
    loss: float | None = None
    labels: tuple[int, ...] | None = None  # the labels the guess was found with
    trace: Trace = Trace()
    cost: Cost = Cost()
    stages: tuple[Stage, ...] = ()  # of an attack that is several in turn
    note: str = ""  # what stood in the attack's way, in a sentence
    pictures: tuple[Picture, ...] = ()


@dataclass
class Phase:
    """A stretch of work that is counted to one total: what was done of it, and when
    (time.monotonic)."""

    total: int
    first_done: int
    first_at: float
    done: int
    at: float

    def seconds(self, began: float) -> float:
        """What all of it takes, from `began` on, at the pace it has had so far."""
        done = self.done - self.first_done
        # Reported once so far: all that was done was done since the beginning
        pace = (self.at - self.first_at) / done if done else (self.at - began) / max(1, self.done)
        return self.first_at - began + pace * max(0, self.total - self.first_done)


@dataclass
class Progress:
    """A blackboard the attack writes on and the display reads from. It calls nobody, so it can
    lead nowhere."""

    done: int = 0
    total: int = 0
    loss: float | None = None
    guesses: tuple[str, ...] = ()
    phases: list[Phase] = field(default_factory=list)
    tries: int = 1  # how often all phases may be gone through

    def report(
        self, done: int, total: int, loss: float | None = None, guesses: Sequence[str] | None = None
    ) -> None:
        self.done, self.total, self.loss = done, total, loss
        if guesses is not None:
            self.guesses = tuple(guesses)
        now = time.monotonic()
        if self.phases and self.phases[-1].total == total and self.phases[-1].done <= done:
            self.phases[-1].done, self.phases[-1].at = done, now
        else:
            self.phases.append(Phase(total, done, now, done, now))


@typing.runtime_checkable
class Display(typing.Protocol):
    """Who watches: reads the blackboard that an attack writes on. Attacks never see this side."""

    def say(self, sentence: str) -> None:
        """Shows one line of news."""

    def watch(self, title: str, progress: Progress) -> AbstractContextManager[None]:
        """Follows a blackboard while the block runs."""


class Silent:
    """A display that shows nothing."""

    def say(self, sentence: str) -> None:
        """Shows nothing."""

    @contextmanager
    def watch(self, title: str, progress: Progress) -> Iterator[None]:
        """Follows nothing."""
        yield


@dataclass(frozen=True, eq=False)
class Bench:
    """What an attack works with: its own randomness, an opened prior, a place to report
    progress, a deadline, some memory."""

    streams: Streams
    prior: AnyPrior
    progress: Progress = field(default_factory=Progress)
    deadline: float | None = None  # time.monotonic() after which to stop with the best guess so far
    # A file of one's own for what is learnt, or which attacks of several have ended
    checkpoint: Path | None = None
    # Bytes the process may hold on its device in all; none: most of what is free
    memory: int | None = None

    @property
    def words(self) -> Prior:
        """The prior, for an attack on texts."""
        return prior_of_texts(self.prior)

    def streams_of(self, observation: Observation) -> Streams:
        """The stream of one observation: the same whoever shares the batch."""
        return self.streams.child("observation", observation.index)

    def ending_early(self, share: float) -> "Bench":
        """The same with a share of the time left kept back for what comes after."""
        if self.deadline is None:
            return self
        return replace(
            self, deadline=self.deadline - share * max(0.0, self.deadline - time.monotonic())
        )

    @property
    def out_of_time(self) -> bool:
        return self.ends_within(0.0)

    def ends_within(self, seconds: float) -> bool:
        """Whether the deadline is less than so many seconds away: what takes longer is not
        begun."""
        return self.deadline is not None and time.monotonic() > self.deadline - seconds

    def memory_left(self, device: torch.device) -> float:
        """The bytes that may be taken now."""
        return memory_left(self.memory, device)


class Attack(Component, ABC):
    """Guesses what clients had. No argument can carry the answer."""

    medium: ClassVar[Medium] = "text"
    # Raised by its author when its answers change: published rows of two versions are never mixed
    version: ClassVar[int] = 1
    # It supposes that each text has one class, told or tried
    wants_classes: ClassVar[bool] = True

    @property
    def members(self) -> "tuple[Attack, ...]":
        """The attacks it runs in turn; itself where it is one."""
        return (self,)

    @property
    def passes(self) -> int:
        """About how many passes through the target, forward and back, it makes for a batch:
        calls are sized by it."""
        return 2000

    @property
    def requires(self) -> frozenset[Fact]:
        """Facts without which it cannot run. Labels are granted of classifiers only: of a
        language model they are the secret."""
        return frozenset()

    @property
    def uses(self) -> frozenset[Fact]:
        """Facts that it makes use of where they are granted, and can do without."""
        return frozenset()

    def adapts_to(self, channel: Channel) -> bool:
        """Whether it takes into account what a known defense did to the update."""
        return False

    def before(self, channel: Channel) -> Mapping[str, Any]:
        """What fields that a record is too old to have stood for through that channel, where it
        is not their default."""
        return {}

    @abstractmethod
    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        """One reconstruction for each observation."""

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"] | None:
        """What it minimises, at given batches of token ids; none where it has no such number."""
        return None

    def objective_scale(self, observation: Observation) -> Scale:
        """What the objective of this observation is counted in; as it stands, of something like
        a share or a cosine."""
        return Scale()

    def penalty(self, observation: Observation, sentences: Sentences, prior: Prior) -> float:
        """What its search adds to the objective for texts that are unlikely beforehand, in the
        objective's unit."""
        return 0.0


def refuse_open_labels(attack: Attack) -> None:
    """Refuses an attack that supposes classes, of a model whose labels are none."""
    if attack.wants_classes:
        raise GradleakError(
            f"{attack.name} tells or tries one class for each text, and this model learns several"
            " labels at once, numbers or a class for each token: use span, energy or portfolio."
        )


READING_PASSES = 10  # that take about as long as an inverter's answer, once it has learnt


@dataclass(frozen=True, eq=False)
class ClientSetting:
    """What an attacker knows of clients before any has sent anything; enough to play one."""

    spec: TargetSpec
    target: Target  # the same, opened
    protocol: Protocol
    defenses: tuple[Defense, ...]  # as far as they are known
    view: View
    batch_size: int = 1

    def describe(self) -> dict[str, Any]:
        """Returns plain values that say what a fit belongs to."""
        return {
            "target": to_dict(self.spec),
            "weights": self.spec.fingerprint(),
            "protocol": to_dict(self.protocol),
            "defenses": [to_dict(defense) for defense in self.defenses],
            "view": to_dict(self.view),
            "batch_size": self.batch_size,
        }

    def refuse_another(self, name: str, learnt: dict[str, Any]) -> None:
        """Refuses what was learnt for another setting, by the first thing that differs."""
        for part, here in self.describe().items():
            if learnt.get(part) != here:
                raise GradleakError(
                    f"This {name} was fitted to another {part.removesuffix('s')}: "
                    f"{write_briefly(learnt.get(part))}, and here it is {write_briefly(here)}. "
                    "Fit it anew."
                )


def write_briefly(plain: Any) -> str:
    """Returns a component as its name and fields, several with a plus, nothing as `none`."""
    if isinstance(plain, dict):
        fields = ",".join(f"{key}={value}" for key, value in plain.items() if key != "name")
        name = str(plain.get("name", "?"))
        return f"{name}:{fields}" if fields else name
    if isinstance(plain, list):
        return " + ".join(map(write_briefly, plain)) or "none"
    return str(plain)


class FittedAttack(Attack):
    """What was learnt for one setting: good for that one only."""

    @property
    def passes(self) -> int:
        return READING_PASSES

    @property
    @abstractmethod
    def summary(self) -> str:
        """A sentence on how it learnt: how long, how fast, how well on texts held out."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Writes all that is needed to go on, whole or not at all."""


class TrainableAttack(Attack):
    """An attack that has to be fitted to a setting before it can guess."""

    weights: str | None  # the file of a fit to use instead of learning anew

    @property
    def passes(self) -> int:
        return READING_PASSES

    @abstractmethod
    def fit(self, setting: ClientSetting, public: Sequence[Example], bench: Bench) -> FittedAttack:
        """Learns from clients it plays itself on public data. Nothing of the secrets is at hand.

        With `bench.checkpoint`, what was learnt so far is kept there now and then, and found again.
        """

    def describe_learning(self) -> dict[str, Any]:
        """Returns the fields that decide what is learnt, as plain values.

        Attacks that have them in common share a fit.
        """
        return to_dict(self)

    @abstractmethod
    def load(self, path: Path, setting: ClientSetting) -> FittedAttack:
        """Returns a saved fit; one of another setting is refused, by what differs."""

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        raise GradleakError(
            f"{self.name} has learnt nothing yet: call fit first, as an audit does."
        )
