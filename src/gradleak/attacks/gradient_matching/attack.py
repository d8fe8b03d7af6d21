"""An attack that is nothing but a choice of parts for the loop."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.core.attack import ROUNDING, Attack, Bench, Reconstruction, Scale
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.observation import Fact, Observation
from gradleak.core.registry import Count
from gradleak.matching import distance_of_nothing


@dataclass(frozen=True, kw_only=True)
class MatchingAttack(Attack):
    """Holds what every recipe is given; a recipe picks the parts of its paper."""

    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    @abstractmethod
    def parts(self) -> MatchingLoop:
        """The parts and numbers of this attack."""

    @property
    def loop(self) -> MatchingLoop:
        """The parts, with what they are told of observations."""
        assumptions = Assumptions(self.labels, self.lengths, longest=self.longest)
        return replace(
            self.parts, assumptions=assumptions, adaptive=self.adaptive, unroll=self.unroll
        )

    @property
    def requires(self) -> frozenset[Fact]:
        return self.loop.assumptions.requires

    @property
    def passes(self) -> int:
        """One a step, or four where words are tried too.

        Orders of words, the start and a last search take about three times as many more.
        """
        loop = self.loop
        is_plain = loop.discrete is None and loop.polish is None
        return (1 + loop.restarts) * loop.steps * (1 if is_plain else 4)

    def adapts_to(self, channel: Channel) -> bool:
        return self.loop.adapts

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        return self.loop.reconstruct(observations, bench)

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"]:
        return self.loop.objective(observations, batches)

    def objective_scale(self, observation: Observation) -> Scale:
        """Returns the scale of differences of sums as large as a candidate's without gradient."""
        nothing = distance_of_nothing(observation, self.loop.distance)
        return Scale(rounding=ROUNDING * float(nothing))
