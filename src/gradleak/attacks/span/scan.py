"""Which words at which positions could have been fed into the first layer: all of them are held against the span."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.evidence import longest_length
from gradleak.attacks.span.row_space import INSIDE, RowSpace
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching.additive import additive_of
from gradleak.matching.inputs import ModuleInputs, first_inputs

SKETCH = 24  # random directions outside of the span that screen all words
SCREEN = 1e-2  # of a unit input's miss, in single precision; what passes is looked at in double
VECTORS_AT_ONCE = 2**13
KEPT = 16  # words a position, where no span is exact
FIRST_POSITIONS = 16


@dataclass(frozen=True, eq=False)
class Pairs:
    """Words at positions that fit the span of one observation."""

    words: Int[Tensor, "pairs"]
    positions: Int[Tensor, "pairs"]
    coordinates: Float[Tensor, "pairs rank"]  # of their inputs in the span
    distances: Float[Tensor, "pairs"]

    def at(self, position: int) -> Int[Tensor, "pairs"]:
        """Words that fit a position."""
        return self.words[self.positions == position]


class Scan:
    """Holds every word at every position against the spans of several observations in one pass over the vocabulary."""

    def __init__(self, target: Target, inputs: ModuleInputs, spaces: Sequence[RowSpace], streams: Sequence[Streams]) -> None:
        self.target, self.inputs, self.spaces = target, inputs, spaces
        sketches = [space.sketch(SKETCH, stream.child("scan").generator()) for space, stream in zip(spaces, streams, strict=True)]
        self.widths = [sketch.shape[1] for sketch in sketches]
        self.sketches = torch.cat(sketches, dim=1).to(target.dtype)
        vocabulary = target.vocabulary
        known = vocabulary.allowed.clone()
        known[list({*vocabulary.specials, vocabulary.pad})] = True
        self.words = known.nonzero()[:, 0]
        self.by_position = not _position_free(inputs)

    def pairs(self, positions: int) -> list[Pairs]:
        """What fits each observation at the first positions; at one for all where positions play no part."""
        places = positions if self.by_position else 1
        misses = self._misses(places)
        return [self._fitting(space, seen) for space, seen in zip(self.spaces, misses, strict=True)]

    @torch.no_grad()
    def distances(self, word: int, positions: int) -> Float[Tensor, "observations positions"]:
        """How far one word is outside of each span at every position."""
        fed = self._fed(torch.tensor([word], device=self.target.device), positions)[:, 0]
        return torch.stack([space.distances(fed) for space in self.spaces])

    def _fed(self, words: Int[Tensor, "words"], positions: int) -> Float[Tensor, "positions words width"]:
        return next(iter(first_inputs(self.inputs, words, positions).values()))

    @torch.no_grad()
    def _misses(self, positions: int) -> Float[Tensor, "observations positions words"]:
        chunks = []
        additive = additive_of(self.inputs, self.words, positions) if self.by_position else None
        if additive is not None:
            return torch.stack([additive.misses(sketch) for sketch in torch.split(self.sketches, self.widths, dim=1)])
        for words in torch.split(self.words, max(1, VECTORS_AT_ONCE // positions)):
            fed = self._fed(words, positions)
            products = torch.split((fed @ self.sketches).square(), self.widths, dim=-1)
            sizes = fed.square().sum(-1)
            chunks.append(torch.stack([(part.sum(-1) / sizes).sqrt() for part in products]))
        return torch.cat(chunks, dim=-1)

    @torch.no_grad()
    def _fitting(self, space: RowSpace, misses: Float[Tensor, "positions words"]) -> Pairs:
        if space.exact:
            chosen = misses < max(SCREEN, INSIDE * space.widest)
        else:  # a ranking is all there is
            nearest = misses.topk(min(KEPT, misses.shape[1]), largest=False).indices
            chosen = torch.zeros_like(misses, dtype=torch.bool).scatter_(1, nearest, True)
        places, columns = chosen.nonzero(as_tuple=True)
        used, where = torch.unique(columns, return_inverse=True)
        if not len(used):
            return Pairs(used, places, space.strengths.new_zeros(0, space.rank), space.strengths.new_zeros(0))
        kept, coordinates, distances = [], [], []
        step = max(1, VECTORS_AT_ONCE // len(misses))
        for start in range(0, len(used), step):  # only what fits is kept: of full spans most words pass the screen
            pairs = ((where >= start) & (where < start + step)).nonzero()[:, 0]
            fed = self._fed(self.words[used[start : start + step]], len(misses))[places[pairs], where[pairs] - start]
            found = space.distances(fed)
            fits = found < (INSIDE if space.exact else float("inf"))
            kept.append(pairs[fits])
            coordinates.append(space.coordinates(fed[fits]))
            distances.append(found[fits])
        pairs, order = torch.cat(kept).sort()
        return Pairs(self.words[columns[pairs]], places[pairs], torch.cat(coordinates)[order], torch.cat(distances)[order])


@torch.no_grad()
def _position_free(inputs: ModuleInputs) -> bool:
    """Whether a word is fed alike at every position: rotary models turn queries and keys only later."""
    words = inputs.target.vocabulary.allowed.nonzero()[:2, 0]
    fed = next(iter(first_inputs(inputs, words, 3).values()))
    return torch.allclose(fed[0], fed[1], rtol=1e-5, atol=1e-7) and torch.allclose(fed[0], fed[2], rtol=1e-5, atol=1e-7)


def used_positions(scan: Scan, observations: Sequence[Observation], longest: int) -> list[int]:
    """How many positions each observation's batch used: up to the last where its closing token, or else any word, fits."""
    if not scan.by_position:
        return [1] * len(observations)
    longest = min(longest, _most_positions(scan.target))
    suffix = scan.target.vocabulary.suffix
    closing = scan.distances(suffix[-1], longest) if suffix else torch.full((len(observations), longest), float("inf"))
    found = []
    for observation, space, row in zip(observations, scan.spaces, closing, strict=True):
        inside = (row < INSIDE).nonzero()[:, 0] + 1
        if space.exact and len(inside):
            found.append(int(inside.max()))
        elif space.exact:
            found.append(0)
        else:
            found.append(_estimated(observation, row))
    return _extended(scan, found, longest) if 0 in found else found


def _estimated(observation: Observation, closing: Float[Tensor, "positions"]) -> int:
    """A length where no span is exact: by the rows of the position embeddings, or where the closing token fits best."""
    rows = longest_length(observation)
    if rows is not None:
        return min(rows.values[0], len(closing))
    shortest = len(observation.target.vocabulary.prefix) + len(observation.target.vocabulary.suffix) + 1
    if bool(closing.isinf().all()):
        return min(FIRST_POSITIONS, len(closing))
    return int(closing[shortest - 1 :].argmin()) + shortest


def _extended(scan: Scan, found: list[int], longest: int) -> list[int]:
    """Positions by the words themselves, for those without another sign: twice as many are tried while the last ones fit."""
    positions = min(FIRST_POSITIONS, longest)
    while True:
        last = [int(pairs.positions.max()) + 1 if len(pairs.positions) else 1 for pairs in scan.pairs(positions)]
        wanted = [place for place, known in enumerate(found) if known == 0]
        if positions == longest or all(last[place] < positions for place in wanted):
            return [known or last[place] for place, known in enumerate(found)]
        positions = min(2 * positions, longest)


def _most_positions(target: Target) -> int:
    tables = [target.module.get_parameter(name) for name in target.groups["position_embedding"]]
    return min((len(table) - 2 for table in tables), default=10**9)  # RoBERTa's begin at 2; nobody misses the last two of BERT's
