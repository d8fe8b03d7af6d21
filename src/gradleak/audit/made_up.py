"""Batches that no client has, to try on an attack what it can do with an observation before it has run."""

import torch

from gradleak.attacks.blind import Blind
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.pixels import pixels_of


def make_up(observation: Observation, bench: Bench) -> Batch:
    """A batch of the blind guess, with the labels that are granted or else the first class: from public facts only."""
    (guess,) = Blind().reconstruct([observation], bench)
    target, labels = observation.target, observation.knows.labels
    count = len(guess.pictures) or len(guess.sentences)
    classes = torch.zeros(count, dtype=torch.int64) if labels is None or len(labels) != count else labels
    if guess.pictures:
        pixels = torch.stack([pixels_of(picture) for picture in guess.pictures])
        return Batch.of_pixels(pixels.to(target.device, target.dtype), classes.to(target.device))
    return target.batch_of(guess.sentences, None if target.labels_are_tokens else classes.tolist())
