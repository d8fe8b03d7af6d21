"""Reorderings are permutations of four kinds."""

import pytest
import torch

from gradleak.attacks.gradient_matching.moves import reorderings
from gradleak.core.streams import Streams


@pytest.mark.parametrize("free", [0, 1, 2, 3, 8, 25])
def test_every_reordering_is_a_permutation_and_the_first_changes_nothing(free: int) -> None:
    made = reorderings(free, 200, Streams.root("moves", free).generator())
    assert torch.equal(made.sort(1).values, torch.arange(free).expand(200, free))
    assert torch.equal(made[0], torch.arange(free))


def kinds(free: int) -> list[set[tuple[int, ...]]]:
    made = reorderings(free, 8001, Streams.root("moves", 0).generator())
    return [{tuple(row) for row in made[1 + kind :: 4].tolist()} for kind in range(4)]


def test_each_kind_reaches_all_its_orders_and_no_others() -> None:
    free = 6
    start = list(range(free))
    swaps, tokens, blocks, prefixes = kinds(free)
    assert swaps == {tuple(_swap(start, a, b)) for a in start for b in start if a < b}
    assert tokens == {tuple(_move(start, a, b)) for a in start for b in start if a != b}
    assert blocks == {
        tuple(_exchange(start, a, b, c)) for a in range(free) for b in range(a + 1, free) for c in range(b + 1, free + 1)
    }
    assert prefixes == {tuple(start[cut:] + start[:cut]) for cut in range(1, free)}


def _swap(order: list[int], a: int, b: int) -> list[int]:
    order = list(order)
    order[a], order[b] = order[b], order[a]
    return order


def _move(order: list[int], a: int, b: int) -> list[int]:
    rest = order[:a] + order[a + 1 :]
    return [*rest[:b], order[a], *rest[b:]]


def _exchange(order: list[int], a: int, b: int, c: int) -> list[int]:
    return order[:a] + order[b:c] + order[a:b] + order[c:]
