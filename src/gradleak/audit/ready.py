"""What stands ready before anything is attacked: the model and the prior, opened, and attacks
that learn, fitted.

Fits are kept on disk and shared by audits of one setting.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gradleak.audit.client import private_examples
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import (
    Attack,
    Bench,
    ClientSetting,
    Display,
    FittedAttack,
    TrainableAttack,
)
from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact
from gradleak.core.prior import AnyPrior
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.records.schema import spec_id


@dataclass(frozen=True, eq=False)
class Opened:
    """The model of an audit and its prior, which is of what the model reads."""

    target: Target
    prior: AnyPrior


def open_target(spec: AuditSpec, device: str) -> Target:
    """Opens the model of an audit, in the audit's precision."""
    return spec.target.open(torch.device(device), getattr(torch, spec.dtype))


def open_prior(spec: AuditSpec, target: Target) -> Opened:
    """Opens the prior of an audit for its opened model."""
    return Opened(target, spec.prior.open(target))


def open_all(spec: AuditSpec, device: str, display: Display) -> Opened:
    """Opens the model and the prior of an audit, and says so first: it may take long."""
    display.say(f"Opening {to_string(spec.target)} on {device}")
    return open_prior(spec, open_target(spec, device))


class Fits:
    """Fits of one audit, each made when it is first asked for."""

    def __init__(
        self,
        spec: AuditSpec,
        opened: Opened,
        out: Path | None,
        display: Display,
        memory: int | None = None,
    ) -> None:
        self.spec, self.opened, self.out = spec, opened, out
        self.display, self.memory = display, memory  # in bytes: what the process may hold
        self.made: dict[str, FittedAttack] = {}
        self.public: list[Example] | None = None

    def ready(self, key: str, attack: Attack) -> Attack:
        """Returns the attack as it can guess: itself, or what it learnt."""
        if not isinstance(attack, TrainableAttack):
            return attack
        if key not in self.made:
            self.made[key] = self._find_or_make(key, attack)
        return self.made[key]

    def _find_or_make(self, key: str, attack: TrainableAttack) -> FittedAttack:
        spec = self.spec
        defenses = spec.defenses if Fact.DEFENSE in spec.granted else ()
        setting = ClientSetting(
            spec.target, self.opened.target, spec.protocol, defenses, spec.view, spec.batch_size
        )
        if attack.weights is not None:
            return attack.load(Path(attack.weights), setting)
        if self.public is None:
            self.public = public_examples(spec)
        name = f"{self._identify(attack, setting)}.safetensors"
        path = None if self.out is None else self.out / "fits" / name
        if path is not None and path.is_file():
            self.display.say(f"{key} was fitted before: {path}")
            return attack.load(path, setting)
        bench = Bench(
            Streams.root("attacker", spec.seed),
            self.opened.prior,
            checkpoint=None if path is None else path.with_suffix(".checkpoint"),
            memory=self.memory,
        )
        news = f"{key} learns from {len(self.public)} public examples"
        with self.display.watch(news, bench.progress):
            fitted = attack.fit(setting, self.public, bench)
        self.display.say(f"{key} {fitted.summary}")
        if path is not None:
            fitted.save(path)
            # The checkpoint and what lies beside it have served; another process may be writing.
            for left in path.parent.glob(f"{path.stem}.*"):
                if left.suffix not in (path.suffix, ".tmp"):
                    left.unlink(missing_ok=True)
        return fitted

    def _identify(self, attack: TrainableAttack, setting: ClientSetting) -> str:
        """Returns the id of a fit: the same for whatever would learn the same."""
        texts = "\n".join(f"{example.label}\t{example.as_text}" for example in self.public or ())
        return spec_id(
            {
                "attack": attack.describe_learning(),
                "setting": setting.describe(),
                "public": hashlib.sha256(texts.encode()).hexdigest(),
                "seed": self.spec.seed,
                "dtype": self.spec.dtype,
            }
        )


def public_examples(spec: AuditSpec, private: Sequence[Example] | None = None) -> list[Example]:
    """Returns what an attacker may learn from, never a text that is a secret.

    It is the data named for it, or what the audited data offers.
    """
    source = spec.public or spec.data.public() or spec.data
    secrets = private_examples(spec) if private is None else private
    known = {simplify(example.as_text) for example in secrets}
    found = [example for example in source.load() if simplify(example.as_text) not in known]
    if not found:
        raise GradleakError(
            f"Nothing of {to_string(source)} is left to learn from once the secrets are taken out:"
            " add --public with other data."
        )
    return found


def simplify(text: str) -> str:
    """Returns the text without case and spacing, which make no difference to most models."""
    return " ".join(text.casefold().split())
