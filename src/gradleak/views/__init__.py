"""Which part of an update is seen."""

from dataclasses import dataclass

from gradleak.core.registry import register
from gradleak.core.target import Target
from gradleak.core.view import View
from gradleak.views.parts import Parts
from gradleak.views.tensors import Tensors

__all__ = ["Everything", "Lamp", "LampStrict", "Parts", "Tensors"]


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
