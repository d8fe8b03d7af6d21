"""Ways to reorder the words of a sentence, as permutations of its places."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

KINDS = 4  # swap two tokens, move a token, move a subsequence, move a prefix to the end: in turn (LAMP, section 4.3)


def reorderings(free: int, count: int, generator: torch.Generator, padded: int | None = None) -> Int[Tensor, "count places"]:
    """`count` permutations of `free` places: the first changes nothing, the others are of the four kinds in turn.

    With `padded`, permutations of so many places, of which a prefix goes to the very end: a slip of LAMP's released code.
    """
    width = padded or free
    places = torch.arange(width).expand(count, width)
    if free < 2:
        return places
    first, second, third = torch.rand(3, count, generator=generator, dtype=torch.float64)
    one = (first * free).long()
    other = (one + 1 + (second * (free - 1)).long()) % free
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    kind = (torch.arange(count) - 1) % KINDS
    swapped = _swapped(places, low, high)
    # Moving a token or a block is exchanging two neighbouring blocks [a, b) and [b, c).
    forward = one < other
    token = _exchanged(places, low, torch.where(forward, low + 1, high), high + 1)
    middle = low + 1 + (third * (high - low)).long().clamp(max=high - low - 1).clamp(min=0)
    block = _exchanged(places, low, middle, high + 1)
    prefix = _exchanged(places, torch.zeros_like(low), high, torch.full_like(low, width))
    chosen = torch.stack([swapped, token, block, prefix])[kind, torch.arange(count)]
    chosen[0] = places[0]
    return chosen


def exchanges(
    orders: Int[Tensor, "count places"], firsts: Sequence[int], free: Sequence[int], generator: torch.Generator
) -> Int[Tensor, "count places"]:
    """Identities turned into exchanges of a run of words between two sentences, which begin at `firsts` and have `free` words.

    The first stays as it is; every second run is a single word, the others have up to a third of the shorter sentence.
    """
    draws = torch.rand(len(orders), 5, generator=generator, dtype=torch.float64).tolist()
    for number, (which, other, size, here, there) in enumerate(draws[1:], start=1):
        one = int(which * len(free))
        two = (one + 1 + int(other * (len(free) - 1))) % len(free)
        shorter = min(free[one], free[two])
        if shorter < 1:
            continue
        run = 1 if number % 2 else 1 + int(size * max(1, shorter // 3))
        run = min(run, shorter)
        a = firsts[one] + int(here * (free[one] - run + 1))
        b = firsts[two] + int(there * (free[two] - run + 1))
        orders[number, a : a + run], orders[number, b : b + run] = torch.arange(b, b + run), torch.arange(a, a + run)
    return orders


def _swapped(places: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.where(places == low[:, None], high[:, None], torch.where(places == high[:, None], low[:, None], places))


def _exchanged(places: Tensor, start: Tensor, middle: Tensor, end: Tensor) -> Tensor:
    """[start, middle) and [middle, end) exchanged."""
    start, middle, end = start[:, None], middle[:, None], end[:, None]
    second_length = end - middle
    moved = torch.where(places < start + second_length, places - start + middle, places - second_length)
    return torch.where((places >= start) & (places < end), moved, places)
