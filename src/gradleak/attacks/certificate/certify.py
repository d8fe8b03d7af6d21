"""The certificate: a guess is proven if it gives back all that was seen, in one way only, and nothing near it does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradleak.attacks.certificate.columns import Columns, columns_of, distinct, labels_of, make_columns
from gradleak.attacks.certificate.counting import Count, Counting
from gradleak.attacks.certificate.neighbours import NO_TIME, CannotTell, Neighbourhood
from gradleak.core.attack import Bench, Reconstruction, Sentences
from gradleak.core.observation import Observation
from gradleak.matching.exact import ExactGradients, gradients_of

CERTIFYING = 0.08  # of a time limit: what attacks keep back to hold their guesses against the updates
MOST_BYTES = 2**31  # of layer inputs and output gradients
TOKENS_AT_ONCE = 2**12
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
    (found,) = certify_all([observation], [sentences])
    return found


def certify_all(
    observations: Sequence[Observation], guesses: Sequence[Sequence[Sequence[int]]], bench: Bench | None = None
) -> list[Certificate]:
    """The certificates of several guesses; their gradients are computed together. What there is no time for is not proven."""
    each = [distinct(guess) for guess in guesses]
    found = {place: Certificate(False, note=note) for place, note in enumerate(map(obstacle_of, observations, each)) if note}
    for group in _groups(observations, each, [place for place in range(len(each)) if place not in found]):
        if bench is not None and bench.out_of_time:
            found |= dict.fromkeys(group, Certificate(False, note=NO_TIME))
            continue
        target, labels = observations[group[0]].target, labels_of(observations[group[0]].target)
        every = tuple(sentence for place in group for sentence in each[place])
        made, start = make_columns(target, every, _exact(observations[group[0]])), 0
        for place in group:
            stop = start + len(each[place]) * labels
            if bench is not None and bench.out_of_time:
                found[place] = Certificate(False, note=NO_TIME)
            else:
                columns = columns_of(observations[place], each[place], made.take(torch.arange(start, stop)))
                found[place] = _judge(columns, bench)
            start = stop
    return [found[place] for place in range(len(each))]


def _groups(observations: Sequence[Observation], each: Sequence[Sentences], places: Sequence[int]) -> list[list[int]]:
    """Places of guesses whose columns are computed in one pass: of one model and view, not too many tokens."""
    groups: list[list[int]] = []
    held: dict[object, tuple[list[int], int]] = {}
    for place in places:
        one = observations[place]
        alone = place if one.target.attend_padding or not one.target.padding_is_free else None
        key = (id(one.target), tuple(one.update.tensors), alone)
        tokens = sum(map(len, each[place])) * labels_of(one.target)
        group, size = held.get(key, ([], 0))
        if not group or size + tokens > TOKENS_AT_ONCE:
            group, size = [], 0
            groups.append(group)
        group.append(place)
        held[key] = group, size + tokens
    return groups


def with_certificates(
    observations: Sequence[Observation], guesses: Sequence[Reconstruction], bench: Bench
) -> list[Reconstruction]:
    """The guesses with what the updates prove of them, or with what stands against that."""
    certificates = certify_all(observations, [guess.sentences for guess in guesses], bench)
    return [_with(guess, certificate) for guess, certificate in zip(guesses, certificates, strict=True)]


def _with(guess: Reconstruction, certificate: Certificate) -> Reconstruction:
    if not certificate.proven:
        return replace(guess, note=guess.note or certificate.note)
    return replace(guess, certified=True, sentences=certificate.sentences, labels=certificate.labels)


def fits(observation: Observation, sentences: Sequence[Sequence[int]]) -> bool:
    """Whether sentences make up what was seen, each some number of times, whatever else may."""
    guess = distinct(sentences)
    if obstacle_of(observation, guess):
        return False
    columns = columns_of(observation, guess, make_columns(observation.target, guess, _exact(observation)))
    return any(_fitting(columns, size) for size in _sizes(columns))


def _exact(observation: Observation) -> ExactGradients:
    return gradients_of(observation.target, tuple(observation.update.tensors))


def obstacle_of(observation: Observation, guess: Sentences) -> str:
    """Why nothing of this observation can be proven, or nothing of this guess; empty where something may be."""
    target, size = observation.target, _known_size(observation)
    labels = labels_of(target)
    if observation.protocol.dropout:
        return "The client's dropout changed the update in a way that only the client knows."
    if not observation.channel.only_scaled:
        return "A defense changed the update: what is behind it can be likely, not proven."
    if not observation.protocol.is_one_gradient(size or 1):
        return "The update is not one gradient: it is not computed anew from a guess."
    if _scaled_one_by_one(observation) and size != 1:
        return "Every example was scaled down by itself: how often each is there does not show."
    if not guess or min(map(len, guess)) < (2 if target.labels_are_tokens else 1):
        return "There is no guess of which a model would learn."
    if len(guess) * labels > MOST_COLUMNS:
        return f"{len(guess)} sentences with {labels} labels are too many to be held against the update."
    if _bytes(observation, guess, labels) > MOST_BYTES:
        return f"{sum(map(len, guess))} tokens with {labels} labels are too many to be held against the update."
    return ""


def _bytes(observation: Observation, guess: Sentences, labels: int) -> int:
    """What layer inputs and output gradients of all columns take, once in double precision and once in the client's."""
    matrices = [tensor.shape[1:] for tensor in observation.update.tensors.values() if tensor.ndim == 3]
    return 2 * 8 * labels * len(guess) * max(map(len, guess)) * sum(sum(shape) for shape in matrices)


def _known_size(observation: Observation) -> int | None:
    knows = observation.knows
    return knows.batch_size if knows.lengths is None else len(knows.lengths)


def _scaled_one_by_one(observation: Observation) -> bool:
    defenses = observation.knows.defenses or ()
    return bool(defenses) and defenses[0].wants_per_example and observation.channel.clip is not None


def _sizes(columns: Columns) -> Sequence[int]:
    """The batch size that is known, or those that would do."""
    known, sentences = _known_size(columns.observation), len(columns.sentences)
    return [known] if known is not None else range(sentences, 2 * sentences + 8)


def _fitting(columns: Columns, size: int) -> list[Count]:
    """Ways to count, the best of which makes up what was seen; none where it does not."""
    counts = Counting(columns, size, columns.observation.channel.clip is not None).counts()
    return counts if counts and columns.misfit(counts[0].shares(), counts[0].scale) <= 1 else []


def _judge(columns: Columns, bench: Bench | None) -> Certificate:
    for size in _sizes(columns):
        counts = _fitting(columns, size)
        if counts:
            return _concluded(columns, counts[0], len(counts), _known_size(columns.observation) is not None, bench)
    least = Counting(columns, size, columns.observation.channel.clip is not None).least
    return Certificate(False, misfit=least, note="The update does not follow from the guess.")


def _concluded(columns: Columns, count: Count, ways: int, size_is_known: bool, bench: Bench | None) -> Certificate:
    """What remains where a guess gives back all that was seen: that nothing else near it does."""
    repeated = tuple(sentence for sentence, total in zip(columns.sentences, count.totals, strict=True) for _ in range(total))
    labels = None
    if not columns.observation.target.labels_are_tokens:
        labels = tuple(label for row in count.numbers for label, number in enumerate(row) for _ in range(number))
    misfit = columns.misfit(count.shares(), count.scale)

    def unproven(note: str) -> Certificate:
        return Certificate(False, repeated, labels, misfit, note)

    if ways > 1:
        return unproven("The sentences make up the update in several ways: how often each is there does not show.")
    if min(count.totals) == 0:  # a sentence of the guess is not needed
        (again,) = certify_all([columns.observation], [repeated], bench)
        return again
    if not size_is_known:
        return unproven("The batch size is not known, and the same batch several times over gives the same update.")
    try:
        others = Neighbourhood(columns, count, bench).others()
    except CannotTell as why:
        return unproven(str(why))
    if others:
        return unproven(f"The guess is one of at least {others + 1} that fit: another word or order does as well.")
    return Certificate(True, repeated, labels, misfit)
