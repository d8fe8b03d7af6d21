"""The model under audit."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradleak.core.batch import Batch, Example, Label, PrivateBatch, pad_rows
from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.core.parts import Part, by_name
from gradleak.core.registry import Component, Medium


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What a text attack has to know of the tokens: their embeddings, which may stand in a
    sentence, what frames one."""

    embeddings: Float[Tensor, "words hidden"]
    allowed: Bool[Tensor, "words"]  # may stand inside a sentence: neither special nor [unused]
    prefix: tuple[int, ...]  # [CLS] or the like
    suffix: tuple[int, ...]  # [SEP] or the like
    pad: int
    specials: tuple[int, ...] = ()  # [CLS], [SEP], [MASK] and the like; never allowed inside

    def frame(self, length: int) -> tuple[list[int], list[bool]]:
        """Ids of a sentence of that many tokens with only its special ones filled in, and which
        places those are."""
        inside = length - self.frame_length
        ids = [*self.prefix, *([self.pad] * inside), *self.suffix]
        fixed = [True] * len(self.prefix) + [False] * inside + [True] * len(self.suffix)
        return ids, fixed

    def fill(self, length: int, words: Sequence[int]) -> list[int]:
        """A sentence of that many tokens with these words in its free places, begun again where
        they run out."""
        ids, fixed = self.frame(length)
        free = [place for place, special in enumerate(fixed) if not special]
        for rank, place in enumerate(free):
            ids[place] = words[rank % len(words)] if words else self.pad
        return ids

    @property
    def frame_length(self) -> int:
        """How many special tokens stand around a sentence."""
        return len(self.prefix) + len(self.suffix)

    @property
    def mean_norm(self) -> float:
        """Mean norm of the word embeddings (BERT-base: 1.4)."""
        return float(self.embeddings.norm(dim=-1).mean())


class Target(ABC):
    """An opened model: weights on a device, its tokenizer and its per-example loss. Holds
    nothing of anyone's data."""

    medium: ClassVar[Medium] = "text"
    # A language model: what it learns to predict is the text itself
    labels_are_tokens: ClassVar[bool] = False

    module: nn.Module
    vocabulary: Vocabulary
    classes: int  # how many labels there are: of a language model, words
    hidden_size: int
    attend_padding: bool  # the client passes no attention mask (LAMP's released code)
    # Masked positions change nothing, so that sentences of different lengths may share a pass
    padding_is_free: bool
    # Word embeddings tied to the output layer: every row has a gradient whatever the text
    words_are_outputs: bool = False
    # Labels are several at once, numbers, or one a token: nobody is told them or tries them all
    labels_are_open: bool = False

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters that train, hence are sent, by name."""

    @property
    @abstractmethod
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Parameter names by role: `word_embedding`, `position_embedding`, `head`, `head_bias`;
        empty where there is none."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The parameters that train, each with its layer and module; fused ones as their slices."""

    @property
    @abstractmethod
    def frozen_parts(self) -> tuple[Part, ...]:
        """The same for the parameters that do not train, hence are never sent."""

    @abstractmethod
    def losses(
        self, batch: Batch, parameters: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "*lead"]:
        """The loss of each example, differentiable in embeddings, soft labels and the given
        parameters; their mean over the last leading axis is that of a client's batch.

        A language model takes its labels from the batch's ids, and from its labels only where
        embeddings are given.
        """

    def weigh(self, batch: Batch) -> Float[Tensor, "*lead"]:
        """How much each example counts in the mean of its batch, against its own loss alone: as
        much as any other, unless a subclass takes the mean over tokens."""
        return torch.ones(batch.lead, dtype=self.dtype, device=self.device)

    @abstractmethod
    def probabilities(self, batch: Batch) -> Float[Tensor, "*lead classes"]:
        """The model's class probabilities for each example; of a language model, those of the
        word after its last."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, special ones included."""

    @abstractmethod
    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """The text of token ids."""

    @abstractmethod
    def private_batch(self, examples: Sequence[Example]) -> PrivateBatch:
        """One client's batch, tokenised, truncated to what the model reads and padded; refuses
        empty texts and unknown labels."""

    def class_of(self, label: Label) -> int:
        """The class that the data means by a label; refuses what is none of the model's."""
        if not isinstance(label, int) or not 0 <= label < self.classes:
            raise GradleakError(
                f"label {str(label)[:40]!r} is none of this model's {self.classes} classes,"
                " numbered from 0."
            )
        return label

    @property
    def in_words(self) -> str:
        """What kind of model it is, as a noun without its article, and what of it was drawn at
        random."""
        return f"model of {self.medium}s"

    @property
    def device(self) -> torch.device:
        return self.vocabulary.embeddings.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vocabulary.embeddings.dtype

    @property
    def in_double(self) -> "Target":
        """The same model with its weights in double precision: what it computes has no rounding
        to speak of."""
        raise GradleakError("This kind of model has no copy in double precision.")

    def part(self, name: str) -> Part:
        """The part of a name, as tensors of an update are called; the name of a fused parameter
        is the whole of it."""
        if name not in self._by_name:
            near = did_you_mean(name, list(self._by_name))
            raise GradleakError(
                f"This model does not train {name!r}{near} Is it of another model, or frozen in"
                " this one?"
            )
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Part]:
        return by_name(self.parts, self.parameters)

    def embed(self, ids: Int[Tensor, "*lead tokens"]) -> Float[Tensor, "*lead tokens hidden"]:
        """Word embeddings of ids."""
        return self.vocabulary.embeddings[ids]

    def any_labels(
        self, examples: int, tokens: int
    ) -> (
        Int[Tensor, "examples"] | Int[Tensor, "examples tokens"] | Float[Tensor, "examples outputs"]
    ):
        """Labels as different as can be, for passes that ask how the model computes and not
        what."""
        shape = (examples, tokens) if self.labels_are_tokens else (examples,)
        return (
            torch.linspace(0, self.classes - 1, math.prod(shape), device=self.device)
            .long()
            .view(shape)
        )

    def probe(self, examples: int, tokens: int, generator: torch.Generator | None = None) -> Batch:
        """A batch of no meaning, to ask how the model computes: zeros, or random numbers of the
        size of word embeddings."""
        shape = (examples, tokens, self.hidden_size)
        size = self.vocabulary.mean_norm / self.hidden_size**0.5
        drawn = (
            torch.zeros(shape)
            if generator is None
            else torch.randn(shape, generator=generator) * size
        )
        return Batch(
            embeddings=drawn.to(self.device, self.dtype),
            mask=torch.ones(examples, tokens, dtype=torch.bool, device=self.device),
            labels=self.any_labels(examples, tokens),
        )

    def ordinary(self) -> Batch:
        """Eight examples such as the model may meet, with labels that mean nothing."""
        words = self.vocabulary.allowed.nonzero()[:, 0]
        ids = words[torch.linspace(0, len(words) - 1, 64, device=words.device).long()].view(8, 8)
        before, after = (
            torch.tensor(part, device=ids.device).expand(8, -1).long()
            for part in (self.vocabulary.prefix, self.vocabulary.suffix)
        )
        ids = torch.cat([before, ids, after], dim=1)
        return Batch(
            ids=ids,
            mask=torch.ones_like(ids).bool(),
            labels=self.any_labels(*ids.shape)
            if self.labels_are_open
            else torch.zeros(8, dtype=torch.int64, device=ids.device),
        )

    def batch_of(
        self, sentences: Sequence[Sequence[int]], labels: Sequence[int] | Tensor | None
    ) -> Batch:
        """Sentences as a client would batch them.

        Without labels the sentences themselves are the labels, or, where labels are open, those
        that are as good as any.
        """
        ids = pad_rows(sentences, self.vocabulary.pad)
        if labels is None:
            classes = self.any_labels(*ids.shape) if self.labels_are_open else ids
        else:
            classes = labels if isinstance(labels, Tensor) else torch.tensor(list(labels))
        return Batch(
            ids=ids.to(self.device),
            mask=self.attention_mask([len(sentence) for sentence in sentences]),
            labels=classes.to(self.device),
        )

    def attention_mask(self, lengths: Sequence[int]) -> Bool[Tensor, "examples tokens"]:
        """The mask a client passes for a batch of sentences of these lengths."""
        width = max(lengths)
        counted = (
            torch.full((len(lengths),), width)
            if self.attend_padding
            else torch.tensor(list(lengths))
        )
        return (torch.arange(width) < counted[:, None]).to(self.device)


class TargetSpec(Component, ABC):
    """Says which model, without holding it; the runner opens it on a device and keeps it."""

    medium: ClassVar[Medium] = "text"
    labels_are_tokens: ClassVar[bool] = False  # as the target it opens

    @property
    def labels_are_open(self) -> bool:
        """As of the target it opens."""
        return False

    @abstractmethod
    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        """Loads the model."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash or name of the weights for records."""
