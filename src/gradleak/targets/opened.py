"""What opened transformers have in common, whatever their loss: weights, tokenizer and passes."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradleak.core.batch import Batch, Example
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.targets import transformer


class OpenedTransformer(Target):
    """Abstract: a subclass says what is learnt, and so what a private batch is and what the loss."""

    name: str
    tokenizer: Any
    longest: int
    _weights: transformer.Weights
    _aliases: Mapping[str, Sequence[str]]

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._weights.parameters

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return self._weights.groups

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._weights.parts

    @property
    def frozen_parts(self) -> tuple[Part, ...]:
        return self._weights.frozen_parts

    @cached_property
    def in_double(self) -> "OpenedTransformer":
        if self.dtype == torch.float64:
            return self
        twin = copy.copy(self)
        twin.module = copy.deepcopy(self.module).double()
        trained = {name: twin.module.get_parameter(name) for name in self.parameters}
        twin._weights = replace(self._weights, parameters=trained)
        twin.vocabulary = replace(self.vocabulary, embeddings=self.vocabulary.embeddings.double())
        return twin

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return transformer.encode(self.tokenizer, texts)

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        return transformer.decode(self.tokenizer, ids, keep_special)

    def _encoded(self, examples: Sequence[Example]) -> tuple[Tensor, tuple[int, ...]]:
        """Padded ids and lengths; empty and over-long texts are refused."""
        rows = self.encode([example.text for example in examples])
        lengths = tuple(len(row) for row in rows)
        specials = len(self.vocabulary.prefix) + len(self.vocabulary.suffix)
        transformer.refuse_lengths(self.name, lengths, specials, self.longest, self.padding_is_free)
        return transformer.padded(rows, self.vocabulary.pad).to(self.device), lengths

    def _logits(self, batch: Batch, parameters: Mapping[str, Tensor] | None) -> Tensor:
        return transformer.logits_of(self.module, self._aliases, batch, parameters)
