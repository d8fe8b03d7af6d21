"""The attack on pictures: an MLP from the update to the pixels, trained on defended gradients of public pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gradleak.attacks.learning_to_invert.features import Largest
from gradleak.attacks.learning_to_invert.inversion import PAPER
from gradleak.attacks.learning_to_invert.picture_fitted import FittedPictureInverter
from gradleak.attacks.learning_to_invert.picture_fitting import PictureFitting
from gradleak.attacks.learning_to_invert.pictures import Changes
from gradleak.attacks.learning_to_invert.precision import Precision
from gradleak.attacks.learning_to_invert.saved import load_fit
from gradleak.core.attack import Bench
from gradleak.core.batch import Example
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact
from gradleak.core.registry import Medium, register
from gradleak.core.specs import to_dict
from gradleak.core.target import Target
from gradleak.core.trainable import FittedAttack, Setting, TrainableAttack, refuse_other_setting


@register("attack", "lti_pictures")
@dataclass(frozen=True)
class LtiPictures(TrainableAttack):
    """Learns to invert from public pictures: an MLP from the update to the pixels, trained through the defense (LTI)."""

    medium: ClassVar[Medium] = "image"
    cites = f"{PAPER}, section 4.1"

    steps: int = 600  # for small targets; the paper's 200 epochs of 50,000 pictures are 39,000
    epochs: float | None = None  # of the public pictures; takes the place of steps
    training_batch: int = 256  # clients in a step; learning rates that are tried grow with its root
    learning_rate: float | None = None  # none: the best of three after probe_epochs; the paper's is 1e-4
    probe_epochs: float = 2.0  # of the public pictures, at each rate that is tried
    decay: float = 0.5  # the last share of the steps, over which the rate falls to nothing
    drops: bool = False  # the rate is a tenth in the last steps instead, as the paper's after three quarters
    directions: int | None = 2000  # of the features, the strongest, decorrelated; none: all features, scaled only
    raw: bool = False  # all features as they come, neither decorrelated nor scaled, as the paper's
    bounded: bool = False  # a sigmoid after the last layer, as the paper's
    width: int = 3000
    hidden_layers: int = 2  # the paper's three layers are two hidden ones and the pixels
    relabelled: float = 0.0  # the share of the attacker's pictures under random labels, so that all labels' gradients are learnt
    mirrored: bool = False  # half of the attacker's pictures stand left to right: more to learn from than the paper has
    shifted: int = 0  # pixels by which the attacker's pictures are moved at most, each by its own: more to learn from, likewise
    variation_weight: float = 0.0  # of the guess's total variation beside its squared error (the paper's section 5)
    fraction: float = 1.0  # of the entries that are seen, as bins they are summed in; 1: as they are
    signed: bool = False  # hashed entries get random signs before they are summed
    hashing_seed: int = 0
    largest: Largest = "sizes"  # what is read of entries where only the largest are sent: sizes, as the paper does, or signs
    precision: Precision = "tf32"  # of the inverter's products on a GPU, never of gradients
    weights: str | None = None  # a fit that was saved, instead of a new one

    def __post_init__(self) -> None:
        for name in ("steps", "training_batch", "directions", "width", "hidden_layers"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} counts from 1, not {getattr(self, name)}.")
        for name in ("epochs", "learning_rate", "probe_epochs"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {self.fraction}.")
        for name in ("decay", "relabelled"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)}.")
        if self.raw and self.directions is not None:
            raise ValueError("raw features are not turned to directions: write directions=null beside raw=true.")
        if self.shifted < 0:
            raise ValueError(f"shifted must not be negative, not {self.shifted}.")
        if self.variation_weight < 0:
            raise ValueError(f"variation_weight must not be negative, not {self.variation_weight}.")

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset({Fact.BATCH_SIZE})

    def adapts_to(self, channel: Channel) -> bool:
        return True  # it learnt from updates that went through the same defense

    def changes(self, target: Target) -> Changes:
        """What is done to public pictures before they are learnt from."""
        return Changes(target.classes, self.relabelled, self.mirrored, self.shifted)

    def fit(self, setting: Setting, public: Sequence[Example], bench: Bench) -> FittedAttack:
        return PictureFitting(self, setting, public, bench).run()

    def load(self, path: Path, setting: Setting) -> FittedAttack:
        tensors, facts = load_fit(path)
        refuse_other_setting(f"{self.name} ({path})", facts["setting"], setting)
        if facts["attack"] != self.learnt():
            raise GradleakError(
                f"{path} holds another {self.name} than this one: {facts['attack']}. Write the same fields, or fit again."
            )
        return FittedPictureInverter.from_tensors(self, setting, tensors, facts)

    def learnt(self) -> dict[str, Any]:
        """The fields that decide what is learnt."""
        return {name: value for name, value in to_dict(self).items() if name != "weights"}


@register("attack", "lti_pictures_paper")
@dataclass(frozen=True)
class LtiPicturesPaper(LtiPictures):
    """Learns to invert from public pictures as its paper does: the raw gradient, a final sigmoid, 200 epochs at 1e-4."""

    epochs: float | None = 200.0
    learning_rate: float | None = 1e-4
    decay: float = 0.25  # after 150 of 200 epochs
    drops: bool = True
    directions: int | None = None
    raw: bool = True
    bounded: bool = True
