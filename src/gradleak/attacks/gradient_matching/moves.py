"""Ways to reorder the words of a sentence, as permutations of its places."""

import torch
from jaxtyping import Int
from torch import Tensor

KINDS = 4  # swap two tokens, move a token, move a subsequence, move a prefix to the end: in turn (LAMP, section 4.3)


def reorderings(free: int, count: int, generator: torch.Generator) -> Int[Tensor, "count free"]:
    """`count` permutations of `free` places: the first changes nothing, the others are of the four kinds in turn."""
    places = torch.arange(free).expand(count, free)
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
    prefix = _exchanged(places, torch.zeros_like(low), high, torch.full_like(low, free))
    chosen = torch.stack([swapped, token, block, prefix])[kind, torch.arange(count)]
    chosen[0] = places[0]
    return chosen


def _swapped(places: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.where(places == low[:, None], high[:, None], torch.where(places == high[:, None], low[:, None], places))


def _exchanged(places: Tensor, start: Tensor, middle: Tensor, end: Tensor) -> Tensor:
    """[start, middle) and [middle, end) exchanged."""
    start, middle, end = start[:, None], middle[:, None], end[:, None]
    second_length = end - middle
    moved = torch.where(places < start + second_length, places - start + middle, places - second_length)
    return torch.where((places >= start) & (places < end), moved, places)
