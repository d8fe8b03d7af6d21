"""Attacks that learn are fitted here, before they see anything; fits are kept on disk and shared by audits of one setting."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from gradleak.audit.client import private_examples
from gradleak.audit.display import Display
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Attack, Bench, Progress
from gradleak.core.batch import Example
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact
from gradleak.core.prior import Prior
from gradleak.core.specs import to_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.trainable import FittedAttack, Setting, TrainableAttack
from gradleak.records.schema import spec_id


class Fits:
    """Fits of one audit, each made when it is first asked for."""

    def __init__(
        self,
        spec: AuditSpec,
        target: Target,
        prior: Prior,
        out: Path | None,
        display: Display,
        memory: int | None = None,
    ) -> None:
        self.spec, self.target, self.prior, self.out, self.display = spec, target, prior, out, display
        self.memory = memory  # bytes the process may hold
        self.made: dict[str, FittedAttack] = {}
        self.public: list[Example] | None = None

    def ready(self, key: str, attack: Attack) -> Attack:
        """The attack as it can guess: itself, or what it learnt."""
        if not isinstance(attack, TrainableAttack):
            return attack
        if key not in self.made:
            self.made[key] = self._fitted(key, attack)
        return self.made[key]

    def _fitted(self, key: str, attack: TrainableAttack) -> FittedAttack:
        setting = self._setting()
        if attack.weights is not None:
            return attack.load(Path(attack.weights), setting)
        if self.public is None:
            self.public = public_examples(self.spec)
        path = None if self.out is None else self.out / "fits" / f"{self._id(attack, setting)}.safetensors"
        if path is not None and path.is_file():
            self.display.say(f"{key} was fitted before: {path}")
            return attack.load(path, setting)
        progress = Progress()
        checkpoint = None if path is None else path.with_suffix(".checkpoint")
        bench = Bench(Streams.root("attacker", self.spec.seed), self.prior, progress, checkpoint=checkpoint, memory=self.memory)
        with self.display.watch(f"{key} learns from {len(self.public)} public examples", progress):
            fitted = attack.fit(setting, self.public, bench)
        self.display.say(f"{key} {fitted.summary}")
        if path is not None and checkpoint is not None:
            fitted.save(path)
            for left in path.parent.glob(f"{path.stem}.*"):  # the checkpoint and what lies beside it, but for files being written
                if left.suffix not in (path.suffix, ".tmp"):
                    left.unlink(missing_ok=True)
        return fitted

    def _setting(self) -> Setting:
        spec = self.spec
        defenses = spec.defenses if Fact.DEFENSE in spec.granted else ()
        return Setting(spec.target, self.target, spec.protocol, defenses, spec.view, spec.batch_size)

    def _id(self, attack: TrainableAttack, setting: Setting) -> str:
        texts = "\n".join(f"{example.label}\t{example.content}" for example in self.public or ())
        described = {
            "attack": attack.learnt(),
            "setting": setting.described(),
            "public": hashlib.sha256(texts.encode()).hexdigest(),
            "seed": self.spec.seed,
            "dtype": self.spec.dtype,
        }
        return spec_id(described)


def public_examples(spec: AuditSpec, private: Sequence[Example] | None = None) -> list[Example]:
    """What an attacker may learn from: the data named for it, or what the audited data offers, never a text that is a secret."""
    source = spec.public or spec.data.public() or spec.data
    secrets = {_bare(example.content) for example in (private_examples(spec) if private is None else private)}
    found = [example for example in source.load() if _bare(example.content) not in secrets]
    if not found:
        raise GradleakError(
            f"Nothing of {to_string(source)} is left to learn from once the secrets are taken out: add --public with other data."
        )
    return found


def _bare(text: str) -> str:
    """Case and spacing make no difference, as to most models."""
    return " ".join(text.casefold().split())
