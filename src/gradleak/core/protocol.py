"""How a private batch becomes what a client sends."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch
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

    def rounding_std(self, weights: Float[Tensor, "*shape"], examples: int) -> float:
        """The standard deviation that rounding to the weights' own digits leaves on the entries
        that are sent."""
        return 0.0

    def rounding_bound(self, weights: Float[Tensor, "*shape"]) -> float:
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
