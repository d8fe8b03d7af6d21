"""Steps of the search that try many changes in one pass and take as many of them as help."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.energy.changes import moved, replaced

if TYPE_CHECKING:
    from gradleak.attacks.energy.search import WordSearch

BEST = 3  # words a place that are tried again after the best of all was taken
AHEAD = 24  # moves that are tried again after the best was taken
ENOUGH = 1e-4  # nats: less is no improvement

Ids = Int[Tensor, "rows examples tokens"]


def swept_at_once(
    search: "WordSearch", ids: Ids, scores: Float[Tensor, "rows"], downhill: Int[Tensor, "rows places downhill"]
) -> tuple[Ids, Float[Tensor, "rows"]]:
    """All places in one pass, by what the update says alone; then the best few of each in turn, by the prior too."""
    places = torch.stack([place for place, _ in search.free_places()], dim=1)
    words = torch.stack([search.proposals(ids, place, downhill) for place in places.T], dim=1)
    flat_places, flat_words = places[..., None].expand_as(words).flatten(1), words.flatten(1)

    def made(rows: slice, some: slice) -> Tensor:
        return replaced(ids[rows], flat_places[rows, some], flat_words[rows, some])

    found = search.unweighed_of(made, flat_words.shape[1]).view(words.shape)
    reached, best = found.topk(min(BEST, words.shape[2]), largest=False)
    chosen = words.gather(2, best)
    ids, scores = _several(search, ids, scores, places, chosen[..., 0], reached[..., 0])
    some_places, some_words = places[..., None].expand_as(best).flatten(1), chosen.flatten(1)
    return _followed(search, ids, scores, lambda now, rows: replaced(now, some_places[rows], some_words[rows]))


def _several(
    search: "WordSearch",
    ids: Ids,
    scores: Float[Tensor, "rows"],
    places: Int[Tensor, "rows places"],
    words: Int[Tensor, "rows places"],
    reached: Float[Tensor, "rows places"],
) -> tuple[Ids, Float[Tensor, "rows"]]:
    """The best word of every place, at the places that gain most: at one, at two and so on, whichever is best."""
    order = reached.argsort(1)
    candidates = ids.flatten(1)[:, None].repeat(1, places.shape[1], 1)
    for number, (place, word) in enumerate(zip(places.gather(1, order).T, words.gather(1, order).T, strict=True)):
        later = candidates[:, number:]
        later.scatter_(2, place[:, None, None].expand(-1, later.shape[1], 1), word[:, None, None].expand(-1, later.shape[1], 1))
    found, chosen = search.scores(candidates.view(len(ids), -1, *ids.shape[1:])).min(1)
    better = found < scores - ENOUGH
    taken = candidates[torch.arange(len(ids), device=ids.device), chosen].view_as(ids)
    return torch.where(better[:, None, None], taken, ids), torch.where(better, found, scores)


def moved_on(search: "WordSearch", ids: Ids, scores: Float[Tensor, "rows"]) -> tuple[Ids, Float[Tensor, "rows"]]:
    """Exchanges of two words and moves of one, the best taken, until none helps.

    All are tried, then those that did best again after each that was taken, until all have to be tried once more.
    """
    ids, scores = ids.clone(), scores.clone()
    going = torch.arange(len(ids), device=ids.device)
    for _ in range(2 * ids.shape[-1]):
        part = search.of(going)
        found = part.scores(moved(ids[going], part.orders))
        ahead = found.topk(min(AHEAD, found.shape[1]), largest=False).indices
        best = part.orders[torch.arange(len(going), device=ids.device)[:, None], ahead]
        taken, reached = _followed(part, ids[going], scores[going], partial(_moved_by, best))
        search.passes += part.passes
        better = reached < scores[going] - ENOUGH
        going = going[better]
        ids[going], scores[going] = taken[better], reached[better]
        if not len(going) or search.bench.out_of_time:
            break
    return ids, scores


def _followed(
    search: "WordSearch",
    ids: Ids,
    scores: Float[Tensor, "rows"],
    changed: Callable[[Ids, Int[Tensor, "some"]], Int[Tensor, "some changes examples tokens"]],
) -> tuple[Ids, Float[Tensor, "rows"]]:
    """The best of a few changes taken, and again, until none of these helps."""
    ids, scores = ids.clone(), scores.clone()
    going = torch.arange(len(ids), device=ids.device)
    for _ in range(2 * ids[0].numel()):
        part = search.of(going)
        candidates = changed(ids[going], going)
        found, chosen = part.scores(candidates).min(1)
        search.passes += part.passes
        better = found < scores[going] - ENOUGH
        going = going[better]
        if not len(going):
            break
        ids[going], scores[going] = candidates[better, chosen[better]], found[better]
        if search.bench.out_of_time:
            break
    return ids, scores


def _moved_by(
    orders: Int[Tensor, "rows moves places"], ids: Int[Tensor, "some examples tokens"], rows: Int[Tensor, "some"]
) -> Int[Tensor, "some moves examples tokens"]:
    return moved(ids, orders[rows])
