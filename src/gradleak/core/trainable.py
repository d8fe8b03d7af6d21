"""Attacks that learn first, from data of their own."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.batch import Example
from gradleak.core.defense import Defense
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation, View
from gradleak.core.protocol import Protocol
from gradleak.core.specs import to_dict
from gradleak.core.target import Target, TargetSpec

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
