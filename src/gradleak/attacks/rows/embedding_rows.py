"""Step 1: which words a batch holds, and at which positions, by the rows of the embeddings.

A token adds one vector e to three rows at once: to its word's, to its position's and to its type's.
So the rows of words and of positions are sums of the same vectors.

Where the embeddings are summed and then normalised, e says itself where it belongs: a LayerNorm
gives the same output for x and for 2x, so its gradient e is orthogonal to what it was fed, and that
is word + position + type. The row of a word that stands at one position only is orthogonal to its
input there, up to rounding, and to no other. However large the batch is, such a word is placed.

Words that stand at several positions are shared out over them by least squares: rows of words,
times shares that are at least zero and sum to one a word, give the rows of positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.attack import TokenIds
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import ATTENTION_INPUTS, Part
from gradleak.core.target import Target
from gradleak.matching.inputs import Additive, ModuleInputs, additive_of, centre
from gradleak.matching.linear_algebra import bring_to_unit_size, require_finite
from gradleak.matching.precision import unit_rounding

# Units of rounding that the product of a row with its input may be off, as a share of their sizes:
# measured at up to 1.5 in single precision (2,000 tokens). Each unit more lets a wrong word pass
# with a chance of some 1e-5.
ORTHOGONAL = 4.0
# Of a row, what is left when a token is taken out of it, in units of rounding of the row as it was
TAKEN_OUT = 64.0
ALIKE = (
    1e-3  # a cosine that is none: of the model's own rows, where they are not orthogonal, it is 0.1
)
STEPS = 1000  # of the projected gradient
SETTLED = 1e-7  # a change of the shares that is none


@dataclass(frozen=True, eq=False)
class EmbeddingRows:
    """The rows of an update's embeddings, less what sentences that were found have added."""

    words: Int[Tensor, "words"]
    word_rows: Float[Tensor, "words width"]
    position_rows: Float[Tensor, "positions width"] | None
    word_sizes: Float[Tensor, "words"]  # of the rows as they were seen: rounding is relative to it
    position_sizes: Float[Tensor, "positions"]
    fed: Float[Tensor, "words positions width"] | None  # what the normalisation is fed, centred
    rounding: float  # of one operation of the client
    # How far the product of a row with what was fed may be from zero, as a share of their sizes
    tolerance: float

    @cached_property
    def kept(self) -> Float[Tensor, "words"]:
        """Ones for the words of which something is left."""
        left = torch.linalg.vector_norm(self.word_rows, dim=1)
        kept: Tensor = left > TAKEN_OUT * self.rounding * self.word_sizes
        return kept.double()

    @property
    def positions(self) -> int:
        """How many positions have something left, counted from the first."""
        if self.position_rows is None:
            return len(self.position_sizes)
        left = torch.linalg.vector_norm(self.position_rows, dim=1)
        used = (left > TAKEN_OUT * self.rounding * self.position_sizes).nonzero()
        return int(used.max()) + 1 if len(used) else 0

    @cached_property
    def placed(self) -> dict[int, int]:
        """The position of every word that stands at one only, by word."""
        if self.fed is None:
            return {}
        sizes = torch.linalg.vector_norm(self.word_rows, dim=1)
        products = torch.einsum("wh,wph->wp", self.word_rows, self.fed).abs()
        products = products / torch.linalg.vector_norm(self.fed, dim=2)
        # What was taken out of a row has left its own rounding there.
        floor = self.tolerance * self.word_sizes
        least, places = products.min(1)
        found = (least <= floor) & (self.kept > 0) & (sizes > 1e3 * floor)
        each = zip(self.words[found].tolist(), places[found].tolist(), strict=True)
        return dict(each)

    @cached_property
    def shares(self) -> Float[Tensor, "words positions"]:
        """How much of a word's row lies at each position: certain for placed words, an estimate
        for the others."""
        count = len(self.position_sizes)
        known = torch.zeros(len(self.words), count, dtype=torch.float64)
        rows = {word: row for row, word in enumerate(self.words.tolist())}
        for word, place in self.placed.items():
            known[rows[word], place] = 1
        unplaced = (self.kept > 0) & (known.sum(1) == 0)
        if self.position_rows is None:
            known[unplaced] = 1 / max(count, 1)
        elif bool(unplaced.any()):
            rest = self.position_rows - known.mT @ self.word_rows
            known[unplaced] = share_out(self.word_rows[unplaced], rest)
        return known

    def subtract(
        self, sentence: TokenIds, vectors: Float[Tensor, "tokens width"]
    ) -> "EmbeddingRows":
        """Takes one sentence out of the rows, given what each of its tokens adds to them."""
        rows = {word: row for row, word in enumerate(self.words.tolist())}
        places = torch.tensor([rows[word] for word in sentence])
        positions = self.position_rows
        if positions is not None:
            taken = torch.arange(len(sentence))
            positions = positions.index_add(0, taken, -vectors)
        word_rows = self.word_rows.index_add(0, places, -vectors)
        return replace(self, word_rows=word_rows, position_rows=positions)


def read_embedding_rows(observation: Observation, longest: int) -> EmbeddingRows | None:
    """Reads the rows that a batch has touched; none where words cannot be read off them."""
    target, tensors = observation.target, observation.update.tensors
    table = _find(target, tensors, "word_embedding")
    if table is None or target.words_are_outputs:
        return None
    table = require_finite(table, "rows of the word embeddings") / observation.gradient_scale
    words = table.any(1).nonzero()[:, 0]
    if len(words) == len(
        table
    ):  # noise, or a decay of all weights: nothing tells words from others
        return None
    positions = _find(target, tensors, "position_embedding")
    count, position_rows = longest, None
    if positions is not None:
        used = positions.any(1).nonzero()[:, 0]
        if 0 < len(used) < len(positions):
            # Every text has a first token: the first row that moved is its position's.
            first, count = int(used.min()), int(used.max() - used.min()) + 1
            position_rows = positions[first : first + count].double() / observation.gradient_scale
    word_rows = table[words]
    sizes = torch.linalg.vector_norm(word_rows, dim=1).cpu()
    position_sizes = torch.zeros(count, dtype=torch.float64)
    if position_rows is not None:
        position_rows = position_rows.cpu()
        position_sizes = torch.linalg.vector_norm(position_rows, dim=1)
    fed, eps = _find_fed(target, words, count)
    rounding, tolerance = unit_rounding(next(iter(tensors.values())).dtype), 0.0
    if fed is not None:
        # A LayerNorm adds eps to the variance, and so is not quite free of the size of its input.
        tolerance = ORTHOGONAL * rounding + eps / float(fed.square().mean(2).min())
    exact = observation.channel.only_scaled and observation.protocol.one_gradient
    return EmbeddingRows(
        words.cpu(),
        word_rows.cpu(),
        position_rows,
        sizes,
        position_sizes,
        fed if exact else None,
        rounding,
        tolerance,
    )


def share_out(
    word_rows: Float[Tensor, "words width"], position_rows: Float[Tensor, "positions width"]
) -> Float[Tensor, "words positions"]:
    """Returns shares of words in positions, none below zero and each word's summing to one, that
    leave least of the positions' rows.

    It is projected gradient with Nesterov's steps, over products of rows, so that a step costs
    words² times positions. Every row is scaled to be worth as much as any other.
    """
    rows, _ = bring_to_unit_size(torch.cat([word_rows, position_rows]))
    words, positions = rows[: len(word_rows)], rows[len(word_rows) :]
    gram, along = words @ words.mT, words @ positions.mT
    # A word with a large row would hold back all others: each has a step size of its own size.
    sizes = gram.diagonal().sqrt().clamp_min(1e-300)
    gram = gram / sizes[:, None] / sizes
    along = along / sizes[:, None]
    steepest = torch.linalg.matrix_norm(gram, torch.inf)
    found = torch.full_like(along, 1 / along.shape[1]) * sizes[:, None]
    ahead, pace = found, 1.0
    for _ in range(STEPS):
        slope = gram @ ahead - along
        moved = sizes[:, None] * _project((ahead - slope / steepest) / sizes[:, None])
        faster = (1 + (1 + 4 * pace * pace) ** 0.5) / 2
        ahead = moved + (pace - 1) / faster * (moved - found)
        change = float(((moved - found) / sizes[:, None]).abs().max())
        found, pace = moved, faster
        if change < SETTLED:
            break
    return found / sizes[:, None]


def _project(rows: Float[Tensor, "words positions"]) -> Float[Tensor, "words positions"]:
    """Returns the nearest shares to each row (Duchi et al. 2008, figure 1)."""
    ordered = rows.sort(1, descending=True).values
    excess = ordered.cumsum(1) - 1
    count = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=rows.device)
    last = ((ordered - excess / count) > 0).sum(1, keepdim=True)
    return (rows - excess.gather(1, last - 1) / last).clamp_min(0)


def _find_fed(
    target: Target, words: Int[Tensor, "words"], positions: int
) -> tuple[Float[Tensor, "words positions width"] | None, float]:
    """Returns what the embeddings' normalisation is fed for each word at each position, centred,
    and what it adds to their variance.

    None where a row's gradient is not orthogonal to it: where the sum goes on beside the
    normalisation, as in GPT-2, or none follows at all.
    """
    parts = _first_parts(target)
    if not parts:
        return None, 0.0
    sums = additive_of(ModuleInputs(target, parts[:1]), words, positions)
    if sums is None or not _is_orthogonal(target, sums):
        return None, 0.0
    apart = centre(sums.words.double())[:, None] + centre(sums.positions.double())[None]
    return apart.cpu(), sums.norm.eps


def _first_parts(target: Target) -> list[Part]:
    every = (*target.parts, *target.frozen_parts)
    return [
        part
        for part in every
        if part.layer == 1 and part.module in ATTENTION_INPUTS and len(part.shape) == 2
    ]


def _is_orthogonal(target: Target, sums: Additive) -> bool:
    """Whether the gradient by what the normalisation is fed is all that the embeddings get."""
    probe, fed = target.ordinary(), list[Tensor]()
    handle = sums.norm.register_forward_pre_hook(lambda _, arguments: fed.append(arguments[0]))
    try:
        with torch.enable_grad():
            assert probe.ids is not None
            embeddings = target.embed(probe.ids).detach().requires_grad_()
            given = Batch(probe.mask, probe.labels, embeddings=embeddings)
            (slopes,) = torch.autograd.grad(target.losses(given).sum(), embeddings)
    finally:
        handle.remove()
    if not fed or fed[0].shape != slopes.shape:
        return False
    inputs, slopes = centre(fed[0].detach().double().flatten(0, 1)), slopes.double().flatten(0, 1)
    products = (inputs * slopes).sum(-1).abs()
    reach = torch.linalg.vector_norm(inputs, dim=-1) * torch.linalg.vector_norm(slopes, dim=-1)
    return bool((products <= ALIKE * reach).all())


def _find(target: Target, tensors: Mapping[str, Tensor], group: str) -> Tensor | None:
    names: Sequence[str] = [name for name in target.groups[group] if name in tensors]
    return tensors[names[0]][0] if names else None
