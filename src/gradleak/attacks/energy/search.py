"""Coordinate search over words: best word a place, then moves of words, then again from a guess that is partly wiped out."""

import copy
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.energy.changes import replaced, slipped, widened, wiped
from gradleak.attacks.energy.first_layer import words_of_first_layer
from gradleak.attacks.energy.objective import Energy
from gradleak.attacks.energy.settings import CHANGES, SearchSettings
from gradleak.attacks.energy.steps import ENOUGH, moved_on, swept_at_once
from gradleak.attacks.energy.words import Likely, punctuation
from gradleak.attacks.gradient_matching.discrete import batch_nll
from gradleak.attacks.search.matched import Matched
from gradleak.attacks.search.neighbours import neighbours
from gradleak.attacks.search.rows import Rows
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.matching.chunking import Chunks, fastest, pieces, refuse_without_room

TOKENS_AT_ONCE = {"cuda": 400_000, "cpu": 12_000}  # forward passes only: a third of what gradients of gradients take

ASKED = 16  # candidates whose likelihood the prior is asked for

Ids = Int[Tensor, "rows examples tokens"]


class WordSearch:
    """The moving state: for every row the words now and the best so far."""

    def __init__(
        self,
        rows: Rows,
        energy: Energy | Matched,
        bench: Bench,
        settings: SearchSettings,
        filler: int,
        likely: Likely,
        start: Ids | None = None,
    ) -> None:
        self.rows, self.energy, self.bench, self.settings, self.filler = rows, energy, bench, settings, filler
        self.likely, self.many = likely
        self._refuse_without_room()
        self.orders = neighbours(rows)
        self.passes = 0
        self.start = words_of_first_layer(rows, filler, bench) if start is None else start
        self.always = punctuation(rows)
        self.base_weight = self._base_weight()
        self.prior_weight = self.base_weight
        self.level = energy.levels(settings.solved).to(rows.frame.device)
        self.begun = False  # whether the best guess is already the end of an attempt
        self.best, self.best_scores = self.start, self.scores(self.start[:, None])[:, 0]
        self.on_progress: Callable[[int, int], None] = lambda done, total: None

    def run(self) -> None:
        """From nothing, then from the best guess changed in parts, several at once; rows that are solved are left alone."""
        rounds = self.settings.rounds
        for number in range(int(self.begun), rounds):
            open_rows = (~self.solved(self.best, self.best_scores)).nonzero()[:, 0]
            if not len(open_rows) or self.bench.out_of_time:
                break
            part = self.of(open_rows)
            found, scores = part.attempt(part.start) if number == 0 else part.retry(self.best[open_rows], number)
            better = scores < self.best_scores[open_rows]
            self.best[open_rows] = torch.where(better[:, None, None], found, self.best[open_rows])
            self.best_scores[open_rows] = torch.where(better, scores, self.best_scores[open_rows])
            self.passes += part.passes
            self.on_progress(number + 1, rounds)

    def _base_weight(self) -> Float[Tensor, "rows"]:
        """Of the prior's mean over tokens: under noise, where the objective is in nats, all tokens count; otherwise none."""
        tokens = torch.tensor([sum(problem.hypothesis.lengths) for problem in self.rows.problems], device=self.rows.frame.device)
        return (self.settings.prior_under_noise * tokens * self.energy.noisy).to(self.rows.target.dtype)

    def settle(self) -> None:
        """Where sentences of a batch fit equally well with words exchanged between them, the prior decides."""
        if self.rows.mask.shape[1] == 1 or not self.settings.prior_weight or self.bench.out_of_time:
            return
        part = self.of(torch.arange(len(self.best), device=self.best.device))
        part.prior_weight = self.base_weight.clamp_min(self.settings.prior_weight)
        moved, _ = part.move(self.best, part.scores(self.best[:, None])[:, 0])
        reached = self.scores(moved[:, None])[:, 0]
        judged = reached.isfinite()  # not where time ended first
        self.best = torch.where(judged[:, None, None], moved, self.best)
        self.best_scores = torch.where(judged, reached.to(self.best_scores), self.best_scores)
        self.passes += part.passes

    def retry(self, ids: Ids, number: int) -> tuple[Ids, Float[Tensor, "rows"]]:
        """Searches from the guesses, changed in each of several ways, side by side; of each row the best."""
        starts = [
            slipped(self, ids, 2 * (number - 1)),
            slipped(self, ids, 2 * (number - 1) + 1),
            wiped(self, ids, number, weakest=True),
            wiped(self, ids, number, weakest=False),
        ]
        every = torch.arange(len(ids), device=ids.device).repeat(len(CHANGES))
        chains = self.of(every)
        every_second = (torch.arange(len(every), device=ids.device) // len(ids)) % 2 == 1
        chains.prior_weight = torch.maximum(chains.base_weight, self.settings.prior_weight * every_second)
        found, _ = chains.attempt(torch.cat(starts))
        chains.prior_weight = chains.base_weight
        scores = chains.scores(found[:, None])[:, 0]
        self.passes += chains.passes
        best, chosen = scores.view(len(CHANGES), -1).min(0)
        return found.view(len(CHANGES), *ids.shape)[chosen, torch.arange(len(ids), device=ids.device)], best

    def of(self, places: Int[Tensor, "some"]) -> "WordSearch":
        """The same search on some of its rows, or on some of them several times."""
        part = copy.copy(self)
        part.rows, part.energy, part.passes = self.rows.take(places), self.energy.take(places), 0
        part.start, part.likely, part.orders = self.start[places], self.likely[places], self.orders[places]
        part.many, part.level = self.many[places], self.level[places]
        part.prior_weight, part.base_weight = self.prior_weight[places], self.base_weight[places]
        return part

    def attempt(self, ids: Ids) -> tuple[Ids, Float[Tensor, "rows"]]:
        """Down from a guess; where that ends short, many more words at the weakest places, and down from there."""
        ids, scores = self.descend(ids)
        left = (~self.solved(ids, scores)).nonzero()[:, 0]
        if len(left) and self.settings.weak and not self.bench.out_of_time:
            part = self.of(left)
            ids[left], scores[left] = part.descend(widened(part, ids[left]))
            self.passes += part.passes
        return ids, scores

    def descend(self, ids: Ids) -> tuple[Ids, Float[Tensor, "rows"]]:
        """Sweeps and moves, each row until it improves no more: a row does not go on because another does."""
        ids, scores = ids.clone(), self.scores(ids[:, None])[:, 0]
        going = torch.arange(len(ids), device=ids.device)
        for _ in range(self.settings.sweeps):
            part = self.of(going)
            found, reached = part.move(*part.sweep(ids[going]))
            self.passes += part.passes
            better = reached < scores[going] - ENOUGH
            going, found, reached = going[better], found[better], reached[better]
            ids[going], scores[going] = found, reached
            going = going[~self.of(going).solved(found, reached)]
            if not len(going) or self.bench.out_of_time:
                break
        return ids, scores

    def sweep(self, ids: Ids) -> tuple[Ids, Float[Tensor, "rows"]]:
        """At every place the words towards which the objective falls fastest are tried, the best is taken."""
        ids, scores = ids.clone(), self.scores(ids[:, None])[:, 0]
        downhill = self.downhill(ids)
        if self.settings.at_once:
            return swept_at_once(self, ids, scores, downhill)
        for places, has_one in self.free_places():
            if self.bench.out_of_time:
                break
            words = self.proposals(ids, places, downhill)
            found, reached = self.best_words(ids, places, words)
            taken = has_one & reached.isfinite()  # none where time ended before anything was tried
            ids = torch.where(taken[:, None, None], found, ids)
            scores = torch.where(taken, reached, scores)
        return ids, scores

    def best_words(
        self, ids: Ids, places: Int[Tensor, "rows"], words: Int[Tensor, "rows words"]
    ) -> tuple[Ids, Float[Tensor, "rows"]]:
        """The guesses with the best of some words (the first of which gives way to the word that is there) at one place each."""
        flat = ids.flatten(1)
        words[:, 0] = flat.gather(1, places[:, None])[:, 0]
        scores, chosen = self.scores(replaced(ids, places[:, None].expand_as(words), words)).min(1)
        return flat.scatter(1, places[:, None], words.gather(1, chosen[:, None])).view_as(ids), scores

    def move(self, ids: Ids, scores: Float[Tensor, "rows"]) -> tuple[Ids, Float[Tensor, "rows"]]:
        """Exchanges of two words and moves of one, the best taken, until none helps."""
        return moved_on(self, ids, scores)

    def proposals(
        self, ids: Ids, places: Int[Tensor, "rows"], downhill: Int[Tensor, "rows places downhill"]
    ) -> Int[Tensor, "rows proposals"]:
        """Likely words, those down the objective's slope at the place, the guess's own, punctuation."""
        slopes = downhill[torch.arange(len(ids), device=ids.device), places]
        own = torch.where(self.rows.fixed | (ids == self.filler), self.likely[:, :1, None], ids).flatten(1)
        return torch.cat([self.likely[:, :1], self.likely, slopes, own, self.always.expand(len(ids), -1)], dim=1)

    def downhill(self, ids: Ids) -> Int[Tensor, "rows places downhill"]:
        """For every place the words towards which the objective falls fastest, with its word there and without."""
        places = ids[0].numel()
        emptied = ids.flatten(1)[:, None].repeat(1, places, 1)
        emptied.diagonal(dim1=1, dim2=2).fill_(self.filler)
        here = self.slopes(ids[:, None])[:, 0]
        without = self.slopes(emptied.view(len(ids), places, *ids.shape[1:]), torch.arange(places, device=ids.device))
        half = min(self.settings.proposals // 2, len(self.rows.words))
        if self.bench.out_of_time:  # nobody will look at them
            return self.rows.words[:1].expand(len(ids), places, 2 * half)
        table = self.rows.target.vocabulary.embeddings[self.rows.words].T
        chosen = [
            torch.cat([(slope @ table).topk(half, largest=False).indices for slope in (row, other)], dim=-1)
            for row, other in zip(here, without, strict=True)
        ]
        return self.rows.words[torch.stack(chosen)]

    def slopes(
        self, ids: Int[Tensor, "rows candidates examples tokens"], places: Int[Tensor, "candidates"] | None = None
    ) -> Float[Tensor, "rows candidates *places hidden"]:
        """The objective's slopes with respect to the embeddings of all words, or of the word at one place of each candidate."""
        hidden = self.rows.target.hidden_size if places is not None else (ids[0, 0].numel(), self.rows.target.hidden_size)

        def piece(rows: slice, some: slice) -> Tensor:
            with torch.enable_grad():
                embeddings = self.rows.target.embed(ids[rows, some]).detach().requires_grad_()
                score = self.energy.scores(self.rows.batch(embeddings, rows), rows).sum()
            slope = torch.autograd.grad(score, embeddings)[0].nan_to_num_().flatten(2, 3)
            return slope if places is None else slope[:, torch.arange(slope.shape[1], device=ids.device), places[some]]

        missing = self.rows.target.vocabulary.embeddings.new_zeros(hidden)
        return self._chunks(slope=True).run_pairs(piece, len(ids), ids.shape[1], missing)

    @torch.no_grad()
    def scores(self, ids: Int[Tensor, "rows candidates examples tokens"]) -> Float[Tensor, "rows candidates"]:
        """The objective of candidates; in rows that weigh the prior, with it, and no lower where all is explained."""
        found = self.unweighed(ids)
        weighed = self.prior_weight.nonzero()[:, 0]
        if len(weighed):
            found = found.double()
            found[weighed] = self.of(weighed).with_prior(ids[weighed], found[weighed])
        return found

    def unweighed(self, ids: Int[Tensor, "rows candidates examples tokens"]) -> Float[Tensor, "rows candidates"]:
        """The objective of candidates by itself."""
        return self.unweighed_of(lambda rows, some: ids[rows, some], ids.shape[1])

    @torch.no_grad()
    def unweighed_of(self, made: Callable[[slice, slice], Tensor], candidates: int) -> Float[Tensor, "rows candidates"]:
        """The same for candidates that are made a few at a time; infinity for those that time did not allow."""

        def piece(rows: slice, some: slice) -> Tensor:
            return self.energy.scores(self._batch(made(rows, some), rows), rows)

        missing = torch.tensor(torch.inf, dtype=torch.float64, device=self.rows.frame.device)
        return self._chunks().run_pairs(piece, len(self.rows.frame), candidates, missing)

    def with_prior(
        self, ids: Int[Tensor, "rows candidates examples tokens"], scores: Float[Tensor, "rows candidates"]
    ) -> Float[Tensor, "rows candidates"]:
        """Scores with the weighted prior, no lower where all is explained. The prior costs more than the model's first layers:
        it is asked for the best candidates and the first, which stands for what is there; others are out of the race."""
        scores = torch.maximum(scores, self.level[:, None])
        ahead = scores.clone()
        ahead[:, 0] = -torch.inf
        best = ahead.topk(min(ASKED, ids.shape[1]), largest=False).indices
        some = ids.gather(1, best[..., None, None].expand(*best.shape, *ids.shape[2:]))
        nll = batch_nll(self.bench, self.rows, some).double()
        weighed = scores.gather(1, best) + self.prior_weight[:, None] * nll
        return torch.full_like(scores, torch.inf).scatter(1, best, weighed)

    @torch.no_grad()
    def solved(self, ids: Ids, scores: Float[Tensor, "rows"]) -> Bool[Tensor, "rows"]:
        """Rows of which every matrix that is looked at is explained, not only most."""
        explained = scores <= self.level
        for row in explained.nonzero()[:, 0].tolist():
            one = slice(row, row + 1)
            explained[row] = self.energy.explained(self._batch(ids[one, None], one), one, float(self.level[row]))
        return explained

    def losses_without(self, ids: Ids) -> Float[Tensor, "rows places"]:
        """What the objective would be without each of the words: a wrong one is hardly missed."""
        count = ids[0].numel()
        candidates = ids.flatten(1)[:, None].repeat(1, count, 1)
        candidates.diagonal(dim1=1, dim2=2).fill_(self.filler)
        candidates = torch.where(self.rows.fixed.flatten(1)[:, None], self.rows.frame.flatten(1)[:, None], candidates)
        return self.scores(candidates.view(len(ids), count, *ids.shape[1:]))

    def free_places(self) -> list[tuple[Int[Tensor, "rows"], Bool[Tensor, "rows"]]]:
        """Free places (numbered over the whole batch) in turn, and which rows have that many; others repeat their last."""
        fixed = self.rows.fixed.flatten(1)
        order, counts = fixed.to(torch.uint8).argsort(dim=1, stable=True), (~fixed).sum(1)
        longest = int(counts.max())
        return [(order.gather(1, (counts - 1).clamp_max(number)[:, None])[:, 0], number < counts) for number in range(longest)]

    def _batch(self, ids: Int[Tensor, "rows candidates examples tokens"], rows: slice) -> Batch:
        return self.rows.batch(self.rows.target.embed(ids), rows)

    def _chunks(self, slope: bool = False) -> Chunks:
        self.passes += 1
        (_, examples, tokens), device = self.rows.mask.shape, self.rows.target.device
        most = fastest(TOKENS_AT_ONCE, device) / (examples * tokens * self.energy.cost * (3 if slope else 1))
        each = self.energy.bytes(examples, tokens, slope)
        return pieces(self.bench, device, each, self.energy.work(examples, tokens, slope), most)

    def _refuse_without_room(self) -> None:
        examples, tokens = self.rows.mask.shape[1:]
        what = f"one candidate of this batch ({examples} texts of up to {tokens} tokens)"
        needed = self.energy.bytes(examples, tokens, slope=True)
        refuse_without_room("energy", needed, self.bench, self.rows.target.device, what)
