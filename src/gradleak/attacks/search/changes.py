"""Guesses near a guess: words in another order, drawn or all one move away, and other words.

An order is a permutation of all places of a batch, and a guess is put into it by `reorder`.
"""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.search.search_rows import Candidates, Ids, Rows
from gradleak.core.attack import Bench

KINDS = 4  # swap two tokens, move a token, move a block, move a prefix to the end (LAMP, 4.3)
MOST_MOVES = 600  # tried at once within sentences; of more (long ones) those of nearest places
# And between sentences: all of eight sentences of twenty words. Of larger batches some are tried,
# evenly taken.
MOST_ACROSS = 1200

Orders = Int[Tensor, "rows candidates places"]


def reorder(ids: Ids, orders: Orders) -> Candidates:
    """Returns each row's guess in every one of its orders."""
    flat = ids.flatten(1)[:, None].expand(-1, orders.shape[1], -1)
    return flat.gather(2, orders).view(*orders.shape[:2], *ids.shape[1:])


def replace_words(
    ids: Ids, places: Int[Tensor, "rows changes"], words: Int[Tensor, "rows changes"]
) -> Candidates:
    """Returns the guesses with one word each put at one place."""
    candidates = ids.flatten(1)[:, None].repeat(1, words.shape[1], 1)
    candidates.scatter_(2, places[..., None], words[..., None])
    return candidates.view(*words.shape, *ids.shape[1:])


def replace_more_and_more(
    ids: Ids, places: Int[Tensor, "rows changes"], words: Int[Tensor, "rows changes"]
) -> Candidates:
    """Returns the guesses with words put at the first place, at the first two, and so on."""
    candidates = ids.flatten(1)[:, None].repeat(1, places.shape[1], 1)
    for number, (place, word) in enumerate(zip(places.T, words.T, strict=True)):
        later = candidates[:, number:]
        shape = (-1, later.shape[1], 1)
        later.scatter_(2, place[:, None, None].expand(shape), word[:, None, None].expand(shape))
    return candidates.view(*places.shape, *ids.shape[1:])


def empty_each_place(ids: Ids, filler: int) -> Candidates:
    """Returns the guesses with a filler at one place: at each of them in turn."""
    places = ids[0].numel()
    candidates = ids.flatten(1)[:, None].repeat(1, places, 1)
    candidates.diagonal(dim1=1, dim2=2).fill_(filler)
    return candidates.view(len(ids), places, *ids.shape[1:])


def draw_cleared(
    rows: Rows,
    bench: Bench,
    loss: Float[Tensor, "rows places"],
    share: float,
    purpose: tuple[str, int, bool],
) -> Bool[Tensor, "rows examples tokens"]:
    """Draws a part of each guess's words: rather those without which little is lost."""
    cleared = torch.zeros(loss.shape, dtype=torch.bool)
    name, *which = purpose
    for row, problem in enumerate(rows.problems):
        stream = bench.streams_of(problem.observation)
        generator = stream.child(name, problem.number, *which).generator()
        free = (~rows.fixed[row]).flatten().nonzero()[:, 0].cpu()
        chance = torch.rand(len(free), generator=generator, dtype=torch.float64)
        spread = loss[row, free].std().nan_to_num() + 1e-6
        order = (loss[row, free] / spread + chance).argsort()
        cleared[row, free[order[: max(1, round(share * len(free)))]]] = True
    return cleared.view(rows.fixed.shape)


def find_gaps(orders: Orders) -> Bool[Tensor, "rows candidates places"]:
    """Finds where each order puts the word that goes furthest; of two exchanged ones, the first."""
    displaced = (orders - torch.arange(orders.shape[2], device=orders.device)).abs()
    furthest = displaced == displaced.amax(-1, keepdim=True)
    return furthest & (furthest.cumsum(-1) == 1) & (displaced > 0)


def draw_orders(
    rows: Rows,
    bench: Bench,
    count: int,
    number: int,
    sentence: int,
    purpose: str,
    padded_prefix: bool = False,
) -> Orders:
    """Returns orders that reorder one sentence, drawn for each row from its own stream.

    Special and padding places stay, unless `padded_prefix` moves prefixes behind the padding.
    """
    examples, width = rows.mask.shape[1:]
    orders = torch.arange(examples * width).repeat(len(rows.problems), count, 1)
    before, after = len(rows.target.vocabulary.prefix), len(rows.target.vocabulary.suffix)
    for row, problem in enumerate(rows.problems):
        stream = bench.streams_of(problem.observation)
        generator = stream.child(purpose, problem.number, number, sentence).generator()
        lengths = problem.hypothesis.lengths
        free = lengths[sentence] - before - after
        padded = max(lengths) - before - after if padded_prefix else free
        first = sentence * width + before
        drawn = draw_permutations(free, count, generator, padded)
        orders[row, :, first : first + padded] = first + drawn
    return orders.to(rows.target.device)


def draw_exchanges(rows: Rows, bench: Bench, count: int, number: int, purpose: str) -> Orders:
    """Returns orders that exchange runs of words between two sentences of a batch."""
    examples, width = rows.mask.shape[1:]
    orders = torch.arange(examples * width).repeat(len(rows.problems), count, 1)
    before, after = len(rows.target.vocabulary.prefix), len(rows.target.vocabulary.suffix)
    firsts = [sentence * width + before for sentence in range(examples)]
    for row, problem in enumerate(rows.problems):
        stream = bench.streams_of(problem.observation).child(purpose, problem.number, number)
        free = [length - before - after for length in problem.hypothesis.lengths]
        orders[row] = exchange_runs(orders[row], firsts, free, stream.generator())
    return orders.to(rows.target.device)


def draw_moves(
    rows: Rows, bench: Bench, count: int, number: int, sentence: int, purpose: str
) -> Orders:
    """Returns orders that reorder one sentence and, in a batch, half as many across sentences.

    In a batch words may be in the wrong sentence.
    """
    orders = draw_orders(rows, bench, count, number, sentence, purpose)
    if rows.mask.shape[1] == 1:
        return orders
    across = draw_exchanges(rows, bench, count // 2, number, f"{purpose} {sentence}")
    return torch.cat([orders, across], dim=1)


def draw_permutations(
    free: int, count: int, generator: torch.Generator, padded: int | None = None
) -> Int[Tensor, "count places"]:
    """Returns permutations of `free` places.

    The first changes nothing, the others are of the four kinds in turn. With `padded`, there are so
    many places, and a prefix goes to the very end: a slip of LAMP's released code.
    """
    width = padded or free
    places = torch.arange(width).expand(count, width)
    if free < 2:
        return places
    first, second, third = torch.rand(3, count, generator=generator, dtype=torch.float64)
    # Two different places, each pair as likely as any other
    one = (first * free).long()
    other = (one + 1 + (second * (free - 1)).long()) % free
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    kind = (torch.arange(count) - 1) % KINDS  # in turn, from the second on
    swapped = _swap(places, low, high)
    # Moving a token or a block is exchanging two neighbouring blocks [a, b) and [b, c).
    token = _exchange_blocks(places, low, torch.where(one < other, low + 1, high), high + 1)
    middle = low + 1 + (third * (high - low)).long().clamp(max=high - low - 1).clamp(min=0)
    block = _exchange_blocks(places, low, middle, high + 1)
    prefix = _exchange_blocks(places, torch.zeros_like(low), high, torch.full_like(low, width))
    chosen = torch.stack([swapped, token, block, prefix])[kind, torch.arange(count)]
    chosen[0] = places[0]
    return chosen


def exchange_runs(
    orders: Int[Tensor, "count places"],
    firsts: Sequence[int],
    free: Sequence[int],
    generator: torch.Generator,
) -> Int[Tensor, "count places"]:
    """Turns identities into exchanges of a run of words between two sentences.

    Sentences begin at `firsts` and have `free` words. The first order stays as it is; every second
    run is a single word, the others have up to a third of the shorter sentence.
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
        orders[number, a : a + run] = torch.arange(b, b + run)
        orders[number, b : b + run] = torch.arange(a, a + run)
    return orders


def _swap(places: Tensor, low: Tensor, high: Tensor) -> Tensor:
    low, high = low[:, None], high[:, None]
    return torch.where(places == low, high, torch.where(places == high, low, places))


def _exchange_blocks(places: Tensor, start: Tensor, middle: Tensor, end: Tensor) -> Tensor:
    """Returns the places with [start, middle) and [middle, end) exchanged."""
    start, middle, end = start[:, None], middle[:, None], end[:, None]
    second_length = end - middle
    is_early = places < start + second_length
    moved = torch.where(is_early, places - start + middle, places - second_length)
    return torch.where((places >= start) & (places < end), moved, places)


def list_neighbours(rows: Rows) -> Orders:
    """Returns all orders one move away; rows with fewer are filled up with the order they have.

    A move exchanges two words, puts one elsewhere, or exchanges the ends of two sentences.
    """
    size = rows.fixed[0].numel()
    made = []
    for fixed in rows.fixed:
        free = (~fixed).flatten().nonzero()[:, 0].tolist()
        made.append(_list_exchanges_across(fixed) + _list_moves(free, size))
    orders = torch.arange(size).repeat(len(made), max(map(len, made)), 1)
    for row, one in enumerate(made):
        orders[row, : len(one)] = torch.tensor(one)
    return orders.to(rows.target.device)


def _list_exchanges_across(fixed: Bool[Tensor, "examples tokens"]) -> list[list[int]]:
    """Returns, between two sentences, words at one position exchanged, and all from there on."""
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
    orders = []
    for places, first, second in moves:
        order = list(range(examples * width))
        for place in places:
            order[first + place], order[second + place] = second + place, first + place
        orders.append(order)
    return orders


def _list_moves(free: list[int], size: int) -> list[list[int]]:
    """Returns exchanges of any two free places, and moves of the word at one to before another."""
    made = [list(range(size))]
    pairs = sorted(itertools.combinations(range(len(free)), 2), key=lambda pair: pair[1] - pair[0])
    for one, two in pairs:
        order = list(range(size))
        order[free[one]], order[free[two]] = free[two], free[one]
        made.append(order)
        if two - one > 1:
            made += [_move_word(free, size, one, two), _move_word(free, size, two, one)]
        # Pairs come nearest first, so that what is left out goes furthest.
        if len(made) > MOST_MOVES:
            break
    return made


def _move_word(free: list[int], size: int, start: int, end: int) -> list[int]:
    order = list(range(size))
    words = [place for place in free if place != free[start]]
    words.insert(end, free[start])
    for place, word in zip(free, words, strict=True):
        order[place] = word
    return order
