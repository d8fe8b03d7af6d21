"""Pictures in scores and records."""

import torch

from gradleak.core.attack import Reconstruction
from gradleak.core.batch import PrivateBatch
from gradleak.core.metric import Content, Pair
from gradleak.core.picture import Picture
from gradleak.core.pixels import picture_of, pixels_of
from gradleak.metrics.alignment import nearest_pictures
from gradleak.records.png import Pixels, data_uri, from_data_uri


def picture_pairs(private: PrivateBatch, guess: Reconstruction) -> list[Pair]:
    """Secrets of one batch with the guesses nearest to them; what was not guessed counts as
    grey."""
    secrets = [one.content for one in private.examples if isinstance(one.content, Picture)]
    grey = [picture_of(torch.full_like(pixels_of(secret), 0.5)) for secret in secrets]
    guesses = [*guess.pictures, *grey][: len(secrets)]
    values = [
        torch.stack([pixels_of(picture) for picture in pictures]) for pictures in (secrets, guesses)
    ]
    order = nearest_pictures(values[0], values[1])
    return [Pair(secret, guesses[chosen]) for secret, chosen in zip(secrets, order, strict=True)]


def from_record(guess: str) -> Picture:
    """Returns the picture that a record holds as such text."""
    found = from_data_uri(guess)
    return Picture(found.shape, found.data)


def shown(content: str | Content) -> str:
    """Returns a text as it reads, or a picture as text that browsers draw."""
    if isinstance(content, Picture):
        return data_uri(Pixels(content.shape, content.pixels))
    return content if isinstance(content, str) else content.text
