"""Work in pieces that fit: an out-of-memory error halves the piece and goes on."""

import warnings
from collections.abc import Callable

import torch


class Chunks:
    """Runs a function over ranges of at most `size` rows, halving the size (for good) whenever memory runs out."""

    def __init__(self, size: int) -> None:
        self.size = max(1, size)

    def run(self, function: Callable[[slice], torch.Tensor], total: int) -> torch.Tensor:
        """The results of all pieces, joined along the first axis."""
        results, start = [], 0
        while start < total:
            piece = slice(start, min(start + self.size, total))
            try:
                results.append(function(piece))
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self._halve(error)
                continue
            start = piece.stop
        return torch.cat(results)

    def _halve(self, error: Exception) -> None:
        if not _out_of_memory(error) or self.size == 1:
            raise error
        self.size = (self.size + 1) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        warnings.warn(f"Out of memory: going on with pieces of {self.size}.", stacklevel=3)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
