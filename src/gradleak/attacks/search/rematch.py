"""A last search over whole words by what they match, from a guess that another search made."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from gradleak.attacks.search.first_layer import find_first_layer
from gradleak.attacks.search.matched import Matched
from gradleak.attacks.search.search_rows import Ids, Rows, group_by_size
from gradleak.attacks.search.word_search import Likely, Scores, SearchEffort, WordSearch
from gradleak.core.attack import Bench

# Nats that a tensor may be worth at first: the last layers' are worth thousands and know of words
# least.
MOST_NATS = 300.0
SIZE_RATIO = 1.8  # numbers of tokens within it go together: a pass costs more than what is in it


@dataclass(frozen=True)
class Rematch:
    """A search over whole words by what they match; at first with the loudest tensors held down."""

    bench: Bench
    effort: SearchEffort
    # Whether the first layer says which words are tried, where few entries of it arrive
    asks_first_layer: bool = False

    def run(self, rows: Rows, matched: Matched, start: Ids, likely: Likely) -> tuple[Ids, Scores]:
        """Returns the guesses after the search and their scores.

        They are no worse by what they match (and, under noise, by the prior).
        """
        ids = start.clone()
        scores = torch.zeros(len(start), device=start.device, dtype=torch.float64)
        for group in group_by_size(rows.problems, SIZE_RATIO):
            if self.bench.out_of_time:
                break
            where = torch.tensor(group, device=start.device)
            words = likely[0][where], likely[1][where]
            part, objective = rows.take(where), matched.take(where)
            ids[where], found = self._search_group(part, objective, start[where], words)
            scores[where] = found.double()
        return ids, scores

    def _search_group(
        self, rows: Rows, matched: Matched, start: Ids, likely: Likely
    ) -> tuple[Ids, Scores]:
        quieter = matched.hold_down(MOST_NATS)
        search = self._begin(rows, quieter, start, likely)
        self._attempt_twice(search)
        best = search.best.clone()
        fits = matched.fits(rows.batch(rows.target.embed(best[:, None])), self.bench)
        going = (~fits).nonzero()[:, 0]
        if len(going):
            few, many = likely[0][going], likely[1][going]
            part = self._begin(rows.take(going), quieter.take(going), best[going], (few, many))
            part.run(first_round=1)
            best[going] = part.best
            search.best_scores[going] = part.best_scores
        if self.bench.out_of_time:
            return best, search.best_scores
        last = self._begin(rows, matched, start, likely)
        if quieter is matched:
            found, scores = best, last.score(best[:, None])[:, 0]
        else:
            found, scores = last.attempt(best)
        better = scores < last.best_scores
        ids = torch.where(better[:, None, None], found, start)
        return ids, torch.where(better, scores, last.best_scores)

    def _begin(self, rows: Rows, matched: Matched, start: Ids, likely: Likely) -> WordSearch:
        # On a CPU passes are no dearer than what is in them, and large ones are slower.
        effort = replace(self.effort, at_once=start.device.type == "cuda")
        first_layer = find_first_layer(rows) if self.asks_first_layer else None
        return WordSearch(rows, matched, self.bench, effort, likely, start, first_layer)

    def _attempt_twice(self, search: WordSearch) -> None:
        """Attempts from the start, and from the start with its words moved first; keeps the better.

        Where words are right and their order is not, exchanging words first leads away, and
        elsewhere moving them does. On a GPU both go at once, which takes hardly longer than one;
        on a CPU the second is for rows that the first has not solved.
        """
        start, every = search.start, torch.arange(len(search.start), device=search.start.device)
        if start.device.type == "cuda":
            moved, _ = search.move_words(start, search.best_scores)
            self._attempt(search, every.repeat(2), torch.cat([start, moved]))
            return
        self._attempt(search, every, start)
        left = (~search.find_solved(search.best, search.best_scores)).nonzero()[:, 0]
        if len(left) and not search.bench.out_of_time:
            part = search.take(left)
            moved, _ = part.move_words(start[left], part.score(start[left][:, None])[:, 0])
            self._attempt(search, left, moved)

    def _attempt(self, search: WordSearch, places: Int[Tensor, "some"], begun: Ids) -> None:
        """Attempts from guesses of the rows at these places and keeps what is better."""
        found, scores = search.take(places).attempt(begun)
        best, best_scores = search.best.clone(), search.best_scores.clone()
        for place, ids, score in zip(places.tolist(), found, scores, strict=True):
            if score < best_scores[place]:
                best[place], best_scores[place] = ids, score
        search.best, search.best_scores = best, best_scores


def repeat_first(words: Int[Tensor, "words"], width: int) -> Int[Tensor, "width"]:
    """Returns the words, the first of them repeated up to a number."""
    return torch.cat([words, words[:1].expand(width - len(words))])
