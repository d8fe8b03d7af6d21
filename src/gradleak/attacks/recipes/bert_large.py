"""LAMP and its baselines with the settings for BERT-large (LAMP, supplement D): AdamW, clipped, more and slower steps."""

from dataclasses import dataclass
from typing import Literal

from gradleak.attacks.gradient_matching.attack import MatchingAttack
from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.gradient_matching.slips import NONE, RELEASED
from gradleak.attacks.gradient_matching.starts import OneGaussian, TwoStep
from gradleak.attacks.recipes.lamp import CITES, Discrete, discrete_rounds
from gradleak.attacks.search.descent import Adam, Linear
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.core.ranges import Count, Rate
from gradleak.core.registry import register
from gradleak.matching import L2L1, Cosine, SquaredL2


def optimiser(learning_rate: float, clip_norm: float) -> Adam:
    """AdamW as transformers had it, falling linearly over 10,000 steps."""
    return Adam(learning_rate, Linear(10_000), clip_norm, epsilon=1e-6, weight_decay=0.01)


@register("attack", "lamp_bert_large")
@dataclass(frozen=True)
class LampBertLarge(MatchingAttack):
    """LAMP as run on BERT-large; with loss=l2l1 its weights are shares of the gradient's size, as those of `lamp_l2l1`."""

    cites = CITES + ", supplement D"
    version = 2

    loss: Literal["cosine", "l2l1"] = "cosine"
    steps: Count = 5000
    starts: Count = 500
    learning_rate: Rate = 0.01
    prior_weight: float = 0.2
    norm_weight: float = 1.0
    discrete: Discrete = "alternate"
    across: bool = False
    faithful: bool = False
    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    def loop(self) -> MatchingLoop:
        return MatchingLoop(
            distance=Cosine() if self.loss == "cosine" else L2L1(),
            start=TwoStep(self.starts),
            optimiser=optimiser(self.learning_rate, clip_norm=0.5),
            steps=self.steps,
            assumptions=Assumptions(self.labels, self.lengths, longest=self.longest),
            norm_weight=self.norm_weight,
            discrete=discrete_rounds(self, every=200),
            answer_by_prior=None if self.faithful else self.prior_weight,
            relative_weights=self.loss == "l2l1",
            slips=RELEASED if self.faithful else NONE,
        )


@register("attack", "tag_bert_large")
@dataclass(frozen=True)
class TagBertLarge(MatchingAttack):
    """TAG as run on BERT-large."""

    cites = CITES + ", supplement D"

    steps: Count = 10_000
    learning_rate: Rate = 0.01  # the paper's; the released code has 0.03
    l1_weight: float = 0.01
    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    def loop(self) -> MatchingLoop:
        return MatchingLoop(
            distance=L2L1(self.l1_weight),
            start=OneGaussian(),
            optimiser=optimiser(self.learning_rate, clip_norm=1.0),
            steps=self.steps,
            assumptions=Assumptions(self.labels, self.lengths, longest=self.longest),
        )


@register("attack", "dlg_bert_large")
@dataclass(frozen=True)
class DlgBertLarge(MatchingAttack):
    """DLG as run on BERT-large."""

    cites = CITES + ", supplement D"

    steps: Count = 10_000
    learning_rate: Rate = 0.1
    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    def loop(self) -> MatchingLoop:
        return MatchingLoop(
            distance=SquaredL2(),
            start=OneGaussian(),
            optimiser=optimiser(self.learning_rate, clip_norm=1.0),
            steps=self.steps,
            assumptions=Assumptions(self.labels, self.lengths, longest=self.longest),
        )
