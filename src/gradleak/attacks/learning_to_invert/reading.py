"""What inverters of texts and of pictures have in common once they have learnt: they read updates of one setting."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.belonging import refuse_another
from gradleak.attacks.learning_to_invert.features import Features
from gradleak.core.attack import Bench, Cost, Reconstruction
from gradleak.core.defense import Channel
from gradleak.core.observation import Fact, Observation
from gradleak.core.trainable import FittedAttack, Setting, TrainableAttack
from gradleak.core.update import Update

CLIENTS_AT_ONCE = 64


class FittedInverter(FittedAttack):
    """Reads updates of one setting in a single pass."""

    attack: TrainableAttack
    model: nn.Module

    def __init__(self, setting: Setting, features: Features, facts: dict[str, Any]) -> None:
        self.setting, self.features, self.facts = setting, features, facts
        self.unpaid = float(facts["seconds"])  # learning is a part of what an attack takes: the first guesses carry it

    @property
    def requires(self) -> frozenset[Fact]:
        return self.attack.requires

    def adapts_to(self, channel: Channel) -> bool:
        return self.attack.adapts_to(channel)

    @torch.no_grad()
    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        found: list[Reconstruction] = []
        for start in range(0, len(observations), CLIENTS_AT_ONCE):
            began = time.monotonic()
            some = observations[start : start + CLIENTS_AT_ONCE]
            for observation in some:
                refuse_another(self.attack.name, self.setting, observation)
            names = some[0].update.tensors
            guesses = self.read(self.features(Update({name: _joined(some, name) for name in names})), bench)
            cost = Cost((time.monotonic() - began + self.unpaid) / len(some), 1)
            self.unpaid = 0.0
            found += [replace(guess, cost=cost) for guess in guesses]
            bench.progress.report(len(found), len(observations))
        return found

    @abstractmethod
    def read(self, features: Tensor, bench: Bench) -> list[Reconstruction]:
        """A guess at every client's data, from the features of its update."""


def _joined(observations: Sequence[Observation], name: str) -> Tensor:
    return torch.cat([one.update.tensors[name] for one in observations])
