"""Laws of ROUGE."""

import pickle
from typing import cast

import pytest

import gradleak.metrics
from gradleak.core.metric import Metric, Pair, Text
from gradleak.core.registry import find, list_registered
from gradleak.metrics.texts import UnicodeWords, f_measure

ROUGES = [name for name in list_registered("metric") if name.startswith("rouge")]


def value(name: str, secret: str, guess: str) -> float | None:
    def sentence(text: str) -> Text:
        return Text(text, f"[CLS] {text} [SEP]", ())

    metric = cast(Metric, find("metric", name)())
    return metric.values([Pair(sentence(secret), sentence(guess))])[0]


def test_six_kinds_are_registered_and_survive_a_trip_to_another_process() -> None:
    assert ROUGES == [
        "rouge1",
        "rouge1_legacy",
        "rouge2",
        "rouge2_legacy",
        "rougeL",
        "rougeL_legacy",
    ]
    for name in ROUGES:
        metric = find("metric", name)()
        assert pickle.loads(pickle.dumps(metric)) == metric and metric.name == name


def test_the_default_metrics_are_all_registered() -> None:
    assert set(gradleak.metrics.DEFAULT_METRICS) <= set(list_registered("metric"))


@pytest.mark.parametrize("name", ROUGES)
def test_an_exact_guess_scores_one_whatever_its_case_and_punctuation(name: str) -> None:
    assert value(name, "The cat sat.", "the cat , sat") == pytest.approx(1.0)


def test_a_wrong_guess_scores_zero_honestly_and_not_in_legacy() -> None:
    secret, guess = "one two three four five six seven eight", "a b c d e f g h"
    assert value("rouge1", secret, guess) == 0.0
    assert value("rouge1_legacy", secret, guess) == pytest.approx(0.2)


def test_order_is_seen_by_rouge2_and_rougel_only() -> None:
    assert value("rouge1", "a b c", "c b a") == pytest.approx(1.0)
    assert value("rouge2", "a b c", "c b a") == 0.0
    assert value("rougeL", "a b c", "c b a") == pytest.approx(1 / 3)


def test_words_are_not_stemmed() -> None:
    assert value("rouge1", "cats", "cat") == 0.0


def test_an_exact_guess_in_any_script_scores_one_honestly() -> None:
    assert f_measure("rouge1", "Τα μυστικά μας", "τα μυστικά μας") == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text", ["Don't stop_me, now: 3.14 (ok)!", "", "  a\tb\n", "[CLS] e-mail [SEP]"]
)
def test_on_ascii_the_words_are_those_of_rouge_score(text: str) -> None:
    from rouge_score.tokenizers import DefaultTokenizer  # type: ignore[import-untyped]

    assert UnicodeWords().tokenize(text) == DefaultTokenizer(use_stemmer=False).tokenize(text)


@pytest.mark.parametrize("name", ROUGES)
def test_an_empty_guess_scores_less_than_any_word_right(name: str) -> None:
    empty, right = value(name, "a b c", ""), value(name, "a b c", "a b")
    assert empty is not None and right is not None and 0 <= empty < right
