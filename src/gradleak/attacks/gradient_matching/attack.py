"""An attack that is nothing but a choice of parts for the loop."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.core.attack import ROUNDING, Attack, Bench, Reconstruction, Scale
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.observation import Fact, Observation
from gradleak.matching import distance_of_nothing


class MatchingAttack(Attack):
    """A recipe gives the loop; everything else follows from it."""

    # Fields of every recipe:
    adaptive: bool  # whether it adapts to a defense that is known
    unroll: bool  # whether it goes through every local step of FedAvg, slowly, or takes the update for one averaged gradient

    @property
    @abstractmethod
    def loop(self) -> MatchingLoop:
        """The parts and numbers of this attack."""

    @property
    def requires(self) -> frozenset[Fact]:
        return self.loop.requires

    @property
    def passes(self) -> int:
        """One a step; orders of words that are tried, the start and a last search take about three times as many more."""
        plain = self.loop.discrete is None and self.loop.polish is None
        return (1 + self.loop.restarts) * self.loop.steps * (1 if plain else 4)

    def adapts_to(self, channel: Channel) -> bool:
        return self._loop.adapts

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        return self._loop.reconstruct(observations, bench)

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"]:
        return self._loop.objective(observations, batches)

    def objective_scale(self, observation: Observation) -> Scale:
        """Distances are differences of sums as large as the distance of a candidate without gradient."""
        return Scale(rounding=ROUNDING * float(distance_of_nothing(observation, self._loop.distance)))

    @property
    def _loop(self) -> MatchingLoop:
        return replace(self.loop, adaptive=self.adaptive, unroll=self.unroll)
