"""Which part of an update is seen."""

from dataclasses import dataclass

from gradleak.core.registry import register
from gradleak.core.target import Target
from gradleak.core.view import View


@register("view", "everything")
@dataclass(frozen=True)
class Everything(View):
    """Every parameter that trains."""

    def visible(self, target: Target) -> tuple[str, ...]:
        return tuple(target.parameters)


@register("view", "lamp")
@dataclass(frozen=True)
class Lamp(View):
    """All but the word embeddings, whose gradient would give the words away at once (LAMP, supplement A.1)."""

    cites = "Balunović et al., NeurIPS 2022"

    def visible(self, target: Target) -> tuple[str, ...]:
        hidden = target.groups["word_embedding"]
        return tuple(name for name in target.parameters if name not in hidden)
