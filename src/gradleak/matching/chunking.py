"""Work in pieces that fit: an out-of-memory error halves the piece and goes on."""

import warnings
from collections.abc import Callable, Mapping

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


def fitting(most: Mapping[str, int], device: torch.device, bytes_each: int) -> int:
    """How many at once on that device: as many as are fastest, or as half the memory holds that nobody else uses now."""
    limit = most.get(device.type, most["cpu"])
    if device.type != "cuda":
        return limit
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, min(limit, (free + kept) // 2 // bytes_each))


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
