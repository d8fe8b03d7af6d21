"""Losses and slopes of all rows, in pieces that fit the memory; on a GPU every piece is a recorded graph."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradleak.attacks.search.rows import Rows
from gradleak.core.attack import Bench
from gradleak.matching import Matcher
from gradleak.matching.chunking import Chunks, pieces, refuse_without_room
from gradleak.matching.graphs import Function, record

RECORDED = 5  # pieces that a GPU may hold side by side: each is a graph of its own and keeps its memory
FASTEST_BYTES = 2**29  # on a CPU; of passes of 4 to 16 rows the largest are fastest
LABELS_HELD = 4  # times soft labels are held: as they are, their slope, and both within the softmax they come from
ROWS_ON_GPU = 128  # one H200, 100 sentences of 6 to 26 tokens: pieces of 25, 50, 100 rows take 30, 21, 17 ms a step in all


class Slopes:
    """Computes the distance of every row and its gradient with respect to the embeddings."""

    def __init__(
        self,
        matcher: Matcher,
        rows: Rows,
        bench: Bench,
        norm_weights: Float[Tensor, "rows"],
        penalise_padding: bool = False,
    ) -> None:
        self.matcher, self.rows = matcher, rows
        self.norm_weights = norm_weights if bool(norm_weights.any()) else None
        self.word_norm = rows.target.vocabulary.mean_norm
        self.penalised = _whole_batches(rows) if penalise_padding else rows.mask
        self.chunks = rows_at_once(matcher, rows, bench)
        self.recorded: dict[tuple[int, int], Function] = {}

    def __call__(
        self, embeddings: Float[Tensor, "rows examples tokens hidden"]
    ) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows examples tokens hidden"]]:
        gradients = torch.zeros_like(embeddings)

        def piece(rows: slice) -> Tensor:
            losses, gradients[rows] = self._function(rows, embeddings[rows])(embeddings[rows])
            return losses.clone()

        losses = self.chunks.run(piece, len(self.rows.problems))
        return losses, gradients.nan_to_num_()

    def _length_penalty(self, embeddings: Tensor, mask: Tensor) -> Float[Tensor, "rows"]:
        """(mean norm of the embeddings − mean norm of the vocabulary's)² (LAMP, equation 6)."""
        norms = embeddings.square().sum(-1).add(1e-12).sqrt() * mask
        return (norms.sum((1, 2)) / mask.sum((1, 2)) - self.word_norm).square()

    def _function(self, rows: slice, example: Tensor) -> Function:
        def losses_and_gradients(values: Tensor) -> tuple[Tensor, Tensor]:
            leaf = values.detach().requires_grad_()
            losses = self.matcher.distances(self.rows.batch(leaf[:, None], rows), rows)[:, 0]
            if self.norm_weights is not None:
                losses = losses + self.norm_weights[rows] * self._length_penalty(leaf, self.penalised[rows])
            return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]

        if example.device.type != "cuda":
            return losses_and_gradients
        key = (rows.start, rows.stop)
        if key not in self.recorded:
            self.recorded[key] = record(losses_and_gradients, example)
        return self.recorded[key]


def _whole_batches(rows: Rows) -> Bool[Tensor, "rows examples tokens"]:
    """Every place of a batch, its own padding included."""
    longest = torch.tensor([max(problem.hypothesis.lengths) for problem in rows.problems], device=rows.mask.device)
    places = torch.arange(rows.mask.shape[-1], device=rows.mask.device)
    return (places < longest[:, None, None]).expand_as(rows.mask)


def _label_bytes(rows: Rows) -> float:
    """What the soft labels of one row take: of a language model a number for every word at every place."""
    return rows.mask[0].numel() * rows.target.classes * rows.target.dtype.itemsize if rows.target.labels_are_tokens else 0.0


def rows_at_once(matcher: Matcher, rows: Rows, bench: Bench) -> Chunks:
    """Rows that one pass may hold, forward and twice back; refused where there is no room for one."""
    (_, examples, tokens), device = rows.mask.shape, rows.target.device
    bytes_a_row = matcher.bytes(examples, tokens, slope=True) + LABELS_HELD * _label_bytes(rows)
    what = f"one step on this batch ({examples} texts of up to {tokens} tokens)"
    refuse_without_room("Gradient matching", bytes_a_row, bench, device, what)
    if device.type == "cuda":
        return pieces(bench, device, RECORDED * bytes_a_row, 0, ROWS_ON_GPU)
    most = FASTEST_BYTES / bytes_a_row
    return pieces(bench, device, bytes_a_row, matcher.work(examples, tokens, slope=True), most)
