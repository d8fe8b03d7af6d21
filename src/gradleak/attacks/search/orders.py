"""Given words in the order a prior finds likeliest: a beam search over sentences that are filled from the left."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradleak.core.attack import Sentences
from gradleak.core.prior import Prior
from gradleak.core.target import Target, Vocabulary


@dataclass(frozen=True)
class Beam:
    """Sentences so far, the last one unfinished, and what the finished ones cost."""

    words: Sentences = ((),)  # without special tokens
    finished: float = 0.0  # nats
    cost: float = 0.0  # with the unfinished one


def likely_order(prior: Prior, target: Target, words: Sequence[int], lengths: Sequence[int], beams: int) -> Sentences:
    """Sentences of these lengths, framed, that hold every word at least once where there is room, the rest repeated."""
    vocabulary = target.vocabulary
    free = [length - len(vocabulary.prefix) - len(vocabulary.suffix) for length in lengths]
    kept = [Beam()]
    for sentence, count in enumerate(free):
        for place in range(count):
            left = count - place + sum(free[sentence + 1 :])
            longer = [_longer(beam, word) for beam in kept for word in _choices(beam, words, left)]
            last = place + 1 == count
            scored = _scored(prior, target, longer, last)
            # A single token has no likelihood in a model that predicts each from those before: all are kept then.
            kept = sorted(scored, key=lambda beam: beam.cost)[:beams] if place or vocabulary.prefix else scored
        kept = [Beam((*beam.words, ()), beam.cost, beam.cost) for beam in kept]
    return tuple(tuple(_framed(vocabulary, sentence, True)) for sentence in kept[0].words[: len(lengths)])


def _choices(beam: Beam, words: Sequence[int], left: int) -> Sequence[int]:
    """Any word while there is room for the others, and otherwise those that are still missing."""
    used = {word for sentence in beam.words for word in sentence}
    missing = [word for word in words if word not in used]
    return words if len(missing) < left else missing


def _longer(beam: Beam, word: int) -> Beam:
    *before, last = beam.words
    return Beam((*before, (*last, word)), beam.finished)


def _scored(prior: Prior, target: Target, beams: Sequence[Beam], last: bool) -> list[Beam]:
    rows = [_framed(target.vocabulary, beam.words[-1], last) for beam in beams]
    if len(rows[0]) < 2:
        return list(beams)
    ids = torch.tensor(rows, device=target.device)
    lengths = torch.full((len(rows),), ids.shape[1], device=target.device)
    costs = (prior.nll(ids, lengths) * ids.shape[1]).tolist()
    return [Beam(beam.words, beam.finished, beam.finished + cost) for beam, cost in zip(beams, costs, strict=True)]


def _framed(vocabulary: Vocabulary, words: Sequence[int], last: bool) -> list[int]:
    return [*vocabulary.prefix, *words, *(vocabulary.suffix if last else ())]


def spare_places(words: Sequence[int], bag: Sequence[int]) -> list[int]:
    """Places whose word may be exchanged for another of the bag without losing the only one of its kind.

    Where the bag does not fit, some words are missing in any case: every place is spare.
    """
    counts = Counter(words)
    crowded = len(set(bag)) > len(words)
    return [place for place, word in enumerate(words) if crowded or counts[word] > 1]
