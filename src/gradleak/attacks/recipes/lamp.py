"""LAMP: continuous steps and discrete rounds in turn, guided by a language model (Balunović et al., NeurIPS 2022)."""

from dataclasses import dataclass, replace
from typing import Literal

from gradleak.attacks.gradient_matching.attack import MatchingAttack
from gradleak.attacks.gradient_matching.descent import Adam, StepDecay
from gradleak.attacks.gradient_matching.discrete import DiscreteRounds
from gradleak.attacks.gradient_matching.hypotheses import Assumptions, Source
from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.gradient_matching.polish import Polish
from gradleak.attacks.gradient_matching.starts import TwoStep
from gradleak.core.registry import register
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2

Discrete = Literal["alternate", "at_end", "none"]
CITES = "Balunović et al., NeurIPS 2022"


def lamp_loop(recipe: "LampCos | LampL2L1", distance: Distance) -> MatchingLoop:
    """LAMP's parts, numbers of supplement D: 200 orders a round, every 75 steps after the first tenth; decay 0.89 each 50."""
    every = 75
    rounds = {
        "alternate": DiscreteRounds(every, prior_weight=recipe.prior_weight),
        "at_end": DiscreteRounds(every, prior_weight=recipe.prior_weight, rounds_at_end=recipe.steps // every),
        "none": None,
    }
    return MatchingLoop(
        distance=distance,
        start=TwoStep(recipe.starts),
        optimiser=Adam(recipe.learning_rate, StepDecay(0.89, 50)),
        steps=recipe.steps,
        assumptions=Assumptions(recipe.labels, recipe.lengths, longest=recipe.longest),
        norm_weight=recipe.norm_weight,
        discrete=rounds[recipe.discrete],
        # The released code takes the embeddings of the lowest continuous loss, which throws late rounds away.
        answer_by_prior=recipe.prior_weight,
    )


@register("attack", "lamp_cos")
@dataclass(frozen=True)
class LampCos(MatchingAttack):
    """LAMP with the cosine distance: the paper's best for single sentences."""

    cites = CITES

    steps: int = 2000
    starts: int = 500
    learning_rate: float = 0.01
    prior_weight: float = 0.2
    norm_weight: float = 1.0
    distance: Literal["cosine", "l2"] = "cosine"  # l2 is the ablation of Table 4
    discrete: Discrete = "alternate"
    labels: Source = "known"
    lengths: Source = "known"
    longest: int = 32  # tokens, when lengths are enumerated

    @property
    def loop(self) -> MatchingLoop:
        return lamp_loop(self, Cosine() if self.distance == "cosine" else SquaredL2())


@register("attack", "lamp_l2l1")
@dataclass(frozen=True)
class LampL2L1(MatchingAttack):
    """LAMP with TAG's distance, whose scale asks for larger weights."""

    cites = CITES

    steps: int = 2000
    starts: int = 500
    learning_rate: float = 0.01
    prior_weight: float = 60.0
    norm_weight: float = 25.0
    l1_weight: float = 0.01
    discrete: Discrete = "alternate"
    labels: Source = "known"
    lengths: Source = "known"
    longest: int = 32

    @property
    def loop(self) -> MatchingLoop:
        return lamp_loop(self, L2L1(self.l1_weight))


@register("attack", "lamp_quick")
@dataclass(frozen=True)
class LampQuick(MatchingAttack):
    """`lamp_plus` with few steps and a short last search, to see a leak on a laptop in minutes. Never used for figures."""

    cites = CITES

    steps: int = 300
    starts: int = 50
    polish_rounds: int = 20
    labels: Source = "known"
    lengths: Source = "known"

    @property
    def loop(self) -> MatchingLoop:
        base = LampCos(steps=self.steps, starts=self.starts, labels=self.labels, lengths=self.lengths).loop
        return replace(base, polish=Polish(rounds=self.polish_rounds, orders=80, substitutions=40))


@register("attack", "lamp_plus")
@dataclass(frozen=True)
class LampPlus(MatchingAttack):
    """LAMP with the cosine distance, and a last search over whole words: chained moves and exchanges judged by the distance."""

    cites = CITES + "; the last search is ours"

    steps: int = 2000
    starts: int = 500
    polish_rounds: int = 60
    polish_prior_weight: float = 0.02
    labels: Source = "known"
    lengths: Source = "known"
    longest: int = 32

    @property
    def loop(self) -> MatchingLoop:
        base = LampCos(steps=self.steps, starts=self.starts, labels=self.labels, lengths=self.lengths, longest=self.longest).loop
        return replace(base, polish=Polish(rounds=self.polish_rounds, prior_weight=self.polish_prior_weight))
