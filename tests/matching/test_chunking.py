"""Laws of working in pieces."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from gradleak.core.attack import Bench
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching.chunking import Chunks
from gradleak.priors.english import FrequentWords


class Memory:
    """A function over rows that can hold so many at once, and notes how many it was given."""

    def __init__(self, room: int, error: Exception) -> None:
        self.room, self.error = room, error
        self.sizes: list[int] = []

    def __call__(self, rows: slice) -> torch.Tensor:
        self.sizes.append(rows.stop - rows.start)
        if self.sizes[-1] > self.room:
            raise self.error
        return torch.arange(rows.start, rows.stop) ** 2


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("size", [1, 3, 10, 100])
def test_the_size_of_pieces_changes_nothing(size: int) -> None:
    memory = Memory(100, RuntimeError())
    assert Chunks(size).run(memory, 10).tolist() == [row**2 for row in range(10)]
    assert max(memory.sizes) <= size


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_halves_the_pieces_for_good_with_one_warning(error: Exception) -> None:
    memory, chunks = Memory(5, error), Chunks(8)
    with pytest.warns(UserWarning, match="Out of memory: going on with pieces of 4") as caught:
        result = chunks.run(memory, 10)
    assert len(caught) == 1
    assert memory.sizes == [8, 4, 4, 2]
    assert result.tolist() == [row**2 for row in range(10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunks.run(memory, 10)


def test_one_row_that_does_not_fit_is_an_error() -> None:
    with pytest.warns(UserWarning, match="pieces of 1"), pytest.raises(torch.OutOfMemoryError):
        Chunks(2).run(Memory(0, OUT_OF_MEMORY[0]), 2)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("nonsense")], ids=repr
)
def test_other_errors_pass_through_at_once(error: Exception) -> None:
    memory = Memory(0, error)
    with pytest.raises(type(error), match=str(error)):
        Chunks(8).run(memory, 10)
    assert memory.sizes == [8]


@dataclass(frozen=True, eq=False)
class Hurried(Bench):
    """A bench whose time is over after so many pieces."""

    pieces: list[tuple[slice, slice]] = field(default_factory=list)
    most: int = 0

    @property
    def out_of_time(self) -> bool:
        return len(self.pieces) >= self.most


def products(done: list[tuple[slice, slice]]) -> Callable[[slice, slice], torch.Tensor]:
    """A function of rows and candidates: one number each, and a note of what was asked for."""

    def function(rows: slice, some: slice) -> torch.Tensor:
        done.append((rows, some))
        return torch.arange(rows.start, rows.stop)[:, None] * 100.0 + torch.arange(
            some.start, some.stop
        )

    return function


@pytest.mark.parametrize("size", [1, 2, 5, 7, 14, 100])
def test_rows_and_candidates_are_all_computed_once_whatever_the_size(size: int) -> None:
    done: list[tuple[slice, slice]] = []
    found = Chunks(size).run_pairs(products(done), 3, 7, torch.tensor(torch.inf))
    assert torch.equal(found, torch.arange(3)[:, None] * 100.0 + torch.arange(7))
    sizes = [(rows.stop - rows.start) * (some.stop - some.start) for rows, some in done]
    assert sum(sizes) == 21 and max(sizes) <= size


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_after_the_deadline_nothing_is_begun_and_the_rest_is_filled(
    pieces: int, tiny: Target
) -> None:
    done: list[tuple[slice, slice]] = []
    bench = Hurried(Streams.root("pieces", 0), FrequentWords().open(tiny), pieces=done, most=pieces)
    found = Chunks(5, bench).run_pairs(products(done), 3, 7, torch.tensor(torch.inf))
    assert found.shape == (3, 7)
    assert len(done) == pieces
    assert int(found.isfinite().sum()) == sum(
        (rows.stop - rows.start) * (some.stop - some.start) for rows, some in done
    )


def test_vectors_are_filled_with_vectors(tiny: Target) -> None:
    bench = Hurried(Streams.root("pieces", 0), FrequentWords().open(tiny))
    found = Chunks(5, bench).run_pairs(lambda rows, some: torch.ones(1, 1, 4), 2, 3, torch.zeros(4))
    assert torch.equal(found, torch.zeros(2, 3, 4))
