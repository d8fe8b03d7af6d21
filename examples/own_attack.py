"""An attack of your own: words read off the word embeddings' gradient. python
examples/own_attack.py"""

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
    """Says the words whose embedding has a gradient, in the order of their ids; it does not
    search for their order."""

    @property
    def requires(self) -> frozenset[Fact]:
        return frozenset({Fact.LENGTHS})

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        return [self._guess(observation) for observation in observations]

    def _guess(self, observation: Observation) -> Reconstruction:
        vocabulary, found = observation.target.vocabulary, evidence.bag_of_words(observation)
        words = found.values if found else ()
        (length,) = observation.knows.lengths or ()  # batches of one
        sentence, fixed = vocabulary.frame(length)
        for word, place in zip(
            words, [place for place, special in enumerate(fixed) if not special], strict=False
        ):
            sentence[place] = word
        return Reconstruction(sentences=(tuple(sentence),))


record = gradleak.measure(target="tiny", attacks=["words_by_id"], limit=16).record
for name, score in record.worst_case.items():
    if name in ("rouge1", "bag_f1", "exact_match"):
        print(
            f"{name:<12} {score.mean:.2f} [{score.low:.2f}, {score.high:.2f}], blind"
            f" {score.blind:.2f}"
        )
