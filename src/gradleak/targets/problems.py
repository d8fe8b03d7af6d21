"""What a sequence classifier's head learns: one class, several at once, or numbers.

Names and losses are transformers' own (`problem_type` in config.json).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Label
from gradleak.core.errors import GradleakError
from gradleak.targets.class_names import ClassNames

ProblemName = Literal[
    "single_label_classification",
    "multi_label_classification",
    "regression",
    "token_classification",
]
NEAR = 0.05  # how far an answer that was solved for may be from the whole number that it is


@dataclass(frozen=True)
class Problem(ABC):
    """One way to learn from the outputs of a head."""

    outputs: int
    names: ClassNames
    in_words: ClassVar[str]
    labels_are_open: ClassVar[bool] = True

    @abstractmethod
    def losses(
        self, logits: Float[Tensor, "examples outputs"], labels: Tensor
    ) -> Float[Tensor, "examples"]:
        """The loss of each example."""

    @abstractmethod
    def predict(self, logits: Float[Tensor, "examples outputs"]) -> Tensor:
        """What the model says of each example: probabilities, or numbers."""

    @abstractmethod
    def read(self, label: Label) -> Any:
        """An example's label as one row of a batch's; refuses what is none."""

    @abstractmethod
    def any_labels(self, examples: int) -> Tensor:
        """Labels as different as can be."""

    @abstractmethod
    def solve(
        self,
        logits: Float[Tensor, "examples outputs"],
        slopes: Float[Tensor, "examples outputs"],
    ) -> Tensor | None:
        """The labels with which each example's own loss has these slopes; none where no labels
        have."""


@dataclass(frozen=True)
class SingleLabel(Problem):
    """One class: cross-entropy."""

    in_words = "classes"
    labels_are_open = False

    def losses(
        self, logits: Float[Tensor, "examples outputs"], labels: Tensor
    ) -> Float[Tensor, "examples"]:
        return F.cross_entropy(logits, labels, reduction="none")

    def predict(self, logits: Float[Tensor, "examples outputs"]) -> Tensor:
        return logits.softmax(-1)

    def read(self, label: Label) -> int:
        return self.names.class_of(label)

    def any_labels(self, examples: int) -> Int[Tensor, "examples"]:
        return torch.linspace(0, self.outputs - 1, examples).long()

    def solve(
        self,
        logits: Float[Tensor, "examples outputs"],
        slopes: Float[Tensor, "examples outputs"],
    ) -> Tensor | None:
        return read_classes(logits.softmax(-1) - slopes)


@dataclass(frozen=True)
class SeveralLabels(Problem):
    """Any number of classes at once: binary cross-entropy, the mean over classes."""

    in_words = "labels, any number at once"

    def losses(
        self, logits: Float[Tensor, "examples outputs"], labels: Tensor
    ) -> Float[Tensor, "examples"]:
        each = F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
        return each.mean(-1)

    def predict(self, logits: Float[Tensor, "examples outputs"]) -> Tensor:
        return logits.sigmoid()

    def read(self, label: Label) -> list[float]:
        """A class or a list of classes by name; or as many zeros and ones as there are classes."""
        given = label if isinstance(label, tuple) else (label,)
        if isinstance(label, tuple) and len(given) == self.outputs and set(given) <= {0, 1}:
            return [float(one) for one in given]
        chosen = {self.names.class_of(one) for one in given}
        return [float(place in chosen) for place in range(self.outputs)]

    def any_labels(self, examples: int) -> Float[Tensor, "examples outputs"]:
        return (torch.arange(examples * self.outputs) % 2).float().view(examples, self.outputs)

    def solve(
        self,
        logits: Float[Tensor, "examples outputs"],
        slopes: Float[Tensor, "examples outputs"],
    ) -> Tensor | None:
        found = logits.sigmoid() - slopes * self.outputs
        whole = found.round().clamp(0, 1)
        return whole if float((found - whole).abs().max()) < NEAR else None


@dataclass(frozen=True)
class Regression(Problem):
    """Numbers: squared error, the mean over outputs."""

    in_words = "numbers"

    def losses(
        self, logits: Float[Tensor, "examples outputs"], labels: Tensor
    ) -> Float[Tensor, "examples"]:
        return (logits - labels.to(logits)).square().mean(-1)

    def predict(self, logits: Float[Tensor, "examples outputs"]) -> Tensor:
        return logits

    def read(self, label: Label) -> list[float]:
        given = label if isinstance(label, tuple) else (label,)
        try:
            numbers = [float(one) for one in given]
        except ValueError as error:
            raise GradleakError(
                f"label {str(label)[:40]!r} is no number, which a regression model learns."
            ) from error
        if len(numbers) != self.outputs:
            raise GradleakError(
                f"label {str(label)[:40]!r} has {len(numbers)} numbers, and this regression model"
                f" learns {self.outputs}."
            )
        return numbers

    def any_labels(self, examples: int) -> Float[Tensor, "examples outputs"]:
        return torch.linspace(-1, 1, examples * self.outputs).view(examples, self.outputs)

    def solve(
        self,
        logits: Float[Tensor, "examples outputs"],
        slopes: Float[Tensor, "examples outputs"],
    ) -> Tensor | None:
        return logits - slopes * self.outputs / 2


PROBLEMS: Mapping[str, type[Problem]] = {
    "single_label_classification": SingleLabel,
    "multi_label_classification": SeveralLabels,
    "regression": Regression,
}


def problem_of(name: str, config: Any) -> Problem:
    """What a model's config.json says that its head learns, as transformers reads it."""
    outputs = int(config.num_labels)
    stated = config.problem_type or (
        "regression" if outputs == 1 else "single_label_classification"
    )
    if stated == "single_label_classification" and outputs < 2:
        raise GradleakError(
            f"{name} has one output and is to tell classes apart: a model with one output is a"
            " regression model (problem_type=regression), or use two or more classes."
        )
    return PROBLEMS[stated](outputs, ClassNames.of_config(name, config))


def read_classes(found: Float[Tensor, "rows classes"]) -> Int[Tensor, "rows"] | None:
    """The classes of rows that are one in one place and zero elsewhere; none where one is not."""
    classes = found.argmax(-1)
    whole = F.one_hot(classes, found.shape[-1]).to(found)
    return classes if float((found - whole).abs().max()) < NEAR else None
