"""The network that turns features of an update into pictures; several, for several settings, in one."""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.decorrelation import decorrelated, scaling
from gradleak.matching.rough import products_of_10_bits


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
    """The paper's MLP: features → 3000 → 3000 → pixels, with ReLUs; beside it labels are read off the features by one layer."""

    def __init__(
        self,
        inverters: int,
        features: int,
        directions: int | None,
        widths: Sequence[int],
        mean: Float[Tensor, "channels height width"],
        slots: int,
        classes: int,
        raw: bool = False,
        bounded: bool = False,
    ) -> None:
        super().__init__()
        self.slots, self.shape, self.raw, self.bounded = slots, tuple(mean.shape), raw, bounded
        sizes = [directions or features, *widths]
        self.hidden = nn.ModuleList(Layer(inverters, *pair) for pair in itertools.pairwise(sizes))
        self.pixels = Layer(inverters, sizes[-1], slots * mean.numel())
        self.labels = Layer(inverters, sizes[0], slots * classes)
        self.directions = directions
        self.register_buffer("centre", torch.zeros(inverters, 1, features))
        # One over each feature's spread, or directions that features are turned to
        self.register_buffer("turn", torch.zeros(inverters, 1 if directions is None else features, sizes[0]))
        if not bounded:
            with torch.no_grad():
                self.pixels.bias.copy_(mean.flatten().repeat(slots))  # it begins with the blind guess

    @torch.no_grad()
    def measure(
        self,
        inverter: int,
        features: Float[Tensor, "clients features"],
        groups: Sequence[int] | None,
        noise: Float[Tensor, "features"] | None = None,
    ) -> None:
        """Centres and scales what one inverter is fed, as measured on some clients before training, without their noise."""
        centre, turn = self.get_buffer("centre")[inverter], self.get_buffer("turn")[inverter]
        if self.raw:
            turn.fill_(1.0)
            return
        if self.directions is None:
            centre.copy_(features.mean(0))
            turn.copy_(scaling(features, groups, noise))
            return
        middle, turned = decorrelated(features, groups, self.directions, noise)
        centre.copy_(middle)
        turn.copy_(turned)

    def forward(
        self, features: Float[Tensor, "inverters clients features"]
    ) -> tuple[Float[Tensor, "inverters clients slots channels height width"], Float[Tensor, "inverters clients slots classes"]]:
        """Pictures, and scores of the labels."""
        centred, turn = features - self.get_buffer("centre"), self.get_buffer("turn")
        # In fewer bits small directions would drown in the rounding of large ones.
        with torch.autocast(features.device.type, enabled=False), products_of_10_bits(False):
            given = centred * turn if self.directions is None else centred @ turn
        hidden = given
        for layer in self.hidden:
            hidden = layer(hidden).relu()
        pixels = self.pixels(hidden)
        pictures = (pixels.sigmoid() if self.bounded else pixels).unflatten(2, (self.slots, *self.shape))
        return pictures, self.labels(given).unflatten(2, (self.slots, -1))
