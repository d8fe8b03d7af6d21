"""What an attack minimises, at its guesses and at the truth: tells a search that failed from a
defense that held."""

import math
from collections.abc import Sequence

import torch

from gradleak.attacks.blind import Blind
from gradleak.core.attack import Attack, Bench, Reconstruction, Sentences
from gradleak.core.batch import Batch, PrivateBatch, pixels_of
from gradleak.core.observation import Observation
from gradleak.core.prior import AnyPrior, Prior
from gradleak.core.target import Target
from gradleak.metrics.alignment import nearest_pictures

Values = Sequence[float | None]


def objectives(
    attack: Attack,
    observations: Sequence[Observation],
    secrets: Sequence[PrivateBatch],
    found: Sequence[Reconstruction],
    prior: AnyPrior,
) -> tuple[Values, Values]:
    """At the guesses, and at the secrets; none of either where the attack has no objective. No
    attack may run after this.

    A guess that is the secret has the secret's: the same number, and not one that is summed in
    another order. One that lacks a sentence has an infinite one.
    """
    at_truth = (
        attack.objective(observations, [secret.batch for secret in secrets])
        if observations
        else None
    )
    if at_truth is None:
        return [None] * len(found), [None] * len(found)
    truths: list[float] = at_truth.double().tolist()
    if isinstance(prior, Prior):
        for place, (observation, secret) in enumerate(zip(observations, secrets, strict=True)):
            truths[place] += attack.penalty(observation, sentences_of(secret), prior)
    values = [
        truth if is_right(guess, secret) else math.inf
        for truth, guess, secret in zip(truths, found, secrets, strict=True)
    ]
    wrong = [
        place
        for place, guess in enumerate(found)
        if values[place] == math.inf and _is_whole(guess, secrets[place])
    ]
    if wrong:
        seen = [observations[place] for place in wrong]
        at_guess = attack.objective(
            seen, [_as_batch(seen[0].target, found[place], secrets[place]) for place in wrong]
        )
        assert at_guess is not None
        for place, value in zip(wrong, at_guess.double().tolist(), strict=True):
            values[place] = value
            if isinstance(prior, Prior):
                values[place] += attack.penalty(observations[place], found[place].sentences, prior)
    return values, truths


def is_right(guess: Reconstruction, secret: PrivateBatch) -> bool:
    """Whether a guess holds the secret's sentences and no others, beside their labels where it
    has any; never of pictures."""
    if secret.batch.pixels is not None:
        return False
    guessed, true = tuple(map(tuple, guess.sentences)), sentences_of(secret)
    # Of a language model they are its words
    if guess.labels is None or secret.batch.labels.ndim > 1:
        return sorted(guessed) == sorted(true)
    beside = zip(true, secret.batch.labels.tolist(), strict=True)
    return len(guess.labels) == len(guessed) and sorted(
        zip(guessed, guess.labels, strict=True)
    ) == sorted(beside)


def _is_whole(guess: Reconstruction, secret: PrivateBatch) -> bool:
    """Whether a guess has something for each example."""
    if secret.batch.pixels is not None:
        return len(guess.pictures) == len(secret.examples)
    return len(guess.sentences) == len(secret.examples) and all(guess.sentences)


def sentences_of(secret: PrivateBatch) -> Sentences:
    """The token ids of each text, special ones included and padding not."""
    assert secret.batch.ids is not None
    return tuple(
        tuple(row[:length])
        for row, length in zip(secret.batch.ids.tolist(), secret.lengths, strict=True)
    )


def _as_batch(target: Target, guess: Reconstruction, secret: PrivateBatch) -> Batch:
    if secret.batch.pixels is not None:
        return _as_pictures(guess, secret.batch)
    order = beside_the_secret(guess, sentences_of(secret))
    sentences = [guess.sentences[place] for place in order]
    if target.labels_are_tokens or target.labels_are_open:
        return target.batch_of(sentences, None)
    labels = (
        secret.batch.labels.tolist()
        if guess.labels is None
        else [guess.labels[place] for place in order]
    )
    return target.batch_of(sentences, labels)


def _as_pictures(guess: Reconstruction, secret: Batch) -> Batch:
    """The guessed pictures, each beside the secret it is nearest to, and so beside its label."""
    assert secret.pixels is not None
    guessed = torch.stack([pixels_of(picture) for picture in guess.pictures]).to(secret.pixels)
    order = nearest_pictures(secret.pixels, guessed)
    labels = (
        secret.labels
        if guess.labels is None
        else torch.tensor(guess.labels, device=secret.labels.device)[order]
    )
    return Batch.of_pixels(guessed[order], labels)


def beside_the_secret(guess: Reconstruction, secret: Sentences) -> list[int]:
    """The order of a guess's sentences in which right ones stand where the secret has them, and
    so beside its labels."""
    left = list(range(len(guess.sentences)))
    taken = dict[int, int]()
    for place, sentence in enumerate(secret[: len(left)]):
        found = next((one for one in left if tuple(guess.sentences[one]) == sentence), None)
        if found is not None:
            taken[place] = found
            left.remove(found)
    return [
        taken[place] if place in taken else left.pop(0) for place in range(len(guess.sentences))
    ]


def make_up(observation: Observation, bench: Bench) -> Batch:
    """Returns a batch that no client has, to try an attack on before it runs: from public facts
    only.

    It is the blind guess, with the labels that are granted or else the first class.
    """
    (guess,) = Blind().reconstruct([observation], bench)
    target, labels = observation.target, observation.knows.labels
    count = len(guess.pictures) or len(guess.sentences)
    classes = (
        torch.zeros(count, dtype=torch.int64) if labels is None or len(labels) != count else labels
    )
    if guess.pictures:
        pixels = torch.stack([pixels_of(picture) for picture in guess.pictures])
        return Batch.of_pixels(pixels.to(target.device, target.dtype), classes.to(target.device))
    return target.batch_of(guess.sentences, None if target.labels_are_tokens else classes.tolist())
