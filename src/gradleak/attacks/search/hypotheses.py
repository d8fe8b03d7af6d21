"""What an attack assumes of labels and lengths: given, read off the update, or tried one by one."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradleak.attacks import evidence
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation

Source = Literal["known", "derived", "enumerate"]
MOST_HYPOTHESES = 256  # tried for one observation
MOST_PAIRINGS = 24  # ways to give labels to the sentences of a batch that are tried


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
        needed = {
            Fact.BATCH_SIZE: True,
            Fact.LABELS: self.labels == "known",
            Fact.LENGTHS: self.lengths == "known",
        }
        return frozenset(fact for fact, is_needed in needed.items() if is_needed)

    def list_hypotheses(self, observation: Observation) -> list[Hypothesis]:
        """Returns every combination to try; a single one where nothing is enumerated."""
        labels = list_labels(observation, self.labels)
        combinations = list(itertools.product(labels, self._list_lengths(observation)))
        if len(combinations) > MOST_HYPOTHESES:
            raise GradleakError(
                f"Enumerating gives {len(combinations)} combinations of labels and lengths, "
                f"more than {MOST_HYPOTHESES}: use derived for one of them."
            )
        return [Hypothesis(labels, lengths) for labels, lengths in combinations]

    def _list_lengths(self, observation: Observation) -> list[tuple[int, ...]]:
        if self.lengths == "known":
            assert observation.knows.lengths is not None
            return [observation.knows.lengths]
        if self.lengths == "derived":
            found = evidence.longest_length(observation)
            if found is None:
                raise GradleakError(
                    "lengths=derived reads the position embeddings, which are not visible: use"
                    " lengths=enumerate."
                )
            return [found.values * observation.batch_size]
        # All sentences of a batch are tried at one length: shorter ones then end in words that do
        # not matter, where every mixture of lengths would be far too many.
        tried = range(self.shortest, self.longest + 1)
        return [(length,) * observation.batch_size for length in tried]


def list_labels(
    observation: Observation, source: Source | Literal["unused"]
) -> Sequence[tuple[int, ...] | None]:
    """Returns the labels to try; none of a language model, whose labels are its text."""
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
                "labels=derived reads the bias of the classification head, which is not visible:"
                " use labels=enumerate."
            )
        return [found.values]
    classes = range(observation.target.classes)
    return list(itertools.combinations_with_replacement(classes, observation.batch_size))


def pair_labels(hypothesis: Hypothesis) -> list[Hypothesis]:
    """Returns the ways to give labels to sentences, where labels came without an order.

    Ways that differ only between sentences of one length are the same to a search: one is kept.
    """
    labels, lengths = hypothesis.labels, hypothesis.lengths
    if labels is None or len(set(lengths)) == 1 or len(set(labels)) == 1:
        return [hypothesis]
    repeated = math.prod(math.factorial(count) for count in Counter(labels).values())
    ways = math.factorial(len(labels)) // repeated
    if ways > MOST_PAIRINGS:
        raise GradleakError(
            f"There are {ways} ways to give labels without an order to {len(labels)} sentences, "
            f"more than {MOST_PAIRINGS}: use labels=known, or smaller batches."
        )
    orders = _list_orders(labels)
    distinct = {tuple(sorted(zip(lengths, order, strict=True))): order for order in orders}
    return [Hypothesis(order, lengths) for order in distinct.values()]


def _list_orders(labels: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns all orders of the labels, each once, in the order of their labels."""
    if not labels:
        return [()]
    orders = []
    for label in sorted(set(labels)):
        place = labels.index(label)
        others = [*labels[:place], *labels[place + 1 :]]
        orders += [(label, *rest) for rest in _list_orders(others)]
    return orders
