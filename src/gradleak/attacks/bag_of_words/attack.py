"""The words are read off the word embeddings' gradient; only their order, and which occur twice, is searched."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks import evidence
from gradleak.attacks.bag_of_words.climb import Climb, Settings
from gradleak.attacks.bag_of_words.pairings import paired
from gradleak.attacks.search.hypotheses import Assumptions, Source
from gradleak.attacks.search.passes import distances_of
from gradleak.attacks.search.rows import lay_out, problems_of, side_by_side
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.ranges import Count
from gradleak.core.registry import register
from gradleak.matching import Cosine, for_observations


@register("attack", "bag_of_words")
@dataclass(frozen=True)
class BagOfWords(Attack):
    """Puts the words, known from the word embeddings' gradient, in the order that fits gradients and language best.

    Nothing is called certified: a batch with two words exchanged may fit nearly as well.
    """

    cites = "Gupta et al., NeurIPS 2022, for words from embeddings and their order by a prior; the search is ours"

    steps: Count = 150  # rounds, each of which takes the best of all moves tried
    orders: Count = 200  # word orders tried for each sentence in a round
    repeats: int = 100  # exchanges of a word that is there twice for another of the bag, in a round
    beams: Count = 8  # of the search for the prior's order, with which it begins
    prior_weight: float = 0.002  # 0.02, as in lamp_plus, repeats likely words where others belong (tiny: 1 of 4 exact, not 3)
    labels: Source = "derived"
    lengths: Source = "known"
    longest: Count = 32  # tokens, when lengths are enumerated

    @property
    def assumptions(self) -> Assumptions:
        return Assumptions(self.labels, self.lengths, longest=self.longest)

    @property
    def settings(self) -> Settings:
        return Settings(self.steps, self.orders, self.repeats, self.beams, self.prior_weight)

    @property
    def requires(self) -> frozenset[Fact]:
        return self.assumptions.requires

    def adapts_to(self, channel: Channel) -> bool:
        return channel.every_entry

    def reconstruct(self, observations: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        began = time.monotonic()
        bags = {observation.index: bag_of(observation) for observation in observations}
        found: dict[int, list[Reconstruction]] = {observation.index: [] for observation in observations}
        for group in problems_of(observations, self.assumptions):
            climb = Climb(self.settings, lay_out(group if self.labels == "known" else paired(group)), bags, bench)
            climb.run()
            for problem, guess in zip(climb.rows.problems, guesses(climb), strict=True):
                found[problem.observation.index].append(guess)
        seconds = (time.monotonic() - began) / len(observations)
        return [_best(found[observation.index], seconds) for observation in observations]

    def objective(self, observations: Sequence[Observation], batches: Sequence[Batch]) -> Float[Tensor, "observations"]:
        if observations[0].target.padding_is_free:
            together = [(list(observations), list(batches))]
        else:
            together = [([observation], [batch]) for observation, batch in zip(observations, batches, strict=True)]
        return torch.cat([distances_of(for_observations(seen, Cosine()), side_by_side(held)) for seen, held in together])


def bag_of(observation: Observation) -> list[int]:
    """The words to put in order: those of the bag, and special tokens that stand inside texts ([UNK])."""
    words, special = evidence.bag_of_words(observation), evidence.special_tokens(observation)
    if words is None or not words.values:
        raise GradleakError(
            "bag_of_words reads the words off the word embeddings' gradient, which is not visible: "
            "let them train and choose a view that shows them, or use another attack."
        )
    vocabulary = observation.target.vocabulary
    around = {*vocabulary.prefix, *vocabulary.suffix, vocabulary.pad}
    return [*words.values, *(token for token in (special.values if special else ()) if token not in around)]


def guesses(climb: Climb) -> list[Reconstruction]:
    """The best of every row."""
    climb.done.zero_()  # the distances of all are asked for
    distances = climb.distances(climb.best[:, None])[:, 0].tolist()
    return [
        Reconstruction(
            climb.rows.sentences(climb.best[row], row), loss=distance, labels=hypothesis.labels, cost=Cost(steps=climb.rounds)
        )
        for row, (distance, hypothesis) in enumerate(
            zip(distances, (problem.hypothesis for problem in climb.rows.problems), strict=True)
        )
    ]


def _best(found: Sequence[Reconstruction], seconds: float) -> Reconstruction:
    """The guess that matches best, over all hypotheses."""
    best = min(found, key=lambda guess: guess.loss or 0.0)
    return replace(best, cost=Cost(seconds, best.cost.steps))
