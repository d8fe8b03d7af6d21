"""FedAvg: a client trains for some steps of its own and sends by how much its weights moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.protocol import Protocol
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.protocols.local_optimisers import OPTIMISERS, State, Weights


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
        counts = {
            "epochs": self.epochs,
            "steps": self.steps,
            "local_batch_size": self.local_batch_size,
            "clients": self.clients,
        }
        for name, count in counts.items():
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
            self._summed(target, batches[place], rngs[place] if rngs else None)
            for place in range(batches.lead[0])
        ]
        return Update({name: torch.stack([row[name] for row in rows]) for name in rows[0]})

    def rounding_std(self, weights: Float[Tensor, "*shape"], examples: int) -> float:
        """Weights hold so many digits, and a step moves them by little more than the last: every
        step is rounded to that.

        The same examples move weights the same way again and are rounded alike, so that their
        errors add up.
        """
        spacing = (
            torch.finfo(weights.dtype).eps
            * weights.detach().double().abs().clamp_min(1e-30).log2().floor().exp2()
        )
        taken = [
            tuple(sorted(places))
            for places in self._batches(max(1, examples // self.clients), None)
        ]
        roundings = sum(taken.count(places) ** 2 for places in set(taken)) / self.clients
        return float((spacing.square().mean() / 12 * roundings).sqrt())

    def rounding_bound(self, weights: Float[Tensor, "*shape"]) -> float:
        """Half the distance to the next number for the new weight, and as much again for the
        difference taken of it."""
        largest = weights.detach().double().abs().clamp_min(1e-30)
        spacing = torch.finfo(weights.dtype).eps * largest.log2().floor().exp2()
        return float(spacing.norm())

    def is_one_gradient(self, examples: int) -> bool:
        """One local step of plain SGD over the whole batch is."""
        if self.optimiser != "sgd" or self.clients > 1:
            return False
        return [sorted(places) for places in self._batches(examples, None)] == [
            list(range(examples))
        ]

    def gradient_scale(self, examples: int) -> float:
        """Learning rate times steps: divided by it, an update of SGD is the mean gradient along
        the way."""
        return self.learning_rate * self.local_steps(examples)

    def local_steps(self, examples: int) -> int:
        return len(self._batches(max(1, examples // self.clients), None))

    def _summed(self, target: Target, batch: Batch, rng: Streams | None) -> dict[str, Tensor]:
        share = batch.lead[0] // self.clients
        parts = [batch[place * share : (place + 1) * share] for place in range(self.clients)]
        moved = [
            self._difference(target, part, None if rng is None else rng.child("client", place))
            for place, part in enumerate(parts)
        ]
        return {name: torch.stack([one[name] for one in moved]).mean(0) for name in moved[0]}

    def _difference(self, target: Target, batch: Batch, rng: Streams | None) -> dict[str, Tensor]:
        wanted = batch.asks_for_gradients
        start = {name: value.detach() for name, value in target.parameters.items()}
        weights: Weights = start
        state, optimiser = State(), OPTIMISERS[self.optimiser](self.learning_rate)
        for places in self._batches(batch.lead[0], rng):
            weights, state = optimiser.step(
                weights,
                _gradient(
                    target, batch[torch.tensor(places, device=batch.mask.device)], weights, wanted
                ),
                state,
            )
        return {name: value - weights[name] for name, value in start.items()}

    def _batches(self, examples: int, rng: Streams | None) -> list[list[int]]:
        """The examples of each local step."""
        size = self.local_batch_size or examples
        made: list[list[int]] = []
        epoch = 0
        while epoch < self.epochs if self.steps is None else len(made) < self.steps:
            order = list(range(examples))
            if rng is not None:
                order = torch.randperm(
                    examples, generator=rng.child("order", epoch).generator()
                ).tolist()
            made += [order[start : start + size] for start in range(0, examples, size)]
            epoch += 1
        return made if self.steps is None else made[: self.steps]


def _gradient(target: Target, batch: Batch, weights: Weights, wanted: bool) -> dict[str, Tensor]:
    """The gradient of the mean loss at these weights; `wanted`: as a function of the batch and
    of the steps before."""
    leaves = weights if wanted else {name: weight.detach() for name, weight in weights.items()}
    leaves = {
        name: weight if weight.requires_grad else weight.requires_grad_()
        for name, weight in leaves.items()
    }
    with torch.enable_grad():
        loss = target.losses(batch, leaves).mean()
        found = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=wanted, materialize_grads=True
        )
    return dict(zip(leaves, found, strict=True))
