"""An opened Hugging Face sequence classifier, whatever its head learns."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import Batch, Example, Label, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.targets.opened import OpenedTransformer, name_example
from gradleak.targets.problems import problem_of
from gradleak.targets.weights import weights_of


class TextClassifier(OpenedTransformer):
    """Learns to tell classes apart, to give several labels at once, or numbers (`problem`)."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        frozen: Sequence[str] = (),
        attend_padding: bool = False,
        drawn: str = "",
    ) -> None:
        self.problem = problem_of(name, model.config)
        self.classes, self.labels_are_open = self.problem.outputs, self.problem.labels_are_open
        super().__init__(name, model, tokenizer)
        self.drawn = drawn  # what of it is random, in words
        self.attend_padding = attend_padding
        self._weights = weights_of(name, model, self.classes, frozen)
        self.padding_is_free = self._probe_framed()

    @property
    def in_words(self) -> str:
        learns = f"{type(self.module).__name__}, {self.classes} {self.problem.in_words}"
        return f"sequence classifier ({learns})" + (f" {self.drawn}" if self.drawn else "")

    def losses(
        self, batch: Batch, parameters: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "*lead"]:
        logits = self._logits(batch, parameters)
        return self.problem.losses(logits, batch.flat_labels).view(batch.lead)

    def probabilities(self, batch: Batch) -> Float[Tensor, "*lead classes"]:
        logits = self._logits(batch, None)
        return self.problem.predict(logits).view(*batch.lead, self.classes)

    def any_labels(self, examples: int, tokens: int) -> Tensor:
        return self.problem.any_labels(examples).to(self.device)

    def private_batch(self, examples: Sequence[Example]) -> PrivateBatch:
        read = self._encode_examples(examples)
        labels = [self._label(place, example) for place, example in enumerate(examples, start=1)]
        batch = Batch(
            ids=read.ids,
            mask=self.attention_mask(read.lengths),
            labels=torch.tensor(labels).to(self.device),
        )
        return PrivateBatch(batch, read.examples, read.lengths, read.dropped)

    def _label(self, place: int, example: Example) -> Any:
        where = name_example(example, place)
        if example.label is None:
            raise GradleakError(
                f"{where} has no label, which {self.name} is trained on: name the data's label"
                " column."
            )
        try:
            return self.problem.read(example.label)
        except GradleakError as error:
            raise GradleakError(f"{where}: {error}") from error

    def class_of(self, label: Label) -> int:
        """By the model's own name for it (label2id in its config.json), or its number from 0."""
        return self.problem.names.class_of(label)
