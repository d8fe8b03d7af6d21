"""How a private batch becomes what a client sends."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.registry import Component
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update


class Protocol(Component, ABC):
    """The client's computation, written once; attackers run the same code through
    `observation.simulate`."""

    # The update is one gradient of the mean loss, so that the factored engine applies
    one_gradient: bool
    # Clients train with dropout on: their gradient depends on masks that only they have
    dropout: bool = False

    @property
    def sizes_lost(self) -> bool:
        """Whether entries keep little but their sign, as in a step of Adam, which divides each
        by its own size."""
        return False

    def channel(self, examples: int) -> Channel:
        """What the protocol by itself does to the information in an update of so many examples."""
        return Channel()

    def rounding_bound(
        self, weights: Float[Tensor, "*shape"], update: Float[Tensor, "*shape"]
    ) -> float:
        """The largest norm of what rounding to the weights' own digits can leave on one step's
        difference of weights."""
        return 0.0

    def is_one_gradient(self, examples: int) -> bool:
        """Whether an update of so many examples is one gradient of the mean loss, times
        `gradient_scale`, but for rounding."""
        return self.one_gradient

    @abstractmethod
    def update(
        self,
        target: Target,
        batches: Batch,
        per_example: bool = False,
        rngs: Sequence[Streams] = (),
    ) -> Update:
        """The update of each client, from batches [clients, examples, …]; differentiable in
        embeddings that ask for gradients.

        Clients draw from their streams, one each. Without streams nothing is drawn: dropout is off,
        as an attacker computes.
        """

    def local_steps(self, examples: int) -> int:
        """How many gradients are taken one after the other for an update of so many examples."""
        return 1

    def gradient_scale(self, examples: int) -> float:
        """What to divide an update of so many examples by to have the size of a gradient."""
        return 1.0


def differentiate_loss(
    target: Target, batch: Batch, weights: Mapping[str, Tensor], keep_graph: bool
) -> dict[str, Tensor]:
    """The gradient of a batch's mean loss at some weights; zero for those that it does not reach.

    With `keep_graph` it is a function of the batch and of what the weights came from. The target's
    own parameters never ask for gradients, and never keep a `.grad`.
    """
    leaves = weights if keep_graph else {name: value.detach() for name, value in weights.items()}
    leaves = {
        name: value if value.requires_grad else value.requires_grad_()
        for name, value in leaves.items()
    }
    with torch.enable_grad():
        loss = target.losses(batch, leaves).mean()
        found = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=keep_graph, materialize_grads=True
        )
    return dict(zip(leaves, found, strict=True))
