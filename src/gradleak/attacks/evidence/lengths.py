"""How long the texts of a batch are, and how many different inputs they make."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.evidence.finding import Finding, certain, noisy, seen, touched
from gradleak.core.observation import Observation
from gradleak.core.parts import FUSED
from gradleak.core.streams import Streams
from gradleak.matching.inputs import linear_parts, matrix_of
from gradleak.matching.linear_algebra import find_singular_values
from gradleak.matching.rounding import mixed_sum_error, singular_floor

ATTENTION = ("query", "key", "value", FUSED)
CLEAR_GAP = 100.0  # between neighbouring singular values; measured at the rank 1e4 to 1e7 in float32, elsewhere under 5
WIDEST = 1024  # wider matrices are sketched to so many rows and columns: an SVD would take minutes


def longest_length(observation: Observation) -> Finding | None:
    """The number of positions the batch used, from the rows of the position embeddings; none if they are not seen.

    For one sentence that is its length; for more, the length of the longest. The last token of a text predicts nothing in a
    language model: its position has no gradient.
    """
    rows = seen(observation, "position_embedding")
    if rows is None:
        return None
    used = int(touched(rows, noisy(observation)).sum())
    exact = observation.knows.batch_size == 1 and certain(observation)
    found = used + int(observation.target.labels_are_tokens)
    return Finding("longest_length", (found,), exact, "rows of the position embeddings") if used else None


def distinct_tokens(observation: Observation) -> Finding | None:
    """How many different inputs the first layer had, from the rank of its query, key and value gradients seen.

    Inputs differ by token and, where positions are added, by position: the rank is at least the number of different tokens,
    special ones included, and at most that of all tokens. The last token of a text is no input in a language model. None where
    these matrices are not seen, or no gap tells signal from rounding or noise: more tokens than the layer is wide, say.
    """
    seen_parts = linear_parts(observation.target, tuple(observation.update.tensors))
    first = [part for part in seen_parts if part.layer == 1 and part.module in ATTENTION]
    if not first:
        return None
    matrices = [matrix_of(observation.target, part, observation.update.tensors[part.name])[0] for part in first]
    rank = _rank(torch.cat(matrices))
    if rank is None:
        return None
    names = ", ".join(dict.fromkeys(part.module.replace("_", ", ") for part in first))
    return Finding("distinct_tokens", (rank,), certain(observation), f"rank of the first layer's {names}")


def _rank(matrix: Float[Tensor, "outputs inputs"]) -> int | None:
    """Where the singular values fall furthest from one to the next; none where that is no clear gap."""
    values = find_singular_values(_sketched(matrix.double()))
    if len(values) < 3 or not bool(values[0] > 0):
        return None
    # Full rank leaves no rounding to compare with; and the outputs of a LayerNorm nearly lie in a space one narrower.
    # Values under what rounding makes are taken as equal: where rows are zero, the smallest are endlessly far under the others.
    outputs, inputs = matrix.shape
    entry = mixed_sum_error(matrix.dtype) * float(values.square().sum().sqrt()) / math.sqrt(outputs * inputs)
    gaps = values[:-2] / values[1:-1].clamp_min(singular_floor((outputs, inputs), entry))
    rank = int(gaps.argmax()) + 1
    return rank if float(gaps[rank - 1]) >= CLEAR_GAP else None


def _sketched(matrix: Float[Tensor, "outputs inputs"]) -> Tensor:
    """The matrix, or where it is large a random image of it, which has the same rank if that is below its size."""
    generator = Streams.root("evidence", 0).generator()
    for _ in range(2):
        if min(matrix.shape) > WIDEST:
            drawn = torch.randn(WIDEST, len(matrix), generator=generator, dtype=matrix.dtype)
            matrix = drawn.to(matrix.device) @ matrix
        matrix = matrix.mT
    return matrix
