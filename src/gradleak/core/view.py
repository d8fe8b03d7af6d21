"""Which part of an update the attacker sees."""

from abc import ABC, abstractmethod

from gradleak.core.registry import Component
from gradleak.core.target import Target
from gradleak.core.update import Update


class View(Component, ABC):
    """Selects tensors of an update by name."""

    @abstractmethod
    def visible(self, target: Target) -> tuple[str, ...]:
        """Names of the tensors that are seen: of parameters, or of parts (`PARAMETER[query]`)
        where a slice is seen."""

    def show(self, target: Target, update: Update) -> Update:
        """What is seen of an update of whole parameters."""
        return update.cut(target.part(name) for name in self.visible(target))
