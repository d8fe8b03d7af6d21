"""What an update says outright, each with how exact it is: read in milliseconds, before any search.

Labels stand in the gradient of the classification head's bias, lengths in the rows of the position
embeddings, the number of different inputs in the rank of the first layer's gradient, and words in
the rows of the word embeddings. What is not seen, or not told from rounding or noise, is None.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradleak.core.observation import Observation
from gradleak.core.parts import ATTENTION_INPUTS
from gradleak.core.streams import Streams
from gradleak.matching.inputs import matrix_of, visible_linear_parts
from gradleak.matching.linear_algebra import find_singular_values
from gradleak.matching.precision import cancelled_share, mixed_sum_error, singular_floor

# A row this many times above the quiet rows' size was touched by the batch.
ABOVE_FLOOR = 10.0
# Between neighbouring singular values; measured at the rank 1e4 to 1e7 in float32, else under 5.
CLEAR_GAP = 100.0
# Wider matrices are sketched to so many rows and columns: an SVD would take minutes.
WIDEST = 1024
WORD_ROWS = "rows of the word embeddings"
MOST = 4  # at most one in so many rows can stand out from the others


@dataclass(frozen=True)
class Evidence:
    """Numbers read off an update, and whether they are certain or an estimate."""

    name: str
    values: tuple[int, ...]
    exact: bool
    source: str


def findings(observation: Observation) -> tuple[Evidence, ...]:
    """Returns everything that can be read."""
    readers = (labels, longest_length, distinct_tokens, bag_of_words, special_tokens)
    return tuple(found for read in readers if (found := read(observation)) is not None)


def labels(observation: Observation) -> Evidence | None:
    """Reads the labels off the head's bias gradient.

    That gradient is the mean of (probabilities − one-hot label). Of one example the label is the
    only negative entry (Zhao et al. 2020). Of more the counts of the classes follow, given what the
    model predicts on ordinary examples, which a fresh head predicts for anything. A language model
    has no labels beside its text.
    """
    gradient, size = _find_tensor(observation, "head_bias"), observation.knows.batch_size
    target = observation.target
    if gradient is None or size is None or target.labels_are_tokens or target.labels_are_open:
        return None
    if size == 1:
        source, label = "sign of the head's bias gradient", int(gradient.argmin())
        return Evidence("labels", (label,), _is_certain(observation), source)
    with torch.no_grad():
        ordinary = observation.target.probabilities(observation.target.ordinary()).mean(0)
    counts = _round_counts((ordinary - gradient) * size, size)
    found = tuple(label for label, count in enumerate(counts) for _ in range(count))
    return Evidence("labels", found, exact=False, source="counts from the head's bias gradient")


def find_labels(observation: Observation) -> tuple[int, ...] | None:
    """Returns the labels as known, or as the update shows them; a language model has none."""
    if observation.knows.labels is not None:
        return tuple(observation.knows.labels.tolist())
    found = labels(observation)
    return None if found is None else found.values


def _round_counts(expected: Float[Tensor, "classes"], total: int) -> list[int]:
    """Returns whole numbers that add up to the total, by largest remainder."""
    wished = expected.clamp_min(0).tolist()
    counts = [int(value) for value in wished]
    # Largest remainders first; negative estimates were raised to zero before.
    by_remainder = sorted(range(len(wished)), key=lambda label: counts[label] - wished[label])
    for place in range(max(0, total - sum(counts))):
        counts[by_remainder[place % len(counts)]] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts


def longest_length(observation: Observation) -> Evidence | None:
    """Reads the number of positions the batch used off the rows of the position embeddings.

    For one sentence that is its length; for more, the length of the longest. The last token of a
    text predicts nothing in a language model: its position has no gradient.
    """
    rows = _find_tensor(observation, "position_embedding")
    used = 0 if rows is None else int(_mark_touched(rows, observation.channel.noisy).sum())
    if not used:
        return None
    exact = observation.knows.batch_size == 1 and _is_certain(observation)
    length = used + int(observation.target.labels_are_tokens)
    return Evidence("longest_length", (length,), exact, "rows of the position embeddings")


def distinct_tokens(observation: Observation) -> Evidence | None:
    """Reads how many different inputs the first layer had off the rank of its gradients.

    Inputs differ by token and, where positions are added, by position: the rank is at least the
    number of different tokens, special ones included, and at most that of all tokens. The last
    token of a text is no input in a language model. None where query, key and value are not seen,
    or no gap tells signal from rounding or noise: more tokens than the layer is wide, say.
    """
    parts = visible_linear_parts(observation, 1, ATTENTION_INPUTS)
    if not parts:
        return None
    tensors = observation.update.tensors
    matrices = [matrix_of(observation.target, part, tensors[part.name])[0] for part in parts]
    rank = _find_rank(torch.cat(matrices))
    if rank is None:
        return None
    names = ", ".join(dict.fromkeys(part.module.replace("_", ", ") for part in parts))
    source = f"rank of the first layer's {names}"
    return Evidence("distinct_tokens", (rank,), _is_certain(observation), source)


def _find_rank(matrix: Float[Tensor, "outputs inputs"]) -> int | None:
    """Finds where the singular values fall furthest; none where that is no clear gap."""
    values = find_singular_values(_sketch(matrix.double()))
    if len(values) < 3 or not bool(values[0] > 0):
        return None
    # Full rank leaves no rounding to compare with; and the outputs of a LayerNorm nearly lie in a
    # space one narrower. Values under what rounding makes are taken as equal: where rows are zero,
    # the smallest are endlessly far under the others.
    outputs, inputs = matrix.shape
    size = float(values.square().sum().sqrt())
    entry = mixed_sum_error(matrix.dtype) * size / math.sqrt(outputs * inputs)
    gaps = values[:-2] / values[1:-1].clamp_min(singular_floor((outputs, inputs), entry))
    rank = int(gaps.argmax()) + 1
    return rank if float(gaps[rank - 1]) >= CLEAR_GAP else None


def _sketch(matrix: Float[Tensor, "outputs inputs"]) -> Tensor:
    """Returns the matrix, or a random image of a large one.

    The image has the same rank if that is below its size.
    """
    generator = Streams.root("evidence", 0).generator()
    for _ in range(2):  # the rows, then (turned over) the columns
        if min(matrix.shape) > WIDEST:
            drawn = torch.randn(WIDEST, len(matrix), generator=generator, dtype=matrix.dtype)
            matrix = drawn.to(matrix.device) @ matrix
        matrix = matrix.mT
    return matrix


def bag_of_words(observation: Observation) -> Evidence | None:
    """Reads the set of words in the batch, without special tokens, off the word embeddings.

    It is exact where only looked-up rows have a gradient. A language model does not look up the
    last word of a text, and where the embeddings are its output layer too, every row has a
    gradient: those of the words stand out by their size, an estimate. How often a word occurs
    cannot be read: a row is the sum over its places, so a large norm is no more than a hint.
    """
    rows = _mark_words(observation)
    if rows is None:
        return None
    rows[_list_specials(observation)] = False
    source = f"{WORD_ROWS} that stand out" if observation.target.words_are_outputs else WORD_ROWS
    return Evidence("bag_of_words", _number(rows), _words_are_exact(observation), source)


def special_tokens(observation: Observation) -> Evidence | None:
    """Reads the special tokens in the batch ([CLS], [SEP], an unknown word's [UNK]).

    None where the embeddings are the output layer too: what stands out there is words.
    """
    rows = None if observation.target.words_are_outputs else _mark_words(observation)
    if rows is None:
        return None
    special = torch.zeros_like(rows)
    special[_list_specials(observation)] = True
    exact = _words_are_exact(observation)
    return Evidence("special_tokens", _number(rows & special), exact, WORD_ROWS)


def _mark_words(observation: Observation) -> Bool[Tensor, "words"] | None:
    rows = _find_tensor(observation, "word_embedding")
    if rows is None:
        return None
    norms = torch.linalg.vector_norm(rows, dim=1)
    if observation.target.words_are_outputs:
        lengths = observation.knows.lengths
        return _mark_outstanding(norms, len(norms) // MOST if lengths is None else sum(lengths))
    # Any row at all above zero was looked up, however small: in a batch one sentence may hardly
    # count beside another.
    return norms > 0 if _is_quiet(observation) else _mark_touched(rows, through_noise=True)


def _mark_outstanding(sizes: Float[Tensor, "rows"], most: int) -> Bool[Tensor, "rows"]:
    """Marks the largest, up to the widest gap between neighbours in order of size."""
    # Ratios of neighbours, largest first: words lie above the widest gap.
    ordered, places = sizes.sort(descending=True)
    most = max(1, min(most, len(ordered) - 1))
    gaps = ordered[:most] / ordered[1 : most + 1].clamp_min(torch.finfo(sizes.dtype).tiny)
    chosen = torch.zeros_like(sizes, dtype=torch.bool)
    return chosen.index_fill(0, places[: int(gaps.argmax()) + 1], True)


def _mark_touched(rows: Float[Tensor, "rows width"], through_noise: bool) -> Bool[Tensor, "rows"]:
    """Marks rows larger than rounding and, through noise, than the noise.

    Most rows are untouched, and hence of the noise's size.
    """
    norms = torch.linalg.vector_norm(rows, dim=1)
    floor = norms.quantile(0.25) if through_noise else 0.0  # a quarter is untouched in any case
    rounding = cancelled_share(rows.dtype) * norms.max()
    return torch.logical_and(norms > ABOVE_FLOOR * floor, norms > rounding)


def _words_are_exact(observation: Observation) -> bool:
    target = observation.target
    looked_up = not target.labels_are_tokens and not target.words_are_outputs
    return looked_up and _is_quiet(observation) and _is_certain(observation)


def _is_quiet(observation: Observation) -> bool:
    """Whether no noise is known of, and none shows: with it no row would be zero."""
    rows = _find_tensor(observation, "word_embedding")
    return rows is not None and not observation.channel.noisy and bool((rows == 0).all(1).any())


def _is_certain(observation: Observation) -> bool:
    """Whether what was seen is, as far as the attacker knows, the gradient up to its size."""
    return observation.channel.only_scaled and observation.protocol.one_gradient


def _find_tensor(observation: Observation, group: str) -> Tensor | None:
    """Finds the tensor of a role (`head_bias`, `word_embedding` …) as it was seen."""
    tensors = observation.update.tensors
    names = [name for name in observation.target.groups[group] if name in tensors]
    return tensors[names[0]][0] if names else None


def _list_specials(observation: Observation) -> list[int]:
    words = observation.target.vocabulary
    return sorted({*words.specials, *words.prefix, *words.suffix, words.pad})


def _number(rows: Bool[Tensor, "words"]) -> tuple[int, ...]:
    return tuple(rows.nonzero()[:, 0].tolist())
