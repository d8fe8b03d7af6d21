"""TAG, as LAMP's authors ran it; on a language model as Learning to Invert's did."""

from dataclasses import dataclass, field
from typing import Literal

from gradleak.attacks.gradient_matching.attack import MatchingAttack
from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.gradient_matching.starts import FreeLabels, OneGaussian
from gradleak.attacks.search.descent import RowAdam
from gradleak.core.registry import Count, Rate, register
from gradleak.matching import L2L1


@register("attack", "tag")
@dataclass(frozen=True)
class Tag(MatchingAttack):
    """Matches gradients in squared L2 plus weighted L1 distance (TAG)."""

    cites = (
        "Deng et al., Findings of EMNLP 2021; settings of LAMP, supplement D; on language models of"
        " Wu et al., UAI 2023"
    )

    steps: Count = 2500
    learning_rate: Rate = 0.1  # no decay
    l1_weight: float = 0.01
    # Of a language model only: labels with logits of their own, or those of the words that the
    # embeddings are nearest to.
    token_labels: Literal["free", "tied"] = field(default="free", kw_only=True)
    # Where labels are free, instead of learning_rate: after a warm-up, falling to zero.
    free_learning_rate: Rate = field(default=0.05, kw_only=True)

    @property
    def parts(self) -> MatchingLoop:
        free = FreeLabels.as_released(self.steps, self.free_learning_rate)
        return MatchingLoop(
            L2L1(self.l1_weight),
            OneGaussian(),
            RowAdam(self.learning_rate),
            self.steps,
            free_labels=free if self.token_labels == "free" else None,
        )
