"""Feature hashing: every coordinate of an update falls into one of k bins, and each bin is summed (Weinberger et al. 2009)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gradleak.core.streams import Streams
from gradleak.core.update import Update


class Hashing:
    """Bins as even as can be, from a permutation that a seed gives whenever it is opened: the map is never stored.

    Bins of one size make hashing a gather and a sum over neighbours, where bins of random sizes would need scattered additions.
    """

    def __init__(self, coordinates: int, bins: int, streams: Streams, signed: bool, device: torch.device) -> None:
        if not 1 <= bins <= coordinates:
            raise ValueError(f"bins must lie between 1 and the {coordinates} coordinates, not {bins}")
        self.coordinates, self.bins, self.each = coordinates, bins, coordinates // bins
        order = torch.randperm(coordinates, generator=streams.child("bins").generator()).to(device)
        self.even, self.left_over = order[: bins * self.each], order[bins * self.each :]
        self.signs: Tensor | None = None
        if signed:
            drawn = torch.randint(0, 2, (coordinates,), generator=streams.child("signs").generator(), dtype=torch.int8)
            self.signs = (drawn * 2 - 1).to(device)

    @property
    def counts(self) -> Float[Tensor, "bins"]:
        """How many coordinates each bin sums."""
        counts = torch.full((self.bins,), float(self.each), device=self.even.device)
        counts[: len(self.left_over)] += 1
        return counts

    def __call__(self, flat: Float[Tensor, "clients coordinates"]) -> Float[Tensor, "clients bins"]:
        if self.signs is not None:
            flat = flat * self.signs
        # Clients side by side make long pieces of memory, and nothing is gathered before it is summed.
        by_coordinate = flat.mT.contiguous()
        summed = F.embedding_bag(self.even.view(self.bins, self.each), by_coordinate, mode="sum")
        summed[: len(self.left_over)] += by_coordinate[self.left_over]
        return summed.mT.contiguous()

    def adjoint(self, hashed: Float[Tensor, "clients bins"]) -> Float[Tensor, "clients coordinates"]:
        """Gives every coordinate the value of its bin: ⟨hash(g), h⟩ = ⟨g, adjoint(h)⟩."""
        spread = hashed.new_empty(len(hashed), self.coordinates)
        spread[:, self.even] = hashed.repeat_interleave(self.each, dim=1)
        spread[:, self.left_over] = hashed[:, : len(self.left_over)]
        return spread if self.signs is None else spread * self.signs


def flattened(update: Update) -> Float[Tensor, "clients coordinates"]:
    """All tensors of an update side by side, in its own order."""
    return torch.cat([tensor.flatten(1) for tensor in update.tensors.values()], dim=1)
