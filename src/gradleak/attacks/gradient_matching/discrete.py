"""Search over whole words around the continuous one: rounds between its steps, and a last polish.

In a round words change places where that fits better. The polish begins where the steps end: these
mostly have the words, and not their order. At whole words the true sentence has distance zero
(undefended), so that the distance alone shows the way; the prior breaks ties.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.search.changes import Orders, draw_exchanges, draw_moves, draw_orders, reorder
from gradleak.attacks.search.descent import RowAdamState
from gradleak.attacks.search.likelihood import compute_nll
from gradleak.attacks.search.matched import Matched
from gradleak.attacks.search.rematch import Rematch, repeat_first
from gradleak.attacks.search.search_rows import (
    Candidates,
    Ids,
    Rows,
    nearest_tokens,
    score_in_passes,
)
from gradleak.attacks.search.word_search import Likely, SearchEffort
from gradleak.core.attack import Bench
from gradleak.matching import Matcher

Embeddings = Float[Tensor, "rows examples tokens hidden"]
NEAREST = 6  # words nearest to the embedding at each place
MANY = 256  # and at any place, where a guess is weakest
NO_BETTER = 1e-7  # of a score: less is no improvement


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
        return not self.rounds_at_end and taken >= self.begin * steps and taken % self.every == 0

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
            lowest, place = scorer.score_orders(embeddings, ids, orders, self.prior_weight).min(1)
            if slips.stale_rounds:
                place = torch.where(lowest < best, place, 0)
                best = torch.minimum(best, lowest)
            chosen = orders[torch.arange(count, device=orders.device), place]
            # Moments belong to words: left behind, they would push the words that came instead.
            moments = () if slips.moments_stay else (state.first, state.second)
            for tensor in (embeddings, *moments):
                tensor.copy_(move_places(tensor, chosen))
            if not slips.stale_rounds:
                ids = reorder(ids, chosen[:, None])[:, 0]

    def _draw_orders(
        self, rows: Rows, bench: Bench, number: int, padded_prefix: bool
    ) -> Iterator[Orders]:
        """Yields the orders of one sentence after the other, each made when it is wanted."""
        for one in range(rows.mask.shape[1]):
            yield draw_orders(rows, bench, self.candidates, number, one, "round", padded_prefix)
        if self.across and rows.mask.shape[1] > 1:
            yield draw_exchanges(rows, bench, self.candidates, number, "across")


def move_places(
    values: Float[Tensor, "*lead examples tokens hidden"], orders: Tensor
) -> Float[Tensor, "*lead examples tokens hidden"]:
    """Returns the embeddings of a batch with its places in another order."""
    flat = values.flatten(-3, -2)
    wide = orders[..., None].expand(*orders.shape, flat.shape[-1])
    return flat.gather(-2, wide).view(values.shape)


@dataclass(frozen=True, eq=False)
class Ending:
    """Where a continuous search ended, which a search on words goes on from."""

    scorer: CandidateScorer
    embeddings: Embeddings  # after the last step
    best: Embeddings  # at the lowest loss
    adaptive: bool
    unroll: bool
    report: Callable[[int, int, Ids], None]


@dataclass(frozen=True)
class Polish:
    """Rounds of random moves and substitutions, each round's best taken, until none improves."""

    rounds: int = 60
    orders: int = 200  # word orders tried for each sentence in a round
    substitutions: int = 100  # words exchanged for others of the pool, in a sentence and round
    nearest: int = 4  # words nearest to each place's embedding that enter the pool
    prior_weight: float = 0.02
    patience: int = 4  # rounds without any improvement before it stops

    def improve(self, ending: Ending, ids: Ids) -> Ids:
        """Returns the guesses after polishing: never a worse score than before."""
        scorer, bench = ending.scorer, ending.scorer.bench
        if bench.out_of_time:
            return ids
        ids = ids.clone()
        pools = self._pool_words(ending)
        best = scorer.score_tokens(ids[:, None], self.prior_weight)[:, 0]
        # Rounds without improvement, row by row: a row does not go on because another does.
        idle = torch.zeros_like(best)
        for number in range(self.rounds):
            before = best.clone()
            for sentence in range(ids.shape[1]):
                if bench.out_of_time:
                    break
                candidates = self._draw_candidates(scorer, ids, pools, number, sentence)
                scores = scorer.score_tokens(candidates, self.prior_weight)
                # The first candidate is the guess as it is.
                chosen = torch.where(idle < self.patience, scores.argmin(1), 0)
                best = scores.gather(1, chosen[:, None])[:, 0]
                ids = candidates[torch.arange(len(ids), device=ids.device), chosen]
            ending.report(number + 1, self.rounds, ids)
            idle = torch.where((best < before - NO_BETTER) & (idle < self.patience), 0, idle + 1)
            if bool((idle >= self.patience).all()) or bench.out_of_time:
                break
        return ids

    def _pool_words(self, ending: Ending) -> list[Tensor]:
        """Returns words that may belong to each row: the nearest to its embeddings at free places.

        Those at the lowest loss and those of the end both count.
        """
        rows, pools = ending.scorer.rows, []
        directions = normalise(rows.target.vocabulary.embeddings[rows.words])
        for row, fixed in enumerate(rows.fixed):
            places = torch.cat([ending.best[row][~fixed], ending.embeddings[row][~fixed]])
            cosines = normalise(places) @ directions.T
            pools.append(rows.words[cosines.topk(self.nearest, dim=-1).indices].flatten())
        return pools

    def _draw_candidates(
        self, scorer: CandidateScorer, ids: Ids, pools: list[Tensor], number: int, sentence: int
    ) -> Candidates:
        """Returns the guess itself, reordered, and with single words exchanged."""
        rows, bench = scorer.rows, scorer.bench
        orders = draw_moves(rows, bench, self.orders, number, sentence, "polish")
        exchanged = ids[:, None].expand(-1, self.substitutions, -1, -1).clone()
        every = torch.arange(self.substitutions)
        for row, problem in enumerate(rows.problems):
            stream = bench.streams_of(problem.observation)
            generator = stream.child("exchange", problem.number, number, sentence).generator()
            draws = torch.rand(2, self.substitutions, generator=generator, dtype=torch.float64)
            free, pool = (~rows.fixed[row, sentence]).nonzero()[:, 0].cpu(), pools[row].cpu()
            where, words = free[(draws[0] * len(free)).long()], pool[(draws[1] * len(pool)).long()]
            exchanged[row, every, sentence, where.to(ids.device)] = words.to(ids.device)
        return torch.cat([reorder(ids, orders), exchanged], dim=1)


@dataclass(frozen=True)
class WordPolish:
    """Random moves and exchanges, then word by word what matches best."""

    moves: Polish
    effort: SearchEffort

    def improve(self, ending: Ending, ids: Ids) -> Ids:
        """Returns the guesses after polishing: never a worse match than before."""
        rows, bench = ending.scorer.rows, ending.scorer.bench
        moved = self.moves.improve(ending, ids)
        if bench.out_of_time:
            return moved
        matched = Matched(rows.observations, ending.adaptive, ending.unroll)
        likely = find_nearest_words(rows, ending.best)
        return Rematch(bench, self.effort).run(rows, matched, moved, likely)[0]


def find_nearest_words(rows: Rows, embeddings: Embeddings) -> Likely:
    """Returns words whose embeddings point as those of places do: a few of each, many of any."""
    directions = normalise(rows.target.vocabulary.embeddings[rows.words])
    few, many = [], []
    for one, fixed in zip(embeddings, rows.fixed, strict=True):
        cosines = normalise(one[~fixed]) @ directions.T
        few.append(rows.words[cosines.topk(NEAREST, dim=-1).indices].flatten())
        many.append(rows.words[cosines.amax(0).topk(min(MANY, len(rows.words))).indices])
    width = max(map(len, few))
    return torch.stack([repeat_first(words, width) for words in few]), torch.stack(many)


def normalise(vectors: Float[Tensor, "*lead hidden"]) -> Float[Tensor, "*lead hidden"]:
    """Returns the vectors at length one: products of two such are cosines."""
    return torch.nn.functional.normalize(vectors.detach(), dim=-1)
