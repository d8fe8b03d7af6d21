"""Sums over the entries of matrix gradients dW = Σ_t δ_t x_tᵀ, from x and δ alone if they suffice.

Where few entries of the observed matrix are left, a candidate's gradient is computed at these alone
(`Sparse`). Where a distance or a reading asks for all entries, the gradient is built in pieces.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradleak.matching.distances import Reading
from gradleak.matching.factors import Thin

Sums = tuple[
    Float[Tensor, "tensors observations candidates"],
    Float[Tensor, "tensors observations candidates"],
]
# Of a dense gradient: small enough for the cache of a CPU
ENTRIES_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}
# Of survivors' products: on a CPU larger pieces leave the cache, and are slower than their sums
PRODUCTS_AT_ONCE = {"cpu": 2**19, "cuda": 2**28}
# Times fewer than all entries: from there on gathering is quicker than building the whole
FEW = 20


@dataclass(frozen=True, eq=False)
class Sparse:
    """Entries left of matrices [tensors, observations].

    They are filled up with zeros where others have more.
    """

    outputs: Int[Tensor, "tensors observations entries"]
    inputs: Int[Tensor, "tensors observations entries"]
    values: Float[Tensor, "tensors observations entries"]

    def take(self, places: slice | Int[Tensor, "some"]) -> "Sparse":
        """Returns some of the observations."""
        return Sparse(self.outputs[:, places], self.inputs[:, places], self.values[:, places])


def find_survivors(
    matrices: Float[Tensor, "tensors observations outputs inputs"],
) -> Sparse | None:
    """Returns the entries that are not zero, or none where they are too many for this to pay."""
    flat = matrices.flatten(2)
    if int((flat != 0).sum(-1).max()) * FEW > flat.shape[2]:
        return None
    rows = [row.nonzero()[:, 0] for row in flat.flatten(0, 1)]
    places = pad_sequence(rows, batch_first=True, padding_value=-1).view(*flat.shape[:2], -1)
    # What was filled up points at the first entry, with value zero: sum_survivors leaves it out.
    return Sparse(
        places.clamp_min(0) // matrices.shape[3],
        places.clamp_min(0) % matrices.shape[3],
        flat.gather(2, places.clamp_min(0)) * (places >= 0),
    )


def sum_survivors(
    inputs: Float[Tensor, "m o c uses d_in"],
    deltas: Float[Tensor, "m o c uses d_out"],
    observed: Sparse,
    residuals: bool,
) -> tuple[Float[Tensor, "m o c"], Float[Tensor, "m o c"]]:
    """Returns sums over survivors only: of |g − G|² and |g − G|, or of g·G and g²."""
    first = second = inputs.new_zeros(inputs.shape[:3])
    x, d = _by_entry(inputs), _by_entry(deltas)
    at_once = PRODUCTS_AT_ONCE.get(inputs.device.type, 2**19) // inputs[..., 0].numel()
    every = torch.arange(observed.values.shape[2], device=inputs.device)
    for piece in torch.split(every, max(1, at_once)):
        seen = observed.values[:, :, piece, None]
        made = _select(x, observed.inputs[..., piece]) * _select(d, observed.outputs[..., piece])
        gradients = made.sum(3) * (seen != 0)
        one, two = (gradients - seen, None) if residuals else (gradients, seen)
        first = first + (one.square() if two is None else one * two).sum(2)
        second = second + (one.abs() if two is None else one.square()).sum(2)
    return first, second


def _by_entry(values: Float[Tensor, "m o c uses d"]) -> Float[Tensor, "m o d uses c"]:
    """Returns them with all candidates of an entry side by side, so that whole runs are copied."""
    return values.permute(0, 1, 4, 3, 2).contiguous()


def _select(
    values: Float[Tensor, "m o d uses c"], places: Int[Tensor, "m o n"]
) -> Float[Tensor, "m o n uses c"]:
    m, o, d, uses, c = values.shape
    first = torch.arange(m * o, device=places.device).view(m, o, 1) * d
    chosen = values.view(m * o * d, uses * c).index_select(0, (first + places).flatten())
    return chosen.view(m, o, -1, uses, c)


def outer_angles(
    inputs: Float[Tensor, "m o c uses d_in"],
    deltas: Float[Tensor, "m o c uses d_out"],
    observed: Thin | Tensor,
) -> Sums:
    """Returns Σ dW∘G and Σ dW∘dW. The second costs uses² in Gram form and d_in·d_out in dense form:
    the smaller is taken."""
    m, o, c, uses, d_in = inputs.shape
    d_out = deltas.shape[-1]
    x, d = inputs.reshape(m, o, c * uses, d_in), deltas.reshape(m, o, c * uses, d_out)
    if isinstance(observed, Thin):
        products = (x @ observed.right) * (d @ observed.left)
    else:
        products = (d @ observed) * x
    inner = products.reshape(m, o, c, -1).sum(-1)
    # ‖Σ_t δ_t x_tᵀ‖² = Σ_{t,s} (δ_t·δ_s)(x_t·x_s)
    if uses * (d_in + d_out) <= d_in * d_out:
        squared = ((inputs @ inputs.mT) * (deltas @ deltas.mT)).sum((-1, -2))
    else:
        squared = (deltas.mT @ inputs).square().sum((-1, -2))
    return inner, squared


def lookup_angles(
    ids: Int[Tensor, "m o c uses"],
    deltas: Float[Tensor, "m o c uses d_out"],
    observed: Float[Tensor, "m o rows d_out"],
) -> Sums:
    """Returns the same for an embedding table: its inputs are one-hot, so that products with them
    are look-ups and comparisons."""
    m, o, c, uses, d_out = deltas.shape
    index = ids.reshape(m, o, c * uses, 1).expand(-1, -1, -1, d_out)
    inner = (
        (deltas.reshape(m, o, c * uses, d_out) * observed.gather(2, index))
        .reshape(m, o, c, -1)
        .sum(-1)
    )
    # One-hot inputs have the product one where the words are the same, and else zero.
    same = (ids[..., :, None] == ids[..., None, :]).to(deltas.dtype)
    return inner, (same * (deltas @ deltas.mT)).sum((-1, -2))


def lookup_entries(
    ids: Int[Tensor, "m o c uses"],
    deltas: Float[Tensor, "m o c uses d_out"],
    observed: Float[Tensor, "m o rows d_out"],
    residuals: bool,
    reading: Reading,
) -> Sums:
    """Returns the sums for an embedding table whose entries count one by one, without building the
    table.

    Most rows are not looked up and have no gradient: what is seen there speaks against every
    candidate alike.
    """
    m, o, c, uses, d_out = deltas.shape
    index = ids.reshape(m, o, c * uses, 1).expand(-1, -1, -1, d_out)
    seen = observed.gather(2, index).view(deltas.shape)
    same = ids[..., :, None] == ids[..., None, :]
    # A row that is looked up twice has one gradient, the sum, and is counted at its first use. A
    # product and no scatter_add: that sums in any order on a GPU, and no run would repeat another.
    once = ~same.tril(-1).any(-1, keepdim=True)
    gradients, seen = (same.to(deltas.dtype) @ deltas) * once, seen * once
    differing = reading.residual(gradients, seen).flatten(3)
    idle = ~(ids[..., None] == torch.arange(observed.shape[2], device=ids.device)).any(3)
    # Rows without a use: of the candidate they are zero, and what was seen there is left over.
    left = reading.residual(torch.zeros_like(observed), observed)
    left_squares = (idle.to(left.dtype) @ left.square().sum(-1)[..., None])[..., 0]
    residual_squares = differing.square().sum(-1) + left_squares
    if residuals:
        left_sizes = (idle.to(left.dtype) @ left.abs().sum(-1)[..., None])[..., 0]
        return residual_squares, differing.abs().sum(-1) + left_sizes
    inner = (gradients * seen).flatten(3).sum(-1)
    squares = gradients.square().flatten(3).sum(-1)
    return reading.angles(
        residual_squares, inner, squares, observed.square().sum((-1, -2))[..., None]
    )


def vector_sums(
    gradients: Float[Tensor, "m o c entries"],
    observed: Float[Tensor, "m o entries"],
    residuals: bool,
    reading: Reading,
) -> Sums:
    """Returns the sums for biases, LayerNorms and whatever else is small enough to hold."""
    seen = observed[:, :, None]
    if residuals:
        difference = reading.residual(gradients, seen)
        return difference.square().sum(-1), difference.abs().sum(-1)
    inner, squares = (gradients * seen).sum(-1), gradients.square().sum(-1)
    if not reading.entrywise:
        return inner, squares
    return reading.angles(
        reading.residual(gradients, seen).square().sum(-1), inner, squares, seen.square().sum(-1)
    )


def outer_sums(
    inputs: Float[Tensor, "m o c uses d_in"],
    deltas: Float[Tensor, "m o c uses d_out"],
    observed: Thin | Sparse | Tensor,
    residuals: bool,
    reading: Reading,
) -> Sums:
    """Returns the sums for a matrix gradient; it is built only where the distance or the reading
    asks for its entries."""
    if isinstance(observed, Sparse):
        return sum_survivors(inputs, deltas, observed, residuals)
    if residuals:
        return outer_residuals(inputs, deltas, observed, reading)
    inner, squares = outer_angles(inputs, deltas, observed)
    if not reading.entrywise:
        return inner, squares
    assert isinstance(observed, Tensor)
    residual_squares, _ = outer_residuals(inputs, deltas, observed, reading, absolutes=False)
    return reading.angles(
        residual_squares, inner, squares, observed.square().sum((-1, -2))[..., None]
    )


def outer_residuals(
    inputs: Float[Tensor, "m o c uses d_in"],
    deltas: Float[Tensor, "m o c uses d_out"],
    observed: Thin | Tensor,
    reading: Reading,
    absolutes: bool = True,
) -> Sums:
    """Returns Σ|dW − G|² and Σ|dW − G|. The absolute value has no factored form, so that the
    difference is built, a piece at a time."""
    m, o, c, uses, d_in = inputs.shape
    x, d = inputs.reshape(m * o, c, uses, d_in), deltas.reshape(m * o, c, uses, -1)
    if isinstance(observed, Thin):
        # dW − LRᵀ is itself an outer product of longer factors: [δ, −L]ᵀ [x, R].
        x = torch.cat([x, observed.right.mT.flatten(0, 1)[:, None].expand(-1, c, -1, -1)], dim=2)
        d = torch.cat([d, -observed.left.mT.flatten(0, 1)[:, None].expand(-1, c, -1, -1)], dim=2)
        dense = None
    else:
        dense = observed.flatten(0, 1)
    apply: Any = _Residual.apply
    squares, sizes = apply(x.flatten(0, 1), d.flatten(0, 1), dense, reading, absolutes)
    return squares.view(m, o, c), sizes.view(m, o, c)


class _Residual(torch.autograd.Function):
    """Sums over R = dᵀx − G (or what a reading makes of both) without keeping R: it is built piece
    by piece in one buffer, once, and its slopes with it.

    What each sum's slope needs of R is d·R and x·Rᵀ: for the squares these are Gram products where
    R is an outer product itself; for the absolute values R's signs are needed, while R is there.
    Where these are not asked for they are zero.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, d: Tensor, dense: Tensor | None, reading: Reading, with_absolutes: bool
    ) -> tuple[Tensor, Tensor]:
        squares, absolutes = x.new_empty(x.shape[0]), x.new_zeros(x.shape[0])
        wanted = any(ctx.needs_input_grad)
        slopes = [
            torch.empty_like(part)
            for part in ((x, d, x, d) if with_absolutes else (x, d))
            if wanted
        ]
        for piece, residual in _pieces(x, d, dense, reading):
            squares[piece] = torch.linalg.vector_norm(residual, dim=2).square().sum(1)
            if wanted and dense is not None:
                _slopes(x[piece], d[piece], residual, slopes[0][piece], slopes[1][piece])
            if with_absolutes:
                # Pairwise summation: vector_norm is 1e-5 off over so many entries
                absolutes[piece] = residual.abs().sum((1, 2))
            if wanted and with_absolutes:
                _slopes(x[piece], d[piece], residual.sign_(), slopes[2][piece], slopes[3][piece])
        if wanted and dense is None:
            # R = dᵀx, so that d·R = (d·dᵀ)·x: of the size of tokens², never of d_in·d_out
            slopes[:2] = (d @ d.mT) @ x, (x @ x.mT) @ d
        ctx.save_for_backward(*slopes)
        return squares, absolutes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # ∂ΣR²/∂x = 2 d·R and ∂Σ|R|/∂x = d·sign(R); with respect to d the same with x
        to_squares, to_absolutes = 2 * grads[0][:, None, None], grads[1][:, None, None]
        to_x, to_d = (to_squares * slope for slope in ctx.saved_tensors[:2])
        # None without absolute values
        for whole, slope in zip((to_x, to_d), ctx.saved_tensors[2:], strict=False):
            whole += to_absolutes * slope
        return to_x, to_d, None, None, None


def _slopes(x: Tensor, d: Tensor, residual: Tensor, to_x: Tensor, to_d: Tensor) -> None:
    torch.bmm(d, residual, out=to_x)
    torch.bmm(x, residual.mT, out=to_d)


def _pieces(x: Tensor, d: Tensor, dense: Tensor | None, reading: Reading) -> Any:
    """Yields R for a few rows at a time, in a buffer that the next piece overwrites. Rows that
    share a G are neighbours."""
    rows, d_in, d_out = x.shape[0], x.shape[2], d.shape[2]
    step = max(1, min(rows, ENTRIES_AT_ONCE.get(x.device.type, 2**24) // (d_in * d_out)))
    buffer = x.new_empty(step, d_out, d_in)
    for start in range(0, rows, step):
        piece = slice(start, min(start + step, rows))
        residual = buffer[: piece.stop - start]
        seen = None if dense is None else _repeat_observed(dense, rows, piece)
        if seen is None:
            torch.bmm(d[piece].mT, x[piece], out=residual)
        elif reading.entrywise:
            residual = reading.residual(torch.bmm(d[piece].mT, x[piece], out=residual), seen)
        else:
            torch.baddbmm(seen, d[piece].mT, x[piece], beta=-1, out=residual)
        yield piece, residual


def _repeat_observed(dense: Tensor, rows: int, piece: slice) -> Tensor:
    """Returns what was seen for some of the rows: one G for all candidates of an observation,
    copied for no more than these."""
    if len(dense) == rows:
        return dense[piece]
    return dense[torch.arange(piece.start, piece.stop, device=dense.device) // (rows // len(dense))]
