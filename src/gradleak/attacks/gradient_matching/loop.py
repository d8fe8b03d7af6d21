"""The one search loop of gradient matching: move embeddings until their gradient looks like the observed one."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.gradient_matching.discrete import DiscreteRounds, token_scores
from gradleak.attacks.gradient_matching.free_labels import FreeLabels
from gradleak.attacks.gradient_matching.slips import NONE, Slips
from gradleak.attacks.gradient_matching.slopes import Slopes
from gradleak.attacks.gradient_matching.starts import Start
from gradleak.attacks.search.descent import Adam
from gradleak.attacks.search.hypotheses import Assumptions
from gradleak.attacks.search.passes import distances_of
from gradleak.attacks.search.rows import (
    Problem,
    Rows,
    by_kind,
    lay_out,
    nearest_tokens,
    problems_of,
    side_by_side,
)
from gradleak.core.attack import Bench, Cost, Reconstruction, Trace
from gradleak.core.batch import Batch
from gradleak.core.observation import Fact, Observation
from gradleak.matching import Distance, Matcher, distance_of_nothing, for_observations
from gradleak.matching.rough import rough_products

LOSS_EVERY = 50  # steps between entries of the loss trace
GUESS_EVERY = 500  # steps between kept guesses
SHOW_EVERY_SECONDS = 0.5
# Time is kept for one more step, a last look at where it led (as long as a step) and the judging of guesses (shorter)
ENDING_STEPS = 3


@runtime_checkable
class Improves(Protocol):
    """A last search on whole words."""

    def improve(self, search: "Search", ids: Int[Tensor, "rows examples tokens"]) -> Int[Tensor, "rows examples tokens"]:
        """Guesses that match no worse."""

    def most_passes(self, examples: int, tokens: int) -> int:
        """How often candidates are scored at most, for batches of so many sentences of so many tokens."""


@dataclass(frozen=True)
class MatchingLoop:
    """Parts of a search; a recipe picks them."""

    distance: Distance
    start: Start
    optimiser: Adam
    steps: int
    assumptions: Assumptions
    free_labels: FreeLabels | None = None  # on a language model: labels move beside the embeddings, and do not follow them
    norm_weight: float = 0.0  # of (mean embedding norm − mean word norm)², LAMP's regulariser
    discrete: DiscreteRounds | None = None
    polish: Improves | None = None  # a last search on whole words
    answer_by_prior: float | None = None  # weight of the prior when choosing among kept guesses; none: the lowest loss counts
    relative_weights: bool = False  # weights of prior and norm are shares of the distance of a guess without gradient
    slips: Slips = NONE
    restarts: int = 0  # further tries for observations whose guess, as words, is not matched to within `good_enough`
    good_enough: float = 1e-3
    unroll: bool = False  # goes through every local step of a protocol that takes several; otherwise as one averaged gradient
    adaptive: bool = True  # matches what a known defense left, not the update as it came

    def __post_init__(self) -> None:
        if self.free_labels is not None and (self.discrete is not None or self.answer_by_prior is not None or self.norm_weight):
            raise ValueError("free labels go with plain descent: without discrete rounds, choice by the prior or norm_weight.")

    @property
    def requires(self) -> frozenset[Fact]:
        return self.assumptions.requires

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        """All observations together; where several hypotheses or tries were made, the one that matches best."""
        began = time.monotonic()
        bench.progress.tries = 1 + self.restarts
        tried: dict[int, list[Tried]] = {observation.index: [] for observation in observations}
        left = list(observations)
        for attempt in range(1 + self.restarts):
            for group in problems_of(left, self.assumptions, attempt):
                if bench.out_of_time and all(tried[problem.observation.index] for problem in group):
                    continue  # all have a guess
                self._try(group, bench, tried)
            left = [one for one in left if min(guess.distance for guess in tried[one.index]) > self.good_enough]
            if not left or bench.out_of_time:
                break
        seconds = (time.monotonic() - began) / len(observations)
        return [_best(tried[observation.index], seconds) for observation in observations]

    def most_passes(self, examples: int, tokens: int) -> int:
        """How often candidates or their slopes are computed at most for batches of so many sentences of so many tokens, under
        one hypothesis and (of a last search) one size: a bound that follows from the fields alone."""
        tried = self.start.most_passes + self.steps + 1
        if self.discrete is not None:
            tried += self.discrete.most_passes(examples, self.steps)
        if self.answer_by_prior is not None:
            tried += 2 + (0 if self.polish is None else self.polish.most_passes(examples, tokens))
        return (1 + self.restarts) * tried

    def _try(self, group: Sequence[Problem], bench: Bench, tried: "dict[int, list[Tried]]") -> None:
        free = self.free_labels if group[0].observation.target.labels_are_tokens else None
        loop = self if free is None else replace(self, start=free.start, optimiser=free.optimiser)
        at_once = len(group) if free is None else free.rows_at_once(group, bench)
        for first in range(0, len(group), at_once):
            with rough_products([problem.observation for problem in group]):
                rows = lay_out(group[first : first + at_once], self.slips.specials_inside, free is not None)
                search = Search(loop, rows, bench)
                search.run()
            for row, problem in enumerate(search.rows.problems):
                tried[problem.observation.index].append(Tried(float(search.judged[row]), search.reconstruction(row)))

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"]:
        """The distance at given token ids."""
        target = observations[0].target
        found = torch.zeros(len(observations), device=target.device, dtype=target.dtype)
        places = {id(observation): place for place, observation in enumerate(observations)}
        for alike in by_kind(observations):
            for seen in [alike] if target.padding_is_free else [[one] for one in alike]:
                where = [places[id(one)] for one in seen]
                secrets = side_by_side([batches[place] for place in where])
                found[where] = distances_of(self.matcher(seen), secrets)
        return found

    def matcher(self, observations: Sequence[Observation]) -> Matcher:
        """What the search minimises, for these observations."""
        silent = self.slips.silent_tensors
        return for_observations(observations, self.distance, keep_silent=silent, adaptive=self.adapts, unroll=self.unroll)

    @property
    def adapts(self) -> bool:
        return self.adaptive and not self.slips.defense_ignored


@dataclass(frozen=True)
class Tried:
    """A guess and how far it is from what was seen."""

    distance: float
    guess: Reconstruction


class Search:
    """The moving state of one run of the loop."""

    def __init__(self, loop: MatchingLoop, rows: Rows, bench: Bench) -> None:
        self.loop, self.rows, self.bench = loop, rows, bench
        self.matcher: Matcher = loop.matcher([problem.observation for problem in rows.problems])
        self.unit = self._unit()
        self.slopes = Slopes(self.matcher, rows, bench, loop.norm_weight * self.unit, loop.slips.padding_in_penalty)
        self.frame = rows.special_numbers()
        self.embeddings = self._framed(loop.start.embeddings(rows, bench, self.matcher))
        self.best = self.embeddings.clone()
        self.best_losses = torch.full((len(rows.problems),), torch.inf, device=rows.target.device, dtype=rows.target.dtype)
        self.losses: list[tuple[int, Tensor]] = []
        self.guesses: list[tuple[int, Tensor]] = []
        self.guesses_to_judge: list[Tensor] = []
        self.answers = self.rows.frame
        self.judged = self.best_losses  # the distance of the answers
        self.taken = 0
        self._shown = 0.0

    def _unit(self) -> Float[Tensor, "rows"]:
        """What weights of prior and norm are multiples of, row by row."""
        target = self.rows.target
        if not self.loop.relative_weights:
            return torch.ones(len(self.rows.problems), device=target.device, dtype=target.dtype)
        distance = self.matcher.distance
        return torch.stack([distance_of_nothing(problem.observation, distance) for problem in self.rows.problems]).to(
            target.dtype
        )

    def run(self) -> None:
        """Takes the steps, keeping the embeddings of the lowest loss of each row."""
        discrete = self.loop.discrete
        state = self.loop.optimiser.begin(self.embeddings)
        for step in range(self.loop.steps):
            began = time.monotonic()
            losses, gradients = self.losses_and_gradients()
            self._keep(step, losses)
            state.step(self.embeddings, gradients)
            seconds_a_step = time.monotonic() - began
            self.embeddings = self._framed(self.embeddings)
            self.taken = step + 1
            if discrete is not None and discrete.due(self.taken, self.loop.steps):
                discrete.round(self, state, self.taken)
                self.embeddings = self._framed(self.embeddings)
                self.guesses_to_judge.append(nearest_tokens(self.rows, self.embeddings))
            if self.bench.ends_within(ENDING_STEPS * seconds_a_step):
                break
        if discrete is not None:
            for number in range(discrete.rounds_at_end):
                if self.bench.out_of_time:
                    break
                discrete.round(self, state, number)
        losses, _ = self.losses_and_gradients()
        self._keep(self.taken, losses, last=True)
        self.answers = self._choose()
        by_words = self.loop.answer_by_prior is not None
        self.judged = token_scores(self, self.answers[:, None], self.matcher, 0.0)[:, 0] if by_words else self.best_losses

    def losses_and_gradients(self) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows examples tokens hidden"]]:
        """The distance of every row and its slope."""
        return self.slopes(self.embeddings)

    def reconstruction(self, row: int) -> Reconstruction:
        """The best guess of one row and how it came about."""
        hypothesis = self.rows.problems[row].hypothesis
        return Reconstruction(
            sentences=self.rows.sentences(self.answers[row], row),
            loss=float(self.best_losses[row]) if bool(self.best_losses[row].isfinite()) else None,
            labels=hypothesis.labels,
            cost=Cost(steps=self.taken),
            trace=Trace(
                losses=tuple((step, float(losses[row])) for step, losses in self.losses if bool(losses[row].isfinite())),
                guesses=tuple((step, self.rows.sentences(ids[row], row)) for step, ids in self.guesses),
            ),
        )

    def _choose(self) -> Int[Tensor, "rows examples tokens"]:
        """The tokens of the lowest loss, or the best by matching and prior among all guesses kept along the way."""
        lowest = nearest_tokens(self.rows, self.best)
        if self.loop.answer_by_prior is None:
            return lowest
        kept = torch.stack([lowest, nearest_tokens(self.rows, self.embeddings), *self.guesses_to_judge], dim=1)
        scores = token_scores(self, kept, self.matcher, self.loop.answer_by_prior)
        chosen = kept[torch.arange(len(kept), device=kept.device), scores.argmin(1)]
        return chosen if self.loop.polish is None else self.loop.polish.improve(self, chosen)

    def _keep(self, step: int, losses: Float[Tensor, "rows"], last: bool = False) -> None:
        better = losses < self.best_losses
        self.best_losses = torch.where(better, losses, self.best_losses)
        self.best = torch.where(better[:, None, None, None], self.embeddings, self.best)
        if step % LOSS_EVERY == 0 or last:
            self.losses.append((step, losses.cpu()))
        if step % GUESS_EVERY == 0 or last:
            self.guesses.append((step, nearest_tokens(self.rows, self.best)))
        if last or time.monotonic() - self._shown > SHOW_EVERY_SECONDS:
            self._shown = time.monotonic()
            self.report(step, self.loop.steps, nearest_tokens(self.rows, self.best))

    def report(self, done: int, total: int, ids: Int[Tensor, "rows examples tokens"]) -> None:
        """Writes the state on the blackboard: a few guesses, in the observations' own order."""
        order = sorted(range(len(self.rows.problems)), key=lambda row: self.rows.problems[row].observation.index)
        decode = self.rows.target.decode
        texts = [decode(sentence) for row in order[:6] for sentence in self.rows.sentences(ids[row], row)]
        self.bench.progress.report(done, total, float(self.best_losses.mean()), texts)

    def _framed(self, embeddings: Tensor) -> Tensor:
        return torch.where(self.rows.fixed[..., None], self.frame, embeddings)


def _best(tried: Sequence[Tried], seconds: float) -> Reconstruction:
    """The guess that matches best, at the cost of all that were tried."""
    best = min(tried, key=lambda one: one.distance).guess
    return replace(best, cost=Cost(seconds, sum(one.guess.cost.steps for one in tried)))
