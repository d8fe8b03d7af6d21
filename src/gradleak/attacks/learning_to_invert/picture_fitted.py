"""An inverter of pictures that has learnt."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradleak.attacks.learning_to_invert.features import Features, HashedFeatures, WholeFeatures
from gradleak.attacks.learning_to_invert.picture_inverter import PictureInverter
from gradleak.attacks.learning_to_invert.reading import FittedInverter
from gradleak.attacks.learning_to_invert.saved import save_fit
from gradleak.core.attack import Bench, Reconstruction
from gradleak.core.pixels import picture_of
from gradleak.core.trainable import Setting

if TYPE_CHECKING:
    from gradleak.attacks.learning_to_invert.picture_attack import LtiPictures


def features_of(attack: "LtiPictures", setting: Setting) -> Features:
    """All entries as they are, or hashed to a fraction of them."""
    if attack.fraction == 1:
        return WholeFeatures(setting, attack.largest)
    return HashedFeatures(setting, attack.fraction, attack.hashing_seed, attack.signed, attack.largest)


def new_inverter(
    attack: "LtiPictures", setting: Setting, features: int, mean: Tensor, seed: int, inverters: int = 1
) -> PictureInverter:
    """An inverter that has learnt nothing, or several; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = [attack.width] * attack.hidden_layers
        directions = None if attack.directions is None else min(attack.directions, features)
        slots, classes = setting.batch_size, setting.target.classes
        model = PictureInverter(
            inverters, features, directions, widths, mean.cpu(), slots, classes, raw=attack.raw, bounded=attack.bounded
        )
    return model.to(setting.target.device)


class FittedPictureInverter(FittedInverter):
    """Reads pictures and labels."""

    def __init__(
        self, attack: "LtiPictures", setting: Setting, features: Features, model: PictureInverter, facts: dict[str, Any]
    ) -> None:
        super().__init__(setting, features, facts)
        self.attack: LtiPictures = attack
        self.model: PictureInverter = model.eval()

    @property
    def summary(self) -> str:
        facts, clients = self.facts, self.facts["steps"] * self.attack.training_batch
        memory = "" if facts["peak_memory"] is None else f", peak memory {facts['peak_memory'] / 2**30:.1f} GiB"
        epochs = clients * self.setting.batch_size / facts["pictures"]
        return (
            f"learnt from {clients} clients in {facts['steps']} steps ({epochs:.1f} epochs of {facts['pictures']} public "
            f"pictures) and {facts['seconds']:.0f} s ({facts['clients_per_second']:.0f} clients a second{memory}), learning "
            f"rate {facts['rate']:.3g}; on {facts['held_out']} held-out pictures the squared error is "
            f"{facts['held_out_error']:.4f} and {100 * facts['held_out_labels']:.1f} % of the labels are right"
        )

    @staticmethod
    def from_tensors(
        attack: "LtiPictures", setting: Setting, tensors: dict[str, Tensor], facts: dict[str, Any]
    ) -> "FittedPictureInverter":
        features = features_of(attack, setting)
        model = new_inverter(attack, setting, features.size, torch.zeros(facts["shape"]), 0)
        model.load_state_dict(tensors)
        return FittedPictureInverter(attack, setting, features, model, facts)

    def save(self, path: Path) -> None:
        save_fit(path, dict(self.model.state_dict()), self.facts)

    def read(self, features: Tensor, bench: Bench) -> list[Reconstruction]:
        pixels, scores = self.model(features[None])
        labels = scores[0].argmax(-1).tolist()
        pictures = [tuple(picture_of(one) for one in client) for client in pixels[0].cpu()]
        return [
            Reconstruction((), labels=tuple(classes), pictures=guess) for guess, classes in zip(pictures, labels, strict=True)
        ]
