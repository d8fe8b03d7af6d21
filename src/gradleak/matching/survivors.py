"""An observed matrix of which few entries are left: a candidate's gradient is computed at these
alone."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

FEW = 20  # times fewer than all entries: from there on gathering is quicker than building the whole
ENTRIES_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}


@dataclass(frozen=True, eq=False)
class Sparse:
    """Survivors of matrices [tensors, observations], filled up with zeros where others have
    more."""

    outputs: Int[Tensor, "tensors observations entries"]
    inputs: Int[Tensor, "tensors observations entries"]
    values: Float[Tensor, "tensors observations entries"]

    def rows(self, kept: slice) -> "Sparse":
        """The observations of a slice."""
        return Sparse(self.outputs[:, kept], self.inputs[:, kept], self.values[:, kept])

    def take(self, places: Int[Tensor, "some"]) -> "Sparse":
        """Some of the observations."""
        return Sparse(self.outputs[:, places], self.inputs[:, places], self.values[:, places])


def sparse_survivors(
    matrices: Float[Tensor, "tensors observations outputs inputs"],
) -> Sparse | None:
    """The entries that are not zero, or none where they are too many for this to pay."""
    flat = matrices.flatten(2)
    if int((flat != 0).sum(-1).max()) * FEW > flat.shape[2]:
        return None
    places = pad_sequence(
        [row.nonzero()[:, 0] for row in flat.flatten(0, 1)], batch_first=True, padding_value=-1
    )
    places = places.view(*flat.shape[:2], -1)
    values = flat.gather(2, places.clamp_min(0)) * (places >= 0)
    return Sparse(
        places.clamp_min(0) // matrices.shape[3], places.clamp_min(0) % matrices.shape[3], values
    )


def sparse_sums(
    inputs: Float[Tensor, "m o c uses d_in"],
    deltas: Float[Tensor, "m o c uses d_out"],
    observed: Sparse,
    residuals: bool,
) -> tuple[Float[Tensor, "m o c"], Float[Tensor, "m o c"]]:
    """Over survivors only: of |g − G|² and |g − G|, or of g·G and g²."""
    first = second = inputs.new_zeros(inputs.shape[:3])
    at_once = ENTRIES_AT_ONCE.get(inputs.device.type, 2**22) // inputs[..., 0].numel()
    for piece in torch.split(
        torch.arange(observed.values.shape[2], device=inputs.device), max(1, at_once)
    ):
        seen = observed.values[:, :, None, piece]
        made = _gathered(inputs, observed.inputs[..., piece]) * _gathered(
            deltas, observed.outputs[..., piece]
        )
        gradients = made.sum(3) * (seen != 0)
        one, two = (gradients - seen, None) if residuals else (gradients, seen)
        first = first + (one.square() if two is None else one * two).sum(-1)
        second = second + (one.abs() if two is None else one.square()).sum(-1)
    return first, second


def _gathered(
    values: Float[Tensor, "m o c uses d"], places: Int[Tensor, "m o n"]
) -> Float[Tensor, "m o c uses n"]:
    return values.gather(-1, places[:, :, None, None].expand(*values.shape[:-1], -1))
