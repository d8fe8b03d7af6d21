"""What can be guessed without the update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.defense import Channel
from gradleak.core.observation import Observation
from gradleak.core.pixels import picture_of
from gradleak.core.registry import Medium, register


@register("attack", "blind")
@dataclass(frozen=True)
class Blind(Attack):
    """The prior's likeliest sentence at the known length, or picture: no look at the gradient. Others are judged against it."""

    medium: ClassVar[Medium] = "any"

    @property
    def passes(self) -> int:
        return 1

    def adapts_to(self, channel: Channel) -> bool:
        return True  # there is nothing it looks at

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        return [self._guess(observation, bench) for observation in observations]

    def _guess(self, observation: Observation, bench: Bench) -> Reconstruction:
        size = observation.knows.batch_size or 1
        if bench.pictures is not None:
            return Reconstruction(sentences=(), pictures=(picture_of(bench.pictures.likely()),) * size)
        lengths = observation.knows.lengths or (bench.prior.likely_length(),) * size
        streams = bench.streams_of(observation)
        return Reconstruction(
            sentences=tuple(
                tuple(bench.prior.likely(length, streams.child("blind", place))) for place, length in enumerate(lengths)
            )
        )
