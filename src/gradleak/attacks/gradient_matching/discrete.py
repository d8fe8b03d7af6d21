"""Discrete rounds: between continuous steps, words change places where that makes gradient and language fit better."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.search.descent import AdamState
from gradleak.attacks.search.moves import exchanges, reorderings
from gradleak.attacks.search.passes import nll_in_passes, scored_in_passes
from gradleak.attacks.search.rows import Rows, nearest_tokens
from gradleak.core.attack import Bench
from gradleak.matching import Matcher

if TYPE_CHECKING:
    from gradleak.attacks.gradient_matching.loop import Search


@dataclass(frozen=True)
class DiscreteRounds:
    """When and how words are reordered (LAMP, section 4.3)."""

    every: int = 75  # steps between rounds
    begin: float = 0.1  # share of the steps before the first round
    candidates: int = 200  # orders tried for each sentence in a round
    prior_weight: float = 0.2
    rounds_at_end: int = 0  # instead of alternating: so many rounds after the last step
    across: bool = False  # in a batch, also try exchanges between sentences (the paper has none)

    def due(self, taken: int, steps: int) -> bool:
        """Whether a round follows that many steps."""
        return not self.rounds_at_end and taken >= self.begin * steps and taken % self.every == 0

    def most_passes(self, examples: int, steps: int) -> int:
        """How often candidates are scored at most in a search of so many steps."""
        rounds = self.rounds_at_end or steps // self.every
        return rounds * (examples + (1 if self.across and examples > 1 else 0))

    def round(self, search: "Search", state: AdamState, number: int) -> None:
        """One round over every sentence of every row: the best of the candidate orders is taken."""
        slips, rows = search.loop.slips, search.rows
        ids = nearest_tokens(rows, search.embeddings)
        best = torch.full((len(rows.problems),), torch.inf, device=ids.device, dtype=rows.target.dtype)
        for orders in self._orders(rows, search.bench, number, slips.padded_prefix):
            if search.bench.out_of_time:
                break
            scores = order_scores(search, search.embeddings, ids, orders, self.prior_weight)
            lowest, place = scores.min(1)
            if slips.stale_rounds:
                place = torch.where(lowest < best, place, 0)
                best = torch.minimum(best, lowest)
            chosen = orders[torch.arange(len(orders), device=orders.device), place]
            moving = [search.embeddings] if slips.moments_stay else [search.embeddings, state.first, state.second]
            for tensor in moving:
                tensor.copy_(reordered(tensor, chosen))
            ids = ids if slips.stale_rounds else ids.flatten(1).gather(1, chosen).view_as(ids)

    def _orders(self, rows: Rows, bench: Bench, number: int, padded_prefix: bool) -> Iterator[Tensor]:
        """Of one sentence after the other [rows, candidates, places], each made when it is wanted."""
        sentences = range(rows.mask.shape[1])
        for one in sentences:
            yield candidate_orders(rows, bench, self.candidates, number, one, "round", padded_prefix)
        if self.across and len(sentences) > 1:
            yield candidate_exchanges(rows, bench, self.candidates, number, "across")


def order_scores(
    search: "Search",
    embeddings: Float[Tensor, "rows examples tokens hidden"],
    ids: Int[Tensor, "rows examples tokens"],
    orders: Int[Tensor, "rows candidates places"],
    prior_weight: float,
) -> Float[Tensor, "rows candidates"]:
    """Matching distance plus weighted prior of every candidate order of the places of a batch."""
    rows, count = search.rows, orders.shape[1]

    def matched(kept: slice, some: slice) -> Tensor:
        wanted = orders[kept, some]
        candidates = reordered(embeddings[kept, None].expand(-1, wanted.shape[1], -1, -1, -1), wanted)
        return search.matcher.distances(rows.batch(candidates, kept), kept)

    scores = scored_in_passes(search.bench, rows, search.matcher, matched, count)
    if prior_weight == 0:
        return scores
    moved = ids.flatten(1)[:, None].expand(-1, count, -1).gather(2, orders).view(len(ids), count, *ids.shape[1:])
    return scores + prior_weight * search.unit[:, None] * batch_nll(search.bench, rows, moved)


def batch_nll(bench: Bench, rows: Rows, ids: Int[Tensor, "rows candidates examples tokens"]) -> Float[Tensor, "rows candidates"]:
    """The prior's mean negative log-likelihood over the tokens of a batch; sentences that occur twice are scored once."""
    lengths = torch.tensor([problem.hypothesis.lengths for problem in rows.problems], device=ids.device)
    keyed = torch.cat([ids, lengths[:, None, :, None].expand(*ids.shape[:3], 1)], dim=-1).flatten(0, 2)
    distinct, back = torch.unique(keyed, dim=0, return_inverse=True)
    nll = nll_in_passes(bench, rows, distinct[:, :-1], distinct[:, -1]).to(rows.target.dtype)[back].view(ids.shape[:3])
    shares = lengths / lengths.sum(1, keepdim=True)  # one sentence counts by its length
    return (nll * shares[:, None].to(nll.dtype)).sum(-1)


def token_scores(
    search: "Search", ids: Int[Tensor, "rows candidates examples tokens"], matcher: Matcher, prior_weight: float
) -> Float[Tensor, "rows candidates"]:
    """Matching distance plus weighted prior of candidates given as tokens."""
    rows = search.rows

    def matched(kept: slice, some: slice) -> Tensor:
        return matcher.distances(rows.token_batch(ids[kept, some], kept), kept)

    scores = scored_in_passes(search.bench, rows, matcher, matched, ids.shape[1])
    if prior_weight == 0:
        return scores
    return scores + prior_weight * search.unit[:, None] * batch_nll(search.bench, rows, ids)


def candidate_orders(
    rows: Rows, bench: Bench, count: int, number: int, sentence: int, purpose: str, padded_prefix: bool = False
) -> Int[Tensor, "rows candidates places"]:
    """Orders of a batch's places that reorder one sentence, each row from its own stream; special and padding places stay."""
    examples, width = rows.mask.shape[1:]
    orders = torch.arange(examples * width).repeat(len(rows.problems), count, 1)
    before, after = len(rows.target.vocabulary.prefix), len(rows.target.vocabulary.suffix)
    for row, problem in enumerate(rows.problems):
        stream = bench.streams_of(problem.observation).child(purpose, problem.number, number, sentence)
        lengths = problem.hypothesis.lengths
        free = lengths[sentence] - before - after
        padded = max(lengths) - before - after if padded_prefix else free
        first = sentence * width + before
        orders[row, :, first : first + padded] = first + reorderings(free, count, stream.generator(), padded)
    return orders.to(rows.target.device)


def candidate_exchanges(rows: Rows, bench: Bench, count: int, number: int, purpose: str) -> Int[Tensor, "rows candidates places"]:
    """Orders of a batch's places that exchange words, or runs of words of one length, between two of its sentences."""
    examples, width = rows.mask.shape[1:]
    orders = torch.arange(examples * width).repeat(len(rows.problems), count, 1)
    before, after = len(rows.target.vocabulary.prefix), len(rows.target.vocabulary.suffix)
    for row, problem in enumerate(rows.problems):
        stream = bench.streams_of(problem.observation).child(purpose, problem.number, number)
        free = [length - before - after for length in problem.hypothesis.lengths]
        firsts = [sentence * width + before for sentence in range(examples)]
        orders[row] = exchanges(orders[row], firsts, free, stream.generator())
    return orders.to(rows.target.device)


def reordered(
    values: Float[Tensor, "*lead examples tokens hidden"], orders: Int[Tensor, "*lead places"]
) -> Float[Tensor, "*lead examples tokens hidden"]:
    """The embeddings of a batch with its places in another order."""
    flat = values.flatten(-3, -2)
    return flat.gather(-2, orders[..., None].expand(*orders.shape, flat.shape[-1])).view(values.shape)
