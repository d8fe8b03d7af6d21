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
from gradleak.core.observation import Observation
from gradleak.core.protocol import Protocol
from gradleak.core.specs import to_dict
from gradleak.core.target import Target, TargetSpec
from gradleak.core.view import View

READING = 10  # passes that take about as long as an inverter's answer, once it has learnt


@dataclass(frozen=True, eq=False)
class Setting:
    """What an attacker knows of clients before any of them has sent anything; enough to play one."""

    spec: TargetSpec
    target: Target  # the same, opened
    protocol: Protocol
    defenses: tuple[Defense, ...]  # as far as they are known
    view: View
    batch_size: int = 1

    def described(self) -> dict[str, Any]:
        """Plain values: what a fit belongs to."""
        return {
            "target": to_dict(self.spec),
            "weights": self.spec.fingerprint(),
            "protocol": to_dict(self.protocol),
            "defenses": [to_dict(defense) for defense in self.defenses],
            "view": to_dict(self.view),
            "batch_size": self.batch_size,
        }


class FittedAttack(Attack):
    """What was learnt for one setting: good for that one only."""

    @property
    def passes(self) -> int:
        return READING

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
        return READING

    @abstractmethod
    def fit(self, setting: Setting, public: Sequence[Example], bench: Bench) -> FittedAttack:
        """Learns from clients it plays itself on public data. Nothing of the secrets is at hand here.

        With `bench.checkpoint`, what was learnt so far is kept there now and then, and found again.
        """

    def learnt(self) -> dict[str, Any]:
        """The fields that decide what is learnt, as plain values; fits are shared by attacks that have them in common."""
        return to_dict(self)

    @abstractmethod
    def load(self, path: Path, setting: Setting) -> FittedAttack:
        """A fit that was saved; refused, by what differs, where it belongs to another setting."""

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        raise GradleakError(f"{self.name} has learnt nothing yet: call fit first, as an audit does.")


def refuse_other_setting(name: str, learnt: dict[str, Any], setting: Setting) -> None:
    """Refuses what was learnt elsewhere, by the first thing that differs."""
    for part, here in setting.described().items():
        if learnt.get(part) != here:
            raise GradleakError(
                f"This {name} was fitted to another {part.removesuffix('s')}: {_brief(learnt.get(part))}, "
                f"and here it is {_brief(here)}. Fit it anew."
            )


def _brief(plain: Any) -> str:
    """A component as its name and fields, several with commas, nothing as `none`."""
    if isinstance(plain, dict):
        fields = ",".join(f"{key}={value}" for key, value in plain.items() if key != "name")
        return f"{plain.get('name', '?')}:{fields}" if fields else str(plain.get("name", "?"))
    if isinstance(plain, list):
        return " + ".join(map(_brief, plain)) or "none"
    return str(plain)
