"""What can be guessed without the update."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.batch import picture_of
from gradleak.core.defense import Channel
from gradleak.core.observation import Observation
from gradleak.core.prior import PicturePrior
from gradleak.core.registry import Medium, register
from gradleak.core.specs import to_string


@register("attack", "blind")
@dataclass(frozen=True)
class Blind(Attack):
    """The prior's likeliest sentence at the known length, or picture: no look at the gradient.
    Others are judged against it."""

    medium: ClassVar[Medium] = "any"
    wants_classes: ClassVar[bool] = False

    @property
    def passes(self) -> int:
        return 1

    def adapts_to(self, channel: Channel) -> bool:
        return True  # there is nothing it looks at

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        return [self._guess(observation, bench) for observation in observations]

    def _guess(self, observation: Observation, bench: Bench) -> Reconstruction:
        if isinstance(bench.prior, PicturePrior):
            return Reconstruction(
                sentences=(), pictures=(picture_of(bench.prior.likely()),) * _size(observation)
            )
        streams = bench.streams_of(observation)
        return Reconstruction(
            sentences=tuple(
                tuple(bench.words.likely(length, streams.child("blind", place)))
                for place, length in enumerate(_lengths(observation, bench))
            )
        )


def draw_beside(
    attack: Attack,
    observations: Sequence[Observation],
    bench: Bench,
) -> list[Reconstruction]:
    """Draws one more blind guess of each observation, by a stream that has the attack's name.

    The worst case over attacks is picked with the truth in hand. So that it is not above chance for
    the number of its attacks, it is held against as many blind guesses as there are attacks: the
    first attack brings the blind guess itself, every other one such a draw.
    """
    streams = [bench.streams_of(one).child("blind draw", to_string(attack)) for one in observations]
    prior = bench.prior
    if isinstance(prior, PicturePrior):
        return [
            Reconstruction(
                sentences=(),
                pictures=tuple(
                    picture_of(prior.draw(stream.child(place))) for place in range(_size(one))
                ),
            )
            for one, stream in zip(observations, streams, strict=True)
        ]
    lengths = [_lengths(one, bench) for one in observations]
    # All sentences in one call of the prior: most draw many as fast as one.
    drawn = bench.words.draw(
        [length for group in lengths for length in group],
        [
            stream.child(place)
            for stream, group in zip(streams, lengths, strict=True)
            for place in range(len(group))
        ],
    )
    sentences = iter(map(tuple, drawn))
    return [Reconstruction(tuple(itertools.islice(sentences, len(group)))) for group in lengths]


def _size(observation: Observation) -> int:
    return observation.knows.batch_size or 1


def _lengths(observation: Observation, bench: Bench) -> Sequence[int]:
    return observation.knows.lengths or (bench.words.likely_length(),) * _size(observation)
