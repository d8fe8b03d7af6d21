"""What each view shows of each architecture, and what it says when it shows nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradleak.core.errors import GradleakError
from gradleak.core.specs import from_string
from gradleak.core.target import Target
from gradleak.targets.tiny import Tiny
from gradleak.views import Everything, Lamp, LampStrict, PartsView

CPU = torch.device("cpu")
LAYER = "bert.encoder.layer."


def test_layers_alone_are_whole_layers_without_embeddings_pooler_and_head(tiny: Target) -> None:
    assert PartsView(layers="all").visible(tiny) == tuple(
        name for name in tiny.parameters if name.startswith(LAYER)
    )
    assert PartsView(layers="2").visible(tiny) == tuple(
        name for name in tiny.parameters if name.startswith(LAYER + "1.")
    )


def test_modules_alone_are_these_modules_wherever_they_are(tiny: Target) -> None:
    norms = PartsView(modules=("layernorm",)).visible(tiny)
    assert norms == tuple(name for name in tiny.parameters if ".LayerNorm." in name)
    assert "bert.embeddings.LayerNorm.bias" in norms
    assert PartsView(modules=("query",)).visible(tiny) == tuple(
        f"{LAYER}{n}.attention.self.query.weight" for n in (0, 1)
    )


def test_both_are_these_modules_of_these_layers_and_what_has_no_layer(tiny: Target) -> None:
    seen = PartsView(layers="1", modules=("head", "value")).visible(tiny)
    assert seen == (f"{LAYER}0.attention.self.value.weight", "classifier.weight", "classifier.bias")


def test_nothing_named_is_all_there_is(tiny: Target) -> None:
    assert PartsView().visible(tiny) == Everything().visible(tiny)


def test_a_slice_is_seen_alone_and_everything_shows_the_matrix_whole(
    random_target: Callable[..., Target],
) -> None:
    target = random_target("GPT2")
    assert PartsView("2", ("query",)).visible(target) == (
        "transformer.h.1.attn.c_attn.weight[query]",
    )
    assert "transformer.h.1.attn.c_attn.weight" in Everything().visible(target)
    assert "transformer.h.1.attn.c_attn.weight" in Lamp().visible(target)
    sizes = [
        sum(target.part(name).size for name in view.visible(target))
        for view in (PartsView(), Everything())
    ]
    assert sizes[0] == sizes[1]


def test_a_view_is_written_in_a_line() -> None:
    assert from_string("view", 'parts:layers="1,4-6",modules=[query,key]') == PartsView(
        "1,4-6", ("query", "key")
    )
    assert from_string("view", "parts:layers=5") == PartsView("5")


@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "GPT2"])
def test_lamp_strict_leaves_out_embeddings_and_every_bias_of_a_block(
    random_target: Callable[..., Target], architecture: str
) -> None:
    target = random_target(architecture)
    hidden = set(Everything().visible(target)) - set(LampStrict().visible(target))
    tables = {
        name for group in ("word_embedding", "position_embedding") for name in target.groups[group]
    }
    blocks = {
        name
        for name in target.parameters
        if name.endswith(".bias") and (".layer." in name or ".h." in name)
    }
    assert hidden == tables | blocks
    assert set(target.groups["head"]) <= set(LampStrict().visible(target))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modules": ("querry",)}, r"Unknown module 'querry' \(did you mean 'query'\?\)"),
        ({"layers": "3-1"}, "Layers are written as all, 5, 3-6 or 1,4-6"),
    ],
)
def test_what_can_be_refused_before_the_model_is_opened_is(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PartsView(**fields)


def test_a_layer_beyond_the_model_is_refused(tiny: Target) -> None:
    with pytest.raises(
        GradleakError, match="There is no layer 5: this model has 2 layers, counted from 1"
    ):
        PartsView(layers="1-5").visible(tiny)


@pytest.mark.parametrize(
    ("architecture", "view", "message"),
    [
        (
            "GPT2",
            PartsView(modules=("query", "pooler")),
            r"This model has no pooler; it has word_embedding, position_embedding, ",
        ),
        (
            "Llama",
            PartsView("1", ("bias",)),
            r"This model has no bias in layers 1; there it has query, key, value, ",
        ),
    ],
)
def test_a_module_the_model_has_not_is_refused(
    random_target: Callable[..., Target], architecture: str, view: PartsView, message: str
) -> None:
    with pytest.raises(GradleakError, match=message):
        view.visible(random_target(architecture))


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (
            PartsView(modules=("query", "word_embedding")),
            "Nothing of word_embedding trains in this model: it is frozen and never sent",
        ),
        (PartsView(layers="1-2"), "Nothing of layer 1 trains"),
        (PartsView(layers="1", modules=("query",)), "Nothing of query trains"),
    ],
)
def test_a_part_that_is_frozen_is_refused(view: PartsView, message: str) -> None:
    target = Tiny(frozen=("word_embedding", "layers:1")).open(CPU)
    with pytest.raises(GradleakError, match=message):
        view.visible(target)


def test_what_is_left_of_all_layers_is_seen_and_nothing_is_refused() -> None:
    some, none = (Tiny(frozen=(frozen,)).open(CPU) for frozen in ("layers:1", "layers:all"))
    assert {name[len(LAYER)] for name in PartsView(layers="all").visible(some)} == {"1"}
    with pytest.raises(GradleakError, match="Nothing of the layers trains"):
        PartsView(layers="all").visible(none)
