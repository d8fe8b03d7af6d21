"""Every word at every position at the price of every word and every position: inputs that are a
normalised sum of the two.

The first layer of most models is fed LayerNorm(word + position). Its products with directions, its
variance and its size follow from products of words with positions, so that no input has to be made.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.matching.inputs import ModuleInputs, first_inputs

AGREES = 1e-4  # relative difference from the model's own pass: rounding leaves 1e-6
WORDS_AT_ONCE = 2**13
TRIED = 4  # words that the sum is tried with


@dataclass(frozen=True, eq=False)
class Additive:
    """What the normalisation is fed for each word and for each position; their sums are what it
    is fed for both."""

    words: Float[Tensor, "words width"]
    positions: Float[Tensor, "positions width"]
    norm: nn.LayerNorm

    @torch.no_grad()
    def misses(self, directions: Float[Tensor, "width some"]) -> Float[Tensor, "positions words"]:
        """The part of each input along some directions, relative to its size."""
        gain, shift = self.norm.weight, self.norm.bias
        rows, columns = centre(self.positions), centre(self.words)
        width = rows.shape[-1]
        deviation = (squares_of_sums(rows, columns) / width + self.norm.eps).sqrt()
        rows, columns = rows * gain, columns * gain
        sizes = squares_normalised(rows, columns, deviation, shift)
        along = squares_normalised(
            rows @ directions, columns @ directions, deviation, shift @ directions
        )
        return (along.clamp_min(0) / sizes).sqrt()


def centre(rows: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    return rows - rows.mean(-1, keepdim=True)


def squares_of_sums(
    rows: Float[Tensor, "rows width"], columns: Float[Tensor, "columns width"]
) -> Float[Tensor, "rows columns"]:
    """The squared norm of every sum of one of each."""
    return rows.square().sum(-1)[:, None] + columns.square().sum(-1) + 2 * rows @ columns.mT


def squares_normalised(
    rows: Tensor, columns: Tensor, deviation: Tensor, shift: Tensor
) -> Float[Tensor, "rows columns"]:
    """The squared norm of every sum of one of each, divided by its deviation and shifted."""
    across = (rows @ shift)[:, None] + columns @ shift
    return (
        squares_of_sums(rows, columns) / deviation.square()
        + 2 * across / deviation
        + shift.square().sum()
    )


@torch.no_grad()
def additive_of(
    inputs: ModuleInputs, words: Int[Tensor, "words"], positions: int
) -> Additive | None:
    """The sum a model's first inputs are made of; none where they are made otherwise."""
    norms = [
        module for module in inputs.target.module.modules() if isinstance(module, nn.LayerNorm)
    ]
    some = words[torch.linspace(0, len(words) - 1, TRIED, device=words.device).long()]
    for norm in norms:
        if norm.weight is None or norm.bias is None:
            continue
        seen, fed = _before(norm, inputs, some, positions)
        # ELECTRA and ALBERT normalise embeddings that are narrower than their layers.
        if seen is None or seen.shape != fed.shape:
            continue
        sums = seen[:, :1] + seen[:1] - seen[:1, :1]
        if float((norm(sums) - fed).norm() / fed.norm()) < AGREES:
            pieces = [
                _before(norm, inputs, piece, 1)[0] for piece in torch.split(words, WORDS_AT_ONCE)
            ]
            alone = torch.cat([piece[:, 0] for piece in pieces if piece is not None])
            return Additive(alone, seen[0] - seen[0, :1], norm)
    return None


def _before(
    norm: nn.LayerNorm, inputs: ModuleInputs, words: Int[Tensor, "words"], positions: int
) -> tuple[Float[Tensor, "words positions _"] | None, Float[Tensor, "words positions width"]]:
    """What a normalisation is fed for each word at each position, and what the first layer is."""
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        fed = next(iter(first_inputs(inputs, words, positions).values())).movedim(0, 1)
    finally:
        handle.remove()
    return (seen[0] if seen else None), fed
