"""Coordinate search over words: the best word at each place, then moves of words, then again.

Each time it begins anew from its best guess, changed in part.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.search.changes import (
    draw_cleared,
    empty_each_place,
    find_gaps,
    list_neighbours,
    reorder,
    replace_more_and_more,
    replace_words,
)
from gradleak.attacks.search.first_layer import FirstLayer
from gradleak.attacks.search.likelihood import compute_nll
from gradleak.attacks.search.matched import WordObjective
from gradleak.attacks.search.search_rows import Candidates, Ids, Rows, find_filler, find_marks
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.matching.chunking import Chunks, fastest, pieces, refuse_without_room

# Forward passes only: they take a third of what gradients of gradients do (as in search_rows).
TOKENS_AT_ONCE = {"cuda": 400_000, "cpu": 12_000}
RESTARTS_AT_ONCE = 4  # from the best guess changed in so many ways, side by side
WEAKEST = 3  # places of a guess where many words are tried
ASKED = 16  # candidates whose likelihood the prior is asked for
MORE = 4  # times as many words of the first layer's are tried where a guess is weakest
CLEARED = 0.34  # the part of a guess that is taken out before a restart
PRIOR_UNDER_NOISE = 1.0  # nats for one of the prior, where the objective is itself in nats
BEST = 3  # words a place that are tried again after the best of all was taken
AHEAD = 24  # moves that are tried again after the best was taken
ENOUGH = 1e-4  # nats: less is no improvement

Scores = Float[Tensor, "rows"]
Places = Int[Tensor, "rows"]
# Words that are tried at every place, and the many that are tried where a guess is weakest.
Likely = tuple[Int[Tensor, "rows few"], Int[Tensor, "rows many"]]


@dataclass(frozen=True)
class SearchEffort:
    """How long and how widely a search over words goes on."""

    proposals: int = 32  # words tried at a place because the objective falls towards them
    sweeps: int = 4  # over all places, at most, before a restart
    restarts: int = 8  # from the best guess with a part of it changed
    # Nats of the objective for one of the prior a token: in every second restart, and between ties.
    prior_weight: float = 0.5
    # Whether a sweep tries all places in one pass: as good, and fewer passes where these are dear.
    at_once: bool = False

    @property
    def rounds(self) -> int:
        """How many attempts: from nothing, and then from the best guess changed in each way."""
        return 1 + -(-self.restarts // RESTARTS_AT_ONCE)


class WordSearch:
    """Holds for every row the words now and the best so far, and moves them."""

    def __init__(
        self,
        rows: Rows,
        objective: WordObjective,
        bench: Bench,
        effort: SearchEffort,
        likely: Likely,
        start: Ids,
        first_layer: FirstLayer | None = None,
    ) -> None:
        self.rows, self.objective, self.bench, self.effort = rows, objective, bench, effort
        self.likely, self.many = likely
        self.first_layer = first_layer  # says which words are tried, where it is given
        self._refuse_without_room()
        self.filler = find_filler(rows.target)
        self.orders = list_neighbours(rows)
        self.passes = 0
        self.marks = find_marks(rows)
        # Of the prior's mean over tokens: under noise, where the objective is in nats, each token's
        # likelihood counts as much; otherwise the prior has no say but in some restarts.
        tokens = [sum(problem.hypothesis.lengths) for problem in rows.problems]
        counts = torch.tensor(tokens, device=rows.frame.device)
        self.base_weight = (PRIOR_UNDER_NOISE * counts * objective.noisy).to(rows.target.dtype)
        self.prior_weight = self.base_weight
        self.level = objective.levels.to(rows.frame.device)
        self.start = start
        self.best, self.best_scores = start, self.score(start[:, None])[:, 0]

    def run(self, first_round: int = 0, shows_progress: bool = False) -> None:
        """Searches from the start, then from the best guess changed in parts, several at once.

        Rows that are solved are left alone. A search whose start is already the end of an attempt
        begins with `first_round` 1.
        """
        for number in range(first_round, self.effort.rounds):
            left = (~self.find_solved(self.best, self.best_scores)).nonzero()[:, 0]
            if not len(left) or self.bench.out_of_time:
                break
            part = self.take(left)
            if number == 0:
                found, scores = part.attempt(part.start)
            else:
                found, scores = part.retry(self.best[left], number)
            better = scores < self.best_scores[left]
            self.best[left] = torch.where(better[:, None, None], found, self.best[left])
            self.best_scores[left] = torch.where(better, scores, self.best_scores[left])
            self.passes += part.passes
            if shows_progress:
                loss, texts = float(self.best_scores.mean()), self.rows.decode_some(self.best)
                self.bench.progress.report(number + 1, self.effort.rounds, loss, texts)

    def settle_ties(self) -> None:
        """Lets the prior decide where sentences of a batch fit as well with words exchanged."""
        is_single = self.rows.mask.shape[1] == 1
        if is_single or not self.effort.prior_weight or self.bench.out_of_time:
            return
        part = self.take(torch.arange(len(self.best), device=self.best.device))
        part.prior_weight = self.base_weight.clamp_min(self.effort.prior_weight)
        moved, _ = part.move_words(self.best, part.score(self.best[:, None])[:, 0])
        reached = self.score(moved[:, None])[:, 0]
        in_time = reached.isfinite()
        self.best = torch.where(in_time[:, None, None], moved, self.best)
        self.best_scores = torch.where(in_time, reached.to(self.best_scores), self.best_scores)
        self.passes += part.passes

    def take(self, places: Int[Tensor, "some"]) -> "WordSearch":
        """Returns the same search on some of its rows, or on some of them several times."""
        part = copy.copy(self)
        part.rows, part.objective = self.rows.take(places), self.objective.take(places)
        part.first_layer = self.first_layer and self.first_layer.take(places)
        part.passes, part.start, part.orders = 0, self.start[places], self.orders[places]
        part.likely, part.many = self.likely[places], self.many[places]
        part.level, part.prior_weight = self.level[places], self.prior_weight[places]
        part.base_weight = self.base_weight[places]
        return part

    # Attempts: from a start to where nothing improves any more

    def attempt(self, ids: Ids) -> tuple[Ids, Scores]:
        """Descends from a guess, and where that ends short, again from the best of many words."""
        ids, scores = self.descend(ids)
        left = (~self.find_solved(ids, scores)).nonzero()[:, 0]
        if len(left) and not self.bench.out_of_time:
            part = self.take(left)
            ids[left], scores[left] = part.descend(part.try_many_words(ids[left]))
            self.passes += part.passes
        return ids, scores

    def retry(self, ids: Ids, number: int) -> tuple[Ids, Scores]:
        """Attempts from the guesses, changed in each of four ways, side by side; keeps the best."""
        starts = [
            self.open_gap(ids, 2 * (number - 1)),
            self.open_gap(ids, 2 * (number - 1) + 1),
            self.clear_words(ids, number, weakest=True),
            self.clear_words(ids, number, weakest=False),
        ]
        chain = torch.arange(RESTARTS_AT_ONCE, device=ids.device).repeat_interleave(len(ids))
        places = torch.arange(len(ids), device=ids.device)
        chains = self.take(places.repeat(RESTARTS_AT_ONCE))
        extra = self.effort.prior_weight * (chain % 2 == 1)
        chains.prior_weight = torch.maximum(chains.base_weight, extra)
        found, _ = chains.attempt(torch.cat(starts))
        chains.prior_weight = chains.base_weight
        scores = chains.score(found[:, None])[:, 0]
        self.passes += chains.passes
        best, chosen = scores.view(RESTARTS_AT_ONCE, -1).min(0)
        return found.view(RESTARTS_AT_ONCE, *ids.shape)[chosen, places], best

    def descend(self, ids: Ids) -> tuple[Ids, Scores]:
        """Sweeps and moves words, each row until it improves no more.

        A row does not go on because another does: what becomes of it depends on it alone.
        """
        ids, scores = ids.clone(), self.score(ids[:, None])[:, 0]
        going = torch.arange(len(ids), device=ids.device)
        for _ in range(self.effort.sweeps):
            part = self.take(going)
            found, reached = part.sweep(ids[going])
            left = (~part._find_settled(found, reached)).nonzero()[:, 0]
            if len(left):
                rest = part.take(left)
                found[left], reached[left] = rest.move_words(found[left], reached[left])
                part.passes += rest.passes
            self.passes += part.passes
            better = reached < scores[going] - ENOUGH
            going, found, reached = going[better], found[better], reached[better]
            ids[going], scores[going] = found, reached
            going = going[~self.take(going).find_solved(found, reached)]
            if not len(going) or self.bench.out_of_time:
                break
        return ids, scores

    def _find_settled(self, ids: Ids, scores: Scores) -> Bool[Tensor, "rows"]:
        """Finds rows of which no other guess can be better.

        They are the solved ones, where that leaves no other order of the words open.
        """
        if not self.objective.tells_orders:
            return torch.zeros_like(scores, dtype=torch.bool)
        return self.find_solved(ids, scores)

    # Changes of a guess that is stuck

    def open_gap(self, ids: Ids, choice: int) -> Ids:
        """Takes a word out and opens a gap elsewhere, words between moved up.

        Of all such changes it is the best, or a later one of them.
        """
        gap = find_gaps(self.orders)
        shaped = gap.view(len(ids), -1, *ids.shape[1:])
        candidates = torch.where(shaped, self.filler, reorder(ids, self.orders))
        opens_one = gap.any(-1)  # orders that move nothing open no gap
        order = self.score(candidates).masked_fill(~opens_one, torch.inf).argsort(1)
        chosen = order[:, min(choice, order.shape[1] - 1)]
        return candidates[torch.arange(len(ids), device=ids.device), chosen]

    def clear_words(self, ids: Ids, number: int, weakest: bool) -> Ids:
        """Takes a part of the words out: by chance, or rather those that explain least."""
        loss = self.score_without_words(ids) if weakest else torch.zeros(ids.flatten(1).shape)
        loss, purpose = loss.cpu().double(), ("wipe", number, weakest)
        gone = draw_cleared(self.rows, self.bench, loss, CLEARED, purpose)
        return torch.where(gone.to(ids.device), self.filler, ids)

    def try_many_words(self, ids: Ids) -> Ids:
        """Puts the best of many words at each of the weakest places: those missed least."""
        ids = ids.clone()
        missed = self.score_without_words(ids)
        missed = missed.masked_fill(self.rows.fixed.flatten(1), torch.inf)
        words = torch.cat([self.many[:, :1], self.many], dim=1)
        count = MORE * self.effort.proposals
        for places in missed.argsort(1)[:, :WEAKEST].T:
            if asked := self.first_layer:
                words = asked.choose_words(self.rows, ids, places, self.many, count)
            found, _ = self.choose_words(ids, places, words)
            is_free = missed.gather(1, places[:, None]).isfinite()  # short sentences have fewer
            ids = torch.where(is_free[..., None], found, ids)
        return ids

    # Sweeps: the best word at each place

    def sweep(self, ids: Ids) -> tuple[Ids, Scores]:
        """Tries at every place the words towards which the objective falls fastest, and others."""
        ids, scores = ids.clone(), self.score(ids[:, None])[:, 0]
        downhill = self.find_downhill(ids)
        if self.effort.at_once:
            return self._sweep_at_once(ids, scores, downhill)
        for places, has_one in self.rows.list_free_places():
            left = (has_one & ~self._find_settled(ids, scores)).nonzero()[:, 0]
            if not len(left) or self.bench.out_of_time:
                break
            part = self.take(left)
            words = part.propose_words(ids[left], places[left], downhill[left])
            found, reached = part.choose_words(ids[left], places[left], words)
            taken = reached.isfinite()  # none where time ended before anything was tried
            ids[left] = torch.where(taken[:, None, None], found, ids[left])
            scores[left] = torch.where(taken, reached, scores[left])
            self.passes += part.passes
        return ids, scores

    def _sweep_at_once(
        self, ids: Ids, scores: Scores, downhill: Int[Tensor, "rows places downhill"]
    ) -> tuple[Ids, Scores]:
        """Tries all places in one pass, by what the update says alone.

        Then the best few of each place are tried, by the prior too.
        """
        places = torch.stack([place for place, _ in self.rows.list_free_places()], dim=1)
        words = torch.stack([self.propose_words(ids, one, downhill) for one in places.T], dim=1)
        tried_places, tried_words = places[..., None].expand_as(words).flatten(1), words.flatten(1)

        def make(rows: slice, some: slice) -> Candidates:
            return replace_words(ids[rows], tried_places[rows, some], tried_words[rows, some])

        found = self._score_made(make, tried_words.shape[1]).view(words.shape)
        reached, best = found.topk(min(BEST, words.shape[2]), largest=False)
        chosen = words.gather(2, best)
        gains = reached[..., 0].argsort(1)
        first = chosen[..., 0].gather(1, gains)
        ids, scores = self._replace_several(ids, scores, places.gather(1, gains), first)
        some_places, some_words = places[..., None].expand_as(best).flatten(1), chosen.flatten(1)
        return self._repeat_best(
            ids, scores, lambda now, rows: replace_words(now, some_places[rows], some_words[rows])
        )

    def _replace_several(
        self,
        ids: Ids,
        scores: Scores,
        places: Int[Tensor, "rows places"],
        words: Int[Tensor, "rows places"],
    ) -> tuple[Ids, Scores]:
        """Puts words at the first place, at the first two and so on; keeps whichever is best."""
        found, chosen = self.score(candidates := replace_more_and_more(ids, places, words)).min(1)
        better = found < scores - ENOUGH
        taken = candidates[torch.arange(len(ids), device=ids.device), chosen]
        return torch.where(better[:, None, None], taken, ids), torch.where(better, found, scores)

    def choose_words(
        self, ids: Ids, places: Places, words: Int[Tensor, "rows words"]
    ) -> tuple[Ids, Scores]:
        """Puts the best of some words at one place of each row.

        The first of the words gives way to the one that is there, so that nothing gets worse.
        """
        flat = ids.flatten(1)
        words[:, 0] = flat.gather(1, places[:, None])[:, 0]
        candidates = replace_words(ids, places[:, None].expand_as(words), words)
        scores, chosen = self.score(candidates).min(1)
        found = flat.scatter(1, places[:, None], words.gather(1, chosen[:, None]))
        return found.view_as(ids), scores

    def propose_words(
        self, ids: Ids, places: Places, downhill: Int[Tensor, "rows places downhill"]
    ) -> Int[Tensor, "rows proposals"]:
        """Returns likely words, those down the slope at the place, the guess's own, and marks.

        Where the first layer is asked, these are its words and the best of the others by it.
        """
        is_none = self.rows.fixed | (ids == self.filler)
        own = torch.where(is_none, self.likely[:, :1, None], ids).flatten(1)
        marks = self.marks.expand(len(ids), -1)
        if self.first_layer is not None:
            others, half = torch.cat([self.likely, own, marks], dim=1), self.effort.proposals // 2
            return self.first_layer.choose_words(self.rows, ids, places, others, half)
        slopes = downhill[torch.arange(len(ids), device=ids.device), places]
        return torch.cat([self.likely[:, :1], self.likely, slopes, own, marks], dim=1)

    def find_downhill(self, ids: Ids) -> Int[Tensor, "rows places downhill"]:
        """Returns for every place the words towards which the objective falls fastest.

        Half of them go by the slope with the word that is there, half by the slope without it.
        """
        places = ids[0].numel()
        if self.first_layer:
            return ids.new_zeros(len(ids), places, 0)  # it says which words to try
        emptied = empty_each_place(ids, self.filler)
        here = self._compute_slopes(ids[:, None])[:, 0]
        without = self._compute_slopes(emptied, torch.arange(places, device=ids.device))
        half = min(self.effort.proposals // 2, len(self.rows.words))
        if self.bench.out_of_time:  # nobody will look at them
            return self.rows.words[:1].expand(len(ids), places, 2 * half)
        table = self.rows.target.vocabulary.embeddings[self.rows.words].T
        chosen = []
        for pair in zip(here, without, strict=True):
            falling = [(slope @ table).topk(half, largest=False).indices for slope in pair]
            chosen.append(torch.cat(falling, dim=-1))
        return self.rows.words[torch.stack(chosen)]

    def _compute_slopes(
        self, ids: Candidates, places: Int[Tensor, "candidates"] | None = None
    ) -> Float[Tensor, "rows candidates *places hidden"]:
        """Returns the slopes along all words' embeddings, or at one place of each candidate."""
        hidden = self.rows.target.hidden_size
        shape = (hidden,) if places is not None else (ids[0, 0].numel(), hidden)

        def piece(rows: slice, some: slice) -> Tensor:
            with torch.enable_grad():
                embeddings = self.rows.target.embed(ids[rows, some]).detach().requires_grad_()
                score = self.objective.score(self.rows.batch(embeddings, rows), rows).sum()
            slope = torch.autograd.grad(score, embeddings)[0].nan_to_num_().flatten(2, 3)
            if places is None:
                return slope
            return slope[:, torch.arange(slope.shape[1], device=ids.device), places[some]]

        missing = self.rows.target.vocabulary.embeddings.new_zeros(shape)
        return self._plan_pass(slope=True).run_pairs(piece, len(ids), ids.shape[1], missing)

    # Moves: the same words in another order

    def move_words(self, ids: Ids, scores: Scores) -> tuple[Ids, Scores]:
        """Exchanges two words or moves one, the best such, until none helps.

        All moves are tried, then those that did best again after each that was taken, until all
        have to be tried once more.
        """
        ids, scores = ids.clone(), scores.clone()
        going = torch.arange(len(ids), device=ids.device)
        for _ in range(2 * ids.shape[-1]):
            part = self.take(going)
            taken, reached = part._move_best(ids[going], scores[going])
            self.passes += part.passes
            better = reached < scores[going] - ENOUGH
            going = going[better]
            ids[going], scores[going] = taken[better], reached[better]
            if not len(going) or self.bench.out_of_time:
                break
        return ids, scores

    def _move_best(self, ids: Ids, scores: Scores) -> tuple[Ids, Scores]:
        """Tries all moves, and takes the best few of them while any helps."""
        found = self.score(reorder(ids, self.orders))
        ahead = found.topk(min(AHEAD, found.shape[1]), largest=False).indices
        best = self.orders[torch.arange(len(ids), device=ids.device)[:, None], ahead]
        return self._repeat_best(ids, scores, lambda now, rows: reorder(now, best[rows]))

    def _repeat_best(
        self, ids: Ids, scores: Scores, change: Callable[[Ids, Int[Tensor, "some"]], Candidates]
    ) -> tuple[Ids, Scores]:
        """Takes the best of a few changes, and again, until none of these helps."""
        ids, scores = ids.clone(), scores.clone()
        going = torch.arange(len(ids), device=ids.device)
        for _ in range(2 * ids[0].numel()):
            part = self.take(going)
            candidates = change(ids[going], going)
            found, chosen = part.score(candidates).min(1)
            self.passes += part.passes
            better = found < scores[going] - ENOUGH
            going = going[better]
            if not len(going):
                break
            ids[going], scores[going] = candidates[better, chosen[better]], found[better]
            if self.bench.out_of_time:
                break
        return ids, scores

    # Scores

    @torch.no_grad()
    def score(self, ids: Candidates) -> Float[Tensor, "rows candidates"]:
        """Returns the objective of candidates; in rows that weigh the prior, with it."""
        found = self._score_made(lambda rows, some: ids[rows, some], ids.shape[1])
        weighed = self.prior_weight.nonzero()[:, 0]
        if len(weighed):
            found = found.double()
            found[weighed] = self.take(weighed)._add_prior(ids[weighed], found[weighed])
        return found

    @torch.no_grad()
    def _score_made(
        self, make: Callable[[slice, slice], Candidates], candidates: int
    ) -> Float[Tensor, "rows candidates"]:
        """Returns the objective by itself of candidates that are made a few at a time.

        It is infinite for those that time did not allow.
        """

        def piece(rows: slice, some: slice) -> Tensor:
            return self.objective.score(self._embed(make(rows, some), rows), rows)

        missing = torch.tensor(torch.inf, dtype=torch.float64, device=self.rows.frame.device)
        return self._plan_pass().run_pairs(piece, len(self.rows.frame), candidates, missing)

    def _add_prior(
        self, ids: Candidates, scores: Float[Tensor, "rows candidates"]
    ) -> Float[Tensor, "rows candidates"]:
        """Returns scores with the weighted prior, no lower where all is explained."""
        scores = torch.maximum(scores, self.level[:, None])
        # The prior costs more than the model's first layers: it is asked for the best candidates
        # and the first, which stands for what is there; others are out of the race.
        ahead = scores.clone()
        ahead[:, 0] = -torch.inf
        best = ahead.topk(min(ASKED, ids.shape[1]), largest=False).indices
        some = ids.gather(1, best[..., None, None].expand(*best.shape, *ids.shape[2:]))
        nll = compute_nll(self.bench, self.rows, some).double()
        weighed = scores.gather(1, best) + self.prior_weight[:, None] * nll
        return torch.full_like(scores, torch.inf).scatter(1, best, weighed)

    @torch.no_grad()
    def find_solved(self, ids: Ids, scores: Scores) -> Bool[Tensor, "rows"]:
        """Returns which rows explain every matrix that is looked at, not only most."""
        solved = scores <= self.level
        for row in solved.nonzero()[:, 0].tolist():
            one = slice(row, row + 1)
            batch = self._embed(ids[one, None], one)
            solved[row] = self.objective.explains_all(batch, one, float(self.level[row]))
        return solved

    def score_without_words(self, ids: Ids) -> Float[Tensor, "rows places"]:
        """Returns the objective without each of the words: a wrong one is hardly missed."""
        candidates = empty_each_place(ids, self.filler)
        fixed, frame = self.rows.fixed[:, None], self.rows.frame[:, None]
        return self.score(torch.where(fixed, frame, candidates))

    def _embed(self, ids: Candidates, rows: slice) -> Batch:
        return self.rows.batch(self.rows.target.embed(ids), rows)

    def _plan_pass(self, slope: bool = False) -> Chunks:
        """Counts a pass, and returns the pieces it is made in."""
        self.passes += 1
        (_, examples, tokens), device = self.rows.mask.shape, self.rows.target.device
        weight = examples * tokens * self.objective.cost * (3 if slope else 1)
        each = self.objective.bytes(examples, tokens, slope)
        work = self.objective.work(examples, tokens, slope)
        return pieces(self.bench, device, each, work, fastest(TOKENS_AT_ONCE, device) / weight)

    def _refuse_without_room(self) -> None:
        examples, tokens = self.rows.mask.shape[1:]
        needed = self.objective.bytes(examples, tokens, slope=True)
        what = f"one candidate of this batch ({examples} texts of up to {tokens} tokens)"
        device = self.rows.target.device
        refuse_without_room("The search over words", needed, self.bench, device, what)
