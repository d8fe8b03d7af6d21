"""Optimisers of a client's local steps, as functions: PyTorch's own change weights in place, and
no slope goes through that."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class State:
    """What an optimiser remembers between steps."""

    taken: int = 0
    first: Weights = field(default_factory=dict)
    second: Weights = field(default_factory=dict)


class LocalOptimiser(ABC):
    """One step: weights, their gradients and what is remembered, to new weights and what is
    remembered then."""

    @abstractmethod
    def step(self, weights: Weights, gradients: Weights, state: State) -> tuple[Weights, State]:
        """The next weights; nothing is changed in place."""


@dataclass(frozen=True)
class Sgd(LocalOptimiser):
    """Gradient descent; with momentum as PyTorch has it (heavy ball, without dampening)."""

    learning_rate: float
    momentum: float = 0.0

    def step(self, weights: Weights, gradients: Weights, state: State) -> tuple[Weights, State]:
        moving = {
            name: self.momentum * state.first[name] + slope if state.taken else slope
            for name, slope in gradients.items()
        }
        moved = {
            name: weight - self.learning_rate * moving[name] for name, weight in weights.items()
        }
        return moved, State(state.taken + 1, moving)


@dataclass(frozen=True)
class Adam(LocalOptimiser):
    """Adam (Kingma & Ba 2015), with decoupled weight decay AdamW; numbers are PyTorch's
    defaults."""

    learning_rate: float
    weight_decay: float = 0.0
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8

    def step(self, weights: Weights, gradients: Weights, state: State) -> tuple[Weights, State]:
        taken = state.taken + 1
        first, second, moved = {}, {}, {}
        for name, slope in gradients.items():
            before = (
                (state.first[name], state.second[name])
                if state.taken
                else (torch.zeros_like(slope),) * 2
            )
            first[name] = self.first_decay * before[0] + (1 - self.first_decay) * slope
            second[name] = self.second_decay * before[1] + (1 - self.second_decay) * slope.square()
            spread = _root(second[name] / (1 - self.second_decay**taken)) + self.epsilon
            step = first[name] / (1 - self.first_decay**taken) / spread
            moved[name] = (
                weights[name] * (1 - self.learning_rate * self.weight_decay)
                - self.learning_rate * step
            )
        return moved, State(taken, first, second)


def _root(squares: Tensor) -> Tensor:
    """The square root, whose slope at exactly zero (a word that does not occur) is zero and not
    infinite."""
    return torch.where(
        squares > 0,
        squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt(),
        torch.zeros_like(squares),
    )


OPTIMISERS: Mapping[str, Callable[[float], LocalOptimiser]] = {
    "sgd": lambda learning_rate: Sgd(learning_rate),
    "momentum": lambda learning_rate: Sgd(learning_rate, momentum=0.9),
    "adam": lambda learning_rate: Adam(learning_rate),
    "adamw": lambda learning_rate: Adam(learning_rate, weight_decay=0.01),
}
