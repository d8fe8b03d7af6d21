"""The engine on causal language models: loss at every token, labels that may depend on the
embeddings, RMSNorm."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradleak.attacks.search.search_rows import soften_tokens
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching import L2L1, Cosine, Distance, SquaredL2, for_observations
from gradleak.matching.factored import FactoredMatcher
from gradleak.matching.kinds import Kind, kind_of
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.tiny import TinyCausal, tiny_tokenizer
from gradleak.views import PartsView

DISTANCES = [Cosine(), SquaredL2(), L2L1()]
UNEQUAL = [
    ("the cat is red .", "my phone number is five five zero one ."),
    ("we owes the bank .", "she left"),
]
Observe = Callable[..., Observation]


def candidates(observations: Sequence[Observation], count: int = 2) -> tuple[Tensor, Tensor]:
    """Noise around ordinary words at the observations' own lengths: embeddings and mask,
    [observations, candidates, …]."""
    target = observations[0].target
    masks = [target.attention_mask(observation.knows.lengths) for observation in observations]
    width = max(mask.shape[1] for mask in masks)
    mask = torch.stack(
        [torch.nn.functional.pad(mask, (0, width - mask.shape[1])) for mask in masks]
    )[:, None]
    mask = mask.expand(-1, count, -1, -1)
    generator = Streams.root("candidates", 0).generator()
    ids = torch.randint(5, 90, mask.shape, generator=generator)
    noise = torch.randn(*mask.shape, target.hidden_size, generator=generator).to(target.dtype)
    return target.embed(ids) + 0.3 * target.vocabulary.mean_norm * noise, mask


def assert_agree(observations: Sequence[Observation], distance: Distance, labelled: str) -> None:
    """Fast form and reference give one distance and one slope, the slope through the labels
    included.

    Labels are hard, tied to the embeddings, or free: logits that have a slope of their own.
    """
    target = observations[0].target
    made, mask = candidates(observations)
    generator = Streams.root("labels", 0).generator()
    hard = torch.randint(5, 90, mask.shape, generator=generator)
    drawn = torch.randn(*mask.shape, target.classes, generator=generator).to(target.dtype)
    found = []
    for plain in (False, True):
        embeddings, logits = made.detach().clone().requires_grad_(), drawn.clone().requires_grad_()
        labels = {
            "hard": hard,
            "tied": soften_tokens(target, embeddings),
            "free": logits.softmax(-1),
        }[labelled]
        batch = Batch(embeddings=embeddings, mask=mask, labels=labels)
        distances = for_observations(observations, distance, plain=plain).distances(batch)
        moved = [embeddings, logits] if labelled == "free" else [embeddings]
        found.append((distances.detach(), torch.autograd.grad(distances.sum(), moved)))
    (fast, fast_slopes), (slow, slow_slopes) = found
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=0)
    for fast_slope, slow_slope in zip(fast_slopes, slow_slopes, strict=True):
        missed = (fast_slope - slow_slope).flatten(2).norm(dim=2) / slow_slope.flatten(2).norm(
            dim=2
        )
        assert float(missed.max()) < 1e-9


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize("labelled", ["hard", "tied", "free"])
def test_the_engine_agrees_with_autograd(
    causal: Target, observe: Observe, distance: Distance, labelled: str
) -> None:
    observations = [observe(causal, pair, index=place) for place, pair in enumerate(UNEQUAL)]
    assert_agree(observations, distance, labelled)


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
@pytest.mark.parametrize("modules", [("layernorm",), ("query",), ("head",)], ids=str)
def test_it_agrees_on_parts(
    causal: Target, observe: Observe, modules: tuple[str, ...], distance: Distance
) -> None:
    if modules == ("head",) and causal.words_are_outputs:
        pytest.skip("its output layer is its word embeddings")
    view = PartsView("", modules)
    assert_agree(
        [observe(causal, pair, index=place, view=view) for place, pair in enumerate(UNEQUAL)],
        distance,
        "tied",
    )


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_tied_words_are_left_out_and_the_rest_has_a_closed_form(
    causal: Target, observe: Observe, distance: Distance
) -> None:
    matcher = for_observations([observe(causal)], distance)
    assert isinstance(matcher, FactoredMatcher)
    assert matcher.plan.by_autograd == ()
    assert set(causal.parameters) - set(matcher.names) == set(causal.groups["word_embedding"])
    assert set(causal.groups["head"]) <= set(matcher.names)


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_tokens_are_their_own_labels_and_the_truth_is_at_distance_zero(
    causal: Target,
    observe: Observe,
    make_private: Callable[..., Any],
    add_axes: Callable[[Batch, int], Batch],
    distance: Distance,
) -> None:
    truth = add_axes(make_private(causal).batch, 2)
    matcher = for_observations([observe(causal)], distance)
    by_embeddings = replace(truth, ids=None, embeddings=causal.embed(truth.ids))
    elsewhere = replace(truth, ids=truth.ids.roll(1, dims=-1))
    assert float(matcher.distances(truth)) < 1e-6 * float(matcher.distances(elsewhere))
    torch.testing.assert_close(
        matcher.distances(by_embeddings), matcher.distances(truth), rtol=1e-6, atol=1e-12
    )


# RMSNorm


class GemmaRMSNorm(nn.Module):
    """1 + weight instead of weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return (
            inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)
        )


class HalfRMSNorm(GemmaRMSNorm):
    """What its name promises and its numbers do not keep."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (
            inputs
            * torch.rsqrt(inputs[..., :4].square().mean(-1, keepdim=True) + 1e-6)
            * self.weight
        )


def test_an_rms_norm_is_known_by_its_numbers() -> None:
    assert [kind_of(module) for module in (nn.RMSNorm(8), GemmaRMSNorm(), HalfRMSNorm())] == [
        Kind.RMS_NORM,
        None,
        None,
    ]
    assert kind_of(nn.RMSNorm(8, elementwise_affine=False)) is None
    with_a_hole = nn.RMSNorm(8)
    with torch.no_grad():
        with_a_hole.weight[3] = 0  # its output no longer tells what was scaled
    assert kind_of(with_a_hole) is None


@pytest.mark.parametrize("distance", DISTANCES, ids=repr)
def test_an_rms_norm_of_another_kind_goes_to_autograd(observe: Observe, distance: Distance) -> None:
    model: Any = TinyCausal(layers=1, shape="llama").open(torch.device("cpu"), torch.float64).module
    model.model.norm = GemmaRMSNorm(32)
    target = CausalLanguageModel("odd", model.double(), tiny_tokenizer("[CLS] $A"))
    observations = [observe(target, pair, index=place) for place, pair in enumerate(UNEQUAL)]
    matcher = for_observations(observations, distance)
    assert isinstance(matcher, FactoredMatcher)
    assert matcher.plan.by_autograd == ("model.norm.weight",)
    assert_agree(observations, distance, "tied")
