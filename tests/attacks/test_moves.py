"""Reorderings are permutations of four kinds."""

import pytest
import torch

from gradleak.attacks.search.changes import draw_permutations, exchange_runs
from gradleak.core.streams import Streams


@pytest.mark.parametrize("free", [0, 1, 2, 3, 8, 25])
def test_every_reordering_is_a_permutation_and_the_first_changes_nothing(free: int) -> None:
    made = draw_permutations(free, 200, Streams.root("moves", free).generator())
    assert torch.equal(made.sort(1).values, torch.arange(free).expand(200, free))
    assert torch.equal(made[0], torch.arange(free))


def kinds(free: int) -> list[set[tuple[int, ...]]]:
    made = draw_permutations(free, 8001, Streams.root("moves", 0).generator())
    return [{tuple(row) for row in made[1 + kind :: 4].tolist()} for kind in range(4)]


def test_each_kind_reaches_all_its_orders_and_no_others() -> None:
    free = 6
    start = list(range(free))
    swaps, tokens, blocks, prefixes = kinds(free)
    assert swaps == {tuple(_swap(start, a, b)) for a in start for b in start if a < b}
    assert tokens == {tuple(_move(start, a, b)) for a in start for b in start if a != b}
    assert blocks == {
        tuple(_exchange(start, a, b, c))
        for a in range(free)
        for b in range(a + 1, free)
        for c in range(b + 1, free + 1)
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


def test_exchanges_move_words_between_sentences_only() -> None:
    firsts, free = [1, 11, 21], [4, 6, 1]
    orders = exchange_runs(
        torch.arange(30).repeat(200, 1), firsts, free, Streams.root("moves", 0).generator()
    )
    assert torch.equal(orders[0], torch.arange(30))
    assert torch.equal(orders.sort(dim=1).values, torch.arange(30).expand(200, 30))
    inside = torch.zeros(30, dtype=torch.bool)
    for first, count in zip(firsts, free, strict=True):
        inside[first : first + count] = True
    moved = orders != torch.arange(30)
    assert not bool(moved[:, ~inside].any())
    # Whatever moves, moves to another sentence
    assert bool((orders // 10 != torch.arange(30) // 10)[moved].all())
    assert bool(moved[1:].any(dim=1).all())


def test_a_padded_prefix_goes_behind_the_padding() -> None:
    orders = draw_permutations(3, 200, Streams.root("moves", 0).generator(), padded=5)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(5).expand(200, 5))
    others, prefixes = orders[[n for n in range(1, 200) if (n - 1) % 4 != 3]], orders[4::4]
    assert torch.equal(others[:, 3:], torch.arange(3, 5).expand(len(others), 2))
    assert bool((prefixes[:, -1] < 3).all())
