"""DLG, as LAMP's authors ran it as their baseline."""

from dataclasses import dataclass

from gradleak.attacks.gradient_matching.attack import MatchingAttack
from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.gradient_matching.starts import OneGaussian
from gradleak.attacks.search.descent import Adam
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.core.ranges import Count, Rate
from gradleak.core.registry import register
from gradleak.matching import SquaredL2


@register("attack", "dlg")
@dataclass(frozen=True)
class Dlg(MatchingAttack):
    """Matches gradients in squared L2 distance (DLG, with labels given)."""

    cites = "Zhu et al., NeurIPS 2019; settings of LAMP, supplement D"

    steps: Count = 2500
    learning_rate: Rate = 0.1  # no decay
    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    def loop(self) -> MatchingLoop:
        return MatchingLoop(
            distance=SquaredL2(),
            start=OneGaussian(),
            optimiser=Adam(self.learning_rate),
            steps=self.steps,
            assumptions=Assumptions(self.labels, self.lengths, longest=self.longest),
        )
