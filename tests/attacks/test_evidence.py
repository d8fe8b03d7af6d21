"""What an update says outright."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gradleak.attacks import evidence
from gradleak.core.observation import Fact, Observation, Round, View
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.targets.tiny import TinyCausal
from gradleak.views import Everything, Lamp, PartsView

Observe = Callable[..., Observation]


@pytest.mark.parametrize("label", [0, 1])
def test_the_label_of_one_sentence_is_the_negative_entry_of_the_heads_bias(
    label: int, tiny: Target, observe: Observe
) -> None:
    found = evidence.labels(observe(tiny, ["the cat is red ."], [label]))
    assert found is not None
    assert (found.values, found.exact) == ((label,), True)


@pytest.mark.parametrize("labels", [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 1, 1), (1, 1, 1, 1)])
def test_label_counts_of_a_batch_are_estimated_on_a_fresh_head(
    labels: tuple[int, ...], minilm: Target, observe: Observe
) -> None:
    texts = ["he walked up the hill", "my pin is lost", "she called me", "we met in paris"]
    found = evidence.labels(observe(minilm, texts, labels))
    assert found is not None
    assert (found.values, found.exact) == (tuple(sorted(labels)), False)


def test_position_rows_give_the_length_exactly_and_of_a_batch_the_longest(
    tiny: Target, observe: Observe
) -> None:
    one, two = (
        observe(tiny, ["the cat is red ."]),
        observe(tiny, ["the cat is red .", "my dog was bad and not very good !"]),
    )
    for seen, exact in ((one, True), (two, False)):
        found = evidence.longest_length(seen)
        assert found is not None
        assert found.values == (max(seen.knows.lengths or ()),)
        assert found.exact is exact


def test_word_rows_give_the_words_exactly_without_special_tokens_and_are_not_there_in_lamps_view(
    tiny: Target, observe: Observe
) -> None:
    seen = observe(tiny, ["the cat is red .", "the dog is not red ."])
    found, special = evidence.bag_of_words(seen), evidence.special_tokens(seen)
    assert found is not None and special is not None
    tokens = {
        token for row in tiny.encode(["the cat is red .", "the dog is not red ."]) for token in row
    }
    assert set(special.values) == {*tiny.vocabulary.prefix, *tiny.vocabulary.suffix}
    assert set(found.values) == tokens - set(special.values)
    assert found.exact and special.exact
    hidden = observe(tiny, ["the cat is red ."], view=Lamp())
    assert evidence.bag_of_words(hidden) is None
    assert evidence.special_tokens(hidden) is None


def test_an_unknown_word_is_a_fact_about_special_tokens(tiny: Target, observe: Observe) -> None:
    found = evidence.special_tokens(observe(tiny, ["the cat ☂ red ."]))
    assert found is not None
    assert "[UNK]" in tiny.decode(found.values, keep_special=True)


def test_a_sentence_that_hardly_counts_still_gives_its_words_away(
    tiny: Target, observe: Observe
) -> None:
    one, other = (observe(tiny, [text]).update for text in ("the cat is red .", "my dog was bad !"))
    mixed = {name: tensor + 1e-9 * other.tensors[name] for name, tensor in one.tensors.items()}
    seen = observe(tiny, ["the cat is red .", "my dog was bad !"])
    found = evidence.bag_of_words(replace(seen, rounds=(Round(tiny, Update(mixed)),)))
    assert found is not None
    assert len(found.values) == 10


def test_noise_nobody_told_of_shows_in_rows_that_should_be_zero(
    tiny: Target, observe: Observe
) -> None:
    seen = observe(tiny, ["the cat is red ."], defenses=(GaussianNoise(1e-6),)).limit_to(
        {Fact.LENGTHS}
    )
    found = evidence.bag_of_words(seen)
    assert found is not None
    assert not found.exact
    assert set(found.values) == set(tiny.encode(["the cat is red ."])[0][1:-1])


@pytest.mark.parametrize(
    "texts",
    [("the cat is red .",), ("my phone number is five five zero one .", "the cat is red .")],
)
def test_the_rank_of_the_first_layer_counts_different_inputs(
    texts: tuple[str, ...], tiny: Target, observe: Observe
) -> None:
    inputs = {pair for row in tiny.encode(texts) for pair in enumerate(row)}
    for view in (
        Everything(),
        PartsView("1", ("query", "key", "value")),
        PartsView("1", ("value",)),
    ):
        found = evidence.distinct_tokens(observe(tiny, texts, view=view))
        assert found is not None
        assert (found.values, found.exact) == ((len(inputs),), True)


def test_the_rank_says_nothing_of_deeper_layers_or_of_more_inputs_than_the_layer_is_wide(
    tiny: Target, observe: Observe
) -> None:
    assert evidence.distinct_tokens(observe(tiny, view=PartsView("2", ("query",)))) is None
    many = [
        "the cat is red . my phone number is five five zero one . she left the house at night and"
        " never moved on again soon ."
    ]
    assert len(tiny.encode(many)[0]) < tiny.hidden_size
    assert evidence.distinct_tokens(observe(tiny, many)) is not None
    assert (
        evidence.distinct_tokens(
            observe(tiny, [*many, "we saw them in the morning at two and he paid my doctor !"])
        )
        is None
    )
    assert evidence.distinct_tokens(observe(tiny, defenses=(GaussianNoise(0.1),))) is None


def test_a_wide_matrix_is_sketched_and_keeps_its_rank(
    monkeypatch: pytest.MonkeyPatch, tiny: Target, observe: Observe
) -> None:
    monkeypatch.setattr(evidence, "WIDEST", 24)
    found = evidence.distinct_tokens(observe(tiny, ["the cat is red ."]))
    assert found is not None
    assert found.values == (7,)


@pytest.mark.parametrize("view", [Everything(), Lamp(), PartsView("2", ("ffn_in",))], ids=repr)
def test_all_that_can_be_read_is_listed_by_name_and_the_rest_left_out(
    view: View, tiny: Target, observe: Observe
) -> None:
    found = {
        one.name: one for one in evidence.findings(observe(tiny, ["the cat is red ."], view=view))
    }
    every = ["labels", "longest_length", "distinct_tokens", "bag_of_words", "special_tokens"]
    assert list(found) == {"everything": every, "lamp": every[:3], "parts": []}[view.name]
    assert all(one.source for one in found.values())


def test_what_is_read_through_noise_is_not_called_exact(tiny: Target, observe: Observe) -> None:
    seen = observe(tiny, ["the cat is red ."], [1], defenses=(GaussianNoise(1e-6),))
    findings = (evidence.labels(seen), evidence.longest_length(seen), evidence.bag_of_words(seen))
    assert [finding.exact for finding in findings if finding] == [False] * 3
    assert findings[1] is not None
    assert findings[1].values == seen.knows.lengths


def test_position_rows_of_a_language_model_give_the_length_too_though_its_last_token_is_silent(
    observe: Observe,
) -> None:
    target = TinyCausal().open(torch.device("cpu"))
    texts = ["the cat is red .", "my dog was bad and not very good !"]
    for seen, exact in ((observe(target, texts[:1]), True), (observe(target, texts), False)):
        found = evidence.longest_length(seen)
        assert found is not None
        assert found.values == (max(seen.knows.lengths or ()),)
        assert found.exact is exact


def test_a_language_model_has_no_labels_to_read_and_does_not_look_up_its_last_word(
    observe: Observe,
) -> None:
    seen = observe(TinyCausal(shape="llama").open(torch.device("cpu")), ["the cat is red ."])
    assert evidence.labels(seen) is None
    found = evidence.bag_of_words(seen)
    assert found is not None
    assert not found.exact
    assert set(found.values) == set(seen.target.encode(["the cat is red ."])[0][1:-1])


@pytest.mark.parametrize(
    "texts",
    [("the cat is red .",), ("the cat is red .", "my phone number is five five zero one .")],
)
def test_where_words_are_outputs_too_those_of_the_text_stand_out_and_are_called_an_estimate(
    texts: tuple[str, ...], observe: Observe
) -> None:
    seen = observe(TinyCausal().open(torch.device("cpu")), texts)
    found = evidence.bag_of_words(seen)
    assert found is not None
    assert not found.exact
    words = {token for row in seen.target.encode(texts) for token in row}
    assert len(words & set(found.values)) >= 0.8 * len(words)
    assert len(words & set(found.values)) >= 0.8 * len(found.values)
    assert evidence.special_tokens(seen) is None
