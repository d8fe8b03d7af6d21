"""All guesses one move away: two words exchanged, one moved elsewhere, or two sentences' ends."""

import itertools

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gradleak.attacks.search.rows import Rows

MOST = 600  # moves tried at once within sentences; of more (long ones) those between nearest places
MOST_ACROSS = 1200  # and between them: all of eight sentences of twenty words; of larger batches some, evenly taken


def neighbours(rows: Rows) -> Int[Tensor, "rows moves places"]:
    """Orders of a batch's places, every row its own; rows with fewer are filled up with the order they have."""
    made = [_across(fixed) + _orders((~fixed).flatten().nonzero()[:, 0].tolist(), fixed.numel()) for fixed in rows.fixed]
    most = max(len(one) for one in made)
    orders = torch.arange(rows.fixed[0].numel()).repeat(len(made), most, 1)
    for row, one in enumerate(made):
        orders[row, : len(one)] = torch.tensor(one)
    return orders.to(rows.target.device)


def _across(fixed: Bool[Tensor, "examples tokens"]) -> list[list[int]]:
    """Between two sentences of a batch: words at one position exchanged, and all words from there on."""
    examples, width = fixed.shape
    moves: list[tuple[list[int], int, int]] = []
    free = (~fixed).tolist()
    for one, two in itertools.combinations(range(examples), 2):
        shared = [place for place in range(width) if free[one][place] and free[two][place]]
        for start, place in enumerate(shared):
            moves.append(([place], one * width, two * width))
            if start and place != shared[-1]:
                moves.append((shared[start:], one * width, two * width))
    if len(moves) > MOST_ACROSS:
        moves = [moves[place * len(moves) // MOST_ACROSS] for place in range(MOST_ACROSS)]
    return [_exchanged(examples * width, *move) for move in moves]


def _exchanged(size: int, places: list[int], one: int, two: int) -> list[int]:
    order = list(range(size))
    for place in places:
        order[one + place], order[two + place] = two + place, one + place
    return order


def _orders(free: list[int], size: int) -> list[list[int]]:
    """Exchanges of any two free places, and moves of the word at one to before another."""
    made = [list(range(size))]
    pairs = sorted(itertools.combinations(range(len(free)), 2), key=lambda pair: pair[1] - pair[0])
    for one, two in pairs:
        order = list(range(size))
        order[free[one]], order[free[two]] = free[two], free[one]
        made.append(order)
        if two - one > 1:
            made += [_moved(free, size, one, two), _moved(free, size, two, one)]
        if len(made) > MOST:
            break
    return made


def _moved(free: list[int], size: int, start: int, end: int) -> list[int]:
    order = list(range(size))
    words = [place for place in free if place != free[start]]
    words.insert(end, free[start])
    for place, word in zip(free, words, strict=True):
        order[place] = word
    return order
