"""Discrete rounds: between continuous steps, words change places where that fits better."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.search.changes import Orders, draw_exchanges, draw_orders, reorder
from gradleak.attacks.search.descent import RowAdamState
from gradleak.attacks.search.likelihood import compute_nll
from gradleak.attacks.search.passes import score_in_passes
from gradleak.attacks.search.search_rows import Candidates, Ids, Rows, nearest_tokens
from gradleak.core.attack import Bench
from gradleak.matching import Matcher

Embeddings = Float[Tensor, "rows examples tokens hidden"]


@dataclass(frozen=True)
class Slips:
    """What LAMP's released code does by oversight and we mended; each can be switched back.

    With all of them off it is the search as we run it.
    """

    silent_tensors: bool = False  # key biases, whose gradient is rounding noise, are matched too
    specials_inside: bool = False  # [SEP] or [MASK] may be guessed inside a sentence
    moments_stay: bool = False  # the optimiser's moments do not move with the words
    # In a batch, a sentence must beat the best loss of the one before, judged with its old words.
    stale_rounds: bool = False
    padded_prefix: bool = False  # a prefix moves to the end of the padding, not of the sentence
    padding_in_penalty: bool = False  # the length penalty averages over padding too
    defense_ignored: bool = False  # updates are matched as if no defense had changed them


MENDED = Slips()
RELEASED = Slips(
    silent_tensors=True,
    specials_inside=True,
    moments_stay=True,
    stale_rounds=True,
    padded_prefix=True,
    padding_in_penalty=True,
    defense_ignored=True,
)


@dataclass(frozen=True, eq=False)
class CandidateScorer:
    """Says how well candidates match what was seen, and how likely they are beforehand."""

    rows: Rows
    matcher: Matcher
    bench: Bench
    unit: Float[Tensor, "rows"]  # what the prior's weight is a multiple of

    def score_tokens(
        self, ids: Candidates, prior_weight: float
    ) -> Float[Tensor, "rows candidates"]:
        """Returns matching distance plus weighted prior of candidates given as tokens."""

        def match(kept: slice, some: slice) -> Tensor:
            return self.matcher.distances(self.rows.token_batch(ids[kept, some], kept), kept)

        scores = score_in_passes(self.bench, self.rows, self.matcher, match, ids.shape[1])
        return self._add_prior(scores, ids, prior_weight)

    def score_orders(
        self, embeddings: Embeddings, ids: Ids, orders: Orders, prior_weight: float
    ) -> Float[Tensor, "rows candidates"]:
        """Returns the same of embeddings, and the words nearest to them, in other orders."""

        def match(kept: slice, some: slice) -> Tensor:
            wanted = orders[kept, some]
            repeated = embeddings[kept, None].expand(-1, wanted.shape[1], -1, -1, -1)
            batch = self.rows.batch(move_places(repeated, wanted), kept)
            return self.matcher.distances(batch, kept)

        scores = score_in_passes(self.bench, self.rows, self.matcher, match, orders.shape[1])
        return self._add_prior(scores, reorder(ids, orders), prior_weight)

    def _add_prior(self, scores: Tensor, ids: Candidates, prior_weight: float) -> Tensor:
        if prior_weight == 0:
            return scores
        return scores + prior_weight * self.unit[:, None] * compute_nll(self.bench, self.rows, ids)


@dataclass(frozen=True)
class DiscreteRounds:
    """When and how words are reordered (LAMP, section 4.3)."""

    every: int = 75  # steps between rounds
    begin: float = 0.1  # share of the steps before the first round
    candidates: int = 200  # orders tried for each sentence in a round
    prior_weight: float = 0.2
    rounds_at_end: int = 0  # instead of alternating: so many rounds after the last step
    across: bool = False  # in a batch, also try exchanges between sentences (the paper has none)

    def is_due(self, taken: int, steps: int) -> bool:
        """Returns whether a round follows that many steps."""
        begun = taken >= self.begin * steps
        return not self.rounds_at_end and begun and taken % self.every == 0

    def reorder_words(
        self,
        scorer: CandidateScorer,
        embeddings: Embeddings,
        state: RowAdamState,
        number: int,
        slips: Slips,
    ) -> None:
        """Moves embeddings and moments in place: of each sentence, to the best of many orders."""
        rows = scorer.rows
        ids = nearest_tokens(rows, embeddings)
        count = len(rows.problems)
        best = torch.full((count,), torch.inf, device=ids.device, dtype=rows.target.dtype)
        for orders in self._draw_orders(rows, scorer.bench, number, slips.padded_prefix):
            if scorer.bench.out_of_time:
                break
            scores = scorer.score_orders(embeddings, ids, orders, self.prior_weight)
            lowest, place = scores.min(1)
            if slips.stale_rounds:
                place = torch.where(lowest < best, place, 0)
                best = torch.minimum(best, lowest)
            chosen = orders[torch.arange(count, device=orders.device), place]
            # Moments belong to words: left behind, they would push the words that came instead.
            moving = [embeddings]
            if not slips.moments_stay:
                moving += [state.first, state.second]
            for tensor in moving:
                tensor.copy_(move_places(tensor, chosen))
            if not slips.stale_rounds:
                ids = reorder(ids, chosen[:, None])[:, 0]

    def _draw_orders(
        self, rows: Rows, bench: Bench, number: int, padded_prefix: bool
    ) -> Iterator[Orders]:
        """Yields the orders of one sentence after the other, each made when it is wanted."""
        examples = rows.mask.shape[1]
        for one in range(examples):
            yield draw_orders(rows, bench, self.candidates, number, one, "round", padded_prefix)
        if self.across and examples > 1:
            yield draw_exchanges(rows, bench, self.candidates, number, "across")


def move_places(
    values: Float[Tensor, "*lead examples tokens hidden"], orders: Tensor
) -> Float[Tensor, "*lead examples tokens hidden"]:
    """Returns the embeddings of a batch with its places in another order."""
    flat = values.flatten(-3, -2)
    wide = orders[..., None].expand(*orders.shape, flat.shape[-1])
    return flat.gather(-2, wide).view(values.shape)
