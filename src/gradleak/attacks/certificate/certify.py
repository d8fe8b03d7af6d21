"""The certificate: a guess is proven if it gives back all that was seen, in one way only, and nothing near it does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradleak.attacks.certificate.columns import Columns, columns_of, distinct, parts_seen
from gradleak.attacks.certificate.counting import Count, Counting
from gradleak.attacks.certificate.neighbours import Neighbourhood
from gradleak.core.attack import Sentences
from gradleak.core.observation import Observation
from gradleak.matching.exact import ExactGradients

MOST_COLUMNS = 256  # sentences times labels: products of more would take longer than the attack


@dataclass(frozen=True)
class Certificate:
    """Whether a guess is proven, and if not, what stands against it."""

    proven: bool
    sentences: Sentences = ()  # each as often as it was in the batch, where that could be told
    labels: tuple[int, ...] | None = None
    misfit: float = math.inf  # the largest distance of a tensor from what was seen, in floors of its rounding
    note: str = ""


def certify(observation: Observation, sentences: Sequence[Sequence[int]]) -> Certificate:
    """Holds a guess against the whole of what was seen; docs/certificates.md has the definition and its assumptions."""
    obstacle = obstacle_of(observation)
    guess = distinct(sentences)
    if obstacle or not guess or any(len(sentence) == 0 for sentence in guess):
        return Certificate(False, note=obstacle or "There is no guess.")
    target = observation.target
    labels = 1 if target.labels_are_tokens else target.classes
    if len(guess) * labels > MOST_COLUMNS:
        return Certificate(False, note=f"{len(guess)} sentences with {labels} labels are too many to be held against the update.")
    if any(len(sentence) < 2 for sentence in guess) and target.labels_are_tokens:
        return Certificate(False, note="A text of one token teaches a language model nothing.")
    columns = columns_of(observation, guess, ExactGradients(target, parts_seen(observation)))
    return _judge(columns, max(len(guess), len(sentences)))


def obstacle_of(observation: Observation) -> str:
    """Why nothing of this observation can be proven; empty where something may be."""
    if observation.protocol.dropout:
        return "The client's dropout changed the update in a way that only the client knows."
    if not observation.channel.only_scaled:
        return "A defense changed the update: what is behind it can be likely, not proven."
    size = observation.knows.batch_size or 1
    if not observation.protocol.is_one_gradient(size):
        return "The update is not one gradient: it is not computed anew from a guess."
    return ""


def _judge(columns: Columns, guessed: int) -> Certificate:
    observation = columns.observation
    known = observation.knows.batch_size
    if known is None and observation.knows.lengths is not None:
        known = len(observation.knows.lengths)
    defenses = observation.knows.defenses or ()
    if defenses and defenses[0].wants_per_example and observation.channel.clip is not None and (known or guessed) > 1:
        return Certificate(False, note="Every example was scaled down by itself: how often each is there does not show.")
    scaled = observation.channel.clip is not None
    for size in [known] if known is not None else range(len(columns.sentences), 2 * len(columns.sentences) + 8):
        counting = Counting(columns, size, scaled)
        counts = counting.counts()
        if counts and columns.misfit(counts[0].shares(), counts[0].scale) <= 1:
            return _concluded(columns, counts[0], len(counts), known is not None)
    return Certificate(False, misfit=counting.least, note="The update does not follow from the guess.")


def _concluded(columns: Columns, count: Count, ways: int, size_is_known: bool) -> Certificate:
    """What remains where a guess gives back all that was seen: that nothing else near it does."""
    repeated = tuple(
        sentence for sentence, total in zip(columns.sentences, count.totals, strict=True) for _ in range(total)
    )
    labels = None
    if not columns.observation.target.labels_are_tokens:
        labels = tuple(label for row in count.numbers for label, number in enumerate(row) for _ in range(number))
    misfit = columns.misfit(count.shares(), count.scale)

    def unproven(note: str) -> Certificate:
        return Certificate(False, repeated, labels, misfit, note)

    if ways > 1:
        return unproven("These sentences make up the update in several numbers: how often each is there does not show.")
    if min(count.totals) == 0:
        return unproven("A sentence of the guess is not needed to make up the update.")
    if not size_is_known:
        return unproven("The batch size is not known, and the same batch several times over gives the same update.")
    others = Neighbourhood(columns, count).others()
    if others is None:
        return unproven("Too many words fit as well as those of the guess for all of them to be tried.")
    if others:
        return unproven(f"The guess is one of at least {others + 1} that fit: another word or order does as well.")
    return Certificate(True, repeated, labels, misfit)


def certify_all(pairs: Sequence[tuple[Observation, Sequence[Sequence[int]]]]) -> list[Certificate]:
    """The certificates of several guesses."""
    with torch.no_grad():
        return [certify(observation, sentences) for observation, sentences in pairs]
