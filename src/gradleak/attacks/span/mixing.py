"""The first layer written out, so that a token can read several words at each position at once, every one with a weight.

Attention is a weighted mean of what it reads. A sentence that is only guessed is read with each word that may stand in it
weighted by how likely it is; with one word a position this is the model's own pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.attacks.span.checks import Check
from gradleak.core.batch import Batch
from gradleak.core.target import Target
from gradleak.matching.inputs import ModuleInputs, first_inputs, module_of

AGREES = 1e-4  # relative difference from the model's own pass: rounding leaves 1e-6
READING = ("query", "key", "value", "attention_output")


@dataclass(frozen=True, eq=False)
class Mixing:
    """A layer that adds what attention read to what it was fed, and then normalises: BERT's and its kin's."""

    inputs: ModuleInputs  # of the first layer
    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    norm: nn.Module
    heads: int

    def table(self, words: Int[Tensor, "words"], positions: int) -> Float[Tensor, "positions words width"]:
        """What the layer is fed for each word at each position."""
        return next(iter(first_inputs(self.inputs, words, positions).values()))

    def affinities(self, readers: Float[Tensor, "readers width"], read: Float[Tensor, "words width"]) -> Tensor:
        """How much each reader would look at each word, before weights: [heads, readers, words]."""
        queries, keys = self._by_head(self.query(readers)), self._by_head(self.key(read))
        products = queries @ keys.mT / queries.shape[-1] ** 0.5
        affinities: Tensor = (products - products.amax(-1, keepdim=True)).exp()
        return affinities

    def values(self, read: Float[Tensor, "words width"]) -> Float[Tensor, "heads words size"]:
        return self._by_head(self.value(read))

    def fed(
        self,
        readers: Float[Tensor, "readers width"],
        affinities: Float[Tensor, "heads readers words"],
        values: Float[Tensor, "heads words size"],
        weights: Float[Tensor, "blends words"],
    ) -> Float[Tensor, "blends readers width"]:
        """What readers feed onwards when they read words with weights."""
        count, (heads, words, size) = len(weights), values.shape
        weighted = torch.cat([values, values.new_ones(heads, words, 1)], dim=-1)[:, :, None] * weights.mT[None, :, :, None]
        read = (affinities @ weighted.flatten(2)).view(heads, len(readers), count, size + 1)
        context = (read[..., :-1] / read[..., -1:].clamp_min(1e-20)).permute(2, 1, 0, 3).flatten(2)
        onwards: Tensor = self.norm(self.output(context) + readers)
        return onwards

    def _by_head(self, rows: Float[Tensor, "rows width"]) -> Float[Tensor, "heads rows size"]:
        return rows.view(len(rows), self.heads, -1).transpose(0, 1)


@torch.no_grad()
def mixing_of(check: Check) -> Mixing | None:
    """The written-out layer that gives what the model gives at the place of a check; none where none does."""
    words = check.target.vocabulary.allowed.nonzero()[:5, 0]
    wanted = check.inputs_of([tuple(words.tolist())])
    for mixing in _readings(check.target):
        readers = _fed(mixing.inputs, words)
        if readers.shape != wanted.shape:
            return None
        weights = readers.new_ones(1, len(words))
        made = mixing.fed(readers, mixing.affinities(readers, readers), mixing.values(readers), weights)[0]
        if float((made - wanted).norm() / wanted.norm()) < AGREES:
            return mixing
    return None


def _readings(target: Target) -> Iterator[Mixing]:
    """Ways to read the first layer: one for each normalisation it has."""
    parts = {part.module: part for part in target.parts if part.layer == 1 and part.module in READING and part.cut is None}
    heads = int(getattr(target.module.config, "num_attention_heads", 0))
    if len(parts) < len(READING) or not heads or target.attend_padding:
        return
    names = [module_of(parts[module]) for module in READING]
    query, key, value, output = (target.module.get_submodule(name) for name in names)
    block = target.module.get_submodule(_shared(names).rpartition(".")[0])
    for norm in block.modules():
        if isinstance(norm, nn.LayerNorm):
            yield Mixing(ModuleInputs(target, [parts["query"]]), query, key, value, output, norm, heads)


def _shared(names: Sequence[str]) -> str:
    """The module that holds all of them."""
    apart = [name.split(".") for name in names]
    depth = next(place for place, level in enumerate(zip(*apart, strict=False)) if len(set(level)) > 1)
    return ".".join(apart[0][:depth])


def _fed(inputs: ModuleInputs, words: Int[Tensor, "words"]) -> Float[Tensor, "words width"]:
    """What the first layer is fed for a sentence of these words."""
    labels = inputs.target.any_labels(1, len(words))
    batch = Batch(torch.ones_like(words, dtype=torch.bool)[None], labels, ids=words[None])
    return next(iter(inputs(batch).values()))[0]
