"""The explained-energy search as an attack."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.certificate import CERTIFYING, with_certificates
from gradleak.attacks.energy.lexicon import choose_likely, rank_words, read_first_layer
from gradleak.attacks.energy.objective import Energy, choose_matrices, find_needed_layers
from gradleak.attacks.energy.whole_vocabulary import (
    VocabularySearch,
    can_search,
    measure_surprise,
    measure_visibility,
)
from gradleak.attacks.search.first_layer import find_first_layer
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.attacks.search.matched import (
    Matched,
    WordObjective,
    can_judge,
    find_labels,
    is_likelihood,
)
from gradleak.attacks.search.rematch import Rematch, repeat_first
from gradleak.attacks.search.search_rows import (
    Ids,
    Rows,
    SearchProblem,
    group_by,
    group_by_size,
    group_problems,
    lay_out,
    score_batches,
)
from gradleak.attacks.search.word_search import PRIOR_UNDER_NOISE, SearchEffort, WordSearch
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction, Scale, Sentences
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.observation import Fact, Observation
from gradleak.core.prior import Prior
from gradleak.core.registry import Count, register
from gradleak.matching.chunking import BESIDE, Chunks
from gradleak.matching.precision import rough_products

# Less is no evidence; of an update of 2e7 entries, noise and all, rounding may reach that too.
NATS = Scale("nats", 1.0)
# Of a cosine distance of 1e-5, below which all is taken for matched, rounding is about a tenth.
LOG = Scale("log", 0.1)
# Spreads of the noise's own square that the gradient's must be for a wrong word to show, and for
# spans to lead to any: below the first the vocabulary is searched, below the second that alone
SHOWING, LEADING = 500.0, 10.0
SIZE_RATIO = 1.35  # numbers of tokens within it are searched together


@dataclass(frozen=True)
class Draft:
    """A guess under one hypothesis of the lengths, and words that may be in it."""

    problem: SearchProblem
    sentences: Sentences
    score: float
    loss: float | None  # none where time ended before the guess was looked at
    explains_all: bool
    passes: int
    few: Int[Tensor, "few"]  # words tried at every place
    many: Int[Tensor, "many"]  # and where the guess is weakest

    @property
    def observation(self) -> Observation:
        return self.problem.observation

    @property
    def tokens(self) -> int:
        return sum(self.problem.hypothesis.lengths)


@register("attack", "energy")
@dataclass(frozen=True)
class EnergyAttack(Attack):
    """Looks for words whose layer inputs explain the seen matrices whole; needs no labels.

    Any linear modules of any layers will do.
    """

    cites = "ours; the span of a linear layer's gradient as in DAGER (Petrov et al., NeurIPS 2024)"

    added_later: ClassVar[frozenset[str]] = frozenset({"candidates"})
    version = 3  # the whole vocabulary, where known noise hides the spans
    wants_classes = False

    words: int = 48
    proposals: int = 32
    sweeps: int = 4
    restarts: int = 8
    prior_weight: float = 0.5
    matrices: int = 6  # looked at, of those visible; under noise all of as many layers as it takes
    # Through a defense, where labels are known or seen: a last search by what matches all visible
    judge: bool = True
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated
    # Sentences that a search of the whole vocabulary scores, where known noise hides the spans of
    # one sentence; 0 leaves it out
    candidates: int = 30_000

    @property
    def effort(self) -> SearchEffort:
        return SearchEffort(self.proposals, self.sweeps, self.restarts, self.prior_weight)

    @property
    def assumptions(self) -> Assumptions:
        return Assumptions("unused", self.lengths, longest=self.longest)

    @property
    def requires(self) -> frozenset[Fact]:
        return self.assumptions.requires

    @property
    def passes(self) -> int:
        # 8 s of a core each from layer 2's query of MiniLM; calls of one batch alone would take
        # twice as long in all.
        return 400

    def adapts_to(self, channel: Channel) -> bool:
        return True  # whatever was done to entries is an error of some size, in its likelihood

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        began, early = time.monotonic(), bench.ending_early(CERTIFYING)
        hidden = [one for one in observations if self.searches_vocabulary(one)]
        drowned: dict[int, Reconstruction | None] = {}
        for number, one in enumerate(hidden):
            turn = early.ending_early(1 - 1 / (len(hidden) - number))  # as much as those after it
            drowned[one.index] = self._search_vocabulary(one, turn)
        spanned = [one for one in observations if drowned.get(one.index) is None]
        explained = self._search_spans(spanned, early)
        found = dict(zip([one.index for one in spanned], explained, strict=True))
        guesses = [drowned.get(one.index) or found[one.index] for one in observations]
        guesses = with_certificates(observations, guesses, bench)
        seconds = (time.monotonic() - began) / len(observations)
        return [replace(guess, cost=replace(guess.cost, seconds=seconds)) for guess in guesses]

    def searches_vocabulary(self, observation: Observation) -> bool:
        """Returns whether the whole vocabulary is searched, by the exact likelihood."""
        if self.candidates <= 0 or not can_search(observation):
            return False
        return measure_visibility(observation) < SHOWING

    def _search_vocabulary(self, observation: Observation, bench: Bench) -> Reconstruction | None:
        """Returns the likeliest sentence found; none where time ended before there was one.

        Where that is known to be wrong, and spans may lead, they are asked too.
        """
        found = VocabularySearch(observation, bench, self.candidates).run()
        if found is None:
            return None
        cost = Cost(steps=found.scored)
        guess = Reconstruction(
            (found.sentence,), loss=-found.score, labels=(found.label,), cost=cost
        )
        if not found.has_failed or measure_visibility(observation) < LEADING:
            return guess
        (other,) = self._search_spans([observation], bench)
        by_spans = other.loss is not None and other.loss < -found.score
        return replace(other if by_spans else guess, cost=Cost(steps=cost.steps + other.cost.steps))

    def _search_spans(
        self, observations: Sequence[Observation], early: Bench
    ) -> list[Reconstruction]:
        """Returns what layer inputs, and then the whole update, say of the words."""
        drafts: dict[int, list[Draft]] = {observation.index: [] for observation in observations}
        for alike in group_by(observations, describe_tensors):
            every = group_problems(alike, self.assumptions)
            misfits = None if self._asks_first_layer(every) else self._rank_words(alike, early)
            for problems in every:
                for places in group_by_size(problems, SIZE_RATIO):
                    group = [problems[place] for place in places]
                    if early.out_of_time and all(drafts[one.observation.index] for one in group):
                        continue  # all have a guess
                    with rough_products(alike):
                        found = self._search(group, early, misfits)
                    for draft in found:
                        drafts[draft.observation.index].append(draft)
        best = [choose_draft(drafts[observation.index]) for observation in observations]
        return [
            Reconstruction(one.sentences, loss=one.loss, cost=Cost(steps=one.passes))
            for one in self._judge(best, early)
        ]

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"]:
        """Returns what decides between guesses, at given words.

        Through a defense that is what matches the whole update, elsewhere what explains its spans.
        It is no lower than where a search takes all to be matched or explained: below that it is
        rounding. The prior, which the search adds where this is a likelihood, is the penalty.
        """
        with torch.no_grad():
            return score_batches(
                observations,
                batches,
                lambda one: id(one) if self._goes_alone(one) else describe_tensors(one),
                self._score_alike,
            )

    def _goes_alone(self, observation: Observation) -> bool:
        return self._is_judged(observation) or self.searches_vocabulary(observation)

    def _score_alike(self, seen: list[Observation], held: Batch) -> Float[Tensor, "observations"]:
        if self.searches_vocabulary(seen[0]):
            return measure_surprise(seen[0], held[0][0])
        objective = Matched(seen) if self._is_judged(seen[0]) else Energy(seen, self.matrices)
        scores = score_in_pieces(objective, held)
        return torch.maximum(scores, objective.levels.to(scores))

    def objective_scale(self, observation: Observation) -> Scale:
        if self.searches_vocabulary(observation):
            return NATS
        if self._is_judged(observation):
            return NATS if is_likelihood(observation) else LOG
        return NATS if find_needed_layers(observation) else LOG

    def penalty(self, observation: Observation, sentences: Sentences, prior: Prior) -> float:
        """Returns the prior's nats over all tokens, where the objective is in nats too."""
        if self.objective_scale(observation) != NATS:
            return 0.0
        device = observation.target.device
        lengths = torch.tensor([len(sentence) for sentence in sentences], device=device)
        ids = observation.target.batch_of(sentences, None).ids
        assert ids is not None
        return PRIOR_UNDER_NOISE * float((prior.nll(ids, lengths).double() * lengths).sum())

    def _is_judged(self, observation: Observation) -> bool:
        """Returns whether a last search by what matches all that is visible has the last word."""
        return self.judge and can_judge(observation)

    def _asks_first_layer(self, groups: Sequence[Sequence[SearchProblem]]) -> bool:
        """Returns whether the first layer says which words are tried, one by one as they are found.

        So it is where few of its entries arrive, and neither lengths nor the sentences of a batch
        have to be told apart.
        """
        problems = [problem for group in groups for problem in group]
        seen = [problem.observation for problem in problems]
        is_open = len({one.index for one in seen}) < len(seen)
        single = all(len(problem.hypothesis.lengths) == 1 for problem in problems)
        if is_open or not single or not all(map(self._is_judged, seen)):
            return False
        return all(find_first_layer(lay_out(group)) is not None for group in groups)

    def _rank_words(
        self, observations: Sequence[Observation], bench: Bench
    ) -> dict[int, Float[Tensor, "words"]]:
        """Returns by observation how badly every allowed word fits what was seen."""
        words = observations[0].target.vocabulary.allowed.nonzero()[:, 0]
        pairs = list(zip(*choose_matrices(observations, self.matrices), strict=True))
        misfits = rank_words(observations, words, pairs, bench)
        return {one.index: row for one, row in zip(observations, misfits, strict=True)}

    def _search(
        self, group: Sequence[SearchProblem], bench: Bench, misfits: Mapping[int, Tensor] | None
    ) -> list[Draft]:
        rows = lay_out(group)
        seen, start, first_layer = rows.observations, read_first_layer(rows, bench), None
        if misfits is None:
            rows = put_labels(rows)
            first_layer = find_first_layer(rows)
            few = many = list_free_words(rows, start)
        else:
            ranked = torch.stack([misfits[one.index] for one in seen])
            few, many = choose_likely(rows, ranked, self.words)
        is_last = not all(map(self._is_judged, seen))  # a search that follows goes much further
        effort = self.effort if is_last else replace(self.effort, restarts=0)
        energy = Energy(seen, self.matrices)
        search = WordSearch(rows, energy, bench, effort, (few, many), start, first_layer)
        search.run(shows_progress=True)
        search.settle_ties()
        solved = search.find_solved(search.best, search.best_scores)
        # No lower than where all is explained: below that it is rounding.
        losses = torch.maximum(search.best_scores, search.level)
        return [
            Draft(
                problem=problem,
                sentences=rows.sentences(search.best[row], row),
                score=float(search.best_scores[row]),
                loss=float(losses[row]) if bool(losses[row].isfinite()) else None,
                explains_all=bool(solved[row]),
                passes=search.passes,
                few=few[row],
                many=many[row],
            )
            for row, problem in enumerate(rows.problems)
        ]

    def _judge(self, drafts: Sequence[Draft], bench: Bench) -> list[Draft]:
        """Returns the drafts, those through a defense after a search by all that is visible."""
        after = list(drafts)
        places = [place for place, one in enumerate(after) if self._is_judged(one.observation)]
        if not places or bench.out_of_time:
            return after
        some = [drafts[place] for place in places]
        seen = [draft.observation for draft in some]
        found = rematch_drafts(some, bench, self.effort)
        batches = [
            one.target.batch_of(sentences, find_labels(one) or None)
            for one, sentences in zip(seen, found, strict=True)
        ]
        losses = self.objective(seen, batches).tolist()
        for place, one, sentences, loss in zip(places, seen, found, losses, strict=True):
            loss += self.penalty(one, sentences, bench.words)
            after[place] = replace(drafts[place], sentences=sentences, loss=loss)
        return after


def choose_draft(drafts: Sequence[Draft]) -> Draft:
    """Returns the shortest that explains everything, or else the one that explains most.

    A longer one explains no less: its further words are free.
    """
    whole = [one for one in drafts if one.explains_all]
    if whole:
        best = min(whole, key=lambda one: one.tokens)
    else:
        best = min(drafts, key=lambda one: one.score)
    return replace(best, passes=sum(one.passes for one in drafts))


def rematch_drafts(drafts: Sequence[Draft], bench: Bench, effort: SearchEffort) -> list[Sentences]:
    """Returns the drafts' sentences after a search by what they match of the whole update."""
    found = [draft.sentences for draft in drafts]
    for places in _group_drafts(drafts):
        if bench.out_of_time:
            break
        some = [drafts[place] for place in places]
        rows = put_labels(lay_out([draft.problem for draft in some]))
        ids = rows.frame.clone()
        for row, draft in enumerate(some):
            for place, sentence in enumerate(draft.sentences):
                ids[row, place, : len(sentence)] = torch.tensor(sentence, device=ids.device)
        few, many = max(len(one.few) for one in some), max(len(one.many) for one in some)
        likely_few = torch.stack([repeat_first(draft.few, few) for draft in some])
        likely_many = torch.stack([repeat_first(draft.many, many) for draft in some])
        with rough_products(rows.observations):
            matched = Matched(rows.observations)
            fits = matched.fits(rows.batch(rows.target.embed(ids[:, None])), bench)
            left = (~fits).nonzero()[:, 0]
            if len(left):
                likely = likely_few[left], likely_many[left]
                part, objective = rows.take(left), matched.take(left)
                rematch = Rematch(bench, effort, asks_first_layer=True)
                ids[left], _ = rematch.run(part, objective, ids[left], likely)
        for row, place in enumerate(places):
            found[place] = rows.sentences(ids[row], row)
    return found


def put_labels(rows: Rows) -> Rows:
    """Returns the rows with the labels that are known of their observations."""
    if rows.target.labels_are_tokens:
        return rows
    labels = [find_labels(one) for one in rows.observations]
    return replace(rows, labels=torch.tensor(labels, device=rows.frame.device))


def list_free_words(rows: Rows, ids: Ids) -> Int[Tensor, "rows words"]:
    """Returns the words that guesses have inside their sentences."""
    words = [own[~fixed] for own, fixed in zip(ids, rows.fixed, strict=True)]
    most = max(map(len, words))
    return torch.stack([repeat_first(own, most) for own in words])


def _group_drafts(drafts: Sequence[Draft]) -> list[list[int]]:
    """Returns where drafts stand that can go together.

    They are under one kind of defense, of the same tensors, and of one length where that is read.
    """

    def describe(place: int) -> tuple[object, ...]:
        one, lengths = drafts[place].observation, drafts[place].problem.hypothesis.lengths
        width = None if one.target.padding_is_free else max(lengths)
        return (one.channel.kind, *one.update.tensors, width)

    return group_by(range(len(drafts)), describe)


@torch.no_grad()
def score_in_pieces(objective: WordObjective, batch: Batch) -> Float[Tensor, "observations"]:
    """Returns the objective of one batch of each observation, a few observations at a time."""
    each = objective.bytes(batch.mask.shape[-2], batch.mask.shape[-1])

    def piece(rows: slice) -> Tensor:
        return objective.score(batch[rows], rows)[:, 0].double()

    return Chunks(int(BESIDE / each)).run(piece, len(batch.mask))


def describe_tensors(observation: Observation) -> tuple[object, ...]:
    """Returns what observations must share to be searched together: tensors and kind of defense.

    Otherwise some would be measured by matrices that only others show.
    """
    seen, kind = observation.update.tensors, observation.channel.kind
    return (*seen, kind, find_needed_layers(observation))
