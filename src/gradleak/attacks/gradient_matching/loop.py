"""The search loop of gradient matching: move embeddings until their gradient is as was seen.

`MatchingAttack` is an attack that is nothing but a choice of parts for the loop.
"""

import math
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.discrete import (
    MENDED,
    CandidateScorer,
    DiscreteRounds,
    Embeddings,
    Ending,
    Polish,
    Slips,
    WordPolish,
)
from gradleak.attacks.gradient_matching.slopes import open_slopes
from gradleak.attacks.gradient_matching.starts import FreeLabels, Start
from gradleak.attacks.search.descent import RowAdam
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.attacks.search.search_rows import (
    Ids,
    Rows,
    SearchProblem,
    compute_distances,
    group_problems,
    lay_out,
    nearest_tokens,
    score_batches,
)
from gradleak.core.attack import ROUNDING, Attack, Bench, Cost, Reconstruction, Scale, Trace
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.observation import Fact, Observation
from gradleak.core.registry import Count
from gradleak.matching import Distance, Matcher, distance_of_nothing, for_observations
from gradleak.matching.precision import rough_products

LOSS_EVERY = 50  # steps between entries of the loss trace
GUESS_EVERY = 500  # steps between kept guesses
SHOW_EVERY_SECONDS = 0.5
# Time is kept for one more step, a last look at where it led (as long as a step) and the judging of
# guesses (shorter).
ENDING_STEPS = 3


@dataclass(frozen=True)
class MatchingLoop:
    """Parts of a search; a recipe picks them."""

    distance: Distance
    start: Start
    optimiser: RowAdam
    steps: int
    assumptions: Assumptions = field(default_factory=Assumptions)
    # On a language model: labels move beside the embeddings, and do not follow them.
    free_labels: FreeLabels | None = None
    norm_weight: float = 0.0  # of (mean embedding norm − mean word norm)², LAMP's regulariser
    discrete: DiscreteRounds | None = None
    polish: Polish | WordPolish | None = None  # a last search on whole words
    # The weight of the prior when choosing among kept guesses; none: the lowest loss counts.
    answer_by_prior: float | None = None
    # Whether weights of prior and norm are shares of the distance of a guess without gradient.
    relative_weights: bool = False
    slips: Slips = MENDED
    restarts: int = 0  # further tries where no guess is matched, as words, to within `good_enough`
    good_enough: float = 1e-3
    unroll: bool = False  # through every local step of a protocol, or as one averaged gradient
    adaptive: bool = True  # matches what a known defense left, not the update as it came

    def __post_init__(self) -> None:
        by_words = self.discrete is not None or self.answer_by_prior is not None
        if self.free_labels is not None and (by_words or self.norm_weight):
            raise ValueError(
                "free labels go with plain descent: without discrete rounds, choice by the prior or"
                " norm_weight."
            )

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        """Returns, of the hypotheses and tries of each observation, the guess that matches best."""
        began = time.monotonic()
        bench.progress.tries = 1 + self.restarts
        tried, left = defaultdict[int, list[Tried]](list), list(observations)
        for attempt in range(1 + self.restarts):
            for group in group_problems(left, self.assumptions, attempt):
                if bench.out_of_time and all(tried[one.observation.index] for one in group):
                    continue  # all have a guess
                for index, guess in self._search(group, bench):
                    tried[index].append(guess)
            nearest = {index: min(one.distance for one in found) for index, found in tried.items()}
            left = [one for one in left if nearest[one.index] > self.good_enough]
            if not left or bench.out_of_time:
                break
        seconds = (time.monotonic() - began) / len(observations)
        return [choose_nearest(tried[observation.index], seconds) for observation in observations]

    def _search(self, group: Sequence[SearchProblem], bench: Bench) -> "list[tuple[int, Tried]]":
        """Returns the index of each problem's observation, and the guess that came of it."""
        free = self.free_labels if group[0].observation.target.labels_are_tokens else None
        loop, at_once = self, len(group)
        if free is not None:
            loop = replace(self, start=free.start, optimiser=free.optimiser)
            at_once = free.plan_rows(group, bench)
        found = []
        for first in range(0, len(group), at_once):
            with rough_products([problem.observation for problem in group]):
                some = group[first : first + at_once]
                rows = lay_out(some, self.slips.specials_inside, free is not None)
                search = Search(loop, rows, bench)
                search.run()
            found += [
                (seen.index, Tried(float(search.judged[row]), search.reconstruct(row)))
                for row, seen in enumerate(rows.observations)
            ]
        return found

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"]:
        """Returns the distance at given token ids."""
        return score_batches(
            observations,
            batches,
            lambda observation: observation.channel.kind,
            lambda seen, held: compute_distances(self.open_matcher(seen), held),
        )

    def open_matcher(self, observations: Sequence[Observation]) -> Matcher:
        """Returns what the search minimises, for these observations."""
        return for_observations(
            observations,
            self.distance,
            keep_silent=self.slips.silent_tensors,
            adaptive=self.adapts,
            unroll=self.unroll,
        )

    @property
    def adapts(self) -> bool:
        return self.adaptive and not self.slips.defense_ignored


@dataclass(frozen=True)
class Tried:
    """A guess and how far it is from what was seen."""

    distance: float
    guess: Reconstruction


def choose_nearest(tried: Sequence[Tried], seconds: float) -> Reconstruction:
    """Returns the guess that matches best, at the cost of all that were tried."""
    best = min(tried, key=lambda one: one.distance).guess
    return replace(best, cost=Cost(seconds, sum(one.guess.cost.steps for one in tried)))


class Search:
    """The moving state of one run of the loop."""

    def __init__(self, loop: MatchingLoop, rows: Rows, bench: Bench) -> None:
        self.loop, self.rows, self.bench = loop, rows, bench
        matcher = loop.open_matcher(rows.observations)
        self.scorer = CandidateScorer(rows, matcher, bench, self._measure_unit(matcher))
        norm_weights = loop.norm_weight * self.scorer.unit
        padded = loop.slips.padding_in_penalty
        self.compute_slopes = open_slopes(matcher, rows, bench, norm_weights, padded)
        self.frame = rows.special_numbers()
        self.embeddings = self._put_back_specials(loop.start.draw(rows, bench, matcher))
        self.best = self.embeddings.clone()
        self.best_losses = torch.full_like(self.scorer.unit, torch.inf)
        self.losses: list[tuple[int, Tensor]] = []
        self.guesses: list[tuple[int, Tensor]] = []
        self.guesses_to_judge: list[Tensor] = []
        self.answers = self.rows.frame
        self.judged = self.best_losses  # the distance of the answers
        self.taken = 0
        self._shown = 0.0

    def _measure_unit(self, matcher: Matcher) -> Float[Tensor, "rows"]:
        """Returns what weights of prior and norm are multiples of, row by row."""
        target, seen = self.rows.target, self.rows.observations
        if not self.loop.relative_weights:
            return torch.ones(len(seen), device=target.device, dtype=target.dtype)
        units = [distance_of_nothing(observation, matcher.distance) for observation in seen]
        return torch.stack(units).to(target.dtype)

    def run(self) -> None:
        """Takes the steps, keeping the embeddings of the lowest loss of each row."""
        discrete, slips = self.loop.discrete, self.loop.slips
        state = self.loop.optimiser.begin(self.embeddings)
        for step in range(self.loop.steps):
            began = time.monotonic()
            losses, gradients = self.compute_slopes(self.embeddings)
            self._keep(step, losses)
            state.step(self.embeddings, gradients)
            seconds_a_step = time.monotonic() - began
            self.embeddings = self._put_back_specials(self.embeddings)
            self.taken = step + 1
            if discrete is not None and discrete.is_due(self.taken, self.loop.steps):
                discrete.reorder_words(self.scorer, self.embeddings, state, self.taken, slips)
                self.embeddings = self._put_back_specials(self.embeddings)
                self.guesses_to_judge.append(nearest_tokens(self.rows, self.embeddings))
            if self.bench.ends_within(ENDING_STEPS * seconds_a_step):
                break
        if discrete is not None:
            for number in range(discrete.rounds_at_end):
                if self.bench.out_of_time:
                    break
                discrete.reorder_words(self.scorer, self.embeddings, state, number, slips)
        losses, _ = self.compute_slopes(self.embeddings)
        self._keep(self.taken, losses, is_last=True)
        self.answers = self._choose_answers()
        self.judged = self.best_losses
        if self.loop.answer_by_prior is not None:  # the answers are then words, as which they count
            self.judged = self.scorer.score_tokens(self.answers[:, None], 0.0)[:, 0]

    def reconstruct(self, row: int) -> Reconstruction:
        """Returns the best guess of one row and how it came about."""
        loss = float(self.best_losses[row])
        losses = [(step, float(losses[row])) for step, losses in self.losses]
        guesses = [(step, self.rows.sentences(ids[row], row)) for step, ids in self.guesses]
        return Reconstruction(
            sentences=self.rows.sentences(self.answers[row], row),
            loss=loss if math.isfinite(loss) else None,
            labels=self.rows.problems[row].hypothesis.labels,
            cost=Cost(steps=self.taken),
            trace=Trace(
                tuple((step, one) for step, one in losses if math.isfinite(one)), tuple(guesses)
            ),
        )

    @property
    def ending(self) -> Ending:
        """Where the search is now, for a last one on words."""
        return Ending(
            self.scorer,
            self.embeddings,
            self.best,
            self.loop.adapts,
            self.loop.unroll,
            self.report,
        )

    def report(self, done: int, total: int, ids: Ids) -> None:
        """Writes the state on the blackboard, with a few guesses."""
        loss = float(self.best_losses.mean())
        self.bench.progress.report(done, total, loss, self.rows.decode_some(ids))

    def _choose_answers(self) -> Ids:
        """Returns the tokens of the lowest loss, or the best by matching and prior of all kept."""
        lowest = nearest_tokens(self.rows, self.best)
        if self.loop.answer_by_prior is None:
            return lowest
        last = nearest_tokens(self.rows, self.embeddings)
        kept = torch.stack([lowest, last, *self.guesses_to_judge], dim=1)
        scores = self.scorer.score_tokens(kept, self.loop.answer_by_prior)
        chosen = kept[torch.arange(len(kept), device=kept.device), scores.argmin(1)]
        return chosen if self.loop.polish is None else self.loop.polish.improve(self.ending, chosen)

    def _keep(self, step: int, losses: Float[Tensor, "rows"], is_last: bool = False) -> None:
        better = losses < self.best_losses
        self.best_losses = torch.where(better, losses, self.best_losses)
        self.best = torch.where(better[:, None, None, None], self.embeddings, self.best)
        if step % LOSS_EVERY == 0 or is_last:
            self.losses.append((step, losses.cpu()))
        if step % GUESS_EVERY == 0 or is_last:
            self.guesses.append((step, nearest_tokens(self.rows, self.best)))
        if is_last or time.monotonic() - self._shown > SHOW_EVERY_SECONDS:
            self._shown = time.monotonic()
            self.report(step, self.loop.steps, nearest_tokens(self.rows, self.best))

    def _put_back_specials(self, embeddings: Embeddings) -> Embeddings:
        return torch.where(self.rows.fixed[..., None], self.frame, embeddings)


@dataclass(frozen=True, kw_only=True)
class MatchingAttack(Attack):
    """Holds what every recipe is given; a recipe picks the parts of its paper."""

    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    @abstractmethod
    def parts(self) -> MatchingLoop:
        """The parts and numbers of this attack."""

    @property
    def loop(self) -> MatchingLoop:
        """The parts, with what they are told of observations."""
        return replace(
            self.parts,
            assumptions=Assumptions(self.labels, self.lengths, longest=self.longest),
            adaptive=self.adaptive,
            unroll=self.unroll,
        )

    @property
    def requires(self) -> frozenset[Fact]:
        return self.loop.assumptions.requires

    @property
    def passes(self) -> int:
        """One a step, or four where words are tried too.

        Orders of words, the start and a last search take about three times as many more.
        """
        loop = self.loop
        is_plain = loop.discrete is None and loop.polish is None
        return (1 + loop.restarts) * loop.steps * (1 if is_plain else 4)

    def adapts_to(self, channel: Channel) -> bool:
        return self.loop.adapts

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        return self.loop.reconstruct(observations, bench)

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"]:
        return self.loop.objective(observations, batches)

    def objective_scale(self, observation: Observation) -> Scale:
        """Returns the scale of differences of sums as large as a candidate's without gradient."""
        nothing = distance_of_nothing(observation, self.loop.distance)
        return Scale(rounding=ROUNDING * float(nothing))
