"""Several attacks in turn, the exact ones first; the next one gets what the ones before could not prove."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks import evidence
from gradleak.attacks.energy.attack import EnergyAttack
from gradleak.attacks.energy.judge import can_judge, labels_of
from gradleak.attacks.energy.matched import Matched
from gradleak.attacks.gradient_matching.hypotheses import Source
from gradleak.attacks.gradient_matching.problems import side_by_side
from gradleak.attacks.recipes.lamp import LampPlus
from gradleak.attacks.span.attack import Span
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction, Stage
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.registry import register


@register("attack", "portfolio")
@dataclass(frozen=True)
class Portfolio(Attack):
    """Span, then energy, then LAMP with a last search: each where no guess before it is proven. The default of an audit.

    Under noise, where nothing can be proven, a guess that matches all but the noise will do.
    """

    restarts: int = 8  # of energy
    steps: int = 2000  # of LAMP; 0 leaves it out
    starts: int = 500
    labels: Source = "known"  # for LAMP and for judging; span and energy need none
    lengths: Source = "known"
    adaptive: bool = True  # LAMP, and the distance by which guesses are judged, to a defense that is known

    @property
    def members(self) -> tuple[Attack, ...]:
        lamp = LampPlus(steps=self.steps, starts=self.starts, labels=self.labels, lengths=self.lengths, adaptive=self.adaptive)
        members = (Span(), EnergyAttack(restarts=self.restarts, lengths=self.lengths), lamp)
        return members if self.steps else members[:-1]

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset().union(*(member.requires for member in self.members))

    def adapts_to(self, channel: Channel) -> bool:
        return any(member.adapts_to(channel) for member in self.members)  # the nearest guess by LAMP's distance counts

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        """The proven guess of each observation, or of those that were made the one that matches best."""
        made: dict[int, list[tuple[str, Reconstruction]]] = {observation.index: [] for observation in observations}
        settled: set[int] = set()
        for number, member in enumerate(self.members):
            left = [one for one in observations if one.index not in settled]
            if not left or (number and bench.out_of_time):  # the first has a guess at least, however late
                break
            for observation, guess in zip(left, _attempted(member, left, bench), strict=True):
                if guess is None:
                    continue
                made[observation.index].append((member.name, in_order(guess, observation.knows.lengths)))
                if _settled(observation, made[observation.index][-1][1], bench):
                    settled.add(observation.index)
        return [self._chosen(observation, made[observation.index]) for observation in observations]

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"] | None:
        try:
            return LampPlus(labels=self.labels, lengths=self.lengths, adaptive=self.adaptive).objective(observations, batches)
        except GradleakError:  # nothing that is seen can be matched
            return None

    def _chosen(self, observation: Observation, made: Sequence[tuple[str, Reconstruction]]) -> Reconstruction:
        if not made:
            raise GradleakError("No attack of the portfolio applies to what is visible: see gradleak list attacks.")
        best = min(made, key=lambda one: self._distance(observation, one[1]))[1]
        stages = tuple(Stage(name, guess.sentences, guess.certified, guess.cost) for name, guess in made)
        cost = Cost(sum(stage.cost.seconds for stage in stages), sum(stage.cost.steps for stage in stages))
        return replace(best, cost=cost, stages=stages)

    def _distance(self, observation: Observation, guess: Reconstruction) -> float:
        """How far a guess is from what was seen; a proven one is nearest of all."""
        if guess.certified:
            return -1.0
        if observation.knows.lengths not in (None, tuple(map(len, guess.sentences))):
            return torch.inf
        labels = guess.labels or _labels(observation)
        fits = observation.target.labels_are_tokens or (labels is not None and len(labels) == len(guess.sentences))
        if not fits:
            return torch.inf
        batch = observation.target.batch_of(guess.sentences, labels)
        with torch.no_grad():
            found = self.objective([observation], [batch])
        return torch.inf if found is None else float(found[0])


def _settled(observation: Observation, guess: Reconstruction, bench: Bench) -> bool:
    """Whether a guess is proven, or nothing but noise is left of what was seen without it."""
    if guess.certified or not can_judge(observation):
        return guess.certified
    if observation.knows.lengths not in (None, tuple(map(len, guess.sentences))):
        return False
    batch = observation.target.batch_of(guess.sentences, labels_of(observation) or None)
    return bool(Matched([observation]).fits(side_by_side([batch]), bench))


def in_order(guess: Reconstruction, lengths: tuple[int, ...] | None) -> Reconstruction:
    """Its sentences in the order of the known lengths, which span does not look at; as they are where lengths do not fit."""
    left = list(guess.sentences)
    if lengths is None or sorted(map(len, left)) != sorted(lengths):
        return guess
    ordered = []
    for length in lengths:
        ordered.append(left.pop(next(place for place, sentence in enumerate(left) if len(sentence) == length)))
    return replace(guess, sentences=tuple(ordered))


def _labels(observation: Observation) -> tuple[int, ...] | None:
    """The labels as known, or as the update shows them."""
    if observation.knows.labels is not None:
        return tuple(observation.knows.labels.tolist())
    found = None if observation.target.labels_are_tokens else evidence.labels(observation)
    return None if found is None else found.values


def _attempted(member: Attack, observations: Sequence[Observation], bench: Bench) -> Sequence[Reconstruction | None]:
    """The member's guesses, or none where it does not apply to what is visible."""
    try:
        return member.reconstruct(observations, bench)
    except GradleakError:
        return [None] * len(observations)
