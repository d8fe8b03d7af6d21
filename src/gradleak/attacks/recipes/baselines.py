"""DLG and TAG, as LAMP's authors ran them; on language models as those of Learning to Invert did.

LAMP's supplement D has other numbers for BERT-large: AdamW, clipped, slower steps.
"""

from dataclasses import dataclass, field
from typing import Literal

from gradleak.attacks.gradient_matching.loop import MatchingAttack, MatchingLoop
from gradleak.attacks.gradient_matching.starts import FreeLabels, OneGaussian
from gradleak.attacks.recipes.lamp import CITES, make_adamw
from gradleak.attacks.search.descent import RowAdam
from gradleak.core.registry import Count, Rate, register
from gradleak.matching import L2L1, SquaredL2


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
