"""The n-gram models that the shipped prior is compared with are distributions, and agree with a
slow reference."""

import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

VOCABULARY, CLS, SEP = 9, 0, 1
LONGEST = 5
SENTENCES = [
    [CLS, 2, 3, 4, 5, SEP],
    [CLS, 2, 3, 4, 6, SEP],
    [CLS, 2, 3, 4, 5, 6, SEP],
    [CLS, 4, 3, 2, SEP],
    [CLS, 3, 4, 5, 2, 3, 4, 5, SEP],
    [CLS, 2, SEP],
    [CLS, 2, 3, 4, 5, SEP],
    [CLS, 7, SEP],
]  # 8 never occurs
HELD_OUT = [[CLS, 2, 3, 4, 5, 6, 7, SEP], [CLS, 8, 2, 3, SEP], [CLS, 5, SEP]]


def _load() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "ngram.py"
    spec = importlib.util.spec_from_file_location("benchmarks_ngram", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ngram = _load()


def judged(sentences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Probabilities by models of one to five tokens."""
    model = ngram.train(ngram.stream([np.array([row]) for row in SENTENCES]), VOCABULARY, LONGEST)
    return list(ngram.probabilities(model, ngram.stream([np.array([row]) for row in sentences])))


class Slow:
    """Modified Kneser-Ney of one order, from dictionaries, as Chen & Goodman write it."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.counts = {length: self._counts(length) for length in range(1, order + 1)}

    def _counts(self, length: int) -> Counter[tuple[int, ...]]:
        raw, before = Counter[tuple[int, ...]](), set[tuple[int, ...]]()
        for row in SENTENCES:
            raw.update(tuple(row[place : place + length]) for place in range(len(row) - length + 1))
            before.update(
                tuple(row[place : place + length + 1]) for place in range(len(row) - length)
            )
        del raw[(CLS,)]
        varied = Counter(gram[1:] for gram in before)
        return (
            raw
            if length == self.order
            else Counter({gram: raw[gram] if gram[0] == CLS else varied[gram] for gram in raw})
        )

    def probability(self, context: tuple[int, ...], token: int) -> float:
        counts = self.counts[len(context) + 1]
        below = self.probability(context[1:], token) if context else 1 / VOCABULARY
        after = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == context}
        if not after:
            return below
        discounts = ngram.discounts(np.array(list(counts.values())))
        taken = sum(discounts[min(count, 3)] for count in after.values())
        own = after.get(token, 0)
        return (own - discounts[min(own, 3)] + taken * below) / sum(after.values())


@pytest.mark.parametrize("order", range(1, LONGEST + 1))
def test_the_fast_models_agree_with_dictionaries(order: int) -> None:
    slow = Slow(order)
    wanted = [
        slow.probability(tuple(row[max(0, place - order + 1) : place]), row[place])
        for row in HELD_OUT + SENTENCES
        for place in range(1, len(row))
    ]
    np.testing.assert_allclose(judged(HELD_OUT + SENTENCES)[order - 1], wanted, rtol=1e-12)


@pytest.mark.parametrize(
    "context",
    [
        [CLS],
        [CLS, 2],
        [CLS, 2, 3, 4],
        [CLS, 2, 3, 4, 5],
        [CLS, 3, 4, 5, 2, 3],
        [CLS, 8],
        [CLS, 8, 8, 3],
        [CLS, 7, 6, 5, 4, 8],
    ],
    ids=str,
)
def test_probabilities_after_a_context_seen_or_not_sum_to_one(context: list[int]) -> None:
    for each in judged([[*context, token] for token in range(VOCABULARY)]):
        after = each.reshape(VOCABULARY, -1)[:, -1]
        assert (after > 0).all()
        assert math.isclose(after.sum(), 1, rel_tol=1e-12)


def test_discounts_follow_the_counts_of_counts() -> None:
    counts = np.repeat([1, 2, 3, 4], [10, 5, 3, 2])
    share = 10 / (10 + 2 * 5)
    wanted = [0, 1 - 2 * share * 5 / 10, 2 - 3 * share * 3 / 5, 3 - 4 * share * 2 / 3]
    np.testing.assert_allclose(ngram.discounts(counts), wanted)


def test_discounts_fall_back_where_some_count_never_occurs() -> None:
    assert ngram.discounts(np.array([1, 1, 3])).tolist() == [0, *ngram.FALLBACK]


def test_what_was_read_often_is_likelier_in_longer_models() -> None:
    means = [np.log(each).mean() for each in judged(SENTENCES)]
    assert means == sorted(means)


def test_sentences_that_stand_in_the_training_text_can_be_left_out() -> None:
    training = {3: torch.tensor([[CLS, 2, SEP], [CLS, 7, SEP]])}
    held_out = {
        3: torch.tensor([[CLS, 7, SEP], [CLS, 5, SEP]]),
        4: torch.tensor([[CLS, 2, 2, SEP]]),
    }
    left = ngram.unseen(held_out, training)
    assert {length: table.tolist() for length, table in left.items()} == {
        3: [[CLS, 5, SEP]],
        4: [[CLS, 2, 2, SEP]],
    }
    assert ngram.unseen(training, training) == {}
