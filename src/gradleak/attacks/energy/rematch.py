"""A last search over whole words by what they match of the update, from a guess that another search made."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.energy.search import Ids, WordSearch
from gradleak.attacks.energy.settings import SearchSettings
from gradleak.attacks.energy.words import Likely, filler_of
from gradleak.attacks.gradient_matching.polish import Polish
from gradleak.attacks.search.matched import Matched
from gradleak.attacks.search.rows import Rows
from gradleak.attacks.search.sizes import places_by_size
from gradleak.core.attack import Bench

if TYPE_CHECKING:
    from gradleak.attacks.gradient_matching.loop import Search

NEAREST = 6  # words nearest to the embedding at each place
MOST = 300.0  # nats that a tensor may be worth at first: the last ones are worth thousands and know of words least
MANY = 256  # and at any place, where a guess is weakest


@dataclass(frozen=True)
class Rematch:
    """A search over whole words by what they match; under noise at first with the loudest tensors held down."""

    bench: Bench
    settings: SearchSettings
    filler: int

    def run(self, rows: Rows, matched: Matched, start: Ids, likely: Likely) -> tuple[Ids, Float[Tensor, "rows"]]:
        """The guesses after the search, no worse by what they match (and, under noise, by the prior), and their scores."""
        ids, scores = start.clone(), torch.zeros(len(start), device=start.device, dtype=torch.float64)
        for group in places_by_size(rows.problems):
            if self.bench.out_of_time:
                break
            where = torch.tensor(group, device=start.device)
            part, few, many = rows.take(where), likely[0][where], likely[1][where]
            ids[where], found = self._searched(part, matched.take(where), start[where], (few, many))
            scores[where] = found.double()
        return ids, scores

    def _searched(self, rows: Rows, matched: Matched, start: Ids, likely: Likely) -> tuple[Ids, Float[Tensor, "rows"]]:
        tempered = matched.tempered(MOST)
        search = self._from(rows, tempered, start, likely)
        self._begin_twice(search)
        best = search.best.clone()
        going = (~matched.fits(rows.batch(rows.target.embed(best[:, None])), self.bench)).nonzero()[:, 0]
        if len(going):
            few, many = likely
            part = self._from(rows.take(going), tempered.take(going), best[going], (few[going], many[going]))
            part.begun = True
            part.run()
            best[going] = part.best
            search.best_scores[going] = part.best_scores
        if self.bench.out_of_time:
            return best, search.best_scores
        last = self._from(rows, matched, start, likely)
        if tempered is matched:
            found, scores = best, last.scores(best[:, None])[:, 0]
        else:
            found, scores = last.attempt(best)
        better = scores < last.best_scores
        return torch.where(better[:, None, None], found, start), torch.where(better, scores, last.best_scores)

    def _from(self, rows: Rows, matched: Matched, start: Ids, likely: Likely) -> WordSearch:
        return WordSearch(rows, matched, self.bench, narrowed(self.settings, start.device), self.filler, likely, start)

    def _begin_twice(self, search: WordSearch) -> None:
        """Where words are right and their order is not, exchanging words first leads away, and elsewhere moving them does."""
        start, count = search.start, len(search.start)
        moved, _ = search.move(start, search.best_scores)
        places = torch.arange(count, device=start.device)
        both = search.of(places.repeat(2))
        found, scores = both.attempt(torch.cat([start, moved]))
        scores, chosen = scores.view(2, -1).min(0)
        better = scores < search.best_scores
        search.best = torch.where(better[:, None, None], found.view(2, *start.shape)[chosen, places], start)
        search.best_scores = torch.where(better, scores, search.best_scores)


def narrowed(settings: SearchSettings, device: torch.device) -> SearchSettings:
    """The settings of this search. On a CPU passes are no dearer than what is in them, and large ones are slower."""
    return replace(settings, many=MANY, at_once=device.type == "cuda")


def most_passes(settings: SearchSettings, examples: int, tokens: int) -> int:
    """How often this search scores candidates at most, for guesses of about one size, on whatever device takes more."""
    return max(_most(narrowed(settings, torch.device(device)), examples, tokens) for device in ("cpu", "cuda"))


def _most(settings: SearchSettings, examples: int, tokens: int) -> int:
    """It begins in two ways, goes on from changed guesses, and ends with an attempt by all that is seen."""
    attempt, retry = settings.of_attempt(examples, tokens), settings.of_retry(examples, tokens)
    return 1 + settings.of_moves(examples, tokens) + attempt + 1 + (settings.rounds - 1) * retry + 1 + attempt


def nearest_words(rows: Rows, embeddings: Float[Tensor, "rows examples tokens hidden"]) -> Likely:
    """Words whose embeddings point as those of some place do: a few of each place, and many of any."""
    table = torch.nn.functional.normalize(rows.target.vocabulary.embeddings[rows.words], dim=-1)
    few, many = [], []
    for one, fixed in zip(embeddings.detach(), rows.fixed, strict=True):
        alike = torch.nn.functional.normalize(one[~fixed], dim=-1) @ table.T
        few.append(rows.words[alike.topk(NEAREST, dim=-1).indices].flatten())
        many.append(rows.words[alike.amax(0).topk(min(MANY, len(rows.words))).indices])
    width = max(map(len, few))
    return torch.stack([filled(words, width) for words in few]), torch.stack(many)


@dataclass(frozen=True)
class WordPolish:
    """Random moves and exchanges, then word by word what matches best: for a continuous search to end with."""

    moves: Polish
    sweeps: int
    restarts: int

    def most_passes(self, examples: int, tokens: int) -> int:
        """How often candidates are scored at most, for guesses of about one size."""
        return self.moves.most_passes(examples, tokens) + most_passes(self._settings, examples, tokens)

    @property
    def _settings(self) -> SearchSettings:
        return SearchSettings(sweeps=self.sweeps, restarts=self.restarts)

    def improve(self, search: "Search", ids: Ids) -> Ids:
        """The guesses after polishing: never a worse match than before."""
        rows = search.rows
        moved = self.moves.improve(search, ids)
        if search.bench.out_of_time:
            return moved
        matched = Matched([problem.observation for problem in rows.problems], search.loop.adapts, search.loop.unroll)
        near = nearest_words(rows, search.best)
        return Rematch(search.bench, self._settings, filler_of(rows.target)).run(rows, matched, moved, near)[0]


def filled(words: Int[Tensor, "words"], width: int) -> Int[Tensor, "width"]:
    """The words, the first of them repeated up to a number."""
    return torch.cat([words, words[:1].expand(width - len(words))])
