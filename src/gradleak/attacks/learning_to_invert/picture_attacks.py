"""The attacks on pictures: a perceptron from the update to the pixels.

It learns from gradients that went through the same defense as those it will read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from gradleak.attacks.learning_to_invert.features import (
    Features,
    HashedFeatures,
    Largest,
    WholeFeatures,
)
from gradleak.attacks.learning_to_invert.inversion import PAPER, Inversion
from gradleak.attacks.learning_to_invert.medium import Lessons, split
from gradleak.attacks.learning_to_invert.picture_lessons import (
    ChangedPictures,
    PublicPictures,
    read_pictures,
)
from gradleak.attacks.learning_to_invert.picture_network import PictureNetwork
from gradleak.attacks.learning_to_invert.training import Precision
from gradleak.core.batch import Example
from gradleak.core.registry import Bounds, Count, Medium, Rate, Share, register
from gradleak.core.target import Target
from gradleak.core.trainable import ClientSetting

MEASURED = 2048  # clients by which features are scaled, at least
AT_ONCE = 512  # of these and of held-out ones


@dataclass(frozen=True)
class PictureInversion(Inversion):
    """Abstract: a subclass says how much of its paper it keeps to."""

    steps: Count = 600  # for small targets; the paper's 200 epochs of 50,000 pictures are 39,000
    epochs: Rate | None = None  # of the public pictures; takes the place of steps
    training_batch: Count = 256  # clients in a step; rates that are tried grow with its root
    # None: the best of three after probe_epochs; the paper's is 1e-4.
    learning_rate: Rate | None = None
    probe_epochs: Rate = 2.0  # of the public pictures, at each rate that is tried
    decay: Share = 0.5  # the last share of the steps, over which the rate falls to nothing
    drops: bool = False  # the rate is a tenth there instead, as the paper's after three quarters
    # Of the features, the strongest, decorrelated; none: all features, scaled only.
    directions: Count | None = 2000
    raw: bool = False  # all features as they come, neither decorrelated nor scaled, as the paper's
    bounded: bool = False  # a sigmoid after the last layer, as the paper's
    width: Count = 3000
    hidden_layers: Count = 2  # the paper's three layers are two hidden ones and the pixels
    # The share of the attacker's pictures under random labels, so that all labels are learnt.
    relabelled: Share = 0.0
    # More to learn from than the paper has: half of the attacker's pictures are mirrored, and
    # each is moved by up to so many pixels.
    mirrored: bool = False
    shifted: int = 0
    # Of the guess's total variation beside its squared error (the paper's section 5).
    variation_weight: float = 0.0
    # Of the entries that are seen, as bins they are summed in; 1: as they are.
    fraction: Annotated[float, Bounds(most=1, above=True)] = 1.0
    signed: bool = False  # hashed entries get random signs before they are summed
    hashing_seed: int = 0
    # What is read of entries where only the largest are sent: sizes, as the paper does, or signs.
    largest: Largest = "sizes"
    precision: Precision = "tf32"  # of the inverter's products on a GPU, never of gradients
    weights: str | None = None  # a fit that was saved, instead of a new one

    medium: ClassVar[Medium] = "image"
    cites = f"{PAPER}, section 4.1"
    noun = "pictures"
    rates = (1e-3, 3e-4, 1e-4)  # the last is the paper's, for its batches
    batch_of_rates = 256

    def __post_init__(self) -> None:
        if self.raw and self.directions is not None:
            raise ValueError(
                "raw features are not turned to directions: write directions=null beside raw=true."
            )

    @property
    def clients_at_once(self) -> int:
        return AT_ONCE

    @property
    def clients_measured(self) -> int:
        return max(MEASURED, 2 * (self.directions or 0))  # of fewer clients directions are guesses

    def make_source(self, target: Target, gallery: PublicPictures) -> ChangedPictures:
        """Returns what the attacker's own clients draw their pictures from."""
        return ChangedPictures(
            gallery, target.classes, self.relabelled, self.mirrored, self.shifted
        )

    def make_lessons(self, setting: ClientSetting, public: Sequence[Example]) -> Lessons:
        gallery = read_pictures(setting.target, public)
        training, held_out = split(gallery, self.noun, fewest=2 * setting.batch_size + 1)
        source = self.make_source(setting.target, training)
        return Lessons(training, held_out, source, training.mean)

    def make_features(
        self, setting: ClientSetting, shape: Sequence[int], bases: Mapping[str, Tensor]
    ) -> Features:
        if self.fraction == 1:
            return WholeFeatures(setting, self.largest)
        return HashedFeatures(setting, self.fraction, self.hashing_seed, self.signed, self.largest)

    def make_network(
        self,
        setting: ClientSetting,
        features: Features,
        shape: Sequence[int],
        inverters: int = 1,
    ) -> PictureNetwork:
        return PictureNetwork(
            features.size,
            None if self.directions is None else min(self.directions, features.size),
            [self.width] * self.hidden_layers,
            shape,
            setting.batch_size,
            setting.target.classes,
            raw=self.raw,
            bounded=self.bounded,
            variation_weight=self.variation_weight,
            inverters=inverters,
        )

    def describe_score(self, facts: dict[str, Any]) -> str:
        return (
            f"the squared error is {facts['held_out_error']:.4f} "
            f"and {100 * facts['held_out_right']:.1f} % of the labels are right"
        )


@register("attack", "lti_pictures")
@dataclass(frozen=True)
class LtiPictures(PictureInversion):
    """Learns to invert from public pictures: a perceptron from the update to the pixels (LTI).

    It is trained on updates that went through the defense.
    """


@register("attack", "lti_pictures_paper")
@dataclass(frozen=True)
class LtiPicturesPaper(PictureInversion):
    """As lti_pictures, just as in its paper: the raw gradient, a sigmoid, 200 epochs at 1e-4."""

    epochs: Rate | None = 200.0
    learning_rate: Rate | None = 1e-4
    decay: Share = 0.25  # after 150 of 200 epochs
    drops: bool = True
    directions: Count | None = None
    raw: bool = True
    bounded: bool = True
