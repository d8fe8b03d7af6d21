"""Laws of random streams: the same path, the same numbers; and no way from one stream to
another."""

import gc

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gradleak.core.streams import Streams

PATHS = st.lists(st.text(max_size=5) | st.integers(), min_size=1, max_size=3)


def numbers(stream: Streams) -> torch.Tensor:
    return torch.randn(2000, generator=stream.generator())


def test_the_same_path_gives_the_same_numbers_every_time() -> None:
    ways = [Streams.root("client", 3).child("batch", 1) for _ in range(2)]
    assert torch.equal(numbers(ways[0]), numbers(ways[1]))
    assert torch.equal(numbers(ways[0]), numbers(ways[0]))
    assert ways[0] == ways[1]


def test_other_owners_seeds_and_names_give_unrelated_numbers() -> None:
    streams = [
        Streams.root("client", 0),
        Streams.root("attacker", 0),
        Streams.root("client", 1),
        Streams.root("client", 0).child("batch", 0),
        Streams.root("client", 0).child("batch", 1),
        Streams.root("client", 0).child("batch", "1"),
        Streams.root("client", 0).child("batch").child(1),
        Streams.root("attacker", 0).child("batch", 0),
    ]
    related = torch.corrcoef(torch.stack([numbers(stream) for stream in streams])) - torch.eye(
        len(streams)
    )
    assert float(related.abs().max()) < 0.1  # 4.5 standard deviations of 2000 independent draws


@given(PATHS, PATHS)
@example(["a/str:b"], ["a", "b"])
@example(["a/"], ["a", ""])
@example(["1"], [1])
def test_two_paths_meet_only_where_they_are_the_same(
    one: list[str | int], other: list[str | int]
) -> None:
    root = Streams.root("client", 0)
    same = [(type(part), part) for part in one] == [(type(part), part) for part in other]
    assert (root.child(*one) == root.child(*other)) == same


def test_owner_and_seed_do_not_run_together() -> None:
    assert Streams.root("a|1", 2) != Streams.root("a", 12)
    assert Streams.root("a1", 2) != Streams.root("a", 12)


def test_a_child_holds_its_own_key_and_nothing_of_its_parent_or_siblings() -> None:
    root = Streams.root("client", 987654321)
    parent = root.child("batch")
    child, sibling = parent.child(0), parent.child(1)
    assert vars(child) == {"key": child.key}
    assert isinstance(child.key, bytes)
    assert len({root.key, parent.key, child.key, sibling.key}) == 4
    reachable = [thing for thing in gc.get_referents(child) if not isinstance(thing, type)]
    held = [
        part
        for thing in reachable
        for part in (thing.values() if isinstance(thing, dict) else [thing])
    ]
    assert all(part is child.key for part in held)
    assert "987654321" not in repr(child)
    assert child.key.hex() not in repr(child)
    drawn = {
        bytes(stream.generator().get_state().tolist()) for stream in (root, parent, child, sibling)
    }
    assert len(drawn) == 4
    assert child.generator().initial_seed() == 0  # tells nothing


def test_generators_are_on_the_cpu_and_fresh() -> None:
    stream = Streams.root("client", 0)
    assert stream.generator().device == torch.device("cpu")
    assert stream.generator() is not stream.generator()


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    numbers(Streams.root("client", 0).child("noise"))
    assert torch.equal(torch.get_rng_state(), before)


def test_more_than_32_bits_of_a_key_matter() -> None:
    """torch ignores the high half of a seed; a stream found by trying four thousand million
    seeds would be no secret."""
    keys = [bytes(32), bytes(31) + b"\x01", b"\x01" + bytes(31), bytes(8) + b"\x01" + bytes(23)]
    draws = [torch.randn(4, generator=Streams(key).generator()) for key in keys]
    assert all(
        not torch.equal(one, other) for place, one in enumerate(draws) for other in draws[:place]
    )


def test_a_filled_generator_draws_standard_normal_numbers() -> None:
    drawn = torch.randn(
        100_000, generator=Streams.root("client", 0).generator(), dtype=torch.float64
    )
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1) < 0.01
    assert abs(float((drawn[1:] * drawn[:-1]).mean())) < 0.02
