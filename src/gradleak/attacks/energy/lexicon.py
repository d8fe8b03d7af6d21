"""Which words a matrix speaks of, before anything is searched: words whose own vectors lie in the seen span.

A word is passed through the model alone among fillers. What the model makes of it there is near what it makes of it in the
secret, even in the last layers: near enough to rank the vocabulary by the share of that vector (less the mean of all words') that
lies in the span of the seen gradient. The words of a sentence are then mostly among the first hundred of thirty thousand.

The attention's output layer is fed averages of values, other ones in every head: there, the value of a word is held against the
span seen in each head's columns. In a classifier's last layer the query's gradient is a sum of keys, again by heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.energy.errors import error_std
from gradleak.attacks.energy.structure import Structure
from gradleak.attacks.energy.sure import sure_directions
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.capture import Kind, kind_of
from gradleak.matching.chunking import FORWARD, Chunks, cost_of, pieces
from gradleak.matching.inputs import ModuleInputs, matrix_of, module_of

BESIDE = 1  # fillers on either side of the word
WORDS_AT_ONCE = 2048


@dataclass(frozen=True)
class Lens:
    """How to hold words against one seen matrix: their inputs to it, or, by heads, what another module makes of them."""

    part: Part
    source: Part  # the module whose input, or (by heads) output, stands for the word
    heads: int = 1

    def vectors(self, target: Target, inputs: Mapping[str, Tensor]) -> Float[Tensor, "words heads width"]:
        found = inputs[module_of(self.source)]
        if self.heads > 1:
            found = target.module.get_submodule(module_of(self.source))(found)
        return found.reshape(len(found), self.heads, -1)

    def basis(self, observation: Observation) -> Float[Tensor, "heads rank width"]:
        """Directions in which the matrix was seen, each as long as it is sure, at most one a token, padded with zeros."""
        matrix = matrix_of(observation.target, self.part, observation.update.tensors[self.part.name])[0]
        by_inputs = matrix.T if self.part.module == "query" and self.heads > 1 else matrix
        by_heads = by_inputs.reshape(len(by_inputs), self.heads, -1).movedim(1, 0)
        return sure_directions(observation, by_heads, error_std(observation, self.part.name))


def lexicon(
    observations: Sequence[Observation],
    words: Int[Tensor, "words"],
    filler: int,
    parts: Sequence[tuple[Part, Structure]],
    bench: Bench,
) -> Float[Tensor, "observations words"]:
    """For every word how badly it fits what was seen (lower fits better); zero, the worst, where nothing can be said."""
    target = observations[0].target
    lenses = [lens for part, structure in parts if (lens := lens_of(target, part, structure)) is not None]
    scores = torch.zeros(len(observations), len(words), device=target.device, dtype=target.dtype)
    if not lenses:
        return scores
    alone = WordsAlone(target, lenses, filler)
    means = alone.means(words[:: max(1, len(words) // WORDS_AT_ONCE)], bench)
    bases = [_bases(lens, observations) for lens in lenses]

    def piece(some: slice) -> Tensor:
        found = torch.zeros_like(scores[:, some])
        for vectors, centre, (places, basis) in zip(alone.vectors(words[some]), means, bases, strict=True):
            found[places] += _outside(vectors - centre, basis)
        scores[:, some] = found
        return found[0]

    alone.pieces(bench).run(piece, len(words))
    return scores


class WordsAlone:
    """Words among fillers, as the modules of some lenses see them."""

    def __init__(self, target: Target, lenses: Sequence[Lens], filler: int) -> None:
        self.target, self.lenses = target, lenses
        self.inputs = ModuleInputs(target, [lens.source for lens in lenses])
        ids, special = target.vocabulary.frame(len(target.vocabulary.prefix) + 2 * BESIDE + 1 + len(target.vocabulary.suffix))
        self.frame = torch.tensor([word if fixed else filler for word, fixed in zip(ids, special, strict=True)])
        self.place = special.index(False) + BESIDE

    def means(self, words: Int[Tensor, "words"], bench: Bench) -> list[Float[Tensor, "heads width"]]:
        """The mean vector of each lens over some words."""
        parts = [self.vectors(some) for some in torch.split(words, self.pieces(bench).size)]
        return [torch.cat(vectors).mean(0) for vectors in zip(*parts, strict=True)]

    def pieces(self, bench: Bench) -> Chunks:
        """So many words at once as fit."""
        cost, tokens = cost_of(self.target, self.inputs), len(self.frame)
        return pieces(bench, self.target.device, cost.bytes(1, tokens, FORWARD), cost.work(1, tokens, 1), WORDS_AT_ONCE)

    @torch.no_grad()
    def vectors(self, words: Int[Tensor, "words"]) -> list[Float[Tensor, "words heads width"]]:
        ids = self.frame.to(words.device).repeat(len(words), 1)
        ids[:, self.place] = words
        labels = self.target.any_labels(*ids.shape)
        inputs = self.inputs(Batch(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), labels=labels))
        own = {name: tensor[:, self.place] for name, tensor in inputs.items()}
        return [lens.vectors(self.target, own) for lens in self.lenses]


def lens_of(target: Target, part: Part, structure: Structure) -> Lens | None:
    """The lens for a matrix, where there is one."""
    beside = {one.module: one for one in (*target.parts, *target.frozen_parts) if one.layer == part.layer}
    wanted = {"attention_output": "value", "query": "key" if structure.place is not None else None}.get(part.module)
    other = beside.get(wanted) if wanted else None
    if other is not None and _by_heads(target, part, other):
        return Lens(part, other, _heads(target))
    return Lens(part, part) if structure.place is None else None


def _by_heads(target: Target, part: Part, other: Part) -> bool:
    """Both plain linear layers, with as many outputs of the one as the other has inputs or outputs: no fused or grouped heads."""
    modules = [target.module.get_submodule(module_of(one)) for one in (part, other)]
    heads = _heads(target)
    width = part.shape[0] if part.module == "query" else part.shape[1]
    plain = all(kind_of(module) is Kind.LINEAR for module in modules) and part.cut is None and other.cut is None
    return plain and heads > 0 and other.shape[0] == width and width % heads == 0


def _heads(target: Target) -> int:
    return int(getattr(target.module.config, "num_attention_heads", 0))


def _bases(
    lens: Lens, observations: Sequence[Observation]
) -> tuple[Int[Tensor, "shown"], Float[Tensor, "shown heads rank width"]]:
    """The bases of the observations that show the lens's matrix, and which these are."""
    shown = [place for place, one in enumerate(observations) if lens.part.name in one.update.tensors]
    found = [lens.basis(observations[place]) for place in shown]
    most = max(one.shape[1] for one in found)
    padded = [torch.nn.functional.pad(one, (0, 0, 0, most - one.shape[1])) for one in found]
    return torch.tensor(shown, device=padded[0].device), torch.stack(padded)


def _outside(
    vectors: Float[Tensor, "words heads width"], basis: Float[Tensor, "shown heads rank width"]
) -> Float[Tensor, "shown words"]:
    """The logarithm of the share of each word's vector outside the span, in the mean over heads."""
    units = torch.nn.functional.normalize(vectors, dim=-1)
    inside = torch.stack([torch.einsum("whd,hkd->wkh", units, one).square().sum(1) for one in basis])
    shares: Tensor = (1 - inside).clamp_min(1e-4).log()
    return shares.mean(-1)
