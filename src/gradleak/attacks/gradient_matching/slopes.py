"""Losses and slopes of all rows, in pieces that fit the memory; on a GPU these are recorded.

A recorded piece is a CUDA graph: a pass of thousands of small kernels, launched as one.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradleak.attacks.search.search_rows import Rows
from gradleak.core.attack import Bench
from gradleak.matching import Matcher
from gradleak.matching.chunking import Chunks, pieces, refuse_without_room

WARM_UP = 3  # runs before recording, as PyTorch asks: libraries set themselves up on first use

Function = Callable[[Tensor], tuple[Tensor, Tensor]]
# Pieces that a GPU may hold side by side: each is a recorded graph of its own and keeps its memory.
RECORDED = 5
FASTEST_BYTES = 2**29  # on a CPU; of passes of 4 to 16 rows the largest are fastest
# Times soft labels are held: as they are, their slope, and both within the softmax they come from.
LABELS_HELD = 4
# One H200, 100 sentences of 6 to 26 tokens: pieces of 25, 50, 100 rows take 30, 21, 17 ms a step.
ROWS_ON_GPU = 128


class ScalarsInPlace(TorchFunctionMode):
    """Makes `torch.tensor(0.0, device="cuda")` a fill on the card, not a copy from the host, which
    a graph cannot record.

    transformers builds attention masks that way.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], (bool, int, float)):
            return torch.full((), args[0], dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        return func(*args, **kwargs)


class Recorded:
    """A function of one tensor of fixed shape, replayed from a CUDA graph."""

    def __init__(self, function: Function, example: Tensor) -> None:
        self.input = example.detach().clone()
        side = torch.cuda.Stream(example.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(example.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                function(self.input)
        torch.cuda.current_stream(example.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with ScalarsInPlace(), torch.cuda.graph(self.graph):
            self.outputs = function(self.input)

    def __call__(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The function's results, to be used before the next call: they lie in the graph's own
        memory."""
        self.input.copy_(value)
        self.graph.replay()
        return self.outputs


def record(function: Function, example: Tensor) -> Function:
    """The function as a CUDA graph, or as it is (with the reason, once) where it cannot be
    recorded."""
    try:
        return Recorded(function, example)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize(example.device)
        warnings.warn(
            f"Running without a CUDA graph, which is slower: {str(error).splitlines()[0]}",
            stacklevel=2,
        )
        return function


@dataclass(frozen=True, eq=False)
class SlopesInPieces:
    """Computes the losses of rows of numbers and their slopes, some rows at a time."""

    chunks: Chunks
    compute_losses: Callable[[Tensor, slice], Tensor]  # of some rows' numbers, which rows they are
    recorded: dict[tuple[int, int], Function] = field(default_factory=dict)

    def __call__(
        self, numbers: Float[Tensor, "rows *shape"]
    ) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows *shape"]]:
        slopes = torch.zeros_like(numbers)

        def piece(rows: slice) -> Tensor:
            losses, slopes[rows] = self._find_function(rows, numbers[rows])(numbers[rows])
            return losses.clone()  # a recorded graph writes the next ones to the same place

        losses = self.chunks.run(piece, len(numbers))
        return losses, slopes.nan_to_num_()

    def _find_function(self, rows: slice, example: Tensor) -> Function:
        def compute(values: Tensor) -> tuple[Tensor, Tensor]:
            leaf = values.detach().requires_grad_()
            losses = self.compute_losses(leaf, rows)
            return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]

        if example.device.type != "cuda":
            return compute
        key = (rows.start, rows.stop)
        if key not in self.recorded:
            self.recorded[key] = record(compute, example)
        return self.recorded[key]


def open_slopes(
    matcher: Matcher,
    rows: Rows,
    bench: Bench,
    norm_weights: Float[Tensor, "rows"],
    penalise_padding: bool = False,
) -> SlopesInPieces:
    """Returns what computes the distance of every row and its slope in the embeddings."""
    is_plain, word_norm = not bool(norm_weights.any()), rows.target.vocabulary.mean_norm
    penalised = mask_whole_batches(rows) if penalise_padding else rows.mask

    def compute_losses(embeddings: Tensor, kept: slice) -> Float[Tensor, "rows"]:
        losses = matcher.distances(rows.batch(embeddings[:, None], kept), kept)[:, 0]
        if is_plain:
            return losses
        # (mean norm of the embeddings − mean norm of the vocabulary's)² (LAMP, equation 6); the
        # small number keeps the slope of a norm finite where an embedding is zero.
        mask = penalised[kept]
        norms = embeddings.square().sum(-1).add(1e-12).sqrt() * mask
        apart = norms.sum((1, 2)) / mask.sum((1, 2)) - word_norm
        return losses + norm_weights[kept] * apart.square()

    return SlopesInPieces(plan_rows(matcher, rows, bench), compute_losses)


def mask_whole_batches(rows: Rows) -> Bool[Tensor, "rows examples tokens"]:
    """Returns a mask of every place of a batch, its own padding included."""
    lengths = [max(problem.hypothesis.lengths) for problem in rows.problems]
    longest = torch.tensor(lengths, device=rows.mask.device)
    places = torch.arange(rows.mask.shape[-1], device=rows.mask.device)
    return (places < longest[:, None, None]).expand_as(rows.mask)


def plan_rows(matcher: Matcher, rows: Rows, bench: Bench) -> Chunks:
    """Returns rows that one pass may hold, forward and twice back.

    It is refused where there is no room for one.
    """
    (_, examples, tokens), device = rows.mask.shape, rows.target.device
    bytes_a_row = matcher.bytes(examples, tokens, slope=True)
    if rows.target.labels_are_tokens:  # soft labels: a number for every word at every place
        numbers = rows.mask[0].numel() * rows.target.classes
        bytes_a_row += LABELS_HELD * numbers * rows.target.dtype.itemsize
    what = f"one step on this batch ({examples} texts of up to {tokens} tokens)"
    refuse_without_room("Gradient matching", bytes_a_row, bench, device, what)
    if device.type == "cuda":
        return pieces(bench, device, RECORDED * bytes_a_row, 0, ROWS_ON_GPU)
    work = matcher.work(examples, tokens, slope=True)
    return pieces(bench, device, bytes_a_row, work, FASTEST_BYTES / bytes_a_row)
