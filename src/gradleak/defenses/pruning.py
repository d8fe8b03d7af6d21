"""Magnitude pruning: small entries are not sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update
from gradleak.defenses.magnitude import keep_largest, refuse_fraction, survivors_seen


@register("defense", "pruning")
@dataclass(frozen=True)
class Pruning(Defense):
    """Sends only the largest entries and zero for the others, chosen in each tensor or over the
    whole update."""

    fraction_kept: float = 0.01  # 99 % pruned
    scope: Literal["tensor", "update"] = "tensor"
    cites = "Aji & Heafield, EMNLP 2017; Zhu et al., NeurIPS 2019"

    def __post_init__(self) -> None:
        refuse_fraction(self.fraction_kept)

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return keep_largest(update, self.fraction_kept, together=self.scope == "update")

    def channel(self) -> Channel:
        return survivors_seen(self.fraction_kept)
