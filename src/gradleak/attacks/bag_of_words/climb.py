"""Climbing to the best order of known words: rounds of moves, judged by how well gradients match and how likely the text is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.gradient_matching.discrete import batch_nll, candidate_exchanges, candidate_orders
from gradleak.attacks.search.orders import likely_order, spare_places
from gradleak.attacks.search.passes import scored_in_passes
from gradleak.attacks.search.rows import Rows
from gradleak.core.attack import Bench
from gradleak.core.streams import Streams
from gradleak.matching import Cosine, for_observations

PATIENCE = 4  # rounds without improvement before a row begins anew
GOOD_ENOUGH = 1e-3  # a cosine distance that needs no further try, as in lamp_plus


@dataclass(frozen=True)
class Settings:
    """How long to climb, and over how many neighbours."""

    rounds: int
    orders: int
    repeats: int
    beams: int
    prior_weight: float

    def most_passes(self, examples: int) -> int:
        """How often candidates are scored at most: at first, for every sentence of every round and twice where rows begin
        anew, and at last."""
        return 1 + self.rounds * (examples + 2) + 1


class Climb:
    """Moves all rows uphill together; one that is stuck begins anew from its best, shuffled in part, until that explains all.

    What becomes of a row depends on the rows of its own observation alone.
    """

    def __init__(self, settings: Settings, rows: Rows, bags: Mapping[int, Sequence[int]], bench: Bench) -> None:
        self.settings, self.rows, self.bench = settings, rows, bench
        self.bags = [bags[problem.observation.index] for problem in rows.problems]
        self.matcher = for_observations([problem.observation for problem in rows.problems], Cosine())
        self.done = torch.zeros(len(rows.problems), dtype=torch.bool, device=rows.target.device)
        self.rounds = 0
        self.ids = self._start()
        self.scores = self._scores(self.ids[:, None])[:, 0]
        self.idle = torch.zeros_like(self.scores)  # rounds without improvement
        self.best, self.best_scores = self.ids.clone(), self.scores.clone()

    def run(self) -> None:
        """Climbs until every row is done or the rounds are over."""
        while self.rounds < self.settings.rounds and not (bool(self.done.all()) or self.bench.out_of_time):
            self.rounds += 1
            before = self.scores.clone()
            for sentence in range(self.ids.shape[1]):
                if self.bench.out_of_time:
                    break
                self._take_best(self._candidates(sentence))
            self.idle = torch.where(self.scores < before - 1e-7, 0, self.idle + 1)
            better = self.scores < self.best_scores
            self.best = torch.where(better[:, None, None], self.ids, self.best)
            self.best_scores = torch.where(better, self.scores, self.best_scores)
            self._begin_anew(~self.done & (self.idle >= PATIENCE))
            self._report()

    def distances(self, ids: Int[Tensor, "rows candidates examples tokens"]) -> Float[Tensor, "rows candidates"]:
        """How far the gradients of the candidates are from what was seen; rows that are done are not looked at."""

        def matched(kept: slice, some: slice) -> Tensor:
            if bool(self.done[kept].all()):
                return torch.zeros(ids[kept, some].shape[:2], dtype=self.rows.target.dtype, device=ids.device)
            return self.matcher.distances(self.rows.token_batch(ids[kept, some], kept), kept)

        return scored_in_passes(self.bench, self.rows, self.matcher, matched, ids.shape[1])

    def _scores(self, ids: Int[Tensor, "rows candidates examples tokens"]) -> Float[Tensor, "rows candidates"]:
        distances = self.distances(ids)
        weight = self.settings.prior_weight
        return distances if weight == 0 else distances + weight * batch_nll(self.bench, self.rows, ids)

    def _take_best(self, candidates: Int[Tensor, "rows candidates examples tokens"]) -> None:
        scores = self._scores(candidates)
        chosen = torch.where(self.done, 0, scores.argmin(1))  # the first is the guess as it is
        self.scores = torch.where(self.done, self.scores, scores.gather(1, chosen[:, None])[:, 0])
        self.ids = candidates[torch.arange(len(candidates), device=chosen.device), chosen]

    def _candidates(self, sentence: int) -> Int[Tensor, "rows candidates examples tokens"]:
        """The guess itself, with its words moved, and with words that are there twice exchanged for others of the bag."""
        ids, count = self.ids, self.settings.orders
        orders = candidate_orders(self.rows, self.bench, count, self.rounds, sentence, "bag")
        if ids.shape[1] > 1:
            across = candidate_exchanges(self.rows, self.bench, count // 2, self.rounds, f"bag {sentence}")
            orders = torch.cat([orders, across], dim=1)
        moved = ids.flatten(1)[:, None].expand(-1, orders.shape[1], -1).gather(2, orders)
        repeated = torch.stack([self._repeats(row, sentence) for row in range(len(ids))])
        made = torch.cat([moved, repeated], dim=1).view(len(ids), -1, *ids.shape[1:])
        return torch.where(self.done[:, None, None, None], ids[:, None], made)

    def _repeats(self, row: int, sentence: int) -> Int[Tensor, "candidates places"]:
        """The guess with one spare word exchanged, any sentence's."""
        ids, bag = self.ids[row].flatten(), torch.tensor(self.bags[row])
        made = ids.expand(self.settings.repeats, -1).clone()
        free = self._free(row)
        spare = torch.tensor(spare_places(ids[free].tolist(), self.bags[row]), dtype=torch.int64)
        if not len(spare):
            return made
        where, which = torch.rand(2, len(made), generator=self._stream(row, "repeats", sentence).generator(), dtype=torch.float64)
        places = free[spare[(where * len(spare)).long()].to(free.device)]
        words = bag[(which * len(bag)).long()].to(ids.device)
        return made.scatter(1, places[:, None], words[:, None])

    def _begin_anew(self, stuck: Bool[Tensor, "rows"]) -> None:
        """Rows that are stuck are done where their best explains what was seen, and are otherwise shuffled in part."""
        if not bool(stuck.any()):
            return
        explained = stuck & (self.distances(self.best[:, None])[:, 0] <= GOOD_ENOUGH)
        solved = {self.rows.problems[row].observation.index for row in explained.nonzero()[:, 0].tolist()}
        for row, problem in enumerate(self.rows.problems):
            if problem.observation.index in solved:
                self.done[row] = True
            elif bool(stuck[row]):
                self.ids[row] = self._shuffled(row)
        self.idle = torch.where(stuck, 0, self.idle)
        self.scores = torch.where(self.done, self.best_scores, self._scores(self.ids[:, None])[:, 0])

    def _shuffled(self, row: int) -> Int[Tensor, "examples tokens"]:
        """The best of a row, a random third of its words put in one another's place."""
        flat, free = self.best[row].flatten(), self._free(row)
        drawn = torch.randperm(len(free), generator=self._stream(row, "shuffle").generator())
        some = free[drawn[: max(3, len(free) // 3)].to(free.device)]
        return flat.scatter(0, some, flat[some.roll(1)]).view_as(self.best[row])

    def _start(self) -> Int[Tensor, "rows examples tokens"]:
        """The order the prior finds likeliest; it depends on words and lengths alone, so hypotheses of the labels share it."""
        ids = self.rows.frame.clone()
        made = {}
        for row, problem in enumerate(self.rows.problems):
            key = (problem.observation.index, problem.hypothesis.lengths)
            if key not in made:
                made[key] = likely_order(self.bench.prior, self.rows.target, self.bags[row], key[1], self.settings.beams)
            for place, sentence in enumerate(made[key]):
                ids[row, place, : len(sentence)] = torch.tensor(sentence)
        return ids

    def _free(self, row: int) -> Int[Tensor, "free"]:
        return (~self.rows.fixed[row].flatten()).nonzero()[:, 0]

    def _stream(self, row: int, *purpose: str | int) -> Streams:
        problem = self.rows.problems[row]
        return self.bench.streams_of(problem.observation).child("bag", problem.number, self.rounds, *purpose)

    def _report(self) -> None:
        order = sorted(range(len(self.best)), key=lambda row: self.rows.problems[row].observation.index)
        texts = [self.rows.target.decode(one) for row in order[:6] for one in self.rows.sentences(self.best[row], row)]
        self.bench.progress.report(self.rounds, self.settings.rounds, float(self.best_scores.mean()), texts)
