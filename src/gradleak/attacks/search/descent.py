"""How embeddings follow a gradient: the optimiser and its schedule."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


class RateSchedule(ABC):
    """The learning rate at a step, as a multiple of the first."""

    @abstractmethod
    def factor(self, step: int) -> float:
        """Returns the multiple at that step (counted from 0)."""


@dataclass(frozen=True)
class Constant(RateSchedule):
    """No decay."""

    def factor(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class StepDecay(RateSchedule):
    """Multiplied by `decay` every `every` steps (LAMP: 0.89 every 50)."""

    decay: float = 0.89
    every: int = 50

    def factor(self, step: int) -> float:
        return float(self.decay ** (step // self.every))


@dataclass(frozen=True)
class Linear(RateSchedule):
    """Falls evenly to zero over `over` steps (LAMP on BERT-large: 10,000; it takes 5,000)."""

    over: int = 10_000

    def factor(self, step: int) -> float:
        return max(0.0, 1 - step / self.over)


@dataclass(frozen=True)
class WarmUp(RateSchedule):
    """Rises evenly over a twentieth of all steps, then falls evenly to zero.

    That is TAG as Learning to Invert ran it.
    """

    steps: int

    def factor(self, step: int) -> float:
        rising = max(1, self.steps // 20)
        return min((step + 1) / rising, (self.steps - step) / max(1, self.steps - rising))


@dataclass(frozen=True)
class Drops(RateSchedule):
    """A tenth of it after 3/8, 5/8 and 7/8 of all steps (IG)."""

    steps: int

    def factor(self, step: int) -> float:
        return float(0.1 ** sum(step >= self.steps * eighths / 8 for eighths in (3, 5, 7)))


@dataclass(frozen=True)
class RowAdam:
    """Adam (Kingma & Ba 2015) on every row by itself.

    All its operations are elementwise but the clipping, which is per row.
    """

    learning_rate: float
    schedule: RateSchedule = Constant()
    clip_norm: float | None = None  # of each row's gradient
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0  # decoupled (AdamW, Loshchilov & Hutter 2019)

    def begin(self, embeddings: Float[Tensor, "rows *shape"]) -> "RowAdamState":
        return RowAdamState(self, torch.zeros_like(embeddings), torch.zeros_like(embeddings))


@dataclass
class RowAdamState:
    """Adam's moments of one search; a search that moves tokens about moves these with them."""

    settings: RowAdam
    first: Tensor
    second: Tensor
    taken: int = 0

    @torch.no_grad()
    def step(self, embeddings: Tensor, gradients: Tensor) -> None:
        """Moves the embeddings in place."""
        settings = self.settings
        if settings.clip_norm is not None:
            # Each row's own norm: how fast a row moves must not depend on who shares the batch.
            norms = gradients.flatten(1).norm(dim=1).view(-1, *[1] * (gradients.ndim - 1))
            gradients = gradients * (settings.clip_norm / norms.clamp_min(1e-12)).clamp(max=1.0)
        self.first.lerp_(gradients, 1 - settings.first_decay)
        self.second.mul_(settings.second_decay).addcmul_(
            gradients, gradients, value=1 - settings.second_decay
        )
        rate = settings.learning_rate * settings.schedule.factor(self.taken)
        self.taken += 1
        # Moments begin at zero, and are this much too small at first (Kingma & Ba, section 3).
        first_scale, second_scale = (
            1 - settings.first_decay**self.taken,
            1 - settings.second_decay**self.taken,
        )
        spread = (self.second / second_scale).sqrt_().add_(settings.epsilon)
        if settings.weight_decay:
            # Of the embeddings themselves, not of their slope: that is what AdamW decouples.
            embeddings.mul_(1 - rate * settings.weight_decay)
        embeddings.addcdiv_(self.first, spread, value=-rate / first_scale)
