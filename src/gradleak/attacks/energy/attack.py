"""The explained-energy search as an attack."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.certificate import CERTIFYING, with_certificates
from gradleak.attacks.energy.judge import Draft, can_judge, judged, labels_of
from gradleak.attacks.energy.lexicon import lexicon
from gradleak.attacks.energy.objective import Energy, layers_needed, looked_at
from gradleak.attacks.energy.search import WordSearch
from gradleak.attacks.energy.settings import SearchSettings
from gradleak.attacks.energy.words import filler_of, likely_words
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.attacks.search.matched import Matched, is_likelihood
from gradleak.attacks.search.rows import Problem, Rows, lay_out, problems_of, side_by_side
from gradleak.attacks.search.sizes import by_size
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction, Scale, Sentences
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.observation import Fact, Observation
from gradleak.core.prior import Prior
from gradleak.core.ranges import Count
from gradleak.core.registry import register
from gradleak.matching.chunking import BESIDE, Chunks
from gradleak.matching.rough import rough_products

NATS = Scale("nats", 1.0)  # less is no evidence; of an update of 2e7 entries, noise and all, rounding may reach that too
LOG = Scale("log", 0.1)  # of a cosine distance of 1e-5, below which all is taken for matched, rounding is about a tenth


@dataclass(frozen=True)
class Found:
    """A guess under one hypothesis of the lengths."""

    score: float
    whole: bool  # all is explained
    draft: Draft
    guess: Reconstruction

    @property
    def tokens(self) -> int:
        return sum(self.draft.problem.hypothesis.lengths)


@register("attack", "energy")
@dataclass(frozen=True)
class EnergyAttack(Attack):
    """Looks for words whose layer inputs explain the seen matrices whole: any linear modules of any layers, no labels needed."""

    cites = "ours; the span of a linear layer's gradient as in DAGER (Petrov et al., NeurIPS 2024)"

    words: int = 48
    proposals: int = 32
    sweeps: int = 4
    restarts: int = 8
    prior_weight: float = 0.5
    matrices: int = 6  # looked at, of those that are visible; under noise all of as many layers as it takes
    judge: bool = True  # through a defense, where labels are known or seen: a last search by what matches all that is visible
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated

    @property
    def settings(self) -> SearchSettings:
        return SearchSettings(
            self.proposals, self.words, sweeps=self.sweeps, restarts=self.restarts, prior_weight=self.prior_weight
        )

    @property
    def assumptions(self) -> Assumptions:
        return Assumptions("unused", self.lengths, longest=self.longest)

    @property
    def requires(self) -> frozenset[Fact]:
        return self.assumptions.requires

    @property
    def passes(self) -> int:
        return 400  # 8 s of a core each from layer 2's query of MiniLM; calls of one batch alone would take twice as long in all

    def adapts_to(self, channel: Channel) -> bool:
        return True  # whatever was done to entries is an error of some size, in its likelihood

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        began, early = time.monotonic(), bench.ending_early(CERTIFYING)
        found: dict[int, list[Found]] = {observation.index: [] for observation in observations}
        for alike in by_tensors(observations):
            misfits = self._misfits(alike, early)
            for group in by_size(problems_of(alike, self.assumptions)):
                if early.out_of_time and all(found[problem.observation.index] for problem in group):
                    continue  # all have a guess
                with rough_products(alike):
                    searched = self._search(group, early, misfits)
                for problem, one in zip(group, searched, strict=True):
                    found[problem.observation.index].append(one)
        best = self._judged([self._best(found[observation.index]) for observation in observations], early)
        best = with_certificates(observations, best, bench)
        seconds = (time.monotonic() - began) / len(observations)
        return [replace(guess, cost=replace(guess.cost, seconds=seconds)) for guess in best]

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"]:
        """What decides between guesses: through a defense what matches the whole update, elsewhere what explains its spans.

        No lower than where a search takes all to be matched or explained: below that it is rounding. Without the prior, which
        the search adds where this is a likelihood: that is the penalty.
        """
        found = torch.zeros(len(observations), device=observations[0].target.device, dtype=torch.float64)
        places = {id(observation): place for place, observation in enumerate(observations)}
        explained = [one for one in observations if not self._is_judged(one)]
        with torch.no_grad():
            for one, batch in zip(observations, batches, strict=True):
                if self._is_judged(one):
                    matched = Matched([one])
                    scores = matched.scores(side_by_side([batch]), slice(None))[:, 0]
                    found[places[id(one)]] = torch.maximum(scores, matched.levels(self.settings.solved))[0]
            for alike in by_tensors(explained):
                for seen in [alike] if alike[0].target.padding_is_free else [[one] for one in alike]:
                    where = [places[id(one)] for one in seen]
                    energy = Energy(seen, self.matrices)
                    scores = scores_of(energy, side_by_side([batches[place] for place in where]))
                    found[where] = torch.maximum(scores, energy.levels(self.settings.solved).to(scores))
        return found

    def objective_scale(self, observation: Observation) -> Scale:
        likelihood = is_likelihood(observation) if self._is_judged(observation) else bool(layers_needed(observation))
        return NATS if likelihood else LOG

    def penalty(self, observation: Observation, sentences: Sentences, prior: Prior) -> float:
        """The prior's nats over all tokens, where the objective is in nats too: both together are searched."""
        if self.objective_scale(observation) != NATS:
            return 0.0
        lengths = torch.tensor([len(sentence) for sentence in sentences], device=observation.target.device)
        ids = observation.target.batch_of(sentences, None).ids
        assert ids is not None
        return self.settings.prior_under_noise * float((prior.nll(ids, lengths).double() * lengths).sum())

    def _is_judged(self, observation: Observation) -> bool:
        """Whether a last search by what matches all that is visible has the last word."""
        return self.judge and can_judge(observation)

    def _misfits(self, observations: Sequence[Observation], bench: Bench) -> dict[int, Float[Tensor, "words"]]:
        """By observation how badly every allowed word fits what was seen."""
        target = observations[0].target
        words = target.vocabulary.allowed.nonzero()[:, 0]
        parts, structures = looked_at(observations, self.matrices)
        found = lexicon(observations, words, filler_of(target), list(zip(parts, structures, strict=True)), bench)
        return {observation.index: row for observation, row in zip(observations, found, strict=True)}

    def _search(self, group: Sequence[Problem], bench: Bench, misfits: Mapping[int, Tensor]) -> list[Found]:
        rows = lay_out(group)
        seen = [problem.observation for problem in rows.problems]
        likely = likely_words(rows, torch.stack([misfits[one.index] for one in seen]), self.settings)
        later = all(map(self._is_judged, seen))  # which goes much further than restarts here
        settings = replace(self.settings, restarts=0) if later else self.settings
        search = WordSearch(rows, Energy(seen, self.matrices), bench, settings, filler_of(rows.target), likely)
        search.on_progress = lambda done, total: _report(search, bench, done, total)
        search.run()
        search.settle()
        whole = search.solved(search.best, search.best_scores)
        return [
            Found(
                float(search.best_scores[row]),
                bool(whole[row]),
                Draft(problem, rows.sentences(search.best[row], row), likely[0][row], likely[1][row]),
                Reconstruction(
                    sentences=rows.sentences(search.best[row], row),
                    loss=_loss(search, row),
                    cost=Cost(steps=search.passes),
                ),
            )
            for row, problem in enumerate(rows.problems)
        ]

    def _best(self, found: Sequence[Found]) -> Found:
        """The shortest that explains everything (a longer one explains no less), or else the one that explains most."""
        whole = [one for one in found if one.whole]
        best = min(whole, key=lambda one: one.tokens) if whole else min(found, key=lambda one: one.score)
        cost = Cost(steps=sum(one.guess.cost.steps for one in found))
        return replace(best, guess=replace(best.guess, cost=cost))

    def _judged(self, found: Sequence[Found], bench: Bench) -> list[Reconstruction]:
        """The guesses, those through a defense after a search by what matches all that is visible."""
        guesses = [one.guess for one in found]
        places = [place for place, one in enumerate(found) if self._is_judged(one.draft.problem.observation)]
        if not places or bench.out_of_time:
            return guesses
        drafts = [found[place].draft for place in places]
        after = judged(drafts, bench, self.settings)
        target = drafts[0].problem.observation.target
        batches = [
            target.batch_of(sentences, labels_of(draft.problem.observation) or None)
            for draft, sentences in zip(drafts, after, strict=True)
        ]
        seen = [draft.problem.observation for draft in drafts]
        losses = self.objective(seen, batches).tolist()
        for place, one, sentences, loss in zip(places, seen, after, losses, strict=True):
            whole = loss + self.penalty(one, sentences, bench.prior)
            guesses[place] = replace(guesses[place], sentences=sentences, loss=whole)
        return guesses


@torch.no_grad()
def scores_of(energy: Energy, batch: Batch) -> Float[Tensor, "observations"]:
    """The objective of one batch of each observation, a few observations at a time."""
    each = energy.bytes(batch.mask.shape[-2], batch.mask.shape[-1])
    return Chunks(int(BESIDE / each)).run(lambda rows: energy.scores(batch[rows], rows)[:, 0].double(), len(batch.mask))


def by_tensors(observations: Sequence[Observation]) -> list[list[Observation]]:
    """Observations that show the same tensors, under one kind of defense: nobody is measured by matrices only others show."""
    groups: dict[tuple[object, ...], list[Observation]] = {}
    for observation in observations:
        key = (*observation.update.tensors, observation.channel.kind, layers_needed(observation))
        groups.setdefault(key, []).append(observation)
    return list(groups.values())


def _loss(search: WordSearch, row: int) -> float | None:
    """The objective at the best guess, no lower than where all is explained; none where time ended before it was looked at."""
    score = torch.maximum(search.best_scores[row], search.level[row])
    return float(score) if bool(score.isfinite()) else None


def _report(search: WordSearch, bench: Bench, done: int, total: int) -> None:
    rows: Rows = search.rows
    order = sorted(range(len(rows.problems)), key=lambda row: rows.problems[row].observation.index)
    texts = [rows.target.decode(sentence) for row in order[:6] for sentence in rows.sentences(search.best[row], row)]
    bench.progress.report(done, total, float(search.best_scores.mean()), texts)
