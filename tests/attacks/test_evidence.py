"""What an update says outright."""

from collections.abc import Callable

import pytest

from gradleak.attacks import evidence
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.defenses.gaussian_noise import GaussianNoise
from gradleak.views import Lamp

Observe = Callable[..., Observation]


@pytest.mark.parametrize("label", [0, 1])
def test_the_label_of_one_sentence_is_the_negative_entry_of_the_heads_bias(label: int, tiny: Target, observe: Observe) -> None:
    found = evidence.labels(observe(tiny, ["the cat is red ."], [label]))
    assert found is not None
    assert (found.values, found.exact) == ((label,), True)


@pytest.mark.parametrize("labels", [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 1, 1), (1, 1, 1, 1)])
def test_label_counts_of_a_batch_are_estimated_on_a_fresh_head(labels: tuple[int, ...], minilm: Target, observe: Observe) -> None:
    texts = ["he walked up the hill", "my pin is lost", "she called me", "we met in paris"]
    found = evidence.labels(observe(minilm, texts, labels))
    assert found is not None
    assert (found.values, found.exact) == (tuple(sorted(labels)), False)


def test_position_rows_give_the_length_exactly_and_of_a_batch_the_longest(tiny: Target, observe: Observe) -> None:
    one, two = observe(tiny, ["the cat is red ."]), observe(tiny, ["the cat is red .", "my dog was bad and not very good !"])
    for seen, exact in ((one, True), (two, False)):
        found = evidence.longest_length(seen)
        assert found is not None
        assert found.values == (max(seen.knows.lengths or ()),)
        assert found.exact is exact


def test_word_rows_give_the_words_and_are_not_there_in_lamps_view(tiny: Target, observe: Observe) -> None:
    found = evidence.words(observe(tiny, ["the cat is red ."]))
    assert found is not None
    assert set(found.values) == set(tiny.encode(["the cat is red ."])[0])
    assert evidence.words(observe(tiny, ["the cat is red ."], view=Lamp())) is None


def test_what_is_read_through_noise_is_not_called_exact(tiny: Target, observe: Observe) -> None:
    seen = observe(tiny, ["the cat is red ."], [1], defenses=(GaussianNoise(1e-6),))
    findings = (evidence.labels(seen), evidence.longest_length(seen), evidence.words(seen))
    assert [finding.exact for finding in findings if finding] == [False] * 3
    assert findings[1] is not None
    assert findings[1].values == seen.knows.lengths
