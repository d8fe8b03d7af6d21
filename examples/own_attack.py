"""An attack of your own, which reads words off the word embeddings' gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

import gradleak
from gradleak.attacks import evidence
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.observation import Fact, Observation
from gradleak.core.registry import register


@register("attack", "words_by_id")
@dataclass(frozen=True)
class WordsById(Attack):
    """Says the words whose embedding has a gradient, in the order of their ids."""

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset({Fact.LENGTHS})

    def reconstruct(self, seen: Sequence[Observation], bench: Bench) -> list[Reconstruction]:
        return [self._guess(one) for one in seen]

    def _guess(self, observation: Observation) -> Reconstruction:
        found = evidence.bag_of_words(observation)
        (length,) = observation.knows.lengths or ()  # batches of one
        sentence, fixed = observation.target.vocabulary.frame(length)
        free = [place for place, special in enumerate(fixed) if not special]
        for word, place in zip(found.values if found else (), free, strict=False):
            sentence[place] = word
        return Reconstruction(sentences=(tuple(sentence),))


record = gradleak.measure(target="tiny", attacks=["words_by_id"], limit=16).record
for name, score in record.worst_case.items():
    if name in ("rouge1", "bag_f1", "exact_match"):
        interval = f"[{score.low:.2f}, {score.high:.2f}]"
        print(f"{name:<12} {score.mean:.2f} {interval}, blind {score.blind:.2f}")
