"""A last discrete search on the words themselves: the continuous search mostly has the words, and not their order.

At whole words the true sentence has distance zero (undefended), so the distance alone shows the way; the prior breaks ties.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from gradleak.attacks.gradient_matching.discrete import candidate_exchanges, candidate_orders, token_scores

if TYPE_CHECKING:
    from gradleak.attacks.gradient_matching.loop import Search


@dataclass(frozen=True)
class Polish:
    """Rounds of random moves and substitutions, each round's best taken; ends when nothing improves for a while."""

    rounds: int = 60
    orders: int = 200  # word orders tried for each sentence in a round
    substitutions: int = 100  # words exchanged for others of the pool, tried for each sentence in a round
    nearest: int = 4  # words nearest to each place's embedding that enter the pool
    prior_weight: float = 0.02
    patience: int = 4  # rounds without any improvement before it stops

    def most_passes(self, examples: int, tokens: int) -> int:
        """How often candidates are scored at most."""
        return 1 + self.rounds * examples

    def improve(self, search: "Search", ids: Int[Tensor, "rows examples tokens"]) -> Int[Tensor, "rows examples tokens"]:
        """The guesses after polishing: never a worse score than before."""
        if search.bench.out_of_time:
            return ids
        ids = ids.clone()
        pools = _pools(search, self.nearest)
        best = token_scores(search, ids[:, None], search.matcher, self.prior_weight)[:, 0]
        idle = torch.zeros_like(best)  # rounds without improvement, row by row: a row does not go on because another does
        for number in range(self.rounds):
            before = best.clone()
            for sentence in range(ids.shape[1]):
                if search.bench.out_of_time:
                    break
                candidates = self._candidates(search, ids, pools, number, sentence)
                scores = token_scores(search, candidates, search.matcher, self.prior_weight)
                chosen = torch.where(idle < self.patience, scores.argmin(1), 0)  # the first is the guess as it is
                best = scores.gather(1, chosen[:, None])[:, 0]
                ids = candidates[torch.arange(len(ids), device=ids.device), chosen]
            search.report(number + 1, self.rounds, ids)
            idle = torch.where((best < before - 1e-7) & (idle < self.patience), 0, idle + 1)
            if bool((idle >= self.patience).all()) or search.bench.out_of_time:
                break
        return ids

    def _candidates(self, search: "Search", ids: Tensor, pools: list[Tensor], number: int, sentence: int) -> Tensor:
        """[rows, candidates, examples, tokens]: the guess itself, reordered, and with single words exchanged."""
        orders = [candidate_orders(search.rows, search.bench, self.orders, number, sentence, "polish")]
        if search.rows.mask.shape[1] > 1:  # words may be in the wrong sentence
            orders.append(candidate_exchanges(search.rows, search.bench, self.orders // 2, number, f"polish {sentence}"))
        places = torch.cat(orders, dim=1)
        moved = ids.flatten(1)[:, None].expand(-1, places.shape[1], -1).gather(2, places)
        moved = moved.view(len(ids), places.shape[1], *ids.shape[1:])
        exchanged = ids[:, None].expand(-1, self.substitutions, -1, -1).clone()
        for row, problem in enumerate(search.rows.problems):
            stream = search.bench.streams_of(problem.observation).child("exchange", problem.number, number, sentence)
            free = (~search.rows.fixed[row, sentence]).nonzero()[:, 0].cpu()
            draws = torch.rand(2, self.substitutions, generator=stream.generator(), dtype=torch.float64)
            where = free[(draws[0] * len(free)).long()]
            words = pools[row].cpu()[(draws[1] * len(pools[row])).long()]
            exchanged[row, torch.arange(self.substitutions), sentence, where.to(ids.device)] = words.to(ids.device)
        return torch.cat([moved, exchanged], dim=1)


def _pools(search: "Search", nearest: int) -> list[Int[Tensor, "words"]]:
    """Words that may belong to a row: the nearest to its embeddings at every free place, at the lowest loss and at the end."""
    words = search.rows.words
    directions = torch.nn.functional.normalize(search.rows.target.vocabulary.embeddings[words], dim=-1)
    pools = []
    for row, fixed in enumerate(search.rows.fixed):
        places = torch.cat([search.best[row][~fixed], search.embeddings[row][~fixed]])
        unit = torch.nn.functional.normalize(places.detach(), dim=-1)
        pools.append(words[(unit @ directions.T).topk(nearest, dim=-1).indices].flatten())
    return pools
