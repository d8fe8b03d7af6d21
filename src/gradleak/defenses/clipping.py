"""Clipping: an update that is too large is scaled down."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import Bounds, register
from gradleak.core.streams import Streams
from gradleak.core.update import Update


@register("defense", "clipping")
@dataclass(frozen=True)
class Clipping(Defense):
    """Scales an update down to a largest norm over all its tensors. Directions stay: by itself
    it hides nothing but the size."""

    # The largest norm; inf: no clipping
    clip: Annotated[float, Bounds(above=True, infinite=True)] = 1.0

    def __post_init__(self) -> None:
        refuse_clip(self.clip)

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return clip_update(update, self.clip)

    def channel(self) -> Channel:
        return Channel(clip=finite(self.clip))


def clip_update(update: Update, clip: float) -> Update:
    """Every client's update (every example's, if per example) scaled down to a norm of at most
    that."""
    return update.scale((clip / update.whole_norms()).clamp(max=1.0))


def finite(clip: float) -> float | None:
    """The norm, or none where nothing is clipped."""
    return None if clip == float("inf") else clip


def refuse_clip(clip: float) -> None:
    if not clip > 0:
        raise ValueError(f"clip must be above 0, not {clip}.")
