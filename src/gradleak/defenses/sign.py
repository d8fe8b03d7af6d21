"""Sign compression: one bit an entry."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update


@register("defense", "sign")
@dataclass(frozen=True)
class Sign(Defense):
    """Sends the sign of every entry: 1, -1, or 0 where it is exactly zero (signSGD)."""

    cites = "Bernstein et al., ICML 2018"

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return update.map(torch.sign)

    def channel(self) -> Channel:
        return Channel(signs_only=True)
