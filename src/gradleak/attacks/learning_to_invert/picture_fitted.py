"""An inverter of pictures that has learnt."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradleak.attacks.learning_to_invert.belonging import refuse_another
from gradleak.attacks.learning_to_invert.features import Features, HashedFeatures, WholeFeatures
from gradleak.attacks.learning_to_invert.picture_inverter import PictureInverter
from gradleak.attacks.learning_to_invert.saved import save_fit
from gradleak.core.attack import Bench, Cost, Reconstruction
from gradleak.core.defense import Channel
from gradleak.core.observation import Fact, Observation
from gradleak.core.pixels import picture_of
from gradleak.core.trainable import FittedAttack, Setting
from gradleak.core.update import Update

if TYPE_CHECKING:
    from gradleak.attacks.learning_to_invert.picture_attack import LtiPictures

CLIENTS_AT_ONCE = 64


def features_of(attack: "LtiPictures", setting: Setting) -> Features:
    """All entries as they are, or hashed to a fraction of them."""
    if attack.fraction == 1:
        return WholeFeatures(setting)
    return HashedFeatures(setting, attack.fraction, attack.hashing_seed, attack.signed)


def new_inverter(
    attack: "LtiPictures", setting: Setting, features: int, mean: Tensor, seed: int, inverters: int = 1
) -> PictureInverter:
    """An inverter that has learnt nothing, or several; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = [attack.width] * attack.hidden_layers
        directions = None if attack.directions is None else min(attack.directions, features)
        slots, classes = setting.batch_size, setting.target.classes
        model = PictureInverter(inverters, features, directions, widths, mean.cpu(), slots, classes)
    return model.to(setting.target.device)


class FittedPictureInverter(FittedAttack):
    """Reads updates of one setting in a single pass."""

    def __init__(
        self, attack: "LtiPictures", setting: Setting, features: Features, model: PictureInverter, facts: dict[str, Any]
    ) -> None:
        self.attack, self.setting, self.features, self.model, self.facts = attack, setting, features, model.eval(), facts
        self.unpaid = float(facts["seconds"])  # learning is a part of what an attack takes: the first guesses carry it

    @property
    def requires(self) -> frozenset[Fact]:
        return self.attack.requires

    def adapts_to(self, channel: Channel) -> bool:
        return self.attack.adapts_to(channel)

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

    @torch.no_grad()
    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        found: list[Reconstruction] = []
        for start in range(0, len(observations), CLIENTS_AT_ONCE):
            began = time.monotonic()
            some = observations[start : start + CLIENTS_AT_ONCE]
            pixels, labels = self._read(some)
            pictures = [tuple(picture_of(one) for one in client) for client in pixels.cpu()]
            cost = Cost((time.monotonic() - began + self.unpaid) / len(some), 1)
            self.unpaid = 0.0
            for guess, classes in zip(pictures, labels.tolist(), strict=True):
                found.append(Reconstruction((), labels=tuple(classes), cost=cost, pictures=guess))
            bench.progress.report(len(found), len(observations))
        return found

    def _read(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        """Pictures and labels of every client."""
        for observation in observations:
            refuse_another(self.attack.name, self.setting, observation)
        names = observations[0].update.tensors
        update = Update({name: torch.cat([one.update.tensors[name] for one in observations]) for name in names})
        pixels, scores = self.model(self.features(update)[None])
        return pixels[0], scores[0].argmax(-1)
