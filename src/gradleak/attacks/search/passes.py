"""How many candidates are scored in one pass."""

from collections.abc import Callable, Hashable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.search.search_rows import Rows, group_by, stack_batches
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.matching import Matcher
from gradleak.matching.chunking import BESIDE, Chunks, fastest, pieces

TOKENS_AT_ONCE = {"cuda": 200_000, "cpu": 4_000}  # on a CPU larger passes are no faster


def score_in_passes(
    bench: Bench,
    rows: Rows,
    matcher: Matcher,
    score: Callable[[slice, slice], Tensor],
    candidates: int,
) -> Float[Tensor, "rows candidates"]:
    """Returns what `score` says of every row's candidates, as many in a pass as fit.

    Those that time did not allow are infinitely far.
    """
    shape, device = rows.mask.shape[1:], rows.target.device
    most = fastest(TOKENS_AT_ONCE, device) / shape.numel()
    chunks = pieces(bench, device, matcher.bytes(*shape), matcher.work(*shape), most)
    missing = torch.tensor(torch.inf, dtype=rows.target.dtype, device=device)
    return chunks.run_pairs(score, len(rows.problems), candidates, missing)


def score_batches(
    observations: Sequence[Observation],
    batches: Sequence[Batch],
    key: Callable[[Observation], Hashable],
    score: Callable[[list[Observation], Batch], Float[Tensor, "some"]],
) -> Float[Tensor, "observations"]:
    """Returns what `score` says of one batch of each observation, those with one key together.

    Where the target reads padding they go one by one.
    """
    alone = not observations[0].target.padding_is_free
    places = range(len(observations))
    groups = group_by(places, lambda place: place if alone else key(observations[place]))
    found: dict[int, Tensor] = {}
    for group in groups:
        seen = [observations[place] for place in group]
        scores = score(seen, stack_batches([batches[place] for place in group]))
        found.update(zip(group, scores, strict=True))
    return torch.stack([found[place] for place in places])


def compute_distances(matcher: Matcher, batch: Batch) -> Float[Tensor, "observations"]:
    """Returns the distance of one batch of each observation, a few observations at a time."""
    each = matcher.bytes(batch.mask.shape[-2], batch.mask.shape[-1])

    def piece(rows: slice) -> Tensor:
        return matcher.distances(batch[rows], rows)[:, 0].detach()

    return Chunks(int(BESIDE / each)).run(piece, len(batch.mask))
