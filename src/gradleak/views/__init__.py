"""Which part of an update is seen: all, what a paper assumes, or layers and modules by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradleak.core.errors import GradleakError
from gradleak.core.observation import View
from gradleak.core.parts import Part, check_modules, read_layers, select_parts
from gradleak.core.registry import register
from gradleak.core.target import Target

__all__ = ["Everything", "Lamp", "LampStrict", "PartsView", "TensorsView"]


@register("view", "everything")
@dataclass(frozen=True)
class Everything(View):
    """Every parameter that trains."""

    def visible(self, target: Target) -> tuple[str, ...]:
        return tuple(target.parameters)


@register("view", "lamp")
@dataclass(frozen=True)
class Lamp(View):
    """All but the word embeddings, whose gradient would give the words away at once (LAMP,
    supplement A.1)."""

    cites = "Balunović et al., NeurIPS 2022"

    def visible(self, target: Target) -> tuple[str, ...]:
        hidden = target.groups["word_embedding"]
        return tuple(name for name in target.parameters if name not in hidden)


@register("view", "lamp_strict")
@dataclass(frozen=True)
class LampStrict(View):
    """As `lamp`, and without position embeddings and any bias of the transformer's blocks (LAMP,
    supplement A.1).

    Models without these are what the paper assumes; its released code matches them all the same. A
    LayerNorm's bias is a bias.
    """

    cites = "Balunović et al., NeurIPS 2022"

    def visible(self, target: Target) -> tuple[str, ...]:
        hidden = {
            part.parameter
            for part in target.parts
            if part.module in ("word_embedding", "position_embedding")
        }
        hidden |= {
            part.parameter for part in target.parts if part.layer is not None and part.is_bias
        }
        return tuple(name for name in target.parameters if name not in hidden)


@register("view", "parts")
@dataclass(frozen=True)
class PartsView(View):
    """Some layers (all, 5, 3-6 or 1,4-6), some modules (query, ffn_in …) or, with both, these
    modules of these layers.

    Embeddings, pooler and head lie in no layer: they are seen when named among the modules. With
    nothing named all is seen.
    """

    layers: str = ""
    modules: tuple[str, ...] = ()
    cites = "Li, Xu and Dras, 2024"

    def __post_init__(self) -> None:
        try:
            check_modules(self.modules)
            read_layers(self.layers or "all")
        except GradleakError as error:
            raise ValueError(str(error)) from error

    def visible(self, target: Target) -> tuple[str, ...]:
        every = (*target.parts, *target.frozen_parts)
        chosen = select_parts(every, self.layers, self.modules)
        for what, found in self._find_named(chosen).items():
            if not found:
                there = ", ".join(
                    dict.fromkeys(part.module for part in select_parts(every, self.layers))
                )
                where = (
                    f" in layers {self.layers}; there it has {there}"
                    if self.layers
                    else f"; it has {there}"
                )
                raise GradleakError(f"This model has no {what}{where}.")
            if set(found) <= set(target.frozen_parts):
                raise GradleakError(
                    f"Nothing of {what} trains in this model: it is frozen and never sent. Name"
                    " parts that train."
                )
        return tuple(part.name for part in chosen if part not in target.frozen_parts)

    def _find_named(self, chosen: Sequence[Part]) -> Mapping[str, Sequence[Part]]:
        """Everything that was asked for by name, with the parts it gave."""
        asked: dict[str, Sequence[Part]] = {
            module: [part for part in chosen if part.module == module] for module in self.modules
        }
        if read_layers(self.layers or "all"):  # named one by one
            for layer in sorted({part.layer for part in chosen if part.layer is not None}):
                asked[f"layer {layer}"] = [part for part in chosen if part.layer == layer]
        return asked or {"the layers": chosen}


@register("view", "tensors")
@dataclass(frozen=True)
class TensorsView(View):
    """The tensors of these names, and no others: what happened to be in a capture."""

    names: tuple[str, ...]  # of parameters, or slices of fused ones: PARAMETER[query]

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("name at least one tensor.")

    def visible(self, target: Target) -> tuple[str, ...]:
        return tuple(target.part(name).name for name in self.names)
