"""The network that turns features of an update into pictures; several, for several settings, in one."""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

SHORTEST_SPREAD = 1e-12


class Layer(nn.Module):
    """Linear layers side by side, each with its own inputs and weights."""

    def __init__(self, inverters: int, inputs: int, outputs: int) -> None:
        super().__init__()
        # Every inverter begins with the same weights: curves then compare what was learnt, not luck.
        drawn = (2 * torch.rand(inputs, outputs) - 1) / inputs**0.5
        self.weight = nn.Parameter(drawn.expand(inverters, -1, -1).clone())
        self.bias = nn.Parameter(torch.zeros(inverters, 1, outputs))

    def forward(self, given: Float[Tensor, "inverters clients inputs"]) -> Float[Tensor, "inverters clients outputs"]:
        return torch.baddbmm(self.bias, given, self.weight)


class PictureInverter(nn.Module):
    """The paper's MLP: features → 3000 → 3000 → pixels, with ReLUs; the last hidden layer is also read as labels."""

    def __init__(
        self,
        inverters: int,
        features: int,
        widths: Sequence[int],
        mean: Float[Tensor, "channels height width"],
        slots: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.slots, self.shape = slots, tuple(mean.shape)
        sizes = [features, *widths]
        self.hidden = nn.ModuleList(Layer(inverters, *pair) for pair in itertools.pairwise(sizes))
        self.pixels, self.labels = (Layer(inverters, sizes[-1], slots * count) for count in (mean.numel(), classes))
        self.register_buffer("centre", torch.zeros(inverters, 1, features))
        self.register_buffer("spread", torch.ones(inverters, 1, features))
        with torch.no_grad():
            self.pixels.bias.copy_(mean.flatten().repeat(slots))  # it begins with the blind guess

    @torch.no_grad()
    def measure(self, features: Float[Tensor, "inverters clients features"], groups: Sequence[int] | None) -> None:
        """Centres features, and brings them to spread 1: each alone, or neighbours together."""
        self.get_buffer("centre").copy_(features.mean(1, keepdim=True))
        found = features.std(1, keepdim=True)
        if groups is not None:
            pieces = torch.split(found, list(groups), dim=2)
            found = torch.cat([piece.square().mean(2, keepdim=True).sqrt().expand_as(piece) for piece in pieces], dim=2)
        self.get_buffer("spread").copy_(torch.where(found > SHORTEST_SPREAD, found, torch.inf))

    def forward(
        self, features: Float[Tensor, "inverters clients features"]
    ) -> tuple[Float[Tensor, "inverters clients slots channels height width"], Float[Tensor, "inverters clients slots classes"]]:
        """Pictures, and scores of the labels."""
        hidden = (features - self.get_buffer("centre")) / self.get_buffer("spread")
        for layer in self.hidden:
            hidden = layer(hidden).relu()
        return self.pixels(hidden).unflatten(2, (self.slots, *self.shape)), self.labels(hidden).unflatten(2, (self.slots, -1))
