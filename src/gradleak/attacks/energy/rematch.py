"""A last search over whole words by what they match of the update, from a guess that another search made."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.energy.matched import Matched
from gradleak.attacks.energy.search import Ids, WordSearch
from gradleak.attacks.energy.settings import SearchSettings
from gradleak.attacks.energy.words import Likely, filler_of
from gradleak.attacks.gradient_matching.polish import Polish
from gradleak.attacks.gradient_matching.problems import Rows
from gradleak.core.attack import Bench

if TYPE_CHECKING:
    from gradleak.attacks.gradient_matching.loop import Search

NEAREST = 6  # words nearest to the embedding at each place
MANY = 256  # and at any place, where a guess is weakest


def rematched(
    rows: Rows, matched: Matched, start: Ids, likely: Likely, bench: Bench, settings: SearchSettings, filler: int
) -> tuple[Ids, Float[Tensor, "rows"]]:
    """The guesses after the search, no worse by what they match (and, under noise, by the prior), and their scores."""
    narrow = replace(settings, many=MANY)
    search = WordSearch(rows, matched, bench, narrow, filler, likely, start)
    # Twice: where words are right and their order is not, exchanging words first leads away, and elsewhere moving them does.
    moved, _ = search.move(start, search.best_scores)
    places = torch.arange(len(start), device=start.device)
    both = search.of(places.repeat(2))
    found, scores = both.attempt(torch.cat([start, moved]))
    scores, chosen = scores.view(2, -1).min(0)
    better = scores < search.best_scores
    search.best = torch.where(better[:, None, None], found.view(2, *start.shape)[chosen, places], start)
    search.best_scores = torch.where(better, scores, search.best_scores)
    search.begun = True
    search.run()
    return search.best, search.best_scores


def nearest_words(rows: Rows, embeddings: Float[Tensor, "rows examples tokens hidden"]) -> Likely:
    """Words whose embeddings point as those of some place do: a few of each place, and many of any."""
    table = torch.nn.functional.normalize(rows.target.vocabulary.embeddings[rows.words], dim=-1)
    few, many = [], []
    for one, fixed in zip(embeddings.detach(), rows.fixed, strict=True):
        alike = torch.nn.functional.normalize(one[~fixed], dim=-1) @ table.T
        few.append(rows.words[alike.topk(NEAREST, dim=-1).indices].flatten())
        many.append(rows.words[alike.amax(0).topk(min(MANY, len(rows.words))).indices])
    width = max(map(len, few))
    return torch.stack([_filled(words, width) for words in few]), torch.stack(many)


@dataclass(frozen=True)
class WordPolish:
    """Random moves and exchanges, then word by word what matches best: for a continuous search to end with."""

    moves: Polish
    sweeps: int
    restarts: int

    def improve(self, search: "Search", ids: Ids) -> Ids:
        """The guesses after polishing: never a worse match than before."""
        rows = search.rows
        moved = self.moves.improve(search, ids)
        matched = Matched([problem.observation for problem in rows.problems], search.loop.adapts, search.loop.unroll)
        settings = SearchSettings(sweeps=self.sweeps, restarts=self.restarts)
        near = nearest_words(rows, search.best)
        return rematched(rows, matched, moved, near, search.bench, settings, filler_of(rows.target))[0]


def _filled(words: Int[Tensor, "words"], width: int) -> Int[Tensor, "width"]:
    return torch.cat([words, words[:1].expand(width - len(words))])
