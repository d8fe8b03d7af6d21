"""The network that turns features of an update into pictures; or several such, side by side.

Features are decorrelated or scaled, go through the paper's perceptron, and come out as pixels.
Labels are read off the features beside it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.features import average_in_groups
from gradleak.attacks.learning_to_invert.medium import (
    Network,
    ReadingScore,
    SeenClients,
    assign_slots,
)
from gradleak.core.attack import Bench, Reconstruction
from gradleak.core.batch import picture_of
from gradleak.matching.linear_algebra import find_eigenvectors
from gradleak.matching.rough import products_of_10_bits

# Of a direction's variance, by which it is divided; 0.5 would make noise as large as signal, and
# learns worse.
POWER = 0.25
WEAKEST = 1e-7  # of the largest variance: rounding, no signal
# Of the labels' cross-entropy in the loss; for the loss to be read by, since pictures and labels
# share no weights.
LABEL_WEIGHT = 0.01


def decorrelate(
    features: Float[Tensor, "clients features"],
    groups: Sequence[int] | None,
    directions: int,
    noise: Float[Tensor, "features"] | None = None,
) -> tuple[Float[Tensor, "features"], Float[Tensor, "features directions"]]:
    """Returns what to subtract from features, and what to multiply them with.

    Of a gradient nearly all variance is the label's (on LeNet 95 % lies in ten directions); what
    tells pictures apart is small beside it, and steps along all features at once go mostly astray.
    So features are turned to their own directions and the strong ones are taken down. Since this is
    linear, a perceptron after it can learn what it could before.

    Features come without the noise that will be on them, and are first scaled: each alone or in
    groups, or to noise of spread 1, whereupon the strongest directions are those that stand out of
    it. Results have spread 1 in the mean; surplus ones are zero.
    """
    centre = features.mean(0)
    scale = find_scale(features, groups) if noise is None else 1 / noise
    centred = ((features - centre) * scale).double()
    clients, size = centred.shape
    few = clients < size  # then the smaller product of the two has all that is not zero
    product = centred @ centred.mT if few else centred.mT @ centred
    variances, vectors = find_eigenvectors(product / clients)
    kept = min(directions, len(variances))
    variances, vectors = variances.flip(0)[:kept], vectors.flip(1)[:, :kept]
    sound = variances > WEAKEST * variances[0].clamp_min(1e-300)
    if few:
        vectors = centred.mT @ vectors / (clients * variances.where(sound, torch.inf)).sqrt()
    seen = variances.where(sound, 0) + (0 if noise is None else 1)
    turned = vectors * torch.where(sound, seen.pow(-POWER), 0)
    mean = seen.pow(1 - 2 * POWER).where(sound, 0).mean().clamp_min(1e-300)
    turned = turned / mean.sqrt()
    whole = features.new_zeros(size, directions)
    whole[:, :kept] = (turned * scale.double()[:, None]).to(features.dtype)
    return centre, whole


def find_scale(
    features: Float[Tensor, "clients features"],
    groups: Sequence[int] | None,
    noise: Float[Tensor, "features"] | None = None,
) -> Float[Tensor, "features"]:
    """Returns one over the spread of every feature or group, noise included; zero if none moves."""
    spread = features.std(0) if noise is None else torch.hypot(features.std(0), noise)
    spread = average_in_groups(spread, groups)
    return torch.where(spread > 1e-12, 1 / spread, 0)


class ParallelLinear(nn.Module):
    """Linear layers side by side, each with its own inputs and weights."""

    def __init__(self, inverters: int, inputs: int, outputs: int) -> None:
        super().__init__()
        # All begin with the same weights: curves then compare what was learnt, not luck.
        drawn = (2 * torch.rand(inputs, outputs) - 1) / inputs**0.5
        self.weight = nn.Parameter(drawn.expand(inverters, -1, -1).clone())
        self.bias = nn.Parameter(torch.zeros(inverters, 1, outputs))

    def forward(
        self, given: Float[Tensor, "inverters clients inputs"]
    ) -> Float[Tensor, "inverters clients outputs"]:
        return torch.baddbmm(self.bias, given, self.weight)


@dataclass(frozen=True, eq=False)
class Errors:
    """What is left to learn, of every inverter."""

    squared: Float[Tensor, "inverters"]
    labels: Float[Tensor, "inverters"]  # cross-entropy
    variation: Float[Tensor, "inverters"]  # of the guess
    labels_right: Float[Tensor, "inverters"]  # a share


class PictureNetwork(Network):
    """The paper's perceptron: features → 3000 → 3000 → pixels, with ReLUs."""

    measured_with_noise = False  # its strength is told apart

    def __init__(
        self,
        features: int,
        directions: int | None,
        widths: Sequence[int],
        shape: Sequence[int],
        slots: int,
        classes: int,
        raw: bool = False,
        bounded: bool = False,
        variation_weight: float = 0.0,
        inverters: int = 1,
    ) -> None:
        super().__init__()
        self.slots, self.shape, self.raw, self.bounded = slots, tuple(shape), raw, bounded
        self.directions, self.variation_weight = directions, variation_weight
        sizes = [directions or features, *widths]
        self.hidden = nn.ModuleList(
            ParallelLinear(inverters, *pair) for pair in itertools.pairwise(sizes)
        )
        self.pixels = ParallelLinear(inverters, sizes[-1], slots * torch.Size(shape).numel())
        self.labels = ParallelLinear(inverters, sizes[0], slots * classes)
        self.register_buffer("centre", torch.zeros(inverters, 1, features))
        # One over each feature's spread, or directions that features are turned to
        rows = 1 if directions is None else features
        self.register_buffer("turn", torch.zeros(inverters, rows, sizes[0]))

    def start_from(self, blind_guess: Float[Tensor, "*inverters channels height width"]) -> None:
        if not self.bounded:
            with torch.no_grad():
                each = torch.cat([blind_guess.flatten(-3)] * self.slots, dim=-1)
                self.pixels.bias.copy_(each[..., None, :])

    def measure(
        self,
        features: Float[Tensor, "clients features"],
        groups: Sequence[int] | None,
        noise: Float[Tensor, "features"] | None = None,
        inverter: int = 0,
    ) -> None:
        centre = self.get_buffer("centre")[inverter]
        turn = self.get_buffer("turn")[inverter]
        if self.raw:
            turn.fill_(1.0)
        elif self.directions is None:
            centre.copy_(features.mean(0))
            turn.copy_(find_scale(features, groups, noise))
        else:
            middle, turned = decorrelate(features, groups, self.directions, noise)
            centre.copy_(middle)
            turn.copy_(turned)

    def forward(
        self, features: Float[Tensor, "inverters clients features"]
    ) -> tuple[
        Float[Tensor, "inverters clients slots channels height width"],
        Float[Tensor, "inverters clients slots classes"],
    ]:
        """Returns pictures, and scores of the labels."""
        centred, turn = features - self.get_buffer("centre"), self.get_buffer("turn")
        # In fewer bits small directions would drown in the rounding of large ones.
        with torch.autocast(features.device.type, enabled=False), products_of_10_bits(False):
            given = centred * turn if self.directions is None else centred @ turn
        hidden = given
        for layer in self.hidden:
            hidden = layer(hidden).relu()
        pixels = self.pixels(hidden)
        pictures = (pixels.sigmoid() if self.bounded else pixels).unflatten(
            2, (self.slots, *self.shape)
        )
        return pictures, self.labels(given).unflatten(2, (self.slots, -1))

    def compare(
        self,
        features: Float[Tensor, "inverters clients features"],
        pixels: Float[Tensor, "inverters clients slots channels height width"],
        labels: Int[Tensor, "inverters clients slots"],
        dtype: torch.dtype,
    ) -> Errors:
        """Returns how far guesses are from what clients hold; each inverter has its own clients."""
        with torch.autocast(features.device.type, torch.bfloat16, dtype is torch.bfloat16):
            guessed, scores = self(features)
        guessed, scores, pixels = guessed.float(), scores.float(), pixels.float()
        if self.slots > 1:
            with torch.no_grad():
                apart = torch.cdist(guessed.flatten(3), pixels.flatten(3)).square()
                order = assign_slots(apart.flatten(0, 1)).view(labels.shape)
            pixels = pixels.gather(2, order[..., None, None, None].expand_as(pixels))
            labels = labels.gather(2, order)
        surprise = F.cross_entropy(scores.flatten(0, 2), labels.flatten(), reduction="none")
        columns, rows = (guessed.diff(dim=axis).abs().flatten(1).mean(1) for axis in (-1, -2))
        return Errors(
            squared=(guessed - pixels).square().flatten(1).mean(1),
            labels=surprise.view(labels.shape).flatten(1).mean(1),
            variation=columns + rows,
            labels_right=(scores.argmax(-1) == labels).float().flatten(1).mean(1),
        )

    def sum_errors(self, errors: Errors) -> Float[Tensor, ""]:
        """Returns equation 2 of the paper, of all inverters together.

        The total variation is what its section 5 proposes.
        """
        variation = self.variation_weight * errors.variation
        return (errors.squared + LABEL_WEIGHT * errors.labels + variation).sum()

    def loss(self, seen: SeenClients, dtype: torch.dtype) -> Float[Tensor, ""]:
        return self.sum_errors(self._compare_one(seen, dtype))

    @torch.no_grad()
    def judge(self, seen: SeenClients, dtype: torch.dtype) -> ReadingScore:
        """Adds up squared errors, and counts labels that are read right."""
        errors, clients = self._compare_one(seen, dtype), seen.clients.lead[0]
        right = clients * float(errors.labels_right)
        return ReadingScore(clients * float(errors.squared), right, clients)

    def _compare_one(self, seen: SeenClients, dtype: torch.dtype) -> Errors:
        clients = seen.clients
        assert clients.pixels is not None
        return self.compare(seen.features[None], clients.pixels[None], clients.labels[None], dtype)

    def read(
        self, features: Float[Tensor, "clients features"], bench: Bench
    ) -> list[Reconstruction]:
        pixels, scores = self(features[None])
        return [
            Reconstruction((), labels=tuple(labels), pictures=tuple(map(picture_of, pictures)))
            for pictures, labels in zip(pixels[0].cpu(), scores[0].argmax(-1).tolist(), strict=True)
        ]
