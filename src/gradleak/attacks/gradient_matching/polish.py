"""A last search on words: the continuous search mostly has the words, and not their order.

At whole words the true sentence has distance zero (undefended), so that the distance alone shows
the way; the prior breaks ties.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.discrete import CandidateScorer, Embeddings
from gradleak.attacks.search.changes import draw_exchanges, draw_orders, reorder
from gradleak.attacks.search.matched import Matched
from gradleak.attacks.search.rematch import Rematch, repeat_first
from gradleak.attacks.search.search_rows import Candidates, Ids, Rows
from gradleak.attacks.search.word_search import Likely, SearchEffort

NEAREST = 6  # words nearest to the embedding at each place
MANY = 256  # and at any place, where a guess is weakest
NO_BETTER = 1e-7  # of a score: less is no improvement


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
            improved = (best < before - NO_BETTER) & (idle < self.patience)
            idle = torch.where(improved, 0, idle + 1)
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
        orders = draw_orders(rows, bench, self.orders, number, sentence, "polish")
        if rows.mask.shape[1] > 1:  # words may be in the wrong sentence
            purpose = f"polish {sentence}"
            across = draw_exchanges(rows, bench, self.orders // 2, number, purpose)
            orders = torch.cat([orders, across], dim=1)
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
