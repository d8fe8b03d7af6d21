"""The words of a batch, from the gradient of the word embeddings: only rows that were looked up have one."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradleak.attacks.evidence.finding import Finding, certain, noisy, seen, touched
from gradleak.core.observation import Observation

ROWS = "rows of the word embeddings"
MOST = 4  # at most one in so many rows can stand out from the others


def bag_of_words(observation: Observation) -> Finding | None:
    """The set of words in the batch, without special tokens; none if the word embeddings' gradient is not seen.

    Exact where only looked-up rows have a gradient. A language model does not look up the last word of a text, and where the
    embeddings are its output layer too, every row has a gradient: those of the words stand out by their size, an estimate.
    How often a word occurs cannot be read: a row is the sum over its places, so a large norm is no more than a hint.
    """
    rows = _touched(observation)
    if rows is None:
        return None
    rows[_specials(observation)] = False
    target = observation.target
    source = f"{ROWS} that stand out" if target.words_are_outputs else ROWS
    return Finding("bag_of_words", _numbers(rows), _exact(observation), source)


def special_tokens(observation: Observation) -> Finding | None:
    """The special tokens in the batch ([CLS], [SEP], an unknown word's [UNK]), read as the words are.

    None where the embeddings are the output layer too: what stands out there is words.
    """
    rows = None if observation.target.words_are_outputs else _touched(observation)
    if rows is None:
        return None
    special = torch.zeros_like(rows)
    special[_specials(observation)] = True
    return Finding("special_tokens", _numbers(rows & special), _exact(observation), ROWS)


def _touched(observation: Observation) -> Bool[Tensor, "words"] | None:
    rows = seen(observation, "word_embedding")
    if rows is None:
        return None
    norms = torch.linalg.vector_norm(rows, dim=1)
    if observation.target.words_are_outputs:
        lengths = observation.knows.lengths
        return standing_out(norms, len(norms) // MOST if lengths is None else sum(lengths))
    # Any row at all above zero was looked up, however small: in a batch one sentence may hardly count beside another.
    return norms > 0 if _quiet(observation) else touched(rows, through_noise=True)


def standing_out(sizes: Float[Tensor, "rows"], most: int) -> Bool[Tensor, "rows"]:
    """The largest, up to the widest gap between neighbours in order of size; at most so many."""
    ordered, places = sizes.sort(descending=True)
    most = max(1, min(most, len(ordered) - 1))
    gaps = ordered[:most] / ordered[1 : most + 1].clamp_min(torch.finfo(sizes.dtype).tiny)
    chosen = torch.zeros_like(sizes, dtype=torch.bool)
    chosen[places[: int(gaps.argmax()) + 1]] = True
    return chosen


def _exact(observation: Observation) -> bool:
    quiet = _quiet(observation) and certain(observation)
    return quiet and not observation.target.labels_are_tokens and not observation.target.words_are_outputs


def _quiet(observation: Observation) -> bool:
    """No noise that is known of, and none that shows: with it no row would be zero."""
    rows = seen(observation, "word_embedding")
    return rows is not None and not noisy(observation) and bool((rows == 0).all(1).any())


def _specials(observation: Observation) -> list[int]:
    vocabulary = observation.target.vocabulary
    return sorted({*vocabulary.specials, *vocabulary.prefix, *vocabulary.suffix, vocabulary.pad})


def _numbers(rows: Bool[Tensor, "words"]) -> tuple[int, ...]:
    return tuple(int(word) for word in rows.nonzero()[:, 0])
