"""LAMP: continuous steps and discrete rounds in turn, guided by a language model.

Balunović et al., NeurIPS 2022; on some tensors of the update, down to a single weight matrix, Li,
Xu and Dras, EMNLP 2024.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from gradleak.attacks.gradient_matching.discrete import (
    MENDED,
    RELEASED,
    DiscreteRounds,
    Polish,
    WordPolish,
)
from gradleak.attacks.gradient_matching.loop import MatchingAttack, MatchingLoop
from gradleak.attacks.gradient_matching.starts import TwoStep
from gradleak.attacks.search.descent import Linear, RowAdam, StepDecay
from gradleak.attacks.search.word_search import SearchEffort
from gradleak.core.defense import Channel
from gradleak.core.registry import Count, Rate, register
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2

Discrete = Literal["alternate", "at_end", "none"]
CITES = "Balunović et al., NeurIPS 2022"


class LampAttack(MatchingAttack):
    """Puts LAMP's parts together; its recipes have these fields, with their papers' numbers."""

    steps: int
    starts: int
    prior_weight: float
    norm_weight: float
    discrete: Discrete
    across: bool
    faithful: bool

    def assemble(
        self, distance: Distance, optimiser: RowAdam, every: int, relative_weights: bool = False
    ) -> MatchingLoop:
        """Returns a loop with rounds of 200 orders every so many steps after the first tenth."""
        rounds = DiscreteRounds(every, prior_weight=self.prior_weight, across=self.across)
        choices = {  # the last two are ablations of Table 4
            "alternate": rounds,
            "at_end": replace(rounds, rounds_at_end=self.steps // every),
            "none": None,
        }
        return MatchingLoop(
            distance,
            TwoStep(self.starts),
            optimiser,
            self.steps,
            norm_weight=self.norm_weight,
            discrete=choices[self.discrete],
            # The released code takes the embeddings of the lowest continuous loss, which throws
            # late rounds away.
            answer_by_prior=None if self.faithful else self.prior_weight,
            relative_weights=relative_weights,
            slips=RELEASED if self.faithful else MENDED,
        )


def make_adamw(learning_rate: float, clip_norm: float) -> RowAdam:
    """Returns AdamW as transformers had it, falling linearly over 10,000 steps."""
    return RowAdam(learning_rate, Linear(10_000), clip_norm, epsilon=1e-6, weight_decay=0.01)


@dataclass(frozen=True)
class LampWithAdam(LampAttack):
    """Abstract: begins with the numbers of supplement D; a recipe adds its own."""

    steps: Count = 2000
    starts: Count = 500
    learning_rate: Rate = 0.01
    decay: float = 0.89  # every 50 steps
    prior_weight: float = 0.2
    norm_weight: float = 1.0

    @property
    def optimiser(self) -> RowAdam:
        """That of supplement D, whose rate decays every 50 steps."""
        return RowAdam(self.learning_rate, StepDecay(self.decay, every=50))


@register("attack", "lamp_cos")
@dataclass(frozen=True)
class LampCos(LampWithAdam):
    """LAMP with the cosine distance: the paper's best for single sentences."""

    cites = CITES

    distance: Literal["cosine", "l2"] = "cosine"  # l2 is the ablation of Table 4
    discrete: Discrete = "alternate"
    across: bool = False  # also try exchanges between the sentences of a batch
    faithful: bool = False  # as the released code, oversights included (discrete.Slips)

    @property
    def parts(self) -> MatchingLoop:
        distance = Cosine() if self.distance == "cosine" else SquaredL2()
        return self.assemble(distance, self.optimiser, every=75)


@register("attack", "lamp_l2l1")
@dataclass(frozen=True)
class LampL2L1(LampWithAdam):
    """LAMP with TAG's distance; its weights are shares of that distance's size.

    That size is the gradient's, which differs from model to model. The paper's are numbers for
    BERT-base: relative=false,prior_weight=60,norm_weight=25.
    """

    cites = CITES + "; weights relative to the gradient's size are ours"
    version = 2

    relative: bool = True  # both weights are shares of the distance of a guess without any gradient
    l1_weight: float = 0.01
    discrete: Discrete = "alternate"
    across: bool = False  # also try exchanges between the sentences of a batch
    faithful: bool = False  # as the released code, oversights included (discrete.Slips)

    @property
    def parts(self) -> MatchingLoop:
        distance = L2L1(self.l1_weight)
        return self.assemble(distance, self.optimiser, every=75, relative_weights=self.relative)

    def before(self, channel: Channel) -> Mapping[str, Any]:
        return {"relative": False}


@register("attack", "lamp_quick")
@dataclass(frozen=True)
class LampQuick(MatchingAttack):
    """`lamp_plus` with few steps and a short last search, to see a leak on a laptop in minutes.

    It is never used for figures.
    """

    cites = CITES
    added_later: ClassVar[frozenset[str]] = frozenset({"longest"})

    steps: Count = 300
    starts: Count = 50
    polish_rounds: int = 20

    @property
    def parts(self) -> MatchingLoop:
        return replace(
            LampCos(steps=self.steps, starts=self.starts).parts,
            polish=Polish(self.polish_rounds, orders=80, substitutions=40),
        )


@register("attack", "lamp_plus")
@dataclass(frozen=True)
class LampPlus(MatchingAttack):
    """LAMP with the cosine distance, a last search over whole words, and a second try.

    The last search moves words, then tries others word by word. The second try is for sentences
    where the first failed.
    """

    cites = CITES + "; the last search and the restarts are ours"

    steps: Count = 2000
    starts: Count = 500
    polish_rounds: int = 60
    polish_prior_weight: float = 0.02
    word_sweeps: int = 4  # of the last search, word by word; 0 leaves it out
    word_restarts: int = 4
    restarts: int = 1  # for sentences whose guess does not explain the update

    @property
    def parts(self) -> MatchingLoop:
        base = LampCos(steps=self.steps, starts=self.starts).parts
        moves = Polish(rounds=self.polish_rounds, prior_weight=self.polish_prior_weight)
        effort = SearchEffort(sweeps=self.word_sweeps, restarts=self.word_restarts)
        return replace(
            base,
            polish=WordPolish(moves, effort) if self.word_sweeps else moves,
            restarts=self.restarts,
        )


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


@register("attack", "partial_gradients")
@dataclass(frozen=True)
class PartialGradients(LampWithAdam):
    """LAMP's cosine search over whatever tensors the view shows, each with the same weight.

    Choose them by view=parts.
    """

    # Where this is not the paper, or not its released code:
    # - The paper sums the distances (equation 1), we take their mean (its equation 4, and LAMP).
    #   For a single matrix these are the same; for n of them a sum would make the weights of prior
    #   and length penalty n times smaller.
    # - Which tensors are matched is the view's choice and not the attack's: the server has no
    #   others. Views name modules exactly; the released selector for "FFN output" takes the
    #   attention's output too.
    # - The mends of LAMP's released code (discrete.Slips) are in; faithful=true takes them out.
    # - The paper attacks BERT-large too, with what it calls LAMP's settings: those are
    #   lamp_bert_large, under any view.
    # - Its defended gradients were read before they were clipped and noised; ours are those that
    #   leave the client.

    cites = "Li, Xu and Dras, EMNLP 2024; settings of LAMP, supplement D"

    discrete: Discrete = "alternate"
    across: bool = False  # also try exchanges between the sentences of a batch
    faithful: bool = False

    @property
    def parts(self) -> MatchingLoop:
        return self.assemble(Cosine(), self.optimiser, every=75)
