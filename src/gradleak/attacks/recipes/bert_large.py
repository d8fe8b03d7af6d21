"""LAMP and its baselines for BERT-large (LAMP, supplement D): AdamW, clipped, slower steps."""

from dataclasses import dataclass
from typing import Literal

from gradleak.attacks.gradient_matching.attack import MatchingAttack
from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.gradient_matching.starts import OneGaussian
from gradleak.attacks.recipes.lamp import CITES, Discrete, LampAttack
from gradleak.attacks.search.descent import Linear, RowAdam
from gradleak.core.registry import Count, Rate, register
from gradleak.matching import L2L1, Cosine, SquaredL2


def make_adamw(learning_rate: float, clip_norm: float) -> RowAdam:
    """Returns AdamW as transformers had it, falling linearly over 10,000 steps."""
    schedule = Linear(10_000)
    return RowAdam(learning_rate, schedule, clip_norm, epsilon=1e-6, weight_decay=0.01)


@register("attack", "lamp_bert_large")
@dataclass(frozen=True)
class LampBertLarge(LampAttack):
    """LAMP as run on BERT-large.

    With loss=l2l1 its weights are shares of the gradient's size, as those of `lamp_l2l1`.
    """

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

    @property
    def parts(self) -> MatchingLoop:
        is_relative = self.loss == "l2l1"
        optimiser = make_adamw(self.learning_rate, clip_norm=0.5)
        return self.assemble(L2L1() if is_relative else Cosine(), optimiser, 200, is_relative)


@register("attack", "tag_bert_large")
@dataclass(frozen=True)
class TagBertLarge(MatchingAttack):
    """TAG as run on BERT-large."""

    cites = CITES + ", supplement D"

    steps: Count = 10_000
    learning_rate: Rate = 0.01  # the paper's; the released code has 0.03
    l1_weight: float = 0.01

    @property
    def parts(self) -> MatchingLoop:
        optimiser = make_adamw(self.learning_rate, clip_norm=1.0)
        return MatchingLoop(L2L1(self.l1_weight), OneGaussian(), optimiser, self.steps)


@register("attack", "dlg_bert_large")
@dataclass(frozen=True)
class DlgBertLarge(MatchingAttack):
    """DLG as run on BERT-large."""

    cites = CITES + ", supplement D"

    steps: Count = 10_000
    learning_rate: Rate = 0.1

    @property
    def parts(self) -> MatchingLoop:
        optimiser = make_adamw(self.learning_rate, clip_norm=1.0)
        return MatchingLoop(SquaredL2(), OneGaussian(), optimiser, self.steps)
