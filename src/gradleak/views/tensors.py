"""A view by the names of tensors: what happened to be in a capture."""

from dataclasses import dataclass

from gradleak.core.registry import register
from gradleak.core.target import Target
from gradleak.core.view import View


@register("view", "tensors")
@dataclass(frozen=True)
class Tensors(View):
    """The tensors of these names, and no others; a slice is called PARAMETER[query]."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("name at least one tensor.")

    def visible(self, target: Target) -> tuple[str, ...]:
        return tuple(target.part(name).name for name in self.names)
