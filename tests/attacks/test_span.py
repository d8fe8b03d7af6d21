"""The span attack: exact on undefended gradients of every architecture, and never certain of
what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.certificate import certify
from gradleak.attacks.span import Span
from gradleak.attacks.span.assemble import reorder_worst
from gradleak.attacks.span.blend import BlendSearch, write_out_attention
from gradleak.attacks.span.row_space import (
    RowSpace,
    find_row_space,
    find_row_space_among_errors,
    read_row_space,
)
from gradleak.attacks.span.scan import Scan
from gradleak.attacks.span.span_attack import SentenceSearch
from gradleak.core.attack import Bench, Reconstruction
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation, Round
from gradleak.core.parts import ATTENTION_INPUTS
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.matching.inputs import ModuleInputs, additive_of, first_inputs, visible_linear_parts
from gradleak.priors.english import FrequentWords
from gradleak.protocols.fedavg import FedAvg
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import Tiny, TinyCausal, tiny_tokenizer
from gradleak.views import Everything, Lamp, PartsView

Observe = Callable[..., Observation]
TEXTS = (
    "my phone number is five five zero one .",
    "the cat is red .",
    "she never paid the bank again soon",
)
WIDE = {
    "Bert": {"hidden_size": 96, "num_hidden_layers": 3},
    "Roberta": {"hidden_size": 96, "num_hidden_layers": 3},
    "DistilBert": {"dim": 96, "n_layers": 3},
    "GPT2": {"n_embd": 96, "n_layer": 3},
    "Llama": {"hidden_size": 96, "num_hidden_layers": 3},
}


def attacked(observation: Observation, attack: Span | None = None) -> Reconstruction:
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(observation.target))
    (guess,) = (attack or Span()).reconstruct([observation.limit_to([Fact.BATCH_SIZE])], bench)
    return guess


def ids_of(target: Target, texts: tuple[str, ...]) -> set[tuple[int, ...]]:
    return {tuple(row) for row in target.encode(texts)}


@pytest.fixture(scope="module")
def wide() -> Target:
    """A random BERT wide enough for a few sentences."""
    return Tiny(layers=3, hidden=96).open(torch.device("cpu"))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("architecture", WIDE)
def test_one_sentence_comes_back_from_every_architecture(
    random_model: Callable[..., Any], observe: Observe, architecture: str, text: str
) -> None:
    target = TextClassifier(
        architecture, random_model(architecture, **WIDE[architecture]), tiny_tokenizer()
    )
    guess = attacked(observe(target, [text], [1]))
    assert set(guess.sentences) == ids_of(target, (text,))
    assert guess.certified
    assert guess.labels == (1,)


@pytest.mark.parametrize("architecture", ["Electra", "Albert"])
def test_embeddings_narrower_than_the_model_do_not_stop_it(
    random_model: Callable[..., Any], observe: Observe, architecture: str
) -> None:
    model = random_model(architecture, hidden_size=96, num_hidden_layers=3)
    target = TextClassifier(architecture, model, tiny_tokenizer())
    guess = attacked(observe(target, TEXTS[1:2], [1]))
    assert len(guess.sentences) == 1
    if architecture == "Electra":  # ALBERT's one layer is used three times: no span is of one
        assert set(guess.sentences) == ids_of(target, TEXTS[1:2])


FULL_SIZE = {
    "Bert": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "Roberta": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "GPT2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "Llama": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("architecture", FULL_SIZE)
def test_models_of_full_size_give_their_sentence_back_too(
    random_model: Callable[..., Any], observe: Observe, architecture: str
) -> None:
    target = TextClassifier(
        architecture, random_model(architecture, **FULL_SIZE[architecture]), tiny_tokenizer()
    )
    for text in TEXTS:
        # Certified too, unless the random head is so sure that rounding is left
        guess = attacked(observe(target, [text], [1]))
        assert set(guess.sentences) == ids_of(target, (text,))


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS[1:2], TEXTS])
def test_texts_of_a_language_model_come_back_with_their_last_word(
    observe: Observe, shape: str, texts: tuple[str, ...]
) -> None:
    target = TinyCausal(layers=3, hidden=96, shape=shape).open(torch.device("cpu"))
    guess = attacked(observe(target, texts))
    assert set(guess.sentences) == ids_of(target, texts)
    assert guess.certified


def test_as_many_prefixes_live_as_a_batch_may_need(observe: Observe) -> None:
    target = TinyCausal(layers=3, hidden=96, shape="llama").open(torch.device("cpu"))
    guess = attacked(observe(target, TEXTS), Span(beam=1))
    assert set(guess.sentences) == ids_of(target, TEXTS)


@pytest.mark.parametrize("texts", [TEXTS[:2], TEXTS, (*TEXTS, TEXTS[1], "he sold the red car")])
def test_a_batch_comes_back_with_its_labels_and_repetitions(
    wide: Target, observe: Observe, texts: tuple[str, ...]
) -> None:
    guess = attacked(observe(wide, texts, [1] * len(texts)))
    assert sorted(guess.sentences) == sorted(map(tuple, wide.encode(texts)))
    assert guess.certified
    assert guess.labels == (1,) * len(texts)


@pytest.mark.parametrize("rate", [1.0, 0.1, 0.01])
def test_texts_of_a_difference_of_weights_are_proven_though_it_is_rounded(
    wide: Target, observe: Observe, rate: float
) -> None:
    seen = observe(wide, TEXTS[:2], protocol=FedAvg(learning_rate=rate))
    assert not seen.channel.exact and seen.channel.clear
    guess = attacked(seen)
    assert set(guess.sentences) == ids_of(wide, TEXTS[:2])
    assert guess.certified


def test_weights_are_rounded_to_their_own_last_digit(wide: Target, observe: Observe) -> None:
    rough = observe(wide, protocol=FedAvg(learning_rate=0.1)).update.tensors
    exact = observe(wide).update.tensors
    seen = observe(wide, protocol=FedAvg(learning_rate=0.1))
    for part in visible_linear_parts(seen, 1, ATTENTION_INPUTS):
        left = rough[part.name][0].double() - 0.1 * exact[part.name][0].double()
        errors = seen.errors(part.name)
        assert 0.8 < float(left.norm() / errors.norm()) < 1.25
        weights = wide.parameters[part.parameter]
        assert float(left.norm()) < seen.protocol.rounding_bound(weights, rough[part.name][0])


@pytest.mark.parametrize("module", ["query", "key", "value"])
def test_one_matrix_of_the_first_layer_is_enough_for_the_words(
    wide: Target, observe: Observe, module: str
) -> None:
    guess = attacked(observe(wide, TEXTS[:1], [0], view=PartsView(layers="1", modules=(module,))))
    if module != "key":  # key sees centred inputs only
        assert set(guess.sentences) == ids_of(wide, TEXTS[:1])


def test_a_word_that_has_anothers_embedding_is_not_certified(
    random_model: Callable[..., Any], observe: Observe
) -> None:
    model, tokenizer = random_model("Bert", **WIDE["Bert"]), tiny_tokenizer()
    dog, cat = tokenizer.convert_tokens_to_ids(["dog", "cat"])
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[dog] = table[cat]
    target = TextClassifier("twins", model, tokenizer)
    hidden, seen = (
        [
            attacked(observe(target, [text], [1], view=view))
            for text in ("he saw the dog", "he saw the car")
        ]
        for view in (Lamp(), Everything())
    )
    assert [guess.certified for guess in hidden] == [False, True]
    assert "in several ways" in hidden[0].note
    assert all(guess.certified for guess in seen)  # rows of the word embeddings tell them apart


def test_a_view_without_the_first_layer_is_refused_by_name(wide: Target, observe: Observe) -> None:
    with pytest.raises(
        GradleakError,
        match="span needs the gradient of the first layer's query, key or value.*use energy",
    ):
        attacked(observe(wide, TEXTS[:1], view=PartsView(layers="2")))


@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-2, 1.0])
def test_noise_gives_a_guess_without_a_certificate(
    wide: Target, observe: Observe, noise: float
) -> None:
    guess = attacked(observe(wide, TEXTS[:2], defenses=(GaussianNoise(noise),)))
    assert guess.sentences
    assert not guess.certified


def test_more_tokens_than_the_model_is_wide_give_a_guess_without_a_certificate(
    observe: Observe,
) -> None:
    narrow = Tiny(layers=3, hidden=16).open(torch.device("cpu"))
    guess = attacked(observe(narrow, (*TEXTS, "he sold the red car")))
    assert guess.sentences
    assert not guess.certified
    assert "directions" in guess.note or "as the model is wide (16)" in guess.note


def wrong_guesses(target: Target, text: str) -> dict[str, tuple[int, ...]]:
    (right,) = target.encode([text])
    other = next(
        word for word in target.vocabulary.allowed.nonzero()[:, 0].tolist() if word not in right
    )
    swapped = [right[0], right[2], right[1], *right[3:]]
    return {
        "exchanged": (*right[:3], other, *right[4:]),
        "swapped": tuple(swapped),
        "shorter": (*right[:-2], right[-1]),
        "longer": (*right[:-1], other, right[-1]),
    }


@pytest.mark.parametrize("kind", ["exchanged", "swapped", "shorter", "longer"])
@pytest.mark.parametrize("beside", [(), TEXTS[1:2]])
def test_a_near_miss_is_never_certified(
    wide: Target, observe: Observe, kind: str, beside: tuple[str, ...]
) -> None:
    observation = observe(wide, (TEXTS[0], *beside)).limit_to([Fact.BATCH_SIZE])
    right = sorted(ids_of(wide, (TEXTS[0], *beside)), key=len, reverse=True)
    wrong = [wrong_guesses(wide, TEXTS[0])[kind], *right[1:]]
    assert certify(observation, right).proven
    missed = certify(observation, wrong)
    assert not missed.proven and missed.misfit > 100


def search_of(observation: Observation) -> SentenceSearch:
    parts = visible_linear_parts(observation, 1, ATTENTION_INPUTS)
    space = read_row_space(observation, parts)
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(observation.target))
    inputs = ModuleInputs(observation.target, parts[:1])
    (pairs,) = Scan(inputs, [space], [bench.streams]).find_pairs(16)
    return SentenceSearch(Span(), observation, space, pairs, 16, True, bench)


def test_a_missing_sentence_is_not_certified(wide: Target, observe: Observe) -> None:
    observation = observe(wide, TEXTS[:2]).limit_to([Fact.BATCH_SIZE])
    told = certify(observation, sorted(ids_of(wide, TEXTS[:1])))
    assert not told.proven and told.misfit > 100


def test_an_update_that_was_changed_is_not_certified(wide: Target, observe: Observe) -> None:
    observation = observe(wide, TEXTS[:1])
    changed = {
        name: tensor * (2.0 if "layer.1" in name else 1.0)
        for name, tensor in observation.update.tensors.items()
    }
    forged = replace(observation, rounds=(Round(wide, Update(changed)),))
    guess = attacked(forged)
    assert set(guess.sentences) == ids_of(wide, TEXTS[:1])  # the span is the same
    assert not guess.certified


def test_padding_that_is_attended_to_changes_nothing_for_the_attacker(observe: Observe) -> None:
    target = Tiny(layers=3, hidden=96, attend_padding=True).open(torch.device("cpu"))
    guess = attacked(observe(target, TEXTS[:2], [0, 1]))
    assert set(guess.sentences) == ids_of(target, TEXTS[:2])
    assert guess.certified


def test_minilm_gives_up_a_canary(minilm: Target, observe: Observe) -> None:
    text = "the patient in room seven is allergic to penicillin."
    guess = attacked(observe(minilm, [text], [1]))
    assert set(guess.sentences) == ids_of(minilm, (text,))
    assert guess.certified and guess.labels == (1,)


@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "DistilBert"])
def test_the_first_layer_written_out_reads_like_the_models_own(
    random_model: Callable[..., Any], observe: Observe, architecture: str
) -> None:
    target = TextClassifier(
        architecture, random_model(architecture, **WIDE[architecture]), tiny_tokenizer()
    )
    search = search_of(observe(target, TEXTS[:1]).limit_to(()))
    assert write_out_attention(search.checks[0]) is not None  # it compares the two itself


def test_a_layer_that_cannot_be_written_out_is_left_alone(
    random_model: Callable[..., Any], observe: Observe
) -> None:
    target = TextClassifier("GPT2", random_model("GPT2", **WIDE["GPT2"]), tiny_tokenizer())
    search = search_of(observe(target, TEXTS[:1]).limit_to(()))
    assert write_out_attention(search.checks[0]) is None


def test_blends_slide_into_the_sentences_of_a_batch(wide: Target, observe: Observe) -> None:
    search = search_of(observe(wide, TEXTS).limit_to(()))
    check, choices = search.checks[0], search.make_choices([])
    attention = write_out_attention(check)
    assert choices is not None and attention is not None
    secrets = ids_of(wide, TEXTS)
    lengths = [len(secret) for secret in secrets] * 2
    rng = torch.Generator().manual_seed(0)
    blends = BlendSearch(attention, check, choices)
    found = blends.search(choices, lengths, rng, lambda step, score: True)
    assert [len(sentence) for sentence in found] == lengths
    assert len(secrets & set(found)) >= 2


def test_taking_a_sentence_out_leaves_the_gradient_of_the_others(
    wide: Target, observe: Observe
) -> None:
    search = search_of(observe(wide, TEXTS[:2], [0, 1]).limit_to(()))
    other = observe(wide, TEXTS[1:2], [1]).limit_to(())
    assert search.remainder is not None
    left = search.remainder.subtract(wide_sentences(wide, TEXTS[:1]))
    parts = visible_linear_parts(other, 1, ATTENTION_INPUTS)
    alone = torch.cat([other.update.tensors[part.name][0] for part in parts]).double()
    wanted = alone @ search.space.basis / 2  # half of a batch of two
    assert left is not None
    assert torch.allclose(left, wanted, rtol=0, atol=1e-5 * float(wanted.norm()))


def test_a_sentence_that_was_not_there_is_not_taken_out(wide: Target, observe: Observe) -> None:
    search = search_of(observe(wide, TEXTS[:2], [0, 1]).limit_to(()))
    assert search.remainder is not None
    assert search.remainder.subtract(wide_sentences(wide, TEXTS[2:])) is None


def wide_sentences(target: Target, texts: tuple[str, ...]) -> list[tuple[int, ...]]:
    return [tuple(row) for row in target.encode(texts)]


def test_swaps_and_moves_of_the_worst_words_are_tried() -> None:
    sentence, misses = (0, 5, 6, 7, 8, 1), (-3.0, -1.0, -3.0, -3.0, -3.0, -3.0)
    tried = reorder_worst(sentence, misses, range(1, 5))
    assert (0, 6, 5, 7, 8, 1) in tried  # swapped with its neighbour
    assert (0, 6, 7, 5, 8, 1) in tried  # moved behind two others
    assert sentence not in tried
    assert all((trial[0], trial[-1]) == (0, 1) for trial in tried)


@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "DistilBert", "GPT2"])
def test_words_and_positions_held_against_a_span_apart_miss_it_as_together(
    random_model: Callable[..., Any], observe: Observe, architecture: str
) -> None:
    target = TextClassifier(
        architecture, random_model(architecture, **WIDE[architecture]), tiny_tokenizer()
    )
    seen = observe(target, TEXTS[:1])
    inputs = ModuleInputs(target, visible_linear_parts(seen, 1, ATTENTION_INPUTS)[:1])
    words, directions = target.vocabulary.allowed.nonzero()[:20, 0], torch.eye(96)[:, ::12]
    additive = additive_of(inputs, words, 7)
    assert additive is not None
    fed = first_inputs(inputs, words, 7)
    slowly = (fed @ directions).norm(dim=-1) / fed.norm(dim=-1)
    assert torch.allclose(additive.misses(directions), slowly, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strength", [1e-2, 1e-3, 1e-4])
def test_an_input_that_is_nearly_a_sum_of_others_counts_among_a_gradients_directions(
    strength: float, seed: int
) -> None:
    assert _space_of_sums(strength, seed).rank == 7  # far above rounding, far below the others


@pytest.mark.parametrize("seed", range(3))
def test_a_direction_under_what_rounding_makes_does_not_count(seed: int) -> None:
    space = _space_of_sums(1e-9, seed)
    assert space.exact and space.rank == 6


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_rounded_weights_have_the_span_of_the_gradient(rate: float) -> None:
    gradient = _gradient_of_sums(1e-2, 0)
    weights = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1)) * 0.02
    difference = (weights - (weights - rate * gradient)) / rate
    unit = torch.nextafter(weights.abs(), torch.tensor(torch.inf)) - weights.abs()
    errors = unit / rate / 12**0.5
    space = find_row_space_among_errors(difference, errors)
    assert space.exact and space.rank == 7


def _space_of_sums(strength: float, seed: int) -> RowSpace:
    return find_row_space(_gradient_of_sums(strength, seed))


def _gradient_of_sums(strength: float, seed: int) -> Float[Tensor, "outputs inputs"]:
    """A gradient of seven inputs; the last leaves the span of the others by so much."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(7, 32, generator=generator)
    inputs[6] = inputs[:6].mean(0) + strength * inputs[6]
    slopes = torch.randn(7, 96, generator=generator)
    return slopes.mT @ inputs
