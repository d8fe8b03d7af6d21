"""Laws of working in pieces."""

import warnings

import pytest
import torch

from gradleak.matching.chunking import Chunks


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


OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


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


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("nonsense")], ids=repr)
def test_other_errors_pass_through_at_once(error: Exception) -> None:
    memory = Memory(0, error)
    with pytest.raises(type(error), match=str(error)):
        Chunks(8).run(memory, 10)
    assert memory.sizes == [8]
