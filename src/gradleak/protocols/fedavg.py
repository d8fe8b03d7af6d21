"""FedAvg: a client trains for some steps of its own and sends by how much its weights moved.

Optimisers of the local steps are functions: PyTorch's own change weights in place, and no slope
goes through that.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, measure_spacing
from gradleak.core.errors import GradleakError
from gradleak.core.protocol import Protocol, differentiate_loss
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update, stack_by_name

Weights = Mapping[str, Tensor]


@register("protocol", "fedavg")
@dataclass(frozen=True)
class FedAvg(Protocol):
    """Weights before local training minus weights after it: of one SGD step that is FedSGD times
    the learning rate."""

    one_gradient = False
    cites = "McMahan et al., AISTATS 2017"

    epochs: int = 1  # passes over the client's batch
    # Local steps in all, over as many passes as it takes; none: as many as `epochs` make
    steps: int | None = None
    local_batch_size: int | None = None  # examples in a step; none: all of the client's
    learning_rate: float = 5e-5  # LAMP's
    optimiser: Literal["sgd", "momentum", "adam", "adamw"] = "sgd"
    # Secure aggregation: the batch is dealt out among so many clients, and the server sees only the
    # mean of their updates. Of FedSGD that is the gradient of one batch of all their examples:
    # audit it with a larger batch_size.
    clients: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "local_batch_size", "clients"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} counts from 1, not {count}.")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be a number above 0, not {self.learning_rate}.")

    @property
    def sizes_lost(self) -> bool:
        return self.optimiser in ("adam", "adamw")

    def update(
        self,
        target: Target,
        batches: Batch,
        per_example: bool = False,
        rngs: Sequence[Streams] = (),
    ) -> Update:
        """Trains each client apart; the order of its examples comes from its stream, or is
        theirs where none is given."""
        if per_example:
            raise GradleakError(
                "fedavg sends one weight difference, not a gradient an example: use fedsgd, or"
                " client_dp."
            )
        if batches.lead[1] % self.clients:
            raise GradleakError(
                f"A batch of {batches.lead[1]} cannot be dealt out evenly among {self.clients}"
                " clients."
            )
        rows = [
            self._mean_difference(target, batches[place], rngs[place] if rngs else None)
            for place in range(batches.lead[0])
        ]
        return Update(stack_by_name(rows))

    def channel(self, examples: int) -> Channel:
        """Weights hold so many digits, and a step moves them by little more than the last: every
        step is rounded to that.

        The same examples move weights the same way again and are rounded alike, so that their
        errors add up.
        """
        taken = [
            tuple(sorted(places))
            for places in self._batches(max(1, examples // self.clients), None)
        ]
        roundings = sum(taken.count(places) ** 2 for places in set(taken)) / self.clients
        return Channel(weight_rounding=math.sqrt(roundings / 12))

    def rounding_bound(
        self, weights: Float[Tensor, "*shape"], update: Float[Tensor, "*shape"]
    ) -> float:
        """Half the distance to the next number for the new weight, and a digit of the step's own.

        The step is a product that is rounded before it is taken off. The difference is exact where
        weights are less than a factor of two apart (Sterbenz 1974), elsewhere it is rounded too.
        """
        new, own = measure_spacing(weights - update), measure_spacing(update)
        return float((new / 2 + own).norm())

    def is_one_gradient(self, examples: int) -> bool:
        """One local step of plain SGD over the whole batch is."""
        taken = [sorted(places) for places in self._batches(examples, None)]
        return self.optimiser == "sgd" and self.clients == 1 and taken == [list(range(examples))]

    def gradient_scale(self, examples: int) -> float:
        """Learning rate times steps: divided by it, an update of SGD is the mean gradient along
        the way."""
        return self.learning_rate * self.local_steps(examples)

    def local_steps(self, examples: int) -> int:
        return len(self._batches(max(1, examples // self.clients), None))

    def _mean_difference(
        self, target: Target, batch: Batch, rng: Streams | None
    ) -> dict[str, Tensor]:
        share = batch.lead[0] // self.clients
        parts = [batch[place * share : (place + 1) * share] for place in range(self.clients)]
        moved = [
            self._difference(target, part, None if rng is None else rng.child("client", place))
            for place, part in enumerate(parts)
        ]
        return {name: tensor.mean(0) for name, tensor in stack_by_name(moved).items()}

    def _difference(self, target: Target, batch: Batch, rng: Streams | None) -> dict[str, Tensor]:
        start = {name: value.detach() for name, value in target.parameters.items()}
        weights: Weights = start
        state, optimiser = OptimiserState(), OPTIMISERS[self.optimiser](self.learning_rate)
        for places in self._batches(batch.lead[0], rng):
            some = batch[torch.tensor(places, device=batch.mask.device)]
            slopes = differentiate_loss(target, some, weights, batch.asks_for_gradients)
            weights, state = optimiser.step(weights, slopes, state)
        return {name: value - weights[name] for name, value in start.items()}

    def _batches(self, examples: int, rng: Streams | None) -> list[list[int]]:
        """The examples of each local step."""
        size = self.local_batch_size or examples
        made: list[list[int]] = []
        steps_in_epoch = -(-examples // size)
        epochs = self.epochs if self.steps is None else -(-self.steps // steps_in_epoch)
        for epoch in range(epochs):
            order = list(range(examples))
            if rng is not None:
                order = torch.randperm(
                    examples, generator=rng.child("order", epoch).generator()
                ).tolist()
            made += [order[start : start + size] for start in range(0, examples, size)]
        return made[: self.steps]


@dataclass(frozen=True, eq=False)
class OptimiserState:
    """What an optimiser remembers between steps."""

    taken: int = 0
    first: Weights = field(default_factory=dict)
    second: Weights = field(default_factory=dict)


class LocalOptimiser(ABC):
    """One step: weights, their gradients and what is remembered, to new weights and what is
    remembered then."""

    @abstractmethod
    def step(
        self, weights: Weights, gradients: Weights, state: OptimiserState
    ) -> tuple[Weights, OptimiserState]:
        """The next weights; nothing is changed in place."""


@dataclass(frozen=True)
class Sgd(LocalOptimiser):
    """Gradient descent; with momentum as PyTorch has it (heavy ball, without dampening)."""

    learning_rate: float
    momentum: float = 0.0

    def step(
        self, weights: Weights, gradients: Weights, state: OptimiserState
    ) -> tuple[Weights, OptimiserState]:
        moving = {
            name: self.momentum * state.first[name] + slope if state.taken else slope
            for name, slope in gradients.items()
        }
        moved = {
            name: weight - self.learning_rate * moving[name] for name, weight in weights.items()
        }
        return moved, OptimiserState(state.taken + 1, moving)


@dataclass(frozen=True)
class Adam(LocalOptimiser):
    """Adam (Kingma & Ba 2015), with decoupled weight decay AdamW; numbers are PyTorch's
    defaults."""

    learning_rate: float
    weight_decay: float = 0.0
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8

    def step(
        self, weights: Weights, gradients: Weights, state: OptimiserState
    ) -> tuple[Weights, OptimiserState]:
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
        return moved, OptimiserState(taken, first, second)


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
