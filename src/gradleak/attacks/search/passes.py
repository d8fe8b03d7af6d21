"""How many candidates are scored in one pass."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.search.rows import Rows
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.matching import Matcher
from gradleak.matching.chunking import BESIDE, Chunks, fastest, pieces

TOKENS_AT_ONCE = {"cuda": 200_000, "cpu": 4_000}  # on a CPU larger passes are no faster
PRIOR_TOKENS = {"cuda": 60_000, "cpu": 8_000}  # of sentences whose likelihood is asked for
PRIOR_NUMBERS = 6  # held for every token and word: logits, their softmax, and copies in single precision


def scored_in_passes(
    bench: Bench, rows: Rows, matcher: Matcher, matched: Callable[[slice, slice], Tensor], candidates: int
) -> Float[Tensor, "rows candidates"]:
    """The distance of every row's candidates, as many in a pass as fit; infinity for those that time did not allow."""
    shape, device = rows.mask.shape[1:], rows.target.device
    chunks = pieces(bench, device, matcher.bytes(*shape), matcher.work(*shape), fastest(TOKENS_AT_ONCE, device) / shape.numel())
    missing = torch.tensor(torch.inf, dtype=rows.target.dtype, device=device)
    return chunks.run_pairs(matched, len(rows.problems), candidates, missing)


def distances_of(matcher: Matcher, batch: Batch) -> Float[Tensor, "observations"]:
    """The distance of one batch of each observation, a few observations at a time."""
    each = matcher.bytes(batch.mask.shape[-2], batch.mask.shape[-1])

    def piece(rows: slice) -> Tensor:
        return matcher.distances(batch[rows], rows)[:, 0].detach()

    return Chunks(int(BESIDE / each)).run(piece, len(batch.mask))


def nll_in_passes(
    bench: Bench, rows: Rows, ids: Int[Tensor, "sentences tokens"], lengths: Int[Tensor, "sentences"]
) -> Float[Tensor, "sentences"]:
    """The prior's negative log-likelihoods: every token of every sentence has a number for every word."""
    table = rows.target.vocabulary.embeddings
    numbers = ids.shape[1] * len(table) * PRIOR_NUMBERS
    most = fastest(PRIOR_TOKENS, table.device) / ids.shape[1]
    chunks = pieces(bench, table.device, 4 * numbers, ids.shape[1] * table.numel(), most)
    return chunks.run(lambda kept: bench.prior.nll(ids[kept], lengths[kept]), len(ids))
