"""An opened Hugging Face token classifier: it learns the class of each word of a text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Batch, Example, Label, PrivateBatch, pad_rows
from gradleak.core.errors import GradleakError
from gradleak.targets.class_names import ClassNames
from gradleak.targets.opened import LossOver, OpenedTransformer, name_example
from gradleak.targets.weights import weights_of

NO_CLASS = -100  # of tokens that the loss leaves out, in transformers
WORD = re.compile(r"\S+")


class TokenClassifier(OpenedTransformer):
    """Its loss is the cross-entropy, as transformers takes it: one mean over all tokens of a batch
    that have a class; with `loss_over="texts"` a mean over texts of such means.

    The first token of each word has the word's class, the others and special tokens have none.
    """

    labels_are_open = True

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        frozen: Sequence[str] = (),
        attend_padding: bool = False,
        drawn: str = "",
        loss_over: LossOver = "tokens",
    ) -> None:
        self.classes = int(model.config.num_labels)
        if self.classes < 2:
            raise GradleakError(f"{name} tells {self.classes} class of token: it needs two.")
        super().__init__(name, model, tokenizer)
        self.loss_over = loss_over
        self.drawn = drawn  # what of it is random, in words
        self.attend_padding = attend_padding
        self.names = ClassNames.of_config(name, model.config)
        self._weights = weights_of(name, model, self.classes, frozen)
        self.padding_is_free = self._probe_framed()

    @property
    def in_words(self) -> str:
        return f"token classifier ({type(self.module).__name__}, {self.classes} classes)" + (
            f" {self.drawn}" if self.drawn else ""
        )

    def losses(
        self, batch: Batch, parameters: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "*lead"]:
        logits = self._logits(batch, parameters)
        labels = _flatten(batch)
        values = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(0, 1), ignore_index=NO_CLASS, reduction="none"
        )
        sums = values.view(logits.shape[:2]).sum(1).view(batch.lead)
        return self._share_out(sums, _count(batch))

    @property
    def learns_tokens(self) -> bool:
        return True

    def weigh(self, batch: Batch) -> Float[Tensor, "*lead"]:
        if self.loss_over == "texts":
            return super().weigh(batch)
        return _count(batch)

    def probabilities(self, batch: Batch) -> Float[Tensor, "*lead classes"]:
        """The mean over tokens."""
        found = self._logits(batch, None).softmax(-1).mean(1)
        return found.view(*batch.lead, self.classes)

    def any_labels(self, examples: int, tokens: int) -> Int[Tensor, "examples tokens"]:
        shape = (examples, tokens)
        return (torch.arange(examples * tokens, device=self.device) % self.classes).view(shape)

    def private_batch(self, examples: Sequence[Example]) -> PrivateBatch:
        read = self._encode_examples(examples)
        rows = [self._label(place, example) for place, example in enumerate(examples, start=1)]
        labels = pad_rows(rows, NO_CLASS).to(self.device)
        batch = Batch(ids=read.ids, mask=self.attention_mask(read.lengths), labels=labels)
        return PrivateBatch(batch, read.examples, read.lengths, read.dropped)

    def class_of(self, label: Label) -> int:
        """By the model's own name for it (label2id in its config.json), or its number from 0."""
        return self.names.class_of(label)

    def _label(self, place: int, example: Example) -> list[int]:
        """Returns the class of each token that is read of a text."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise GradleakError(
                f"{self.name} has a slow tokenizer, which does not say where its tokens stand in a"
                " text: token classification needs a fast one (tokenizer.json)."
            )
        words = [match.span() for match in WORD.finditer(example.text)]
        try:
            classes = self._label_words(example, words)
        except GradleakError as error:
            raise GradleakError(f"{name_example(example, place)}: {error}") from error
        where = self.tokenizer(
            example.text,
            truncation=True,
            max_length=self.longest,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        labels, last = list[int](), -1
        each = zip(where["offset_mapping"], where["special_tokens_mask"], strict=True)
        for (start, end), special in each:
            inside = [at for at, word in enumerate(words) if start < word[1] and end > word[0]]
            first = bool(inside) and not special and inside[0] > last
            labels.append(classes[inside[0]] if first else NO_CLASS)
            last = inside[0] if first else last
        return labels

    def _label_words(self, example: Example, words: Sequence[tuple[int, int]]) -> list[int]:
        """Returns the class of each word, cut at spaces: as the data says, or 1 inside of a marked
        secret and 0 elsewhere."""
        given = example.label
        if isinstance(given, tuple):
            if len(given) != len(words):
                raise GradleakError(
                    f"it has {len(words)} words, cut at spaces, and {len(given)} labels: give one"
                    " label for each word."
                )
            return [self.class_of(one) for one in given]
        return [
            int(any(word[0] < end and word[1] > start for start, end in example.secrets))
            for word in words
        ]


def _flatten(batch: Batch) -> Tensor:
    """Labels of tokens, all leading axes as one."""
    classes = batch.labels.shape[len(batch.mask.shape) :]
    return batch.labels.reshape(-1, batch.mask.shape[-1], *classes)


def _count(batch: Batch) -> Float[Tensor, "*lead"]:
    """How many tokens of each example have a class."""
    labels = _flatten(batch)
    if labels.is_floating_point():
        return labels.detach().sum((-1, -2)).view(batch.lead)
    return (labels != NO_CLASS).sum(-1).float().view(batch.lead)
