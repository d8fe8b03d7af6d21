"""An opened Hugging Face sequence classifier, and which class a label of the data is."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch, ClassNumber, Example, PrivateBatch
from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.targets.opened import OpenedTransformer, name_example, same_logits
from gradleak.targets.weights import weights_of

GIVEN_BY_LIBRARY = re.compile(r"LABEL_[0-9]+")  # what transformers calls a class that nobody named
SHOWN = 20  # names in an error


class TextClassifier(OpenedTransformer):
    """Learns to tell classes apart; its loss is the cross-entropy."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        frozen: Sequence[str] = (),
        attend_padding: bool = False,
        drawn: str = "",
    ) -> None:
        self.classes = _count_classes(name, model.config)
        super().__init__(name, model, tokenizer)
        self.drawn = drawn  # what of it is random, in words
        self.attend_padding = attend_padding
        self.labels = ClassNames.of_config(name, model.config)
        self._weights = weights_of(name, model, self.classes, frozen)
        self.padding_is_free = self._probe()

    @property
    def in_words(self) -> str:
        return f"sequence classifier ({type(self.module).__name__}, {self.classes} classes)" + (
            f" {self.drawn}" if self.drawn else ""
        )

    def losses(
        self, batch: Batch, parameters: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "*lead"]:
        logits = self._logits(batch, parameters)
        return F.cross_entropy(logits, batch.flat_labels, reduction="none").view(batch.lead)

    def probabilities(self, batch: Batch) -> Float[Tensor, "*lead classes"]:
        return self._logits(batch, None).softmax(-1).view(*batch.lead, self.classes)

    def private_batch(self, examples: Sequence[Example]) -> PrivateBatch:
        read = self._encode_examples(examples)
        labels = [self._label(place, example) for place, example in enumerate(examples, start=1)]
        batch = Batch(
            ids=read.ids,
            mask=self.attention_mask(read.lengths),
            labels=torch.tensor(labels).to(self.device),
        )
        return PrivateBatch(batch, read.examples, read.lengths, read.dropped)

    def _label(self, place: int, example: Example) -> int:
        where = name_example(example, place)
        if example.label is None:
            raise GradleakError(
                f"{where} has no label, which {self.name} is trained on: name the data's label"
                " column."
            )
        try:
            return self.class_of(example.label)
        except GradleakError as error:
            raise GradleakError(f"{where}: {error}") from error

    def class_of(self, label: int | str) -> int:
        """By the model's own name for it (label2id in its config.json), or its number from 0."""
        return self.labels.class_of(label)

    @torch.no_grad()
    def _probe(self) -> bool:
        """Refuses a model that does not accept embeddings as it accepts ids; tells whether
        padding changes anything."""
        words = self._ordinary_words(5)
        ids = torch.tensor(
            [[*self.vocabulary.prefix, *words, *self.vocabulary.suffix]], device=self.device
        )
        by_ids = self._read_ids(ids)
        self._refuse_unreachable(ids, by_ids)
        padded = self._pad(ids)
        # RoBERTa: the attacker's embeddings could never match, and every search would look failed
        if self.attend_padding and not same_logits(
            self._read_ids(padded), self._read_embeddings(padded)
        ):
            raise GradleakError(
                f"{self.name} numbers positions by its padding tokens: attend_padding cannot be"
                " audited on it."
            )
        return self._ignores_padding(ids, by_ids)


def _count_classes(name: str, config: Any) -> int:
    if config.problem_type == "regression" or config.num_labels < 2:
        raise GradleakError(
            f"{name} is a regression model ({config.num_labels} output): gradleak audits"
            " classifiers. Use one with two or more labels."
        )
    if config.problem_type == "multi_label_classification":
        raise GradleakError(
            f"{name} predicts several labels at once: gradleak audits single-label classifiers."
        )
    return int(config.num_labels)


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

    def class_of(self, label: int | str) -> int:
        """The class of a label. Where the model's names are numbers themselves (1 to 5 stars), a
        number is a name."""
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
