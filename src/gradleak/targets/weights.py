"""What each parameter of a Hugging Face model is, and which of them train.

A layer is known by where it lies, a module by its exact path within the layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradleak.core.errors import GradleakError
from gradleak.core.parts import MODULES, Cut, Part, select_parts
from gradleak.matching.kinds import Kind, kind_of

PATHS = {  # of linear layers within a transformer layer
    "query": (
        "attention.self.query attention.self.query_proj attention.attn.q attention.query"
        " attention.q_lin self_attn.q_proj attn.attention.q_proj attn.q_proj"
    ),
    "key": (
        "attention.self.key attention.self.key_proj attention.attn.k attention.key attention.k_lin "
        "self_attn.k_proj attn.attention.k_proj attn.k_proj"
    ),
    "value": (
        "attention.self.value attention.self.value_proj attention.attn.v attention.value"
        " attention.v_lin self_attn.v_proj attn.attention.v_proj attn.v_proj"
    ),
    "attention_output": (
        "attention.output.dense attention.attn.o attention.dense attention.out_lin attn.c_proj"
        " self_attn.o_proj self_attn.out_proj self_attn.dense self_attention.dense"
        " attn.attention.out_proj attn.out_proj attn.Wo"
    ),
    "ffn_in": (
        "intermediate.dense ffn ffn.lin1 mlp.c_fc mlp.gate_proj mlp.up_proj mlp.dense_h_to_4h fc1"
        " mlp.fc1 mlp.fc_in mlp.Wi"
    ),
    "ffn_out": (
        "output.dense ffn_output ffn.lin2 mlp.c_proj mlp.down_proj mlp.dense_4h_to_h fc2 mlp.fc2"
        " mlp.fc_out mlp.Wo"
    ),
}
ROLES = {path: module for module, paths in PATHS.items() for path in paths.split()}
# One matrix for query, key and value: are those of a head together, or all queries first?
FUSED_BY_HEAD = {
    "attn.c_attn": False,  # GPT-2
    "attn.Wqkv": False,  # ModernBERT
    "attention.query_key_value": True,  # GPT-NeoX
    "self_attention.query_key_value": True,  # BLOOM
}
ADAPTERS = {"lora_A": "adapter_in", "lora_B": "adapter_out"}  # peft's two of every layer
LAYERS = "layers:"  # `layers:1-3` among the names


@dataclass(frozen=True, eq=False)
class Weights:
    """A model's parameters: those that train by name, by role and by part, and those that do
    not."""

    parameters: Mapping[str, Tensor]
    groups: Mapping[str, tuple[str, ...]]
    parts: tuple[Part, ...]
    frozen_parts: tuple[Part, ...]


def weights_of(name: str, model: Any, classes: int, frozen: Sequence[str]) -> Weights:
    """Sorts the parameters; `frozen` names groups, modules or layers."""
    groups = groups_of(model, classes)
    parts = parts_of(model, groups)
    left_out = frozen_parameters(name, parts, groups, frozen)
    return Weights(
        {
            parameter: value
            for parameter, value in model.named_parameters()
            if parameter not in left_out
        },
        groups,
        tuple(part for part in parts if part.parameter not in left_out),
        tuple(part for part in parts if part.parameter in left_out),
    )


@dataclass(frozen=True)
class Place:
    """Where a module lies: its layer, and its path within the innermost list of modules."""

    layer: int | None = None
    path: str = ""


def groups_of(model: Any, classes: int) -> dict[str, tuple[str, ...]]:
    """Parameter names by role, found by identity and shape rather than by any architecture's
    names."""
    words = model.get_input_embeddings().weight
    positions = getattr(model.config, "max_position_embeddings", None)
    tables = {
        id(m.weight)
        for m in model.modules()
        if _of_positions(m, positions) and m.weight is not words
    }
    inside_base = {id(parameter) for parameter in model.base_model.parameters()}
    head = {
        name: parameter
        for name, parameter in model.named_parameters()
        # DeBERTa's lies outside its base
        if id(parameter) not in inside_base and "pooler" not in name.split(".")
    }
    return {
        "word_embedding": tuple(name for name, p in model.named_parameters() if p is words),
        "position_embedding": tuple(
            name for name, p in model.named_parameters() if id(p) in tables
        ),
        "head": tuple(head),
        "head_bias": tuple(
            name for name, p in head.items() if p.ndim == 1 and p.shape[0] == classes
        )[-1:],
    }


def _of_positions(module: nn.Module, positions: int | None) -> bool:
    if not isinstance(module, nn.Embedding):
        return False
    # OPT's and BART's tables have two rows more than there are positions.
    return module.num_embeddings == positions or type(module).__name__.endswith(
        "LearnedPositionalEmbedding"
    )


def parts_of(model: Any, groups: Mapping[str, tuple[str, ...]]) -> tuple[Part, ...]:
    """Every parameter once, fused ones as their slices. Shared layers (ALBERT) are there once:
    layer 1 stands for all."""
    stacks = _stacks(model)
    known = {
        name: group
        for group in ("word_embedding", "position_embedding", "head")
        for name in groups[group]
    }
    found: list[Part] = []
    for name, parameter in model.named_parameters():
        module_path, _, attribute = name.rpartition(".")
        place = _place(model, module_path, stacks)
        holder = model.get_submodule(module_path)
        if (
            attribute == "weight"
            and place.path in FUSED_BY_HEAD
            and parameter.numel() == 3 * min(parameter.shape) ** 2
        ):
            found += _slices(name, parameter, place, holder, model.config)
        else:
            module = known.get(name) or _module(holder, module_path, attribute, place)
            found.append(Part(name, name, module, tuple(parameter.shape), place.layer))
    return tuple(found)


def _module(holder: nn.Module, module_path: str, attribute: str, place: Place) -> str:
    if place.layer is None and "pooler" in module_path.split("."):
        return "pooler"
    if type(holder).__name__.endswith("Norm"):  # LayerNorm, LlamaRMSNorm …
        return "layernorm"
    if adapter := ADAPTERS.get(module_path.split(".")[-2] if "." in module_path else ""):
        return adapter
    if not isinstance(holder, nn.Linear) and kind_of(holder) is not Kind.CONV1D:
        return "other"
    if attribute == "bias":
        return "bias"
    return "other" if place.layer is None else ROLES.get(place.path, "other")


def _slices(
    name: str, parameter: Tensor, place: Place, holder: nn.Module, config: Any
) -> list[Part]:
    axis = -1 if kind_of(holder) is Kind.CONV1D else -2
    blocks = int(config.num_attention_heads) if FUSED_BY_HEAD[place.path] else 1
    slices = []
    for number, module in enumerate(("query", "key", "value")):
        cut = Cut(axis, number, blocks=blocks)
        shape = tuple(cut.of(parameter).shape)
        slices.append(Part(f"{name}[{module}]", name, module, shape, place.layer, cut))
    return slices


def _stacks(model: Any) -> dict[str, int]:
    """The lists of layers, each with the number of layers before it.

    Lists in one module run side by side (XLM keeps attentions and FFNs apart); a decoder's layers
    count on from its encoder's.
    """
    inside = {id(module) for module in model.base_model.modules()}
    before: dict[str, int] = {}
    count, lengths = 0, dict[str, int]()
    for path, module in model.named_modules():
        if (
            not isinstance(module, nn.ModuleList)
            or id(module) not in inside
            or any(_under(path, other) for other in before)
        ):
            continue
        parent = path.rpartition(".")[0]
        if parent not in lengths:
            count = sum(lengths.values())
        before[path] = count
        lengths[parent] = max(lengths.get(parent, 0), len(module))
    return before


def _under(path: str, other: str) -> bool:
    return path.startswith(other + ".")


def _place(model: Any, module_path: str, stacks: Mapping[str, int]) -> Place:
    outer = next((stack for stack in stacks if _under(module_path, stack)), None)
    if outer is None:
        return Place()
    layer = stacks[outer] + int(module_path.removeprefix(outer + ".").partition(".")[0]) + 1
    names = module_path.split(".")
    lists = [
        end
        for end in range(1, len(names))
        if isinstance(model.get_submodule(".".join(names[:end])), nn.ModuleList)
    ]
    # peft puts the layer that it adapts one module further in
    return Place(layer, ".".join(names[lists[-1] + 1 :]).removesuffix(".base_layer"))


def frozen_parameters(
    name: str, parts: Sequence[Part], groups: Mapping[str, tuple[str, ...]], frozen: Sequence[str]
) -> frozenset[str]:
    """Names of the parameters that `frozen` names; refuses what names nothing, half a matrix, or
    all there is."""
    chosen = {part for word in frozen for part in _find_named(name, parts, groups, word)}
    parameters = frozenset(part.parameter for part in chosen)
    for part in parts:
        if part.parameter in parameters and part not in chosen:
            raise GradleakError(
                f"{name} keeps query, key and value in one matrix, {part.parameter}, which trains"
                " as a whole or not at all: freeze all three, or a layer (layers:1)."
            )
    if len(parameters) == len({part.parameter for part in parts}):
        raise GradleakError(
            f"With {', '.join(frozen)} frozen nothing of {name} trains and no update is sent:"
            " freeze less."
        )
    return parameters


def _find_named(
    name: str, parts: Sequence[Part], groups: Mapping[str, tuple[str, ...]], word: str
) -> list[Part]:
    if word.startswith(LAYERS):
        return list(_layers(name, parts, word))
    if exact := [part for part in parts if part.parameter == word]:
        return exact
    if word not in groups and word not in MODULES:
        known = ", ".join(dict.fromkeys([*groups, *MODULES]))
        raise GradleakError(
            f"{name} has no group of parameters called {word!r} to freeze; groups are {known}, and"
            " layers as in layers:1-3."
        )
    found = (
        [part for part in parts if part.parameter in groups[word]]
        if word in groups
        else select_parts(parts, modules=[word])
    )
    if not found:
        raise GradleakError(f"{name} has no {word} to freeze.")
    return list(found)


def _layers(name: str, parts: Sequence[Part], word: str) -> Sequence[Part]:
    try:
        return select_parts(parts, layers=word.removeprefix(LAYERS).strip() or "?")
    except GradleakError as error:
        raise GradleakError(f"{name} cannot freeze {word!r}. {error}") from error
