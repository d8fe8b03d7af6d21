"""Labels, from the gradient of the classification head's bias."""

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.evidence.finding import Finding, certain, seen
from gradleak.core.observation import Observation
from gradleak.core.target import Target


def labels(observation: Observation) -> Finding | None:
    """Labels from the head's bias gradient, which is the mean of (probabilities − one-hot label); none if it is not seen.

    One example: the label is the only negative entry (Zhao et al. 2020). More: class counts, given what the model predicts
    on ordinary examples, which a fresh head predicts for anything. A language model has no labels beside its text.
    """
    gradient = seen(observation, "head_bias")
    if gradient is None or observation.knows.batch_size is None or observation.target.labels_are_tokens:
        return None
    size = observation.knows.batch_size
    if size == 1:
        return Finding("labels", (int(gradient.argmin()),), certain(observation), "sign of the head's bias gradient")
    expected = (_typical_probabilities(observation.target) - gradient) * size
    counts = _whole_counts(expected, size)
    found = tuple(label for label, count in enumerate(counts) for _ in range(count))
    return Finding("labels", found, exact=False, source="counts from the head's bias gradient")


@torch.no_grad()
def _typical_probabilities(target: Target) -> Float[Tensor, "classes"]:
    return target.probabilities(target.ordinary()).mean(0)


def _whole_counts(expected: Float[Tensor, "classes"], total: int) -> list[int]:
    """Whole numbers that add up to the total, by largest remainder."""
    wished = expected.clamp_min(0).tolist()
    counts = [int(value) for value in wished]
    by_remainder = sorted(range(len(wished)), key=lambda label: counts[label] - wished[label])
    for place in range(max(0, total - sum(counts))):
        counts[by_remainder[place % len(counts)]] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts
