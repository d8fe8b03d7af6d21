"""An opened Hugging Face sequence classifier."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gradleak.core.batch import Batch, Example, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.targets import transformer
from gradleak.targets.class_names import ClassNames
from gradleak.targets.opened import OpenedTransformer


class TextClassifier(OpenedTransformer):
    """Eval mode, gradients off: clients and attackers differentiate copies of the parameters, so
    no `.grad` is left behind."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        frozen: Sequence[str] = (),
        attend_padding: bool = False,
        drawn: str = "",
    ) -> None:
        self.name = name
        self.drawn = drawn  # what of it is random, in words
        self.module: nn.Module = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.attend_padding = attend_padding
        self.classes = _classes(name, model.config)
        self.labels = ClassNames.of_config(name, model.config)
        self.vocabulary = transformer.vocabulary_of(name, model, tokenizer)
        self.hidden_size = int(self.vocabulary.embeddings.shape[1])
        self._weights = transformer.weights_of(name, model, self.classes, frozen)
        self._aliases = transformer.aliases_of(model)
        self.longest = transformer.longest_of(model.config, tokenizer)
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
        labels = (
            batch.labels.flatten()
            if batch.labels.dtype == torch.int64
            else batch.labels.flatten(0, -2)
        )
        return F.cross_entropy(logits, labels, reduction="none").view(batch.lead)

    def probabilities(self, batch: Batch) -> Float[Tensor, "*lead classes"]:
        return self._logits(batch, None).softmax(-1).view(*batch.lead, self.classes)

    def private_batch(self, examples: Sequence[Example]) -> PrivateBatch:
        read = self._encoded(examples)
        labels = [self._label(place, example) for place, example in enumerate(examples, start=1)]
        batch = Batch(
            ids=read.ids,
            mask=self.attention_mask(read.lengths),
            labels=torch.tensor(labels).to(self.device),
        )
        return PrivateBatch(batch, read.examples, read.lengths, read.dropped)

    def _label(self, place: int, example: Example) -> int:
        where = transformer.called(example, place)
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
        words = transformer.ordinary(self.vocabulary, 5)
        ids = torch.tensor(
            [[*self.vocabulary.prefix, *words, *self.vocabulary.suffix]], device=self.device
        )
        padded = F.pad(ids, (0, 3), value=self.vocabulary.pad)
        label = torch.zeros(1, dtype=torch.int64, device=self.device)
        whole, everything = torch.ones_like(ids).bool(), torch.ones_like(padded).bool()
        by_ids = self._logits(Batch(ids=ids, mask=whole, labels=label), None)
        transformer.refuse_unreachable(
            self.name,
            by_ids,
            lambda: self._logits(Batch(embeddings=self.embed(ids), mask=whole, labels=label), None),
        )
        if self.attend_padding and not transformer.same_logits(
            self._logits(Batch(ids=padded, mask=everything, labels=label), None),
            self._logits(Batch(embeddings=self.embed(padded), mask=everything, labels=label), None),
            # RoBERTa: the attacker's embeddings could never match, and every search would look
            # failed
        ):
            raise GradleakError(
                f"{self.name} numbers positions by its padding tokens: attend_padding cannot be"
                " audited on it."
            )
        mask = torch.arange(padded.shape[1], device=self.device)[None] < ids.shape[1]
        with_padding = self._logits(
            Batch(embeddings=self.embed(padded), mask=mask, labels=label), None
        )
        return transformer.same_logits(by_ids, with_padding)


def _classes(name: str, config: Any) -> int:
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
