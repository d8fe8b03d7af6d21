"""The factored engine against plain autograd, on every way a parameter can enter a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation, Round
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2, for_observations
from gradleak.matching.factored import FactoredMatcher
from gradleak.matching.factors import Thin
from gradleak.matching.matcher import SimulatedMatcher
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import Tiny, tiny_tokenizer
from gradleak.views import Everything, PartsView

DISTANCES = [Cosine(), SquaredL2(), L2L1()]
UNEQUAL = [
    ("the cat is red .", "my phone number is five five zero one ."),
    ("we owes the bank .", "she left"),
]
EQUAL = [("the cat is red .", "my dog was bad !"), ("he paid our doctor ?", "i saw the car soon")]
SHORT = [("red cat",), ("one door",)]  # few tokens: gradients of low rank, hence thin factors

Observe = Callable[..., Observation]


def candidates(observations: Sequence[Observation], count: int = 2, spread: float = 0.3) -> Batch:
    """Noise around ordinary words, with every observation's own lengths and labels:
    [observations, candidates, …]."""
    target = observations[0].target
    masks = [target.attention_mask(observation.knows.lengths) for observation in observations]
    width = max(mask.shape[1] for mask in masks)
    mask = torch.stack(
        [torch.nn.functional.pad(mask, (0, width - mask.shape[1])) for mask in masks]
    )[:, None]
    mask = mask.expand(-1, count, -1, -1)
    labels = torch.stack([observation.knows.labels for observation in observations])[
        :, None
    ].expand(-1, count, -1)
    generator = Streams.root("candidates", 0).generator()
    ids = torch.randint(5, 90, mask.shape, generator=generator)
    noise = torch.randn(*mask.shape, target.hidden_size, generator=generator).to(target.dtype)
    return Batch(
        embeddings=target.embed(ids) + spread * target.vocabulary.mean_norm * noise,
        mask=mask,
        labels=labels,
    )


def distances_and_slopes(
    observations: Sequence[Observation], batch: Batch, distance: Distance, plain: bool = False
) -> tuple[Tensor, Tensor]:
    embeddings = batch.embeddings.detach().clone().requires_grad_()
    found = for_observations(observations, distance, plain=plain).distances(
        replace(batch, embeddings=embeddings)
    )
    return found.detach(), torch.autograd.grad(found.sum(), embeddings)[0]


def assert_agree(
    observations: Sequence[Observation], distance: Distance, batch: Batch | None = None
) -> None:
    """The fast form and the reference give one distance and one slope, for every candidate of
    every observation."""
    batch = candidates(observations) if batch is None else batch
    exact = observations[0].target.dtype == torch.float64
    fast, fast_slope = distances_and_slopes(observations, batch, distance)
    slow, slow_slope = distances_and_slopes(observations, batch, distance, plain=True)
    torch.testing.assert_close(fast, slow, rtol=1e-9 if exact else 1e-5, atol=0)
    missed = (fast_slope - slow_slope).flatten(2).norm(dim=2) / slow_slope.flatten(2).norm(dim=2)
    assert float(missed.max()) < (1e-9 if exact else 1e-4)
    assert float(slow_slope.flatten(2).norm(dim=2).min()) > 0


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("architecture", "texts"),
    [
        ("Bert", UNEQUAL),
        ("Roberta", UNEQUAL),
        ("MPNet", UNEQUAL),
        ("Electra", UNEQUAL),
        ("Albert", UNEQUAL),
        ("GPT2", EQUAL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_engine_agrees_with_autograd(
    random_target: Callable[..., Target],
    observe: Observe,
    architecture: str,
    texts: list[tuple[str, ...]],
    dtype: torch.dtype,
    distance: Distance,
) -> None:
    target = random_target(architecture, dtype)
    observations = [observe(target, pair, index=place) for place, pair in enumerate(texts)]
    assert_agree(observations, distance)


@pytest.mark.parametrize(
    ("fixture", "distance"), [("minilm", DISTANCES[0]), ("minilm64", DISTANCES[-1])]
)
def test_it_agrees_on_minilm(
    request: pytest.FixtureRequest, observe: Observe, fixture: str, distance: Distance
) -> None:
    target = request.getfixturevalue(fixture)
    observations = [observe(target, pair, index=place) for place, pair in enumerate(UNEQUAL)]
    assert_agree(observations, distance, candidates(observations, count=1))


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize("fixture", ["tiny", "tiny64"])
def test_it_agrees_where_the_observed_gradients_are_kept_as_thin_factors(
    request: pytest.FixtureRequest, observe: Observe, fixture: str, distance: Distance
) -> None:
    target = request.getfixturevalue(fixture)
    observations = [observe(target, texts, index=place) for place, texts in enumerate(SHORT)]
    matcher = for_observations(observations, distance)
    assert isinstance(matcher, FactoredMatcher)
    assert any(isinstance(seen, Thin) for seen in matcher.observed)
    assert_agree(observations, distance)


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize("fixture", ["tiny", "tiny64"])
def test_it_agrees_on_a_noisy_update_which_has_no_thin_factors(
    request: pytest.FixtureRequest, observe: Observe, fixture: str, distance: Distance
) -> None:
    target = request.getfixturevalue(fixture)
    noisy = [
        observe(target, texts, index=place, defenses=(GaussianNoise(0.01),))
        for place, texts in enumerate(SHORT)
    ]
    # So that the reference simulates no noise
    unaware = [one.limit_to(set(Fact) - {Fact.DEFENSE}) for one in noisy]
    matcher = for_observations(unaware, distance)
    assert isinstance(matcher, FactoredMatcher)
    assert not any(isinstance(seen, Thin) for seen in matcher.observed)
    batch = candidates(noisy)
    assert_agree(unaware, distance, batch)


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_it_agrees_where_the_client_attends_padding(observe: Observe, distance: Distance) -> None:
    target = Tiny(attend_padding=True).open(torch.device("cpu"))
    assert_agree(
        [observe(target, texts, index=place) for place, texts in enumerate(UNEQUAL)], distance
    )


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_it_agrees_where_groups_are_frozen(observe: Observe, distance: Distance) -> None:
    target = Tiny(frozen=("word_embedding", "head_bias")).open(torch.device("cpu"), torch.float64)
    assert_agree(
        [observe(target, texts, index=place) for place, texts in enumerate(UNEQUAL)], distance
    )


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize("share", ["module", "weight"])
def test_it_agrees_where_a_layer_is_used_twice(
    random_model: Callable[..., Any], observe: Observe, share: str, distance: Distance
) -> None:
    model = random_model("Bert").double()
    first, second = (layer.attention.self for layer in model.bert.encoder.layer)
    if share == "module":
        second.value = first.value
    else:
        second.value.weight = first.value.weight
    target = TextClassifier("shared", model, tiny_tokenizer())
    assert_agree(
        [observe(target, texts, index=place) for place, texts in enumerate(UNEQUAL)], distance
    )


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_it_agrees_where_a_row_of_a_table_never_learns(
    random_model: Callable[..., Any], observe: Observe, distance: Distance
) -> None:
    model = random_model("Bert").double()
    # As RoBERTa's padding position, but in use
    model.bert.embeddings.position_embeddings.padding_idx = 2
    target = TextClassifier("padded", model, tiny_tokenizer())
    assert_agree(
        [observe(target, texts, index=place) for place, texts in enumerate(UNEQUAL)], distance
    )


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_observations_with_different_views_share_a_pass_and_give_what_each_gives_alone(
    tiny64: Target, observe: Observe, distance: Distance, plain: bool
) -> None:
    whole = [observe(tiny64, texts, index=place) for place, texts in enumerate(UNEQUAL)]
    names = list(whole[0].update.tensors)
    parts = [names[: len(names) // 2], names[len(names) // 3 :]]
    observations = [
        replace(one, rounds=(Round(tiny64, one.update.select(part)),))
        for one, part in zip(whole, parts, strict=True)
    ]
    batch = candidates(observations)
    together, slopes = distances_and_slopes(observations, batch, distance, plain)
    for place, observation in enumerate(observations):
        alone, slope = distances_and_slopes(
            [observation], batch[place : place + 1], distance, plain
        )
        torch.testing.assert_close(together[place], alone[0], rtol=1e-9, atol=0)
        torch.testing.assert_close(slopes[place], slope[0], rtol=1e-9, atol=1e-12)


VIEWS = [
    PartsView("2", ("query",)),
    Everything(),
    PartsView("", ("layernorm", "value")),
    PartsView("1"),
    PartsView("", ("head",)),
]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize("architecture", ["Bert", "GPT2"])
def test_a_map_of_parts_in_one_pass_gives_what_each_part_gives_alone(
    random_target: Callable[..., Target],
    observe: Observe,
    architecture: str,
    distance: Distance,
    plain: bool,
) -> None:
    target = random_target(architecture, torch.float64)
    observations = [
        observe(target, EQUAL[0], index=place, view=view) for place, view in enumerate(VIEWS)
    ]
    batch = candidates(observations)
    together, slopes = distances_and_slopes(observations, batch, distance, plain)
    for place, observation in enumerate(observations):
        alone, slope = distances_and_slopes(
            [observation], batch[place : place + 1], distance, plain
        )
        torch.testing.assert_close(together[place], alone[0], rtol=1e-9, atol=0)
        torch.testing.assert_close(slopes[place], slope[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("architecture", "view"),
    [
        ("GPT2", PartsView("2", ("query",))),
        ("GPT2", PartsView("1", ("key", "value", "attention_output"))),
        ("GPTNeoX", PartsView("2", ("query",))),
        ("GPTNeoX", PartsView()),
        ("Llama", PartsView("1", ("key", "ffn_in"))),
        ("Llama", PartsView("", ("layernorm",))),  # RMSNorm alone
        ("Bert", PartsView("2", ("query",))),
        ("Albert", PartsView("1", ("ffn_out",))),
    ],
    ids=str,
)
def test_it_agrees_on_parts(
    random_target: Callable[..., Target],
    observe: Observe,
    architecture: str,
    view: PartsView,
    dtype: torch.dtype,
    distance: Distance,
) -> None:
    target = random_target(architecture, dtype)
    observations = [
        observe(target, pair, index=place, view=view) for place, pair in enumerate(EQUAL)
    ]
    assert_agree(observations, distance)


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_it_agrees_on_a_slice_that_is_left_to_autograd(
    random_model: Callable[..., Any], observe: Observe, distance: Distance
) -> None:
    model = random_model("GPT2").double()
    first, second = (block.attn.c_attn for block in model.transformer.h)
    second.weight = first.weight
    target = TextClassifier("tied", model, tiny_tokenizer())
    observations = [
        observe(target, pair, index=place, view=PartsView("1", ("query", "value")))
        for place, pair in enumerate(EQUAL)
    ]
    matcher = for_observations(observations, distance)
    assert isinstance(matcher, FactoredMatcher)
    assert matcher.plan.by_autograd == tuple(
        f"transformer.h.0.attn.c_attn.weight[{part}]" for part in ("query", "value")
    )
    assert_agree(observations, distance)


def test_only_what_is_seen_is_computed(
    random_target: Callable[..., Target], observe: Observe
) -> None:
    matcher = for_observations(
        [observe(random_target("GPT2"), EQUAL[0], view=PartsView("2", ("query",)))], Cosine()
    )
    assert isinstance(matcher, FactoredMatcher)
    assert matcher.names == ("transformer.h.1.attn.c_attn.weight[query]",)
    assert matcher.plan.modules == ("transformer.h.1.attn.c_attn",)


def test_an_observation_with_nothing_to_match_is_refused_among_others(
    tiny: Target, observe: Observe
) -> None:
    views = (Everything(), PartsView("", ("word_embedding",)))
    with pytest.raises(GradleakError, match="Nothing in the visible update can be matched"):
        for_observations(
            [observe(tiny, index=place, view=view) for place, view in enumerate(views)], Cosine()
        )


@pytest.mark.parametrize("plain", [False, True])
def test_a_slice_of_the_observations_gives_its_part_of_the_whole(
    tiny64: Target, observe: Observe, plain: bool
) -> None:
    observations = [
        observe(tiny64, texts, index=place) for place, texts in enumerate([*UNEQUAL, *EQUAL])
    ]
    batch = candidates(observations)
    matcher = for_observations(observations, Cosine(), plain=plain)
    torch.testing.assert_close(
        matcher.distances(batch[1:3], slice(1, 3)),
        matcher.distances(batch)[1:3],
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_slopes_in_soft_labels_agree(tiny64: Target, observe: Observe, distance: Distance) -> None:
    observations = [observe(tiny64, texts, index=place) for place, texts in enumerate(UNEQUAL)]
    batch = candidates(observations)
    found = []
    for plain in (False, True):
        labels = torch.full((*batch.lead, 2), 0.5, dtype=torch.float64).requires_grad_()
        distances = for_observations(observations, distance, plain=plain).distances(
            replace(batch, labels=labels.softmax(-1))
        )
        found.append(torch.autograd.grad(distances.sum(), labels)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-12)


def test_ids_and_their_embeddings_are_the_same_candidate(tiny64: Target, observe: Observe) -> None:
    observation = observe(tiny64, UNEQUAL[0])
    ids = torch.randint(5, 90, (1, 2, 2, max(observation.knows.lengths)))
    by_embeddings = replace(candidates([observation]), embeddings=tiny64.embed(ids))
    by_ids = replace(by_embeddings, embeddings=None, ids=ids)
    matcher = for_observations([observation], Cosine())
    torch.testing.assert_close(matcher.distances(by_ids), matcher.distances(by_embeddings))
    assert not matcher.distances(by_ids).requires_grad


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize(
    ("architecture", "texts"),
    [("Bert", UNEQUAL[0]), ("GPT2", EQUAL[0]), ("Roberta", UNEQUAL[0]), ("MPNet", UNEQUAL[0])],
)
def test_the_distance_at_the_truth_is_nothing_beside_that_elsewhere(
    random_target: Callable[..., Target],
    observe: Observe,
    make_private: Callable[..., Any],
    add_axes: Callable[[Batch, int], Batch],
    architecture: str,
    texts: tuple[str, ...],
    distance: Distance,
) -> None:
    target = random_target(architecture)
    observation = observe(target, texts)
    matcher = for_observations([observation], distance)
    at_truth = float(matcher.distances(add_axes(make_private(target, texts).batch, 2)))
    elsewhere = float(matcher.distances(candidates([observation], count=1)))
    assert abs(at_truth) < 1e-4 * elsewhere


def test_tensors_without_signal_are_left_out(
    tiny: Target, minilm: Target, observe: Observe
) -> None:
    for target in (tiny, minilm):
        observation = observe(target)
        silent = {name for name in observation.update.tensors if name.endswith("key.bias")}
        assert silent
        assert not silent & set(for_observations([observation], Cosine()).names)
        # Noise makes them loud, not meaningful
        noisy = observe(target, defenses=(GaussianNoise(0.1),))
        assert not silent & set(for_observations([noisy], Cosine()).names)


def test_the_word_embeddings_are_left_out(tiny: Target, observe: Observe) -> None:
    assert not set(tiny.groups["word_embedding"]) & set(
        for_observations([observe(tiny)], Cosine()).names
    )


def test_a_view_with_nothing_to_match_is_refused(tiny: Target, observe: Observe) -> None:
    whole = observe(tiny)
    only_words = replace(
        whole, rounds=(Round(tiny, whole.update.select(tiny.groups["word_embedding"])),)
    )
    with pytest.raises(GradleakError, match="Nothing in the visible update can be matched"):
        for_observations([only_words], Cosine())


def test_observations_of_different_models_are_refused(
    tiny: Target, tiny64: Target, observe: Observe
) -> None:
    with pytest.raises(GradleakError, match="different models"):
        for_observations([observe(tiny), observe(tiny64)], Cosine())


def test_a_shared_table_goes_to_autograd_and_linear_layers_do_not(
    random_target: Callable[..., Target], observe: Observe
) -> None:
    matcher = for_observations([observe(random_target("MPNet"))], Cosine())
    assert isinstance(matcher, FactoredMatcher)
    assert matcher.plan.by_autograd == ("mpnet.encoder.relative_attention_bias.weight",)


def test_plain_asks_for_the_reference(tiny: Target, observe: Observe) -> None:
    assert isinstance(for_observations([observe(tiny)], Cosine(), plain=True), SimulatedMatcher)
