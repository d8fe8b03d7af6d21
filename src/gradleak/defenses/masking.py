"""Random masking: entries are set to zero by chance."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradleak.core.defense import Channel, Defense, Survivors
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update


@register("defense", "masking")
@dataclass(frozen=True)
class Masking(Defense):
    """Sets each entry to zero with a probability, the others stay as they are (LAMP's "zeroed
    %")."""

    fraction_zeroed: float = 0.9
    cites = "LAMP Table 8"

    def __post_init__(self) -> None:
        if not 0 <= self.fraction_zeroed < 1:
            raise ValueError(
                f"fraction_zeroed must be at least 0 and under 1, not {self.fraction_zeroed}."
            )

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        generators = [rng.generator() for rng in rngs]
        masked = {}
        for name, tensor in update.tensors.items():
            drawn = torch.stack(
                [torch.rand(tensor.shape[1:], generator=generator) for generator in generators]
            )
            masked[name] = tensor * (drawn >= self.fraction_zeroed).to(tensor.device)
        return Update(masked, update.per_example)

    def channel(self) -> Channel:
        on = self.fraction_zeroed > 0
        return Channel(survivors=Survivors.SEEN if on else Survivors.ALL, randomised=on)
