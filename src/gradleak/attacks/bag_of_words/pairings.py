"""Which sentence has which label, where labels were read off the update or enumerated: these come without an order."""

import math
from collections import Counter
from collections.abc import Sequence

from gradleak.attacks.search.hypotheses import Hypothesis
from gradleak.attacks.search.rows import Problem
from gradleak.core.errors import GradleakError

MOST = 24  # ways to give labels to the sentences of a batch that are tried


def paired(problems: Sequence[Problem]) -> list[Problem]:
    """Every way to give the labels to sentences of different lengths, each a problem of its own."""
    return [
        Problem(one.observation, hypothesis, one.number * MOST + place)
        for one in problems
        for place, hypothesis in enumerate(pairings(one.hypothesis))
    ]


def pairings(hypothesis: Hypothesis) -> list[Hypothesis]:
    """The same labels in other orders, without those that only exchange sentences of one length."""
    labels, lengths = hypothesis.labels, hypothesis.lengths
    if labels is None or len(set(lengths)) == 1 or len(set(labels)) == 1:
        return [hypothesis]
    ways = math.factorial(len(labels)) // math.prod(math.factorial(count) for count in Counter(labels).values())
    if ways > MOST:
        raise GradleakError(
            f"There are {ways} ways to give labels without an order to {len(labels)} sentences, more than {MOST}: "
            "use labels=known, or smaller batches."
        )
    distinct = {tuple(sorted(zip(lengths, order, strict=True))): order for order in _orders(labels)}
    return [Hypothesis(order, lengths) for order in distinct.values()]


def _orders(labels: Sequence[int]) -> list[tuple[int, ...]]:
    """All orders, each once."""
    if not labels:
        return [()]
    without = {label: [*labels[: labels.index(label)], *labels[labels.index(label) + 1 :]] for label in sorted(set(labels))}
    return [(label, *rest) for label, others in without.items() for rest in _orders(others)]
