"""Known words, unknown order: words are read off the word embeddings' gradient, then ordered."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks import evidence
from gradleak.attacks.search.changes import draw_moves, reorder
from gradleak.attacks.search.hypotheses import MOST_PAIRINGS, Assumptions, Source, pair_labels
from gradleak.attacks.search.likelihood import compute_nll, order_by_prior
from gradleak.attacks.search.search_rows import (
    Candidates,
    Ids,
    Rows,
    SearchProblem,
    compute_distances,
    group_problems,
    lay_out,
    score_batches,
    score_in_passes,
)
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.matching import Cosine, for_observations

PATIENCE = 4  # rounds without improvement before a row begins anew
GOOD_ENOUGH = 1e-3  # a cosine distance that needs no further try, as in lamp_plus
NO_BETTER = 1e-7  # of a score: less is no improvement


@register("attack", "bag_of_words")
@dataclass(frozen=True)
class BagOfWords(Attack):
    """Puts the words, known from the word embeddings' gradient, in the order that fits best.

    What has to fit is gradients and language. Nothing is called certified: a batch with two words
    exchanged may fit nearly as well.
    """

    cites = (
        "Gupta et al., NeurIPS 2022, for words from embeddings and their order by a prior; the"
        " search is ours"
    )

    steps: Count = 150  # rounds, each of which takes the best of all moves tried
    orders: Count = 200  # word orders tried for each sentence in a round
    repeats: int = 100  # exchanges of a word that is there twice for another of the bag, in a round
    beams: Count = 8  # of the search for the prior's order, with which it begins
    # 0.02, as in lamp_plus, repeats likely words where others belong (tiny: 1 of 4 exact, not 3).
    prior_weight: float = 0.002
    labels: Source = "derived"
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated

    @property
    def assumptions(self) -> Assumptions:
        return Assumptions(self.labels, self.lengths, longest=self.longest)

    @property
    def requires(self) -> frozenset[Fact]:
        return self.assumptions.requires

    def adapts_to(self, channel: Channel) -> bool:
        return channel.every_entry

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        began = time.monotonic()
        bags = {observation.index: read_bag(observation) for observation in observations}
        found = defaultdict[int, list[Reconstruction]](list)
        for group in group_problems(observations, self.assumptions):
            problems = group if self.labels == "known" else pair_problems(group)
            climb = OrderClimb(self, lay_out(problems), bags, bench)
            climb.run()
            for problem, guess in zip(climb.rows.problems, climb.list_guesses(), strict=True):
                found[problem.observation.index].append(guess)
        seconds = (time.monotonic() - began) / len(observations)
        best = [
            min(found[observation.index], key=lambda guess: guess.loss or 0.0)
            for observation in observations
        ]
        return [replace(guess, cost=Cost(seconds, guess.cost.steps)) for guess in best]

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"]:
        return score_batches(
            observations,
            batches,
            lambda observation: observation.channel.kind,
            lambda seen, held: compute_distances(for_observations(seen, Cosine()), held),
        )


def read_bag(observation: Observation) -> list[int]:
    """Returns the words to put in order, and special tokens that stand inside texts ([UNK])."""
    words = evidence.bag_of_words(observation)
    special = evidence.special_tokens(observation)
    if words is None or not words.values:
        raise GradleakError(
            "bag_of_words reads the words off the word embeddings' gradient, which is not visible: "
            "let them train and choose a view that shows them, or use another attack."
        )
    vocabulary = observation.target.vocabulary
    around = {*vocabulary.prefix, *vocabulary.suffix, vocabulary.pad}
    inside = [token for token in (special.values if special else ()) if token not in around]
    return [*words.values, *inside]


def pair_problems(problems: Sequence[SearchProblem]) -> list[SearchProblem]:
    """Returns a problem for every way to give the labels to sentences of different lengths.

    Labels that were read off the update or enumerated come without an order.
    """
    return [
        SearchProblem(one.observation, hypothesis, one.number * MOST_PAIRINGS + place)
        for one in problems
        for place, hypothesis in enumerate(pair_labels(one.hypothesis))
    ]


class OrderClimb:
    """Moves all rows uphill together, in rounds of which each takes the best of many moves.

    One that is stuck begins anew from its best, shuffled in part, until that explains all. What
    becomes of a row depends on the rows of its own observation alone.
    """

    def __init__(
        self, attack: BagOfWords, rows: Rows, bags: Mapping[int, Sequence[int]], bench: Bench
    ) -> None:
        self.attack, self.rows, self.bench = attack, rows, bench
        self.bags = [bags[observation.index] for observation in rows.observations]
        self.matcher = for_observations(rows.observations, Cosine())
        self.done = torch.zeros(len(self.bags), dtype=torch.bool, device=rows.target.device)
        self.rounds = 0
        self.ids = self._begin()
        self.scores = self._score(self.ids[:, None])[:, 0]
        self.idle = torch.zeros_like(self.scores)  # rounds without improvement
        self.best, self.best_scores = self.ids.clone(), self.scores.clone()

    def run(self) -> None:
        """Climbs until every row is done or the rounds are over."""
        while self.rounds < self.attack.steps:
            if bool(self.done.all()) or self.bench.out_of_time:
                break
            self.rounds += 1
            before = self.scores.clone()
            for sentence in range(self.ids.shape[1]):
                if self.bench.out_of_time:
                    break
                self._take_best(self._draw_candidates(sentence))
            self.idle = torch.where(self.scores < before - NO_BETTER, 0, self.idle + 1)
            better = self.scores < self.best_scores
            self.best = torch.where(better[:, None, None], self.ids, self.best)
            self.best_scores = torch.where(better, self.scores, self.best_scores)
            self._begin_anew(~self.done & (self.idle >= PATIENCE))
            loss, texts = float(self.best_scores.mean()), self.rows.decode_some(self.best)
            self.bench.progress.report(self.rounds, self.attack.steps, loss, texts)

    def list_guesses(self) -> list[Reconstruction]:
        """Returns the best of every row."""
        self.done.zero_()  # the distances of all are asked for
        return [
            Reconstruction(
                self.rows.sentences(self.best[row], row),
                loss=distance,
                labels=self.rows.problems[row].hypothesis.labels,
                cost=Cost(steps=self.rounds),
            )
            for row, distance in enumerate(
                self.measure_distances(self.best[:, None])[:, 0].tolist()
            )
        ]

    def measure_distances(self, ids: Candidates) -> Float[Tensor, "rows candidates"]:
        """Returns how far the gradients of the candidates are from what was seen."""

        def match(kept: slice, some: slice) -> Tensor:
            candidates = ids[kept, some]
            if bool(self.done[kept].all()):  # nobody asks
                return ids.new_zeros(candidates.shape[:2], dtype=self.rows.target.dtype)
            return self.matcher.distances(self.rows.token_batch(candidates, kept), kept)

        return score_in_passes(self.bench, self.rows, self.matcher, match, ids.shape[1])

    def _score(self, ids: Candidates) -> Float[Tensor, "rows candidates"]:
        distances, weight = self.measure_distances(ids), self.attack.prior_weight
        return distances + weight * compute_nll(self.bench, self.rows, ids) if weight else distances

    def _take_best(self, candidates: Candidates) -> None:
        scores = self._score(candidates)
        chosen = torch.where(self.done, 0, scores.argmin(1))  # the first is the guess as it is
        self.scores = torch.where(self.done, self.scores, scores.gather(1, chosen[:, None])[:, 0])
        self.ids = candidates[torch.arange(len(candidates), device=chosen.device), chosen]

    def _draw_candidates(self, sentence: int) -> Candidates:
        """Returns the guess itself, with its words moved, and with spare words exchanged."""
        ids, count = self.ids, self.attack.orders
        orders = draw_moves(self.rows, self.bench, count, self.rounds, sentence, "bag")
        repeated = torch.stack([self._exchange_spare(row, sentence) for row in range(len(ids))])
        made = torch.cat([reorder(ids, orders), repeated.view(len(ids), -1, *ids.shape[1:])], dim=1)
        return torch.where(self.done[:, None, None, None], ids[:, None], made)

    def _exchange_spare(self, row: int, sentence: int) -> Int[Tensor, "candidates places"]:
        """Returns the guess with one word that it can spare exchanged, in any sentence."""
        ids, bag = self.ids[row].flatten(), torch.tensor(self.bags[row])
        made = ids.expand(self.attack.repeats, -1).clone()
        free = self._find_free(row)
        spare = torch.tensor(find_spare(ids[free].tolist(), self.bags[row]), dtype=torch.int64)
        if not len(spare):
            return made
        generator = self._name_stream(row, "repeats", sentence).generator()
        where, which = torch.rand(2, len(made), generator=generator, dtype=torch.float64)
        places = free[spare[(where * len(spare)).long()].to(free.device)]
        words = bag[(which * len(bag)).long()].to(ids.device)
        return made.scatter(1, places[:, None], words[:, None])

    def _begin_anew(self, stuck: Bool[Tensor, "rows"]) -> None:
        """Shuffles stuck rows in part; those whose best explains what was seen are done."""
        if not bool(stuck.any()):
            return
        explained = stuck & (self.measure_distances(self.best[:, None])[:, 0] <= GOOD_ENOUGH)
        seen = self.rows.observations
        solved = {seen[row].index for row in explained.nonzero()[:, 0].tolist()}
        for row, observation in enumerate(seen):
            if observation.index in solved:
                self.done[row] = True
            elif bool(stuck[row]):
                self.ids[row] = self._shuffle(row)
        self.idle = torch.where(stuck, 0, self.idle)
        self.scores = torch.where(self.done, self.best_scores, self._score(self.ids[:, None])[:, 0])

    def _shuffle(self, row: int) -> Int[Tensor, "examples tokens"]:
        """Returns the best of a row, a random third of its words put in one another's place."""
        flat, free = self.best[row].flatten(), self._find_free(row)
        drawn = torch.randperm(len(free), generator=self._name_stream(row, "shuffle").generator())
        some = free[drawn[: max(3, len(free) // 3)].to(free.device)]
        return flat.scatter(0, some, flat[some.roll(1)]).view_as(self.best[row])

    def _begin(self) -> Ids:
        """Returns the order that the prior finds likeliest."""
        ids, beams = self.rows.frame.clone(), self.attack.beams
        # It depends on words and lengths alone: hypotheses of the labels share it.
        made = {}
        for row, problem in enumerate(self.rows.problems):
            lengths = problem.hypothesis.lengths
            key, bag = (problem.observation.index, lengths), self.bags[row]
            if key not in made:
                made[key] = order_by_prior(self.bench.words, self.rows.target, bag, lengths, beams)
            for place, sentence in enumerate(made[key]):
                ids[row, place, : len(sentence)] = torch.tensor(sentence)
        return ids

    def _find_free(self, row: int) -> Int[Tensor, "free"]:
        return (~self.rows.fixed[row].flatten()).nonzero()[:, 0]

    def _name_stream(self, row: int, *purpose: str | int) -> Streams:
        problem = self.rows.problems[row]
        streams = self.bench.streams_of(problem.observation)
        return streams.child("bag", problem.number, self.rounds, *purpose)


def find_spare(words: Sequence[int], bag: Sequence[int]) -> list[int]:
    """Returns places whose word may be exchanged without losing the only one of its kind.

    Where the bag does not fit, some words are missing in any case: every place is spare.
    """
    counts = Counter(words)
    crowded = len(set(bag)) > len(words)
    return [place for place, word in enumerate(words) if crowded or counts[word] > 1]
