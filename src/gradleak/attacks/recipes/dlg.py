"""DLG, as LAMP's authors ran it as their baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.gradient_matching.descent import Adam
from gradleak.attacks.gradient_matching.hypotheses import Assumptions, Source
from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.gradient_matching.starts import OneGaussian
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.batch import Batch
from gradleak.core.observation import Fact, Observation
from gradleak.core.registry import register
from gradleak.matching import SquaredL2


@register("attack", "dlg")
@dataclass(frozen=True)
class Dlg(Attack):
    """Matches gradients in squared L2 distance (DLG, with labels given)."""

    cites = "Zhu et al., NeurIPS 2019; settings of LAMP, supplement D"

    steps: int = 2500
    learning_rate: float = 0.1  # no decay
    labels: Source = "known"
    lengths: Source = "known"
    longest: int = 32  # tokens, when lengths are enumerated

    @property
    def loop(self) -> MatchingLoop:
        return MatchingLoop(
            distance=SquaredL2(),
            start=OneGaussian(),
            optimiser=Adam(self.learning_rate),
            steps=self.steps,
            assumptions=Assumptions(self.labels, self.lengths, longest=self.longest),
        )

    @property
    def requires(self) -> frozenset[Fact]:
        return self.loop.requires

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        return self.loop.reconstruct(observations, bench)

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"]:
        return self.loop.objective(observations, batches)
