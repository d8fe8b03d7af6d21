"""Coordinate search over words: best word a place, then moves of words, then again from a guess that is partly wiped out."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.energy.neighbours import neighbours
from gradleak.attacks.energy.objective import Energy
from gradleak.attacks.gradient_matching.discrete import batch_nll
from gradleak.attacks.gradient_matching.problems import Rows
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.matching.chunking import Chunks

TOKENS_AT_ONCE = {"cuda": 400_000, "cpu": 12_000}  # forward passes only: a third of what gradients of gradients take

ENOUGH = 1e-4  # nats: less is no improvement

Ids = Int[Tensor, "rows examples tokens"]


@dataclass(frozen=True)
class SearchSettings:
    """How long and how widely to search."""

    proposals: int = 128  # words tried at a place
    sweeps: int = 4  # over all places, at most, before a restart
    restarts: int = 8  # from the best guess with a part of it wiped out
    wiped: float = 0.34  # that part
    prior_weight: float = 0.0
    solved: float = -11.5  # log of the unexplained share (1e-5) at which a row is done


class WordSearch:
    """The moving state: for every row the words now and the best so far."""

    def __init__(self, rows: Rows, energy: Energy, bench: Bench, settings: SearchSettings, filler: int) -> None:
        self.rows, self.energy, self.bench, self.settings, self.filler = rows, energy, bench, settings, filler
        self.passes = 0
        self.start = torch.where(rows.fixed, rows.frame, filler)
        self.always = punctuation(rows)
        self.best, self.best_scores = self.start, self.scores(self.start[:, None])[:, 0]
        self.on_progress: Callable[[int, int], None] = lambda done, total: None

    def run(self) -> None:
        """All restarts; rows that are solved are left alone."""
        ids, scores = self.start, self.best_scores
        total = 1 + self.settings.restarts
        for attempt in range(total):
            open_rows = (self.best_scores > self.settings.solved).nonzero()[:, 0]
            if not len(open_rows) or self.bench.out_of_time:
                break
            part = self.of(open_rows)
            ids = part.start if attempt == 0 else part.wiped(self.best[open_rows], attempt)
            ids, scores = part.descend(ids)
            better = scores < self.best_scores[open_rows]
            self.best[open_rows] = torch.where(better[:, None, None], ids, self.best[open_rows])
            self.best_scores[open_rows] = torch.where(better, scores, self.best_scores[open_rows])
            self.passes += part.passes
            self.on_progress(attempt + 1, total)

    def of(self, places: Int[Tensor, "some"]) -> "WordSearch":
        """The same search on some of its rows."""
        rows, energy = self.rows.take(places), self.energy.take(places)
        return WordSearch(rows, energy, self.bench, self.settings, self.filler)

    def descend(self, ids: Ids) -> tuple[Ids, Float[Tensor, "rows"]]:
        """Sweeps and moves, each row until it improves no more: a row does not go on because another does."""
        scores = self.scores(ids[:, None])[:, 0]
        going = torch.ones_like(scores, dtype=torch.bool)
        for _ in range(self.settings.sweeps):
            swept, found = self.move(*self.sweep(ids))
            better = going & (found < scores - ENOUGH)
            ids = torch.where(better[:, None, None], swept, ids)
            scores = torch.where(better, found, scores)
            going = better & (scores > self.settings.solved)
            if not bool(going.any()) or self.bench.out_of_time:
                break
        return ids, scores

    def sweep(self, ids: Ids) -> tuple[Ids, Float[Tensor, "rows"]]:
        """Every place in turn: the words towards which the objective falls fastest are tried, the best is taken."""
        ids, scores = ids.clone(), self.scores(ids[:, None])[:, 0]
        for places, has_one in self._places():
            words = self.proposals(ids, places)
            words[:, 0] = ids.flatten(1).gather(1, places[:, None])[:, 0]
            candidates = ids.flatten(1)[:, None].repeat(1, words.shape[1], 1)
            candidates.scatter_(2, places[:, None, None].expand(-1, words.shape[1], 1), words[..., None])
            found = self.scores(candidates.view(len(ids), -1, *ids.shape[1:]))
            chosen = torch.where(has_one, found.argmin(1), 0)
            scores = found.gather(1, chosen[:, None])[:, 0]
            ids.view(len(ids), -1).scatter_(1, places[:, None], words.gather(1, chosen[:, None]))
        return ids, scores

    def move(self, ids: Ids, scores: Float[Tensor, "rows"]) -> tuple[Ids, Float[Tensor, "rows"]]:
        """All exchanges of two words and all moves of one, the best taken, until none helps."""
        orders, going = neighbours(self.rows), torch.ones_like(scores, dtype=torch.bool)
        for _ in range(2 * ids.shape[-1]):
            moved = ids.flatten(1)[:, None].expand(-1, orders.shape[1], -1).gather(2, orders)
            candidates = moved.view(len(ids), -1, *ids.shape[1:])
            found, chosen = self.scores(candidates).min(1)
            going = going & (found < scores - ENOUGH)
            if not bool(going.any()):
                break
            taken = candidates[torch.arange(len(ids), device=ids.device), chosen]
            ids, scores = torch.where(going[:, None, None], taken, ids), torch.where(going, found, scores)
        return ids, scores

    def proposals(self, ids: Ids, places: Int[Tensor, "rows"]) -> Int[Tensor, "rows proposals"]:
        """The words furthest down the objective's slope at a place, with its word in place and without; punctuation always."""
        emptied = ids.flatten(1).scatter(1, places[:, None], self.filler).view_as(ids)
        words = [self._down_the_slope(one, places) for one in (ids, emptied)]
        return torch.cat([*words, self.always.expand(len(ids), -1)], dim=1)

    def _down_the_slope(self, ids: Ids, places: Int[Tensor, "rows"]) -> Int[Tensor, "rows half"]:
        slopes = self.slopes(ids).flatten(1, 2)
        slope = slopes.gather(1, places[:, None, None].expand(-1, 1, slopes.shape[-1]))[:, 0]
        falls = slope @ self.rows.target.vocabulary.embeddings[self.rows.words].T
        half = min(self.settings.proposals // 2, falls.shape[1])
        return self.rows.words[falls.topk(half, largest=False).indices]

    def slopes(self, ids: Ids) -> Float[Tensor, "rows examples tokens hidden"]:
        """The slope of the objective with respect to the embeddings of the words."""

        def piece(rows: slice) -> Tensor:
            with torch.enable_grad():
                embeddings = self.rows.target.embed(ids[rows]).detach().requires_grad_()
                score = self.energy.scores(self.rows.batch(embeddings[:, None], rows), rows).sum()
            slope = torch.autograd.grad(score, embeddings)[0]
            return slope.nan_to_num_()

        return self._chunks(3).run(piece, len(ids))

    @torch.no_grad()
    def scores(self, ids: Int[Tensor, "rows candidates examples tokens"]) -> Float[Tensor, "rows candidates"]:
        """The objective of candidates, and the weighted prior."""

        def piece(rows: slice) -> Tensor:
            return self.energy.scores(self._batch(ids[rows], rows), rows)

        found = self._chunks(ids.shape[1]).run(piece, len(ids))
        if self.settings.prior_weight:
            found = found + self.settings.prior_weight * batch_nll(self.bench, self.rows, ids)
        return found

    def wiped(self, ids: Ids, attempt: int) -> Ids:
        """The guesses with a part of their words taken out: by chance, or (every second time) those that explain least."""
        loss = self.losses_without(ids).cpu() if attempt % 2 else torch.zeros(len(ids), ids[0].numel())
        ids = ids.clone()
        for row, problem in enumerate(self.rows.problems):
            stream = self.bench.streams_of(problem.observation).child("wipe", problem.number, attempt)
            free = (~self.rows.fixed[row]).flatten().nonzero()[:, 0].cpu()
            chance = torch.rand(len(free), generator=stream.generator(), dtype=torch.float64)
            spread = loss[row, free].double().std().nan_to_num() + 1e-6
            order = (loss[row, free].double() / spread + chance).argsort()
            gone = free[order[: max(1, round(self.settings.wiped * len(free)))]]
            ids[row].view(-1)[gone.to(ids.device)] = self.filler
        return ids

    def losses_without(self, ids: Ids) -> Float[Tensor, "rows places"]:
        """What the objective would be without each of the words: a wrong one is hardly missed."""
        count = ids[0].numel()
        candidates = ids.flatten(1)[:, None].repeat(1, count, 1)
        candidates.diagonal(dim1=1, dim2=2).fill_(self.filler)
        candidates = torch.where(self.rows.fixed.flatten(1)[:, None], self.rows.frame.flatten(1)[:, None], candidates)
        return self.scores(candidates.view(len(ids), count, *ids.shape[1:]))

    def _places(self) -> list[tuple[Int[Tensor, "rows"], Bool[Tensor, "rows"]]]:
        """Free places (numbered over the whole batch) in turn, and which rows have that many."""
        free = [(~fixed).flatten().nonzero()[:, 0] for fixed in self.rows.fixed]
        longest = max(len(one) for one in free)
        numbers = [torch.stack([one[min(number, len(one) - 1)] for one in free]) for number in range(longest)]
        counts = torch.tensor([len(one) for one in free], device=self.rows.fixed.device)
        return [(places, number < counts) for number, places in enumerate(numbers)]

    def _batch(self, ids: Int[Tensor, "rows candidates examples tokens"], rows: slice) -> Batch:
        return self.rows.batch(self.rows.target.embed(ids), rows)

    def _chunks(self, candidates: int) -> Chunks:
        self.passes += 1
        tokens = self.rows.mask[0].numel() * candidates
        return Chunks(max(1, TOKENS_AT_ONCE.get(self.rows.target.device.type, 12_000) // tokens))


def punctuation(rows: Rows) -> Int[Tensor, "words"]:
    """Tokens of one punctuation mark: slopes often miss them, and nearly every sentence has some."""
    decode = rows.target.decode
    words = rows.words.tolist()
    marks = [word for mark in ".,?!'-:;()\"" for word in rows.target.encode([mark])[0] if word in set(words) and decode([word])]
    return torch.tensor(sorted(set(marks)), device=rows.words.device, dtype=torch.int64)
