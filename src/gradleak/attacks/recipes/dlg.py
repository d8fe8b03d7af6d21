"""DLG, as LAMP's authors ran it as their baseline."""

from dataclasses import dataclass

from gradleak.attacks.gradient_matching.attack import MatchingAttack
from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.gradient_matching.starts import OneGaussian
from gradleak.attacks.search.descent import RowAdam
from gradleak.core.registry import Count, Rate, register
from gradleak.matching import SquaredL2


@register("attack", "dlg")
@dataclass(frozen=True)
class Dlg(MatchingAttack):
    """Matches gradients in squared L2 distance (DLG, with labels given)."""

    cites = "Zhu et al., NeurIPS 2019; settings of LAMP, supplement D"

    steps: Count = 2500
    learning_rate: Rate = 0.1  # no decay

    @property
    def parts(self) -> MatchingLoop:
        return MatchingLoop(SquaredL2(), OneGaussian(), RowAdam(self.learning_rate), self.steps)
