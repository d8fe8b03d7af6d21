"""An attack that is nothing but a choice of parts for the loop."""

from abc import abstractmethod
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.batch import Batch
from gradleak.core.observation import Fact, Observation


class MatchingAttack(Attack):
    """A recipe gives the loop; everything else follows from it."""

    @property
    @abstractmethod
    def loop(self) -> MatchingLoop:
        """The parts and numbers of this attack."""

    @property
    def requires(self) -> frozenset[Fact]:
        return self.loop.requires

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        return self.loop.reconstruct(observations, bench)

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"]:
        return self.loop.objective(observations, batches)
