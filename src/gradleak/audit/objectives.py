"""What an attack minimises, at its guesses and at the truth: tells a search that failed from a defense that held."""

from collections.abc import Sequence

import torch

from gradleak.core.attack import Attack, Reconstruction
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.pixels import pixels_of
from gradleak.core.target import Target
from gradleak.metrics.alignment import nearest_pictures

Values = Sequence[float | None]


def objectives(
    attack: Attack, observations: Sequence[Observation], secrets: Sequence[Batch], found: Sequence[Reconstruction]
) -> tuple[Values, Values]:
    """At the guesses, and at the secrets; none of either where the attack has no objective."""
    at_truth = attack.objective(observations, secrets) if observations else None
    if at_truth is None:
        nothing = [None] * len(found)
        return nothing, nothing
    target = observations[0].target
    guesses = [_as_batch(target, guess, secret) for guess, secret in zip(found, secrets, strict=True)]
    at_guess = attack.objective(observations, guesses)
    assert at_guess is not None
    return at_guess.tolist(), at_truth.tolist()


def _as_batch(target: Target, guess: Reconstruction, secret: Batch) -> Batch:
    if secret.pixels is not None:
        return _as_pictures(guess, secret)
    order = beside_the_secret(guess, secret)
    sentences = [guess.sentences[place] for place in order]
    if target.labels_are_tokens:
        return target.batch_of(sentences, None)
    labels = secret.labels.tolist() if guess.labels is None else [guess.labels[place] for place in order]
    return target.batch_of(sentences, labels)


def _as_pictures(guess: Reconstruction, secret: Batch) -> Batch:
    """The guessed pictures, each beside the secret it is nearest to, and so beside its label."""
    assert secret.pixels is not None
    guessed = torch.stack([pixels_of(picture) for picture in guess.pictures]).to(secret.pixels)
    order = nearest_pictures(secret.pixels, guessed)
    labels = secret.labels if guess.labels is None else torch.tensor(guess.labels, device=secret.labels.device)[order]
    return Batch.of_pixels(guessed[order], labels)


def beside_the_secret(guess: Reconstruction, secret: Batch) -> list[int]:
    """The order of a guess's sentences in which right ones stand where the secret has them, and so beside its labels."""
    assert secret.ids is not None
    true = [tuple(row[mask].tolist()) for row, mask in zip(secret.ids, secret.mask, strict=True)]
    left = list(range(len(guess.sentences)))
    taken = dict[int, int]()
    for place, sentence in enumerate(true[: len(left)]):
        found = next((one for one in left if tuple(guess.sentences[one]) == sentence), None)
        if found is not None:
            taken[place] = found
            left.remove(found)
    return [taken[place] if place in taken else left.pop(0) for place in range(len(guess.sentences))]
