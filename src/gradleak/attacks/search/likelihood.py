"""The prior's part in a search: how likely candidates are, and the likeliest order of words."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.search.search_rows import Candidates, Rows
from gradleak.core.attack import Bench, Sentences
from gradleak.core.prior import Prior
from gradleak.core.target import Target, Vocabulary
from gradleak.matching.chunking import fastest, pieces

TOKENS_AT_ONCE = {"cuda": 60_000, "cpu": 8_000}
# Held for every token and word: logits, their softmax, and copies in single precision.
NUMBERS_HELD = 6


def compute_nll(bench: Bench, rows: Rows, ids: Candidates) -> Float[Tensor, "rows candidates"]:
    """Returns the prior's mean negative log-likelihood over the tokens of candidate batches."""
    device = ids.device
    lengths = torch.tensor([one.hypothesis.lengths for one in rows.problems], device=device)
    # Candidates differ in few of their sentences: those that occur many times are scored once.
    keyed = torch.cat([ids, lengths[:, None, :, None].expand(*ids.shape[:3], 1)], dim=-1)
    distinct, back = torch.unique(keyed.flatten(0, 2), dim=0, return_inverse=True)
    found = _score_sentences(bench, rows, distinct[:, :-1], distinct[:, -1])
    nll = found.to(rows.target.dtype)[back].view(ids.shape[:3])
    shares = lengths / lengths.sum(1, keepdim=True)  # one sentence counts by its length
    return (nll * shares[:, None].to(nll.dtype)).sum(-1)


def _score_sentences(
    bench: Bench,
    rows: Rows,
    ids: Int[Tensor, "sentences tokens"],
    lengths: Int[Tensor, "sentences"],
) -> Float[Tensor, "sentences"]:
    """Returns the prior's likelihoods in passes: every token has a number for every word."""
    table = rows.target.vocabulary.embeddings
    bytes_a_sentence = 4 * ids.shape[1] * len(table) * NUMBERS_HELD
    most = fastest(TOKENS_AT_ONCE, table.device) / ids.shape[1]
    chunks = pieces(bench, table.device, bytes_a_sentence, ids.shape[1] * table.numel(), most)
    return chunks.run(lambda kept: bench.words.nll(ids[kept], lengths[kept]), len(ids))


@dataclass(frozen=True)
class Beam:
    """Sentences so far, the last one unfinished, and what the finished ones cost."""

    words: Sentences = ((),)  # without special tokens
    finished: float = 0.0  # nats
    cost: float = 0.0  # with the unfinished one


def order_by_prior(
    prior: Prior, target: Target, words: Sequence[int], lengths: Sequence[int], beams: int
) -> Sentences:
    """Returns words in the order a prior finds likeliest, as framed sentences of these lengths.

    A beam search fills them from the left. They hold every word at least once where there is room,
    and the rest repeated.
    """
    vocabulary = target.vocabulary
    free = [length - len(vocabulary.prefix) - len(vocabulary.suffix) for length in lengths]
    kept = [Beam()]
    for sentence, count in enumerate(free):
        for place in range(count):
            left = count - place + sum(free[sentence + 1 :])
            longer = [
                _extend(beam, word) for beam in kept for word in _list_choices(beam, words, left)
            ]
            scored = _score_beams(prior, target, longer, is_last=place + 1 == count)
            if place or vocabulary.prefix:
                kept = sorted(scored, key=lambda beam: beam.cost)[:beams]
            else:
                # A single token has no likelihood in a model that predicts each from those before.
                kept = scored
        kept = [Beam((*beam.words, ()), beam.cost, beam.cost) for beam in kept]
    best = kept[0].words[: len(lengths)]
    return tuple(tuple(_frame(vocabulary, sentence, True)) for sentence in best)


def _list_choices(beam: Beam, words: Sequence[int], left: int) -> Sequence[int]:
    """Returns any word while there is room for the others, and otherwise those still missing."""
    used = {word for sentence in beam.words for word in sentence}
    missing = [word for word in words if word not in used]
    return words if len(missing) < left else missing


def _extend(beam: Beam, word: int) -> Beam:
    *before, last = beam.words
    return Beam((*before, (*last, word)), beam.finished)


def _score_beams(prior: Prior, target: Target, beams: Sequence[Beam], is_last: bool) -> list[Beam]:
    rows = [_frame(target.vocabulary, beam.words[-1], is_last) for beam in beams]
    if len(rows[0]) < 2:
        return list(beams)
    ids = torch.tensor(rows, device=target.device)
    lengths = torch.full((len(rows),), ids.shape[1], device=target.device)
    costs = (prior.nll(ids, lengths) * ids.shape[1]).tolist()
    pairs = zip(beams, costs, strict=True)
    return [Beam(beam.words, beam.finished, beam.finished + cost) for beam, cost in pairs]


def _frame(vocabulary: Vocabulary, words: Sequence[int], is_last: bool) -> list[int]:
    return [*vocabulary.prefix, *words, *(vocabulary.suffix if is_last else ())]
