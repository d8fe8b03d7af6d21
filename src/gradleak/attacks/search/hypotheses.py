"""What an attack assumes of labels and lengths: given, read off the update, or tried one by one."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradleak.attacks import evidence
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation

Source = Literal["known", "derived", "enumerate"]
MOST = 256  # hypotheses tried for one observation


@dataclass(frozen=True)
class Hypothesis:
    """Labels and lengths (special tokens included) of the sentences of one batch."""

    labels: tuple[int, ...] | None  # none where the sentences themselves are the labels
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Assumptions:
    """Where labels and lengths come from."""

    labels: Source | Literal["unused"] = "known"
    lengths: Source = "known"
    shortest: int = 4  # tokens, special ones included, when lengths are enumerated
    longest: int = 32

    @property
    def requires(self) -> frozenset[Fact]:
        granted = {Fact.LABELS: self.labels == "known", Fact.LENGTHS: self.lengths == "known", Fact.BATCH_SIZE: True}
        return frozenset(fact for fact, needed in granted.items() if needed)

    def hypotheses(self, observation: Observation) -> list[Hypothesis]:
        """Every combination to try; one where nothing is enumerated."""
        combinations = list(itertools.product(label_hypotheses(observation, self.labels), self._lengths(observation)))
        if len(combinations) > MOST:
            raise GradleakError(
                f"Enumerating gives {len(combinations)} combinations of labels and lengths, more than {MOST}: "
                "use derived for one of them."
            )
        return [Hypothesis(labels, lengths) for labels, lengths in combinations]

    def _lengths(self, observation: Observation) -> list[tuple[int, ...]]:
        if self.lengths == "known":
            assert observation.knows.lengths is not None
            return [observation.knows.lengths]
        if self.lengths == "derived":
            found = evidence.longest_length(observation)
            if found is None:
                raise GradleakError(
                    "lengths=derived reads the position embeddings, which are not visible: use lengths=enumerate."
                )
            return [found.values * observation.batch_size]
        # A batch is tried with all its sentences at one length: shorter ones then end in words that do not matter.
        return [(length,) * observation.batch_size for length in range(self.shortest, self.longest + 1)]


def label_hypotheses(observation: Observation, source: Source | Literal["unused"]) -> Sequence[tuple[int, ...] | None]:
    """The labels to try; none of a language model, whose labels are its text."""
    if observation.target.labels_are_tokens:
        return [None]
    if source == "unused":
        return [(0,) * observation.batch_size]
    if source == "known":
        assert observation.knows.labels is not None
        return [tuple(observation.knows.labels.tolist())]
    if source == "derived":
        found = evidence.labels(observation)
        if found is None:
            raise GradleakError(
                "labels=derived reads the bias of the classification head, which is not visible: use labels=enumerate."
            )
        return [found.values]
    return list(itertools.combinations_with_replacement(range(observation.target.classes), observation.batch_size))
