"""Texts of a causal model from adapters of low rank, word by word, by the values of the update.

Where positions turn queries and keys inside the attention (rotary models), no word's key is known
before its distances are, and the first layer's adapters say less than a text has words. But the
gradient of a text is the sum of those of predicting each of its words, and each of these depends on
what came before alone. So a prefix explains its own part of the update, and beams of prefixes grow
by the words whose gradients point most nearly along what was seen. At the end every word is tried
anew at every place, and all pairs are exchanged.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.attack import Bench, TokenIds
from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.matching import Cosine, for_observations
from gradleak.matching.chunking import pieces

MOST_WORDS = 512  # tried at every place
CANDIDATES_AT_ONCE = 256
SWEEPS = 3  # over the places, at the end
MATCHED = 1e-6  # a distance at which nothing is left to find

Measure = Callable[[Int[Tensor, "texts tokens"]], Float[Tensor, "texts"]]


def grow_text(
    observation: Observation,
    words: Int[Tensor, "words"],
    last: Int[Tensor, "more"],
    bench: Bench,
    beam: int,
) -> TokenIds:
    """Returns the text that matches best, of these words and the length that is known.

    Its last word, which is predicted and never read, is one of others.
    """
    lengths = observation.knows.lengths
    if lengths is None or len(lengths) != 1:
        raise GradleakError(
            "span takes adapters of a causal model with rotary positions apart for one text of"
            " known length: use energy, or grant the length."
        )
    if len(words) > MOST_WORDS:
        raise GradleakError(
            f"{len(words)} words may stand at every place, more than the {MOST_WORDS} that can be"
            " tried by the values of adapters: use energy."
        )
    measure = _open_measure(observation, bench)
    prefix = list(observation.target.vocabulary.prefix)
    grown = torch.tensor([prefix], device=words.device, dtype=words.dtype)
    if not prefix:
        grown = words[:, None]
    while grown.shape[1] < lengths[0] and not bench.out_of_time:
        is_last = grown.shape[1] == lengths[0] - 1
        longer = _extend(grown, last if is_last else words)
        kept = measure(longer).topk(min(beam, len(longer)), largest=False).indices
        grown = longer[kept]
    text = grown[0]
    if len(text) == lengths[0]:
        text = _polish(text, words, last, len(prefix), measure, bench)
    return tuple(text.tolist())


def _extend(
    grown: Int[Tensor, "texts tokens"], words: Int[Tensor, "words"]
) -> Int[Tensor, "more longer"]:
    repeated = grown.repeat_interleave(len(words), dim=0)
    return torch.cat([repeated, words.repeat(len(grown))[:, None]], dim=1)


def _open_measure(observation: Observation, bench: Bench) -> Measure:
    """Returns what holds texts of one length against the update."""
    matcher = for_observations([observation], Cosine())

    @torch.no_grad()
    def measure(texts: Int[Tensor, "texts tokens"]) -> Float[Tensor, "texts"]:
        def piece(rows: slice) -> Tensor:
            ids = texts[rows][None, :, None]
            batch = Batch(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), labels=ids)
            return matcher.distances(batch)[0]

        each, work = (f(1, texts.shape[1]) for f in (matcher.bytes, matcher.work))
        return pieces(bench, texts.device, each, work, CANDIDATES_AT_ONCE).run(piece, len(texts))

    return measure


def _polish(
    text: Int[Tensor, "tokens"],
    words: Int[Tensor, "words"],
    last: Int[Tensor, "more"],
    first: int,
    measure: Measure,
    bench: Bench,
) -> Int[Tensor, "tokens"]:
    """Puts the best word at each place and exchanges pairs, until nothing helps."""
    best = float(measure(text[None])[0])
    for _ in range(SWEEPS):
        before = best
        for place in range(first, len(text)):
            if best < MATCHED or bench.out_of_time:
                return text
            choice = last if place == len(text) - 1 else words
            tried = text.repeat(len(choice), 1)
            tried[:, place] = choice
            others = torch.arange(first, len(text), device=text.device)
            swapped = text.repeat(len(others), 1)
            swapped[:, place] = text[others]
            swapped[torch.arange(len(others)), others] = text[place]
            every = torch.cat([tried, swapped])
            found, number = measure(every).min(0)
            if float(found) < best:
                best, text = float(found), every[number]
        if best == before:
            break
    return text
