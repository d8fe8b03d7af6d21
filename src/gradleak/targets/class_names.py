"""Which class a label of the data is, by its number or by the name that the model has for it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradleak.core.batch import ClassNumber, Label
from gradleak.core.errors import GradleakError, did_you_mean

GIVEN_BY_LIBRARY = re.compile(r"LABEL_[0-9]+")  # what transformers calls a class that nobody named
SHOWN = 20  # names in an error


@dataclass(frozen=True)
class ClassNames:
    """The names that a model's config.json gives its classes (label2id), in the case in which
    they are written there."""

    model: str
    classes: int
    numbers: Mapping[str, int]

    @staticmethod
    def of_config(model: str, config: Any) -> "ClassNames":
        """Reads label2id, and id2label for what that lacks."""
        classes = int(config.num_labels)
        found = {str(name): int(number) for number, name in (config.id2label or {}).items()}
        found |= {str(name): int(number) for name, number in (config.label2id or {}).items()}
        return ClassNames(
            model,
            classes,
            {name: number for name, number in found.items() if 0 <= number < classes},
        )

    @property
    def named(self) -> list[str]:
        """The names that somebody gave, by class."""
        given = [name for name in self.numbers if not GIVEN_BY_LIBRARY.fullmatch(name)]
        return sorted(given, key=lambda name: self.numbers[name])

    def class_of(self, label: Label) -> int:
        """The class of a label. Where the model's names are numbers themselves (1 to 5 stars), a
        number is a name."""
        if isinstance(label, tuple):
            raise GradleakError(
                f"there are {len(label)} labels, and {self.model} learns one of each text or word."
            )
        label = str(label) if isinstance(label, float) else label
        may_be_name = not isinstance(label, ClassNumber) and any(
            _is_number(name) for name in self.named
        )
        if isinstance(label, str) or may_be_name:
            return self._by_name(str(label))
        if not 0 <= label < self.classes:
            raise GradleakError(
                f"label {label} is outside the {self.classes} classes of {self.model}: use labels 0"
                f" to {self.classes - 1}{self._or_names()}, or a target with more classes"
                " (classes=…)."
            )
        return label

    def _by_name(self, label: str) -> int:
        if label in self.numbers:
            return self.numbers[label]
        shown = repr(label[:40])  # a wrong column may hold whole private texts
        if not self.named:
            raise GradleakError(
                f"label {shown} is a name, and {self.model} has numbered classes only, 0 to"
                f" {self.classes - 1}: number the labels, name them in their order (--data"
                " FILE:labels=[first,second]), or write label2id into config.json."
            )
        more = f" and {len(self.named) - SHOWN} more" if len(self.named) > SHOWN else ""
        raise GradleakError(
            f"label {shown} is not known to {self.model}{did_you_mean(label, self.named)} Its"
            f" config.json knows {', '.join(map(repr, self.named[:SHOWN]))}{more}; case counts."
        )

    def _or_names(self) -> str:
        return f" or its names {', '.join(map(repr, self.named[:SHOWN]))}" if self.named else ""


def _is_number(name: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]+", name) is not None
