"""TAG, as LAMP's authors ran it as their baseline; on a language model as Learning to Invert's did."""

from dataclasses import dataclass
from typing import Literal

from gradleak.attacks.gradient_matching.attack import MatchingAttack
from gradleak.attacks.gradient_matching.free_labels import FreeLabels
from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.gradient_matching.starts import OneGaussian
from gradleak.attacks.search.descent import Adam
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.core.ranges import Count, Rate
from gradleak.core.registry import register
from gradleak.matching import L2L1


@register("attack", "tag")
@dataclass(frozen=True)
class Tag(MatchingAttack):
    """Matches gradients in squared L2 plus weighted L1 distance (TAG)."""

    cites = "Deng et al., Findings of EMNLP 2021; settings of LAMP, supplement D; on language models of Wu et al., UAI 2023"

    steps: Count = 2500
    learning_rate: Rate = 0.1  # no decay
    l1_weight: float = 0.01
    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient
    # Of a language model only: labels with logits of their own, or those of the words that the embeddings are nearest to.
    token_labels: Literal["free", "tied"] = "free"
    free_learning_rate: Rate = 0.05  # where labels are free, instead of learning_rate: after a warm-up, falling to zero

    @property
    def loop(self) -> MatchingLoop:
        return MatchingLoop(
            distance=L2L1(self.l1_weight),
            start=OneGaussian(),
            optimiser=Adam(self.learning_rate),
            steps=self.steps,
            assumptions=Assumptions(self.labels, self.lengths, longest=self.longest),
            free_labels=FreeLabels.of(self.steps, self.free_learning_rate) if self.token_labels == "free" else None,
        )
