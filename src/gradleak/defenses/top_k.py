"""Top-k: of the whole update only the largest entries are sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update
from gradleak.defenses.pruning import keep_largest, refuse_fraction, survivors_seen


@register("defense", "top_k")
@dataclass(frozen=True)
class TopK(Defense):
    """Sends the k largest entries of the whole update, k a share of all: `pruning` with
    scope=update, under its usual name."""

    fraction_kept: float = 0.1
    cites = "Aji & Heafield, EMNLP 2017; Stich et al., NeurIPS 2018"

    def __post_init__(self) -> None:
        refuse_fraction(self.fraction_kept)

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return keep_largest(update, self.fraction_kept, together=True)

    def channel(self) -> Channel:
        return survivors_seen(self.fraction_kept)
