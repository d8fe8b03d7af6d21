"""Ways to change a guess that is stuck, so that the search can go on from elsewhere."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from gradleak.attacks.energy.search import WordSearch

Ids = Int[Tensor, "rows examples tokens"]


def slipped(search: "WordSearch", ids: Ids, choice: int) -> Ids:
    """The guesses with a word taken out and a gap opened elsewhere, words between moved up: the best such, or a later one."""
    displaced = (search.orders - torch.arange(search.orders.shape[2], device=ids.device)).abs()
    furthest = displaced == displaced.amax(-1, keepdim=True)  # the moved word; of two exchanged, the first
    gap = furthest & (furthest.cumsum(-1) == 1) & (displaced > 0)
    candidates = torch.where(gap.view(len(ids), -1, *ids.shape[1:]), search.filler, moved(ids, search.orders))
    order = search.scores(candidates).masked_fill(~gap.any(-1), torch.inf).argsort(1)  # orders that move nothing open no gap
    chosen = order[:, min(choice, order.shape[1] - 1)]
    return candidates[torch.arange(len(ids), device=ids.device), chosen]


def wiped(search: "WordSearch", ids: Ids, number: int, weakest: bool) -> Ids:
    """The guesses with a part of their words taken out: by chance, or those that explain least."""
    loss = search.losses_without(ids).cpu() if weakest else torch.zeros(len(ids), ids[0].numel())
    ids = ids.clone()
    for row, problem in enumerate(search.rows.problems):
        stream = search.bench.streams_of(problem.observation).child("wipe", problem.number, number, weakest)
        free = (~search.rows.fixed[row]).flatten().nonzero()[:, 0].cpu()
        chance = torch.rand(len(free), generator=stream.generator(), dtype=torch.float64)
        spread = loss[row, free].double().std().nan_to_num() + 1e-6
        order = (loss[row, free].double() / spread + chance).argsort()
        gone = free[order[: max(1, round(search.settings.wiped * len(free)))]]
        ids[row].view(-1)[gone.to(ids.device)] = search.filler
    return ids


def widened(search: "WordSearch", ids: Ids) -> Ids:
    """The guesses with the best of many words at each of their weakest places: those that are missed least."""
    ids = ids.clone()
    missed = search.losses_without(ids).masked_fill(search.rows.fixed.flatten(1), torch.inf)
    for places in missed.argsort(1)[:, : search.settings.weak].T:
        found, _ = search.best_words(ids, places, torch.cat([search.many[:, :1], search.many], dim=1))
        free = missed.gather(1, places[:, None]).isfinite()  # very short sentences have fewer such places
        ids = torch.where(free[..., None], found, ids)
    return ids


def replaced(
    ids: Ids, places: Int[Tensor, "rows changes"], words: Int[Tensor, "rows changes"]
) -> Int[Tensor, "rows changes examples tokens"]:
    """The guesses with one word each put at one place."""
    candidates = ids.flatten(1)[:, None].repeat(1, words.shape[1], 1)
    return candidates.scatter_(2, places[..., None], words[..., None]).view(len(ids), -1, *ids.shape[1:])


def moved(ids: Ids, orders: Int[Tensor, "rows moves places"]) -> Int[Tensor, "rows moves examples tokens"]:
    """The guesses in other orders."""
    flat = ids.flatten(1)[:, None].expand(-1, orders.shape[1], -1).gather(2, orders)
    return flat.view(len(ids), -1, *ids.shape[1:])
