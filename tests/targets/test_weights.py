"""What each parameter is: all are covered once, modules are what they are called, and the
numbers are the paper's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.parts import MODULES, Part
from gradleak.core.target import Target
from gradleak.targets import resolve_target
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import Tiny, tiny_tokenizer
from gradleak.targets.weights import groups_of, parts_of
from gradleak.views import PartsView

CPU = torch.device("cpu")
EVERY = ["Bert", "DistilBert", "Roberta", "MPNet", "Electra", "Albert", "GPT2", "Llama", "GPTNeoX"]
LINEAR = ("query", "key", "value", "attention_output", "ffn_in", "ffn_out")
# What lies in no layer, by module.
OUTSIDE = {
    "Bert": {"layernorm": 2, "other": 1, "pooler": 2, "head": 2, "position_embedding": 1},
    "DistilBert": {"layernorm": 2, "head": 4, "position_embedding": 1},
    "Roberta": {"layernorm": 2, "other": 1, "head": 4, "position_embedding": 1},
    "MPNet": {"layernorm": 2, "other": 1, "head": 4, "position_embedding": 1},
    "Electra": {"layernorm": 2, "other": 2, "bias": 1, "head": 4, "position_embedding": 1},
    "Albert": {
        "layernorm": 2,
        "other": 2,
        "bias": 1,
        "pooler": 2,
        "head": 2,
        "position_embedding": 1,
    },
    "GPT2": {"layernorm": 2, "head": 1, "position_embedding": 1},
    "Llama": {"layernorm": 1, "head": 1},
    "GPTNeoX": {"layernorm": 2, "head": 1},
}


def counted(parts: tuple[Part, ...], layer: int | None) -> dict[str, int]:
    found = [part.module for part in parts if part.layer == layer]
    return {module: found.count(module) for module in MODULES if module in found}


def zeroed(target: Target, parts: list[Part], value: float = 0.0) -> dict[str, torch.Tensor]:
    """The parameters with some parts filled."""
    changed = dict(target.parameters)
    for part in parts:
        places = part.of(
            torch.arange(target.parameters[part.parameter].numel()).view(
                target.parameters[part.parameter].shape
            )
        )
        filled = changed[part.parameter].flatten().clone()
        filled[places.flatten()] = value
        changed[part.parameter] = filled.view_as(target.parameters[part.parameter])
    return changed


@pytest.mark.parametrize("architecture", EVERY)
def test_every_entry_of_every_parameter_is_in_one_part(
    random_target: Callable[..., Target], architecture: str
) -> None:
    target = random_target(architecture)
    assert len({part.name for part in target.parts}) == len(target.parts)
    assert not target.frozen_parts
    assert {part.module for part in target.parts} <= set(MODULES)
    for name, parameter in target.parameters.items():
        places = torch.arange(parameter.numel()).view(parameter.shape)
        held = [part.of(places) for part in target.parts if part.parameter == name]
        assert [tuple(one.shape) for one in held] == [
            part.shape for part in target.parts if part.parameter == name
        ]
        assert torch.equal(
            torch.cat([one.flatten() for one in held]).sort().values, places.flatten()
        )


@pytest.mark.parametrize("architecture", EVERY)
def test_a_layer_has_the_same_modules_in_every_architecture(
    random_target: Callable[..., Target], architecture: str
) -> None:
    parts = random_target(architecture).parts
    # ALBERT's one layer stands for all that share it
    layers = [1] if architecture == "Albert" else [1, 2]
    assert sorted({part.layer for part in parts if part.layer}) == layers
    # A fused layer's bias is whole
    biases = {"Llama": 0, "GPT2": 4, "GPTNeoX": 4}.get(architecture, 6)
    for layer in layers:
        expected = {
            module: 2 if (architecture, module) == ("Llama", "ffn_in") else 1 for module in LINEAR
        }
        expected |= {"layernorm": 2 if architecture == "Llama" else 4} | (
            {"bias": biases} if biases else {}
        )
        assert counted(parts, layer) == expected
    assert counted(parts, None) == {"word_embedding": 1, **OUTSIDE[architecture]}
    groups = random_target(architecture).groups
    for group in ("word_embedding", "position_embedding", "head"):
        assert tuple(part.name for part in parts if part.module == group) == groups[group]


def test_modules_are_exact() -> None:
    parts = {part.name: (part.module, part.layer) for part in Tiny().open(CPU).parts}
    layer = "bert.encoder.layer.1."
    assert parts[layer + "attention.self.query.weight"] == ("query", 2)
    assert parts[layer + "attention.self.query.bias"] == ("bias", 2)
    assert parts[layer + "attention.output.dense.weight"] == ("attention_output", 2)
    assert parts[layer + "output.dense.weight"] == ("ffn_out", 2)
    assert parts[layer + "intermediate.dense.weight"] == ("ffn_in", 2)
    assert parts[layer + "output.LayerNorm.bias"] == ("layernorm", 2)
    assert parts["bert.embeddings.LayerNorm.weight"] == ("layernorm", None)
    assert parts["bert.embeddings.token_type_embeddings.weight"] == ("other", None)
    assert parts["bert.pooler.dense.bias"] == ("pooler", None)
    assert parts["classifier.bias"] == ("head", None)


@pytest.mark.parametrize("architecture", ["GPT2", "GPTNeoX"])
def test_slices_of_a_fused_matrix_are_what_they_are_called(
    random_target: Callable[..., Target],
    make_private: Callable[..., Any],
    observe: Callable[..., Observation],
    architecture: str,
) -> None:
    """Where nothing is asked keys do not matter and values do; and in the last layer only the
    last token asks."""
    target = random_target(architecture, torch.float64)
    batch = make_private(target, ("the cat is red .",)).batch
    query, key, value = (
        [part for part in target.parts if part.module == module] for module in LINEAR[:3]
    )
    biases = [
        part
        for part in target.parts
        if part.parameter in {one.parameter.replace("weight", "bias") for one in query}
    ]
    plain, silent = (
        target.losses(batch, zeroed(target, biases)),
        target.losses(batch, zeroed(target, query + biases)),
    )
    for one, matters in ((key, False), (value, True)):
        assert not torch.allclose(target.losses(batch, zeroed(target, one + biases)), plain)
        assert (
            torch.allclose(target.losses(batch, zeroed(target, query + one + biases)), silent)
            is not matters
        )
    seen = observe(
        target, ("the cat is red .",), view=PartsView(layers="2", modules=LINEAR[:3])
    ).update.tensors
    asked, offered, given = (int(torch.linalg.matrix_rank(tensor[0])) for tensor in seen.values())
    assert asked == 1 < offered
    assert given == 2  # one a head


def test_a_linear_layer_of_no_known_name_is_other_and_in_its_layer(
    random_model: Callable[..., Any],
) -> None:
    model = random_model("Bert")
    model.bert.encoder.layer[1].adapter = torch.nn.Linear(32, 32)
    target = TextClassifier("adapted", model, tiny_tokenizer())
    part = target.part("bert.encoder.layer.1.adapter.weight")
    assert (part.module, part.layer) == ("other", 2)
    assert part.name in PartsView().visible(target)
    assert part.name in PartsView(layers="2").visible(target)


def test_a_decoders_layers_count_on_and_lists_side_by_side_do_not(
    random_model: Callable[..., Any],
) -> None:
    model = random_model("Bert")
    model.bert.decoder = torch.nn.ModuleDict(
        {"layer": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))}
    )
    model.bert.encoder.beside = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    layers = {part.name: part.layer for part in parts_of(model, groups_of(model, 2))}
    assert layers["bert.encoder.beside.1.weight"] == 2
    assert layers["bert.decoder.layer.0.weight"] == 3


@pytest.fixture(scope="module")
def bert_base() -> Target:
    """BERT-base's shape, all zeros: made at once."""
    from transformers import BertConfig, BertForSequenceClassification

    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(attn_implementation="eager"))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return TextClassifier("bert-base", model, tiny_tokenizer())


@pytest.mark.parametrize(
    ("layers", "modules", "parameters"),
    [
        ("", (), 109_483_778),
        ("all", (), 85_054_464),
        ("12", (), 7_087_872),
        ("5", ("ffn_in",), 2_359_296),
        ("5", ("ffn_out",), 2_359_296),
        *(("1", (module,), 589_824) for module in ("query", "key", "value", "attention_output")),
    ],
)
def test_numbers_of_parameters_are_those_of_the_papers_table(
    bert_base: Target, layers: str, modules: tuple[str, ...], parameters: int
) -> None:
    """Li, Xu and Dras (2024), Table 1."""
    assert (
        sum(bert_base.part(name).size for name in PartsView(layers, modules).visible(bert_base))
        == parameters
    )


# Freezing


def test_frozen_parts_are_neither_parameters_nor_parts(tiny: Target) -> None:
    target = Tiny(frozen=("word_embedding", "layers:1", "layernorm")).open(CPU)
    gone = {part.name for part in target.frozen_parts}
    assert gone == {
        part.name
        for part in tiny.parts
        if part.module in ("word_embedding", "layernorm") or part.layer == 1
    }
    assert (
        {part.name for part in target.parts}
        == set(target.parameters)
        == set(tiny.parameters) - gone
    )
    with pytest.raises(
        GradleakError, match="does not train 'bert.embeddings.word_embeddings.weight'"
    ):
        target.part("bert.embeddings.word_embeddings.weight")


def test_a_line_freezes_layers(tiny: Target) -> None:
    target = resolve_target('tiny:frozen=[head_bias,"layers:1-2"]').open(CPU)
    assert set(tiny.parameters) - set(target.parameters) == {"classifier.bias"} | {
        p.name for p in tiny.parts if p.layer
    }


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (
            "layers:3",
            r"tiny cannot freeze 'layers:3'. There is no layer 3: this model has 2 layers",
        ),
        ("layers:", r"tiny cannot freeze 'layers:'. Layers are written as"),
        (
            "words",
            (
                r"no group of parameters called 'words' to freeze; groups are word_embedding, .*,"
                r" and layers as in layers:1-3"
            ),
        ),
    ],
)
def test_what_cannot_be_frozen_is_refused(frozen: str, message: str) -> None:
    with pytest.raises(GradleakError, match=message):
        Tiny(frozen=(frozen,)).open(CPU)


ABSENT = ("convolution", "adapter_in", "adapter_out")  # from a plain BERT


def test_a_model_with_nothing_left_to_train_is_refused() -> None:
    with pytest.raises(
        GradleakError, match="frozen nothing of tiny trains and no update is sent: freeze less"
    ):
        Tiny(frozen=tuple(module for module in MODULES if module not in ABSENT)).open(CPU)


def test_a_slice_of_a_fused_matrix_cannot_be_frozen_alone(random_model: Callable[..., Any]) -> None:
    with pytest.raises(
        GradleakError,
        match=r"fused keeps query, key and value in one matrix, transformer\.h\.0\.attn\.c_attn",
    ):
        TextClassifier("fused", random_model("GPT2"), tiny_tokenizer(), frozen=("query", "key"))
    target = TextClassifier(
        "fused", random_model("GPT2"), tiny_tokenizer(), frozen=("query", "key", "value")
    )
    assert {part.parameter for part in target.frozen_parts} == {
        f"transformer.h.{n}.attn.c_attn.weight" for n in (0, 1)
    }


def test_freezing_what_a_model_has_not_is_refused(random_model: Callable[..., Any]) -> None:
    with pytest.raises(GradleakError, match="causal has no pooler to freeze"):
        TextClassifier("causal", random_model("GPT2"), tiny_tokenizer(), frozen=("pooler",))


def test_minilm_freezes_parts_too(minilm: Target) -> None:
    target = resolve_target('minilm:frozen=["layers:2-6",word_embedding]').open(CPU)
    assert {part.layer for part in target.parts} == {None, 1}
    assert len(target.parameters) < len(minilm.parameters)
