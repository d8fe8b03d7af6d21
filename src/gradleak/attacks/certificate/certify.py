"""The certificate of a guess.

A guess is proven if it gives back all that was seen, in one way only, and nothing near it does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradleak.attacks.certificate.answers import find_answers, join_answers
from gradleak.attacks.certificate.contributions import (
    Contributions,
    compute_gradients,
    count_labels,
    drop_repeats,
    make_contributions,
)
from gradleak.attacks.certificate.counting import CLEAR, Counting, Occurrences
from gradleak.attacks.certificate.neighbourhood import NO_TIME, CannotTell, Neighbourhood
from gradleak.core.attack import Bench, Reconstruction, Sentences
from gradleak.core.observation import Observation

# Of a time limit: what attacks keep back to hold their guesses against the updates
CERTIFYING = 0.08
MOST_BYTES = 2**31  # of layer inputs and output gradients
TOKENS_AT_ONCE = 2**12
MOST_COLUMNS = 256  # sentences times labels: products of more would take longer than the attack


@dataclass(frozen=True)
class Certificate:
    """Whether a guess is proven, and if not, what stands against it."""

    proven: bool
    sentences: Sentences = ()  # each as often as it was in the batch, where that could be told
    labels: tuple[int, ...] | None = None
    # The largest distance of a tensor from what was seen, in floors of its rounding.
    misfit: float = math.inf
    note: str = ""


def certify(observation: Observation, sentences: Sequence[Sequence[int]]) -> Certificate:
    """Holds a guess against the whole of what was seen (docs/certificates.md)."""
    (found,) = certify_all([observation], [sentences])
    return found


def certify_all(
    observations: Sequence[Observation],
    guesses: Sequence[Sequence[Sequence[int]]],
    bench: Bench | None = None,
) -> list[Certificate]:
    """Returns the certificates of several guesses, whose gradients are computed together.

    What there is no time for is not proven.
    """
    each = [drop_repeats(guess) for guess in guesses]
    found = {
        place: Certificate(False, note=note)
        for place, note in enumerate(map(name_obstacle, observations, each))
        if note
    }
    answers = {
        place: find_answers(observations[place], guess)
        for place, guess in enumerate(each)
        if place not in found
    }
    found |= {
        place: Certificate(False, note=one.obstacle)
        for place, one in answers.items()
        if one.obstacle
    }
    left = [place for place in range(len(each)) if place not in found]
    for group in _group(observations, each, left):
        if bench is not None and bench.out_of_time:
            found |= dict.fromkeys(group, Certificate(False, note=NO_TIME))
            continue
        every = tuple(sentence for place in group for sentence in each[place])
        # One pass for the columns of all guesses of a group; each takes its own.
        joined = join_answers(
            observations[group[0]].target,
            [answers[place] for place in group],
            [len(each[place]) for place in group],
        )
        made, start = compute_gradients(observations[group[0]], every, joined), 0
        for place in group:
            stop = start + len(each[place]) * count_labels(observations[place].target)
            if bench is not None and bench.out_of_time:
                found[place] = Certificate(False, note=NO_TIME)
            else:
                own = made.take(torch.arange(start, stop))
                columns = make_contributions(observations[place], each[place], own)
                found[place] = _judge(columns, bench)
            start = stop
    return [found[place] for place in range(len(each))]


def _group(
    observations: Sequence[Observation], each: Sequence[Sentences], places: Sequence[int]
) -> list[list[int]]:
    """Groups the guesses whose columns are computed in one pass.

    They are of one model and view, and have not too many tokens together.
    """
    groups: list[list[int]] = []
    held: dict[object, tuple[list[int], int]] = {}
    for place in places:
        one = observations[place]
        # Where padding is read, a sentence's gradient depends on the width of its batch.
        alone = place if one.target.attend_padding or not one.target.padding_is_free else None
        key = (id(one.target), tuple(one.update.tensors), alone)
        tokens = sum(map(len, each[place])) * count_labels(one.target)
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
    """Returns the guesses with what the updates prove of them, or what stands against that."""
    certificates = certify_all(observations, [guess.sentences for guess in guesses], bench)
    return [_attach(*pair) for pair in zip(guesses, certificates, strict=True)]


def _attach(guess: Reconstruction, certificate: Certificate) -> Reconstruction:
    if not certificate.proven:
        return replace(guess, note=guess.note or certificate.note)
    sentences, labels = certificate.sentences, certificate.labels
    return replace(guess, certified=True, sentences=sentences, labels=labels)


def fits(observation: Observation, sentences: Sequence[Sequence[int]]) -> bool:
    """Whether sentences make up what was seen, each some number of times."""
    guess = drop_repeats(sentences)
    if name_obstacle(observation, guess):
        return False
    answers = find_answers(observation, guess)
    if answers.obstacle:
        return False
    made = compute_gradients(observation, guess, answers)
    columns = make_contributions(observation, guess, made)
    return any(_find_fitting(columns, size) for size in _list_sizes(columns))


def name_obstacle(observation: Observation, guess: Sentences) -> str:
    """Says why nothing of an observation, or of a guess, can be proven; empty where it may be."""
    target, size = observation.target, _find_size(observation)
    labels = count_labels(target)
    if observation.protocol.dropout:
        return "The client's dropout changed the update in a way that only the client knows."
    if not observation.channel.only_scaled:
        return "A defense changed the update: what is behind it can be likely, not proven."
    if not observation.protocol.is_one_gradient(size or 1):
        return "The update is not one gradient: it is not computed anew from a guess."
    if _scales_each_example(observation) and size != 1:
        return "Every example was scaled down by itself: how often each is there does not show."
    if not guess or min(map(len, guess)) < (2 if target.labels_are_tokens else 1):
        return "There is no guess of which a model would learn."
    too_many = "are too many to be held against the update."
    if len(guess) * labels > MOST_COLUMNS:
        return f"{len(guess)} sentences with {labels} labels {too_many}"
    if _count_bytes(observation, guess, labels) > MOST_BYTES:
        return f"{sum(map(len, guess))} tokens with {labels} labels {too_many}"
    return ""


def _count_bytes(observation: Observation, guess: Sentences, labels: int) -> int:
    """Returns the bytes of all columns' layer inputs and output gradients.

    They are held once in double precision and once in the client's.
    """
    tensors = observation.update.tensors.values()
    # A matrix [clients, outputs, inputs] takes a row of inputs and one of outputs for every token.
    widths = sum(sum(tensor.shape[1:]) for tensor in tensors if tensor.ndim == 3)
    return 2 * 8 * labels * len(guess) * max(map(len, guess)) * widths


def _find_size(observation: Observation) -> int | None:
    knows = observation.knows
    return knows.batch_size if knows.lengths is None else len(knows.lengths)


def _scales_each_example(observation: Observation) -> bool:
    defenses = observation.knows.defenses or ()
    return bool(defenses) and defenses[0].wants_per_example and observation.channel.clip is not None


def _list_sizes(columns: Contributions) -> Sequence[int]:
    """Lists the batch size that is known, or those that would do."""
    # Each sentence is there once at least, and the shares of small batches are tried.
    known, sentences = _find_size(columns.observation), len(columns.sentences)
    return [known] if known is not None else range(sentences, 2 * sentences + 8)


def _find_fitting(columns: Contributions, size: int) -> list[Occurrences]:
    """Finds ways to count of which the best makes up what was seen; none where it does not."""
    counts = Counting(columns, size, columns.observation.channel.clip is not None).find_counts()
    return (
        counts
        if counts and columns.measure_misfit(counts[0].shares(), counts[0].scale) <= 1
        else []
    )


def _judge(columns: Contributions, bench: Bench | None) -> Certificate:
    for size in _list_sizes(columns):
        counts = _find_fitting(columns, size)
        if counts:
            return _conclude(columns, counts, bench)
    least = Counting(columns, size, columns.observation.channel.clip is not None).least
    return Certificate(False, misfit=least, note="The update does not follow from the guess.")


def _needs_each(columns: Contributions, count: Occurrences) -> bool:
    """Whether what was seen does not fit without any one of the sentences."""
    shares = count.shares()
    without = [shares.clone() for _ in shares]
    for place, row in enumerate(without):
        row[place] = 0.0
    return all(columns.measure_misfit(row, count.scale) > CLEAR for row in without)


def _conclude(
    columns: Contributions, counts: Sequence[Occurrences], bench: Bench | None
) -> Certificate:
    """Shows what remains once a guess gives back all that was seen: that nothing near it does."""
    count = counts[0]
    pairs = zip(columns.sentences, count.totals, strict=True)
    repeated = tuple(sentence for sentence, total in pairs for _ in range(total))
    labels = None
    if columns.labels > 1:
        numbers = (number for row in count.numbers for number in enumerate(row))
        labels = tuple(label for label, number in numbers for _ in range(number))
    misfit = columns.measure_misfit(count.shares(), count.scale)

    def unproven(note: str) -> Certificate:
        return Certificate(False, repeated, labels, misfit, note)

    if len(counts) > 1:
        return unproven(
            "The sentences make up the update in several ways: how often each is there does not"
            " show."
        )
    if min(count.totals) == 0:  # a sentence of the guess is not needed
        (again,) = certify_all([columns.observation], [repeated], bench)
        return again
    if columns.observation.target.labels_are_open and not _needs_each(columns, count):
        return unproven(
            "A sentence of the guess changes nothing: the model gives its very label already."
        )
    if _find_size(columns.observation) is None:
        return unproven(
            "The batch size is not known, and the same batch several times over gives the same"
            " update."
        )
    try:
        others = Neighbourhood(columns, count, bench).count_others()
    except CannotTell as why:
        return unproven(str(why))
    if others:
        return unproven(
            f"The guess is one of at least {others + 1} that fit: another word or order does as"
            " well."
        )
    return Certificate(True, repeated, labels, misfit)
