"""Which words matrices speak of, before anything is searched.

The lexicon ranks the vocabulary: a word is passed through the model alone among fillers. What the
model makes of it there is near what it makes of it in the secret, even in the last layers: near
enough to rank words by the share of that vector (less the mean of all words') that lies in the span
of the seen gradient. The words of a sentence are then mostly among the first hundred of thirty
thousand. The attention's output layer is fed averages of values, other ones in every head: there,
the value of a word is held against the span seen in each head's columns. In a classifier's last
layer the query's gradient is a sum of keys, again by heads.

The first layer says more: before tokens mix, an input depends on its own word and position alone.
Every word at every place is held against the span that was seen, and the search begins at the best.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.energy.objective import estimate_error_std, find_directions
from gradleak.attacks.energy.structure import Structure, are_linear, count_heads, find_beside
from gradleak.attacks.search.search_rows import Ids, Rows, find_filler
from gradleak.attacks.search.word_search import Likely
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.chunking import FORWARD, Chunks, cost_of, pieces
from gradleak.matching.inputs import (
    ModuleInputs,
    first_inputs,
    matrix_of,
    module_of,
    shared_linear_parts,
)

FILLERS_BESIDE = 1  # on either side of a word that is looked at alone
WORDS_AT_ONCE = 2048
WORDS_A_PLACE = 3  # likely words that every further place of a sentence adds
MANY_WORDS = 1024  # likely words tried where a guess is weakest
FED_ALIKE = ("query", "key", "value")
VECTORS_AT_ONCE = 2**16
VECTORS_HELD = 8  # of an input's width, that one word at one position takes on its way


@dataclass(frozen=True)
class Lens:
    """Says how to hold words against one seen matrix: by their inputs to it, or by heads."""

    part: Part
    source: Part  # the module whose input, or (by heads) output, stands for the word
    heads: int = 1

    def vectors(
        self, target: Target, inputs: Mapping[str, Tensor]
    ) -> Float[Tensor, "words heads width"]:
        """Returns what stands for each word."""
        found = inputs[module_of(self.source)]
        if self.heads > 1:
            found = target.module.get_submodule(module_of(self.source))(found)
        return found.reshape(len(found), self.heads, -1)

    def find_bases(
        self, observations: Sequence[Observation]
    ) -> tuple[Int[Tensor, "shown"], Float[Tensor, "shown heads rank width"]]:
        """Returns which observations show the matrix, and the directions in which it was seen."""
        shown, bases = [], []
        for place, observation in enumerate(observations):
            seen, name = observation.update.tensors, self.part.name
            if name not in seen:
                continue
            matrix = matrix_of(observation.target, self.part, seen[name])[0]
            by_outputs = self.part.module == "query" and self.heads > 1
            by_inputs = matrix.T if by_outputs else matrix
            by_heads = by_inputs.reshape(len(by_inputs), self.heads, -1).movedim(1, 0)
            std = estimate_error_std(observation, name)
            bases.append(find_directions(observation, by_heads, std))
            shown.append(place)
        most = max(one.shape[1] for one in bases)
        # Zero rows count for nothing: observations may show different numbers of directions.
        padded = [torch.nn.functional.pad(one, (0, 0, 0, most - one.shape[1])) for one in bases]
        return torch.tensor(shown, device=padded[0].device), torch.stack(padded)


def find_lens(target: Target, part: Part, structure: Structure) -> Lens | None:
    """Returns the lens for a matrix, where there is one."""
    by_heads = {"attention_output": "value"}
    if structure.place is not None:
        by_heads["query"] = "key"
    source = find_beside(target, part).get(by_heads.get(part.module, ""))
    if source is not None and _has_plain_heads(target, part, source):
        return Lens(part, source, count_heads(target))
    return Lens(part, part) if structure.place is None else None


def _has_plain_heads(target: Target, part: Part, source: Part) -> bool:
    """Returns whether both are linear layers whose heads correspond: none fused, none shared."""
    heads = count_heads(target)
    width = part.shape[0] if part.module == "query" else part.shape[1]
    plain = are_linear(target, (part, source)) and part.cut is None and source.cut is None
    return plain and heads > 0 and source.shape[0] == width and width % heads == 0


def rank_words(
    observations: Sequence[Observation],
    words: Int[Tensor, "words"],
    parts: Sequence[tuple[Part, Structure]],
    bench: Bench,
) -> Float[Tensor, "observations words"]:
    """Returns for every word how badly it fits what was seen: lower fits better.

    It is zero, the worst, where nothing can be said.
    """
    target = observations[0].target
    found = [find_lens(target, part, structure) for part, structure in parts]
    lenses = [lens for lens in found if lens is not None]
    misfits = torch.zeros(len(observations), len(words), device=target.device, dtype=target.dtype)
    if not lenses:
        return misfits
    alone = LoneWords(target, lenses)
    # The mean of all words is no word's doing; every so many of them give it well enough.
    means = alone.average(words[:: max(1, len(words) // WORDS_AT_ONCE)], bench)
    bases = [lens.find_bases(observations) for lens in lenses]

    def piece(some: slice) -> Tensor:
        summed = torch.zeros_like(misfits[:, some])
        vectors = alone.vectors(words[some])
        for own, mean, (shown, basis) in zip(vectors, means, bases, strict=True):
            summed[shown] += _measure_outside(own - mean, basis)
        misfits[:, some] = summed
        return summed[0]

    alone.pieces(bench).run(piece, len(words))
    return misfits


def choose_likely(rows: Rows, misfits: Float[Tensor, "rows words"], count: int) -> Likely:
    """Returns the words that fit best, more for more places, and many of them.

    Rows with fewer places repeat their first.
    """
    places = (~rows.fixed).flatten(1).sum(1)
    counts = count + WORDS_A_PLACE * places
    most = min(max(int(counts.max()), MANY_WORDS), misfits.shape[1])
    best = misfits.topk(most, largest=False).indices
    few = best[:, : int(counts.max())]
    kept = torch.arange(few.shape[1], device=best.device) < counts[:, None]
    few = torch.where(kept, few, few[:, :1])
    return rows.words[few], rows.words[best[:, :MANY_WORDS]]


class LoneWords:
    """Words among fillers, as the modules of some lenses see them."""

    def __init__(self, target: Target, lenses: Sequence[Lens]) -> None:
        self.target, self.lenses = target, lenses
        self.inputs = ModuleInputs(target, [lens.source for lens in lenses])
        around = len(target.vocabulary.prefix) + len(target.vocabulary.suffix)
        ids, special = target.vocabulary.frame(around + 2 * FILLERS_BESIDE + 1)
        filler, pairs = find_filler(target), zip(ids, special, strict=True)
        self.frame = torch.tensor([word if fixed else filler for word, fixed in pairs])
        self.place = special.index(False) + FILLERS_BESIDE

    def average(
        self, words: Int[Tensor, "words"], bench: Bench
    ) -> list[Float[Tensor, "heads width"]]:
        """Returns the mean vector of each lens over some words."""
        parts = [self.vectors(some) for some in torch.split(words, self.pieces(bench).size)]
        return [torch.cat(vectors).mean(0) for vectors in zip(*parts, strict=True)]

    def pieces(self, bench: Bench) -> Chunks:
        """Returns so many words at once as fit."""
        cost, tokens = cost_of(self.target, self.inputs), len(self.frame)
        held, work = cost.bytes(1, tokens, FORWARD), cost.work(1, tokens, 1)
        return pieces(bench, self.target.device, held, work, WORDS_AT_ONCE)

    @torch.no_grad()
    def vectors(self, words: Int[Tensor, "words"]) -> list[Float[Tensor, "words heads width"]]:
        """Returns, for each lens, what stands for each of the words."""
        ids = self.frame.to(words.device).repeat(len(words), 1)
        ids[:, self.place] = words
        labels = self.target.any_labels(*ids.shape)
        mask = torch.ones_like(ids, dtype=torch.bool)
        inputs = self.inputs(Batch(ids=ids, mask=mask, labels=labels))
        own = {name: tensor[:, self.place] for name, tensor in inputs.items()}
        return [lens.vectors(self.target, own) for lens in self.lenses]


def _measure_outside(
    vectors: Float[Tensor, "words heads width"], basis: Float[Tensor, "shown heads rank width"]
) -> Float[Tensor, "shown words"]:
    """Returns the log of the share of each word's vector outside the span, averaged over heads."""
    units = torch.nn.functional.normalize(vectors, dim=-1)
    inside = [torch.einsum("whd,hkd->wkh", units, one).square().sum(1) for one in basis]
    # Less than 1e-4 outside says no more: a word among fillers is never met exactly.
    shares: Tensor = (1 - torch.stack(inside)).clamp_min(1e-4).log()
    return shares.mean(-1)


@torch.no_grad()
def read_first_layer(rows: Rows, bench: Bench) -> Ids:
    """Returns where to begin: what the first layer's matrices say, fillers elsewhere."""
    empty = torch.where(rows.fixed, rows.frame, find_filler(rows.target))
    parts = _find_first_parts(rows.observations)
    if not parts or not rows.target.vocabulary.prefix:
        return empty
    inputs = ModuleInputs(rows.target, parts[:1])
    if not _depends_on_position(inputs, rows.words[:1]):
        return empty
    bases = [_find_first_basis(one, parts) for one in rows.observations]
    found = rows.words[_find_nearest(rows, inputs, bases, bench)]
    shown = [any(part.name in one.update.tensors for part in parts) for one in rows.observations]
    is_shown = torch.tensor(shown, device=found.device)[:, None, None]
    return torch.where(rows.fixed | ~is_shown, empty, found.mT)


def _find_first_parts(observations: Sequence[Observation]) -> list[Part]:
    linear = shared_linear_parts(observations)
    return [part for part in linear if part.layer == 1 and part.module in FED_ALIKE]


def _depends_on_position(inputs: ModuleInputs, word: Int[Tensor, "1"]) -> bool:
    """Returns whether positions are added before the first layer; rotary ones are not."""
    made = first_inputs(inputs, word, 2)
    return not torch.equal(made[0], made[1])


def _find_first_basis(
    observation: Observation, parts: Sequence[Part]
) -> Float[Tensor, "rank width"]:
    """Returns the directions of all that the parts show, at most one a token."""
    target = observation.target
    seen = [part for part in parts if part.name in observation.update.tensors]
    if not seen:
        return torch.zeros(1, parts[0].shape[1], device=target.device, dtype=target.dtype)
    tensors = [observation.update.tensors[part.name] for part in seen]
    pairs = zip(seen, tensors, strict=True)
    matrices = [matrix_of(target, part, tensor)[0] for part, tensor in pairs]
    # Each counts by how far it stands out of its errors; where one has none, all count alike.
    stds = [estimate_error_std(observation, part.name) for part in seen]
    if all(stds):
        scaled = [one / std for one, std in zip(matrices, stds, strict=True)]
        return find_directions(observation, torch.cat(scaled), 1.0)
    scaled = [one / one.norm().clamp_min(1e-30) for one in matrices]
    return find_directions(observation, torch.cat(scaled), 0.0)


def _find_nearest(
    rows: Rows, inputs: ModuleInputs, bases: Sequence[Tensor], bench: Bench
) -> Int[Tensor, "rows positions examples"]:
    """Returns, at every position, the words whose inputs lie least outside each span.

    There is one for each sentence. Inputs are taken less the first token's: that is the same
    special token in every sentence, and differences lie in the span even where only centred inputs
    are seen (the key's).
    """
    positions, examples = rows.mask.shape[-1], rows.mask.shape[1]
    token = torch.tensor(rows.target.vocabulary.prefix[:1], device=rows.words.device)
    first = first_inputs(inputs, token, 1)[0, 0]
    shape, count = (len(bases), positions), min(examples, len(rows.words))
    misses = torch.full((*shape, count), torch.inf, device=first.device, dtype=first.dtype)
    words = torch.arange(count, device=first.device).expand(*shape, count)

    def piece(some: slice) -> Tensor:
        nonlocal misses, words
        apart = first_inputs(inputs, rows.words[some], positions) - first
        vectors = torch.nn.functional.normalize(apart, dim=-1)
        found = torch.stack([1 - (vectors @ basis.T).square().sum(-1) for basis in bases])
        numbers = torch.arange(some.start, some.stop, device=first.device).expand(*shape, -1)
        # A running list of the best: those before beside this piece's
        misses, places = torch.cat([misses, found], dim=-1).topk(count, largest=False)
        words = torch.cat([words, numbers], dim=-1).gather(-1, places)
        return found[0, 0]

    held = positions * (VECTORS_HELD * len(first) + max(map(len, bases)) + 4 * len(bases))
    work, most = held * len(first), VECTORS_AT_ONCE / positions
    chunks = pieces(bench, first.device, held * first.element_size(), work, most)
    chunks.run(piece, len(rows.words))
    return words if count == examples else words.repeat(1, 1, -(-examples // count))[..., :examples]
