"""What all inversions of text share: how an inverter is made, trained, kept and found again."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradleak.attacks.learning_to_invert.features import Largest, only_largest
from gradleak.attacks.learning_to_invert.saved import load_fit
from gradleak.attacks.learning_to_invert.texts import Corpus, Source
from gradleak.core.attack import Bench
from gradleak.core.batch import Example
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact
from gradleak.core.specs import to_dict
from gradleak.core.target import Target
from gradleak.core.trainable import FittedAttack, Setting, TrainableAttack, refuse_other_setting

PAPER = "Wu, Chen, Guo & Weinberger, Learning to Invert, UAI 2023"
AFTERWARDS = ("weights", "prior_weight", "beams", "candidates")  # fields that matter only after the fit


@dataclass(frozen=True)
class TextInversion(TrainableAttack):
    """Abstract: a subclass says what the attacker's own clients hold."""

    steps: int = 600  # for small targets; the paper's 20 epochs of 180,000 blocks are 56,000
    epochs: int | None = None  # of the public texts; takes the place of steps
    training_batch: int = 64  # clients in a step; learning rates that are tried grow with its root
    learning_rate: float | None = None  # none: the best of three after probe_steps
    probe_steps: int = 30
    decay: float = 0.5  # the last share of the steps, over which the rate falls to nothing; the paper's is constant (0)
    features: Literal["hashed", "factors"] = "hashed"
    fraction: float = 0.1  # bins, of the entries that are seen
    signed: bool = False  # entries get random signs before they are summed
    hashing_seed: int = 0
    largest: Largest = "signs"  # what is hashed of entries where only the largest are sent; the paper takes their sizes
    first_width: int = 600
    token_width: int = 1000
    words: Literal["learned", "known"] = "learned"  # the table that states are read by: known is the target's own
    length: int | None = None  # tokens of a text; none: of the longest public one, at most 64
    prior_weight: float = 0.0  # of the prior's log-likelihood beside the inverter's when words are read; 0: the inverter alone
    beams: int = 8  # sentences kept on the way, and
    candidates: int = 16  # words tried at each place, where the prior is asked
    precision: Literal["float32", "tf32", "bfloat16"] = "tf32"  # of the inverter's products on a GPU, never of gradients
    weights: str | None = None  # a fit that was saved, instead of a new one

    cites = PAPER

    def __post_init__(self) -> None:
        counted = ("steps", "training_batch", "probe_steps", "first_width", "token_width", "beams", "candidates")
        for name in counted:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} counts from 1, not {getattr(self, name)}.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {self.fraction}.")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must lie between 0 and 1, not {self.decay}.")
        if self.prior_weight < 0:
            raise ValueError(f"prior_weight must not be negative, not {self.prior_weight}.")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0, not {self.learning_rate}.")

    @abstractmethod
    def source(self, target: Target, corpus: Corpus) -> Source:
        """What the attacker's own clients draw their texts from."""

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset({Fact.BATCH_SIZE})

    def adapts_to(self, channel: Channel) -> bool:
        return True  # it learnt from updates that went through the same defense

    def before(self, channel: Channel) -> Mapping[str, Any]:
        return {"largest": "sizes"} if only_largest(channel) else {}

    def fit(self, setting: Setting, public: Sequence[Example], bench: Bench) -> FittedAttack:
        from gradleak.attacks.learning_to_invert.fitting import Fitting  # which needs these fields

        return Fitting(self, setting, public, bench).run()

    def load(self, path: Path, setting: Setting) -> FittedAttack:
        from gradleak.attacks.learning_to_invert.fitted import FittedTextInverter

        tensors, facts = load_fit(path)
        refuse_other_setting(f"{self.name} ({path})", facts["setting"], setting)
        if facts["attack"] != self.learnt():
            raise GradleakError(
                f"{path} holds another {self.name} than this one: {facts['attack']}. Write the same fields, or fit again."
            )
        return FittedTextInverter.from_tensors(self, setting, tensors, facts)

    def learnt(self) -> dict[str, Any]:
        """The fields that decide what is learnt."""
        return {name: value for name, value in to_dict(self).items() if name not in AFTERWARDS}
