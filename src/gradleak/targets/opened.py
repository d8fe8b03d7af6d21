"""What opened transformers have in common, whatever their loss: weights, tokenizer and passes."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from gradleak.core.batch import Batch, Example
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.targets import transformer


@dataclass(frozen=True, eq=False)
class Encoded:
    """Examples with their ids, padded; how many tokens of each are read, and how many were cut
    off."""

    examples: tuple[Example, ...]
    ids: Int[Tensor, "examples tokens"]
    lengths: tuple[int, ...]
    dropped: tuple[int, ...]


class OpenedTransformer(Target):
    """Abstract: a subclass says what is learnt, and so what a private batch is and what the
    loss."""

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

    def _encoded(self, examples: Sequence[Example]) -> "Encoded":
        """The examples as the model reads them: long ones truncated as its tokenizer does, empty
        ones refused."""
        whole = self.encode([example.text for example in examples])
        cut = {place: row for place, row in enumerate(whole) if len(row) > self.longest}
        again = (
            transformer.encode(
                self.tokenizer, [examples[place].text for place in cut], self.longest
            )
            if cut
            else []
        )
        shorter = dict(zip(cut, again, strict=True))
        rows = [shorter.get(place, row) for place, row in enumerate(whole)]
        lengths = tuple(len(row) for row in rows)
        specials = len(self.vocabulary.prefix) + len(self.vocabulary.suffix)
        transformer.refuse_lengths(self.name, examples, lengths, specials, self.padding_is_free)
        read = [
            (
                transformer.kept_secrets(self.tokenizer, example, self.longest)
                if place in cut
                else example
            )
            for place, example in enumerate(examples)
        ]
        dropped = (
            tuple(len(before) - after for before, after in zip(whole, lengths, strict=True))
            if cut
            else ()
        )
        return Encoded(
            tuple(read),
            transformer.padded(rows, self.vocabulary.pad).to(self.device),
            lengths,
            dropped,
        )

    def _logits(self, batch: Batch, parameters: Mapping[str, Tensor] | None) -> Tensor:
        return transformer.logits_of(self.module, self._aliases, batch, parameters)
