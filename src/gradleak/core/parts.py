"""Parts of a model: every parameter, or slice of one, has a layer and a module that are called
alike in every architecture."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradleak.core.errors import GradleakError, refuse_unknown

WITHOUT_LAYER = ("word_embedding", "position_embedding", "pooler", "head")
MODULES = (
    # Weights alone; both halves of a gated FFN are ffn_in
    *("query", "key", "value", "attention_output", "ffn_in", "ffn_out"),
    "convolution",  # weights alone
    "adapter_in",  # LoRA's A, fed what the layer is fed that it stands beside
    "adapter_out",  # and B, fed what A makes of that
    "layernorm",  # weight and bias, RMSNorm too; of image models, GroupNorm and fixed BatchNorm
    "bias",  # of every linear layer or convolution but those of pooler and head
    *WITHOUT_LAYER,
    "other",  # what has no name of its own here: token-type embeddings, say
)
FUSED = "query_key_value"  # the module of a fused matrix taken whole, which is three parts
# What attention begins with. In the first layer tokens have not mixed in what these are fed.
ATTENTION_INPUTS = ("query", "key", "value", FUSED)


@dataclass(frozen=True)
class Cut:
    """One share of an axis that reads as [blocks, shares, width]: GPT-2's query is share 0 of 3
    in one block of all columns."""

    axis: int  # of the parameter, counted from the end so that leading axes are free
    place: int
    shares: int = 3
    blocks: int = 1  # attention heads, where those of one head lie together (GPT-NeoX)

    def of(self, tensor: Tensor, axis: int | None = None) -> Tensor:
        """The share of a parameter's gradient, or of another axis: a layer's outputs are cut as
        its weight's rows are."""
        axis = self.axis if axis is None else axis
        shape = (self.blocks, self.shares, -1)
        apart: Tensor = tensor.unflatten(axis, shape)  # type: ignore[no-untyped-call]
        return apart.select(axis - 1, self.place).flatten(axis - 1, axis)


@dataclass(frozen=True)
class Part:
    """A parameter, or the slice of one, and what it is. Layers count from 1; what lies outside
    of layers has none."""

    name: str  # the parameter's, or `PARAMETER[query]` for a slice
    parameter: str
    module: str  # one of MODULES
    shape: tuple[int, ...]
    layer: int | None = None
    cut: Cut | None = None

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def is_bias(self) -> bool:
        """Whether it is added: a linear layer's bias or a LayerNorm's (DeBERTa's are called
        q_bias and v_bias)."""
        return self.parameter.rpartition(".")[2].endswith("bias")

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor shaped like the parameter, after any leading axes."""
        return tensor if self.cut is None else self.cut.of(tensor)


def by_name(parts: Iterable[Part], parameters: Mapping[str, Tensor]) -> dict[str, Part]:
    """Parts by name; a fused parameter is there too, as a whole."""
    found: dict[str, Part] = {}
    for part in parts:
        if part.cut is not None:
            whole = tuple(parameters[part.parameter].shape)
            found[part.parameter] = Part(part.parameter, part.parameter, FUSED, whole, part.layer)
        found[part.name] = part
    return found


def select_parts(
    parts: Sequence[Part], layers: str = "", modules: Sequence[str] = ()
) -> tuple[Part, ...]:
    """Those in the named layers and of the named modules; an empty choice restricts nothing.

    Layers leave out what has none, except for modules that never have one: these are taken wherever
    they are named.
    """
    check_modules(modules)
    numbers = number_layers(layers, parts) if layers else frozenset()
    return tuple(
        part
        for part in parts
        if (not modules or part.module in modules)
        and (
            not layers or part.layer in numbers or (bool(modules) and part.module in WITHOUT_LAYER)
        )
    )


def number_layers(layers: str, parts: Iterable[Part]) -> frozenset[int]:
    """The layers a text names, among those there are."""
    count = max((part.layer or 0 for part in parts), default=0)
    if count == 0:
        raise GradleakError("This model has no layers that can be told apart: name modules alone.")
    ranges = read_layers(layers)
    beyond = max((named[-1] for named in ranges), default=0)
    if beyond > count:
        raise GradleakError(
            f"There is no layer {beyond}: this model has {count} layers, counted from 1."
        )
    return frozenset(number for named in ranges or (range(1, count + 1),) for number in named)


def read_layers(layers: str) -> tuple[range, ...]:
    """What `5`, `3-6` or `1,4-6` name; nothing for `all`."""
    if layers.strip() == "all":
        return ()
    ranges = []
    for piece in layers.split(","):
        first, dash, last = (word.strip() for word in piece.partition("-"))
        ends = [first, last if dash else first]
        if not all(end.isdecimal() for end in ends) or not 1 <= int(ends[0]) <= int(ends[1]):
            raise GradleakError(
                f"Layers are written as all, 5, 3-6 or 1,4-6, counted from 1, not {layers!r}."
            )
        ranges.append(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(ranges)


def check_modules(modules: Iterable[str]) -> None:
    """Refuses names that no module has."""
    for module in modules:
        refuse_unknown("Unknown module", module, MODULES, "Modules")
