"""Work in pieces that fit the memory an attack may use, and end with its time.

Every attack says what one candidate takes (`PassCost`, read off the shapes of one small pass) and
gets the number of candidates a piece may have. Pieces are planned before anything fails; an
out-of-memory error, should it come to that, halves the piece. No piece is begun after the deadline:
what was not computed is filled with what the caller says, infinity for scores, so that a search
goes on with the best it has.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.memory import in_words
from gradleak.core.target import Target
from gradleak.matching.inputs import module_of
from gradleak.matching.kinds import Kind, kind_of

# Of the memory that is left, for one piece: the rest is for what lies beside it, and for fragments
ROOM = 0.5
# Multiplications in a piece, a second or two of one core; a GPU is never so slow that it matters
WORK = {"cpu": 1e11}
BESIDE = 2**29  # bytes of a piece of work that is done beside a search and has no bench
PROBED = 8  # tokens of the pass that costs are read off
ATTENTION = 2  # numbers kept for every pair of tokens, head and layer: scores and weights

# How many times the numbers that a forward pass puts out are held at once, measured as growth of
# the process (MiniLM and a BERT-base shape, 1 to 48 sentences of 13 to 64 tokens):
FORWARD = 1.0  # a forward pass alone
FORWARD_AND_BACK = 2.0  # with the slope of a score of its activations
# Gradients of weights as factors: every layer's inputs and output gradients, stacked
GRADIENTS = 3.2
GRADIENTS_AND_BACK = 6.5  # and the slope of a distance of gradients


class Chunks:
    """Runs a function over pieces of at most `size`, halving the size (for good) whenever memory
    runs out."""

    def __init__(
        self, size: int, bench: Bench | None = None, device: torch.device | None = None
    ) -> None:
        self.size, self.bench, self.device = max(1, size), bench, device

    def run(self, function: Callable[[slice], Tensor], total: int) -> Tensor:
        """Returns one number a row from pieces of rows; infinity where time did not allow it."""
        missing = torch.tensor(torch.inf, device=self.device)
        return self.run_pairs(lambda rows, _: function(rows)[:, None], total, 1, missing)[:, 0]

    def run_pairs(
        self,
        function: Callable[[slice, slice], Tensor],
        rows: int,
        candidates: int,
        missing: Tensor,
    ) -> Tensor:
        """Returns the results [rows, candidates, …] for every row and candidate, in pieces of whole
        rows or of one row's candidates."""
        found: Tensor | None = None
        row = first = 0
        while row < rows and not (self.bench is not None and self.bench.out_of_time):
            whole = self.size // max(1, candidates) if first == 0 else 0
            kept = slice(row, min(row + whole, rows)) if whole else slice(row, row + 1)
            some = (
                slice(0, candidates) if whole else slice(first, min(first + self.size, candidates))
            )
            try:
                made = function(kept, some)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self._halve(error)
                continue
            if found is None:
                found = _fill(missing.to(made), rows, candidates)
            found[kept, some] = made
            row, first = (kept.stop, 0) if some.stop == candidates else (row, some.stop)
        return _fill(missing, rows, candidates) if found is None else found

    def _halve(self, error: Exception) -> None:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if self.size == 1 or not (is_memory or "can't allocate memory" in str(error)):
            raise error
        self.size = (self.size + 1) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        warnings.warn(f"Out of memory: going on with pieces of {self.size}.", stacklevel=4)


def _fill(missing: Tensor, rows: int, candidates: int) -> Tensor:
    return missing.expand(rows, candidates, *missing.shape).clone()


@dataclass(frozen=True)
class PassCost:
    """What a forward pass computes for one token (of a picture: for all of it); read off a small
    one."""

    numbers: float  # that its modules put out
    attended: float  # heads times layers: each holds a number for every pair of tokens
    products: float  # multiplications
    element: int  # bytes of a number

    def bytes(self, examples: int, tokens: int, times: float) -> float:
        """Returns what a batch takes whose numbers are held so many times."""
        return (
            times
            * self.element
            * examples
            * tokens
            * (self.numbers + ATTENTION * self.attended * tokens)
        )

    def work(self, examples: int, tokens: int, times: float) -> float:
        """Returns the multiplications in it; a backward pass costs about two forward ones."""
        return times * examples * tokens * (self.products + self.attended * tokens)


@torch.no_grad()
def cost_of(target: Target, run: Callable[[Batch], object] | None = None) -> PassCost:
    """Returns the cost of a pass through all of the model, or as far as `run` goes."""
    probe = target.probe(1, PROBED)
    numbers = products = 0.0
    called: set[str] = set()
    leaves = {
        name: module for name, module in target.module.named_modules() if not any(module.children())
    }
    multiply = {
        name
        for name, module in leaves.items()
        if kind_of(module) in (Kind.LINEAR, Kind.CONV1D, Kind.CONV2D)
    }

    def note(name: str, module: nn.Module, output: Any) -> None:
        nonlocal numbers, products
        if not isinstance(output, Tensor):
            return
        called.add(name)
        numbers += output.numel()
        if name in multiply:
            weight, is_convolution = module.get_parameter("weight"), isinstance(module, nn.Conv2d)
            # Features of a linear layer, or channels of a convolution, share a use of the weight
            uses = output.numel() / output.shape[1 if is_convolution else -1]
            products += weight.numel() * uses
            numbers += uses * weight[0].numel() if is_convolution else 0  # its patches, spelled out

    handles = [
        module.register_forward_hook(
            lambda module, _, output, name=name: note(name, module, output)
        )
        for name, module in leaves.items()
    ]
    try:
        (run or target.losses)(probe)
    finally:
        for handle in handles:
            handle.remove()
    tokens = 1 if target.medium == "image" else PROBED
    config = getattr(target.module, "config", None)
    layers = {
        part.layer for part in (*target.parts, *target.frozen_parts) if module_of(part) in called
    }
    heads = int(getattr(config, "num_attention_heads", 0)) * len(layers - {None})
    return PassCost(numbers / tokens, heads, products / tokens, target.dtype.itemsize)


def pieces(
    bench: Bench, device: torch.device, bytes_each: float, work_each: float, most: float
) -> Chunks:
    """Returns pieces of as many candidates as are fastest, as take a second or two, and as fit the
    memory that is left."""
    quick = WORK.get(device.type, float("inf")) / max(1.0, work_each)
    wanted = max(1, int(min(most, quick)))
    fits = ROOM * bench.memory_left(device) / max(1.0, bytes_each)
    # A power of two, so that a few bytes more or less do not change what is computed together
    if fits < wanted:
        wanted = 2 ** (max(1, int(fits)).bit_length() - 1)
    return Chunks(wanted, bench, device)


def fastest(most: Mapping[str, int], device: torch.device) -> int:
    """Says how many tokens at once are fastest on a device."""
    return most.get(device.type, most["cpu"])


def refuse_without_room(
    name: str, needed: float, bench: Bench, device: torch.device, what: str
) -> None:
    """Refuses before anything starts what would not fit even one piece at a time."""
    left = bench.memory_left(device)
    if needed > left:
        raise GradleakError(
            f"{name} needs about {in_words(needed)} for {what}; {in_words(left)} are left of the"
            " memory it may use. Allow more with --memory, or take smaller batches or a view of"
            " fewer layers."
        )
