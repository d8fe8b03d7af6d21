"""LAMP: continuous steps and discrete rounds in turn, guided by a language model (Balunović et al., NeurIPS 2022)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from gradleak.attacks.energy.rematch import WordPolish
from gradleak.attacks.gradient_matching.attack import MatchingAttack
from gradleak.attacks.gradient_matching.discrete import DiscreteRounds
from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.gradient_matching.polish import Polish
from gradleak.attacks.gradient_matching.slips import NONE, RELEASED
from gradleak.attacks.gradient_matching.starts import TwoStep
from gradleak.attacks.search.descent import Adam, StepDecay
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.core.defense import Channel
from gradleak.core.ranges import Count, Rate
from gradleak.core.registry import register
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2

if TYPE_CHECKING:
    from gradleak.attacks.recipes.bert_large import LampBertLarge

Discrete = Literal["alternate", "at_end", "none"]
CITES = "Balunović et al., NeurIPS 2022"


def lamp_loop(recipe: "LampCos | LampL2L1", distance: Distance) -> MatchingLoop:
    """LAMP's parts, numbers of supplement D: 200 orders a round, every 75 steps after the first tenth; decay 0.89 each 50."""
    return MatchingLoop(
        distance=distance,
        start=TwoStep(recipe.starts),
        optimiser=Adam(recipe.learning_rate, StepDecay(recipe.decay, 50)),
        steps=recipe.steps,
        assumptions=Assumptions(recipe.labels, recipe.lengths, longest=recipe.longest),
        norm_weight=recipe.norm_weight,
        discrete=discrete_rounds(recipe, every=75),
        # The released code takes the embeddings of the lowest continuous loss, which throws late rounds away.
        answer_by_prior=None if recipe.faithful else recipe.prior_weight,
        slips=RELEASED if recipe.faithful else NONE,
    )


def discrete_rounds(recipe: "LampCos | LampL2L1 | LampBertLarge", every: int) -> DiscreteRounds | None:
    """When words are reordered: between the steps, only after them, or never (the last two are ablations of Table 4)."""
    rounds = DiscreteRounds(every, prior_weight=recipe.prior_weight, across=recipe.across)
    choices = {"alternate": rounds, "at_end": replace(rounds, rounds_at_end=recipe.steps // every), "none": None}
    return choices[recipe.discrete]


@register("attack", "lamp_cos")
@dataclass(frozen=True)
class LampCos(MatchingAttack):
    """LAMP with the cosine distance: the paper's best for single sentences."""

    cites = CITES

    steps: Count = 2000
    starts: Count = 500
    learning_rate: Rate = 0.01
    decay: float = 0.89  # every 50 steps
    prior_weight: float = 0.2
    norm_weight: float = 1.0
    distance: Literal["cosine", "l2"] = "cosine"  # l2 is the ablation of Table 4
    discrete: Discrete = "alternate"
    across: bool = False  # also try exchanges between the sentences of a batch
    faithful: bool = False  # as the released code, oversights included (gradient_matching/slips.py)
    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    def loop(self) -> MatchingLoop:
        return lamp_loop(self, Cosine() if self.distance == "cosine" else SquaredL2())


@register("attack", "lamp_l2l1")
@dataclass(frozen=True)
class LampL2L1(MatchingAttack):
    """LAMP with TAG's distance, whose size is that of the gradient: so are its weights, as shares of that size.

    The paper's are numbers for BERT-base: relative=false,prior_weight=60,norm_weight=25.
    """

    cites = CITES + "; weights relative to the gradient's size are ours"
    version = 2

    steps: Count = 2000
    starts: Count = 500
    learning_rate: Rate = 0.01
    decay: float = 0.89  # every 50 steps
    prior_weight: float = 0.2
    norm_weight: float = 1.0
    relative: bool = True  # both weights are shares of the distance of a guess without any gradient
    l1_weight: float = 0.01
    discrete: Discrete = "alternate"
    across: bool = False  # also try exchanges between the sentences of a batch
    faithful: bool = False  # as the released code, oversights included (gradient_matching/slips.py)
    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    def loop(self) -> MatchingLoop:
        return replace(lamp_loop(self, L2L1(self.l1_weight)), relative_weights=self.relative)

    def before(self, channel: Channel) -> Mapping[str, Any]:
        return {"relative": False}


@register("attack", "lamp_quick")
@dataclass(frozen=True)
class LampQuick(MatchingAttack):
    """`lamp_plus` with few steps and a short last search, to see a leak on a laptop in minutes. Never used for figures."""

    cites = CITES

    steps: Count = 300
    starts: Count = 50
    polish_rounds: int = 20
    labels: Source = "known"
    lengths: Source = "known"
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    def loop(self) -> MatchingLoop:
        base = LampCos(steps=self.steps, starts=self.starts, labels=self.labels, lengths=self.lengths).loop
        return replace(base, polish=Polish(rounds=self.polish_rounds, orders=80, substitutions=40))


@register("attack", "lamp_plus")
@dataclass(frozen=True)
class LampPlus(MatchingAttack):
    """LAMP with the cosine distance, a last search over whole words (moves, then word by word), a second try where it failed."""

    cites = CITES + "; the last search and the restarts are ours"

    steps: Count = 2000
    starts: Count = 500
    polish_rounds: int = 60
    polish_prior_weight: float = 0.02
    word_sweeps: int = 4  # of the last search, word by word; 0 leaves it out
    word_restarts: int = 4
    restarts: int = 1  # for sentences whose guess does not explain the update
    labels: Source = "known"
    lengths: Source = "known"
    longest: Count = 32
    adaptive: bool = True  # to a defense that is known; false: the naive attack
    unroll: bool = False  # of FedAvg: through every local step (slow), or as one averaged gradient

    @property
    def loop(self) -> MatchingLoop:
        base = LampCos(steps=self.steps, starts=self.starts, labels=self.labels, lengths=self.lengths, longest=self.longest).loop
        moves = Polish(rounds=self.polish_rounds, prior_weight=self.polish_prior_weight)
        polish = WordPolish(moves, self.word_sweeps, self.word_restarts) if self.word_sweeps else moves
        return replace(base, polish=polish, restarts=self.restarts)
