"""Trains a generator of pictures against an adversary that learns to tell them from real ones
(Goodfellow et al. 2014)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.priors.generator import FIRST_SIDE, GeneratorNetwork

# Of the adversary's slope at real pictures: without it the two circle each other (Mescheder et al.
# 2018)
SLOPE_WEIGHT = 1.0
MOMENTS = (0.5, 0.99)  # of Adam: what was learnt of an opponent is soon out of date


class Adversary(nn.Module):
    """The generator's mirror with one number at its end: how real a picture looks."""

    def __init__(self, shape: tuple[int, int, int], width: int, halvings: int) -> None:
        super().__init__()
        inputs = [shape[0], *[width] * (halvings - 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, 4, 2, 1) for channels in inputs
        )
        self.last = nn.Linear((width if halvings else shape[0]) * FIRST_SIDE**2, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = pictures
        for convolution in self.convolutions:
            hidden = F.leaky_relu(convolution(hidden), 0.2)
        scores: Tensor = self.last(hidden.flatten(1))[:, 0]
        return scores


@dataclass(eq=False)
class Contest:
    """Generator and adversary, each with its own optimiser."""

    network: GeneratorNetwork
    adversary: Adversary
    learning_rate: float

    def __post_init__(self) -> None:
        self.makes = torch.optim.Adam(self.network.parameters(), self.learning_rate, MOMENTS)
        self.tells = torch.optim.Adam(self.adversary.parameters(), self.learning_rate, MOMENTS)

    def step(self, pictures: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        """The adversary learns from real and made pictures, then the generator from the
        adversary; says what share it told."""
        real = pictures.detach().requires_grad_()
        real_scores = self.adversary(real)
        (slopes,) = torch.autograd.grad(real_scores.sum(), real, create_graph=True)
        with torch.no_grad():
            made = self.network(drawn)
        made_scores = self.adversary(made)
        loss = (F.softplus(-real_scores) + F.softplus(made_scores)).mean()
        loss = loss + 0.5 * SLOPE_WEIGHT * slopes.flatten(1).square().sum(1).mean()
        _move(self.tells, loss)
        _move(self.makes, F.softplus(-self.adversary(self.network(drawn))).mean())
        right = torch.cat([real_scores > 0, made_scores < 0])
        return {"told_apart": right.float().mean()}


def _move(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
