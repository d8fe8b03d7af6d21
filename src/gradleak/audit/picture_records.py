"""Pictures in scores and records."""

import torch

from gradleak.core.attack import Reconstruction
from gradleak.core.batch import Example, PrivateBatch, picture_of, pixels_of
from gradleak.core.metric import Pair, Sentence
from gradleak.core.picture import Picture
from gradleak.metrics.alignment import nearest_pictures
from gradleak.records.png import Pixels, data_uri, from_data_uri


def picture_pairs(private: PrivateBatch, guess: Reconstruction) -> list[Pair]:
    """Secrets of one batch with the guesses nearest to them; what was not guessed counts as
    grey."""
    secrets = [example.picture for example in private.examples if example.picture is not None]
    grey = [picture_of(torch.full_like(pixels_of(secret), 0.5)) for secret in secrets]
    guesses = [*guess.pictures, *grey][: len(secrets)]
    values = [
        torch.stack([pixels_of(picture) for picture in pictures]) for pictures in (secrets, guesses)
    ]
    order = nearest_pictures(values[0], values[1])
    return [
        Pair(_seen(secret), _seen(guesses[chosen]))
        for secret, chosen in zip(secrets, order, strict=True)
    ]


def as_data_uri(picture: Picture) -> str:
    """The picture as text that browsers draw."""
    return data_uri(Pixels(picture.shape, picture.pixels))


def from_record(guess: str) -> Sentence:
    """A guess that a record holds as such text, as metrics see it."""
    found = from_data_uri(guess)
    return _seen(Picture(found.shape, found.data))


def shown(example: Example) -> str:
    """A private example as a record keeps it where it may."""
    return example.text if example.picture is None else as_data_uri(example.picture)


def _seen(picture: Picture) -> Sentence:
    return Sentence(text="", legacy="", ids=(), picture=picture)
