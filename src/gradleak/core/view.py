"""Which part of an update the attacker sees."""

from abc import ABC, abstractmethod

from gradleak.core.registry import Component
from gradleak.core.target import Target


class View(Component, ABC):
    """Selects tensors of an update by name."""

    @abstractmethod
    def visible(self, target: Target) -> tuple[str, ...]:
        """Names of the tensors that are seen."""
