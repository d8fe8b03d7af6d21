"""Step 1: which words at which positions could have been fed into the first layer.

There, a word's input depends on the word and its position alone, so that each pair of the two can
be held against the span by itself. All words of the vocabulary are tried at all positions: a few
random directions outside of the span screen them in single precision, and what passes is measured
in double. Several observations share one pass over the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.evidence import longest_length
from gradleak.attacks.span.row_space import INSIDE, RowSpace
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching.inputs import (
    ModuleInputs,
    additive_of,
    depends_on_position,
    first_inputs,
)

SKETCH = 24  # random directions outside of the span that screen all words
# Of a unit input's miss, in single precision. A true word misses by rounding, some 1e-6, so that
# none is lost; what passes is looked at in double.
SCREEN = 1e-2
VECTORS_AT_ONCE = 2**13
KEPT = 16  # words a position, where no span is exact
FIRST_POSITIONS = 16  # tried where nothing says how many there are


@dataclass(frozen=True, eq=False)
class Pairs:
    """Words at positions that fit the span of one observation."""

    words: Int[Tensor, "pairs"]
    positions: Int[Tensor, "pairs"]
    coordinates: Float[Tensor, "pairs rank"]  # of their inputs in the span
    distances: Float[Tensor, "pairs"]

    def at(self, position: int) -> Int[Tensor, "pairs"]:
        """Returns the words that fit a position."""
        return self.words[self.positions == position]


class Scan:
    """Holds every word at every position against the spans of several observations."""

    def __init__(
        self,
        inputs: ModuleInputs,
        spaces: Sequence[RowSpace],
        streams: Sequence[Streams],
    ) -> None:
        self.target, self.inputs, self.spaces = inputs.target, inputs, spaces
        sketches = [
            space.draw_sketch(SKETCH, stream.child("scan").generator())
            for space, stream in zip(spaces, streams, strict=True)
        ]
        self.widths = [sketch.shape[1] for sketch in sketches]
        self.sketches = torch.cat(sketches, dim=1).to(self.target.dtype)
        vocabulary = self.target.vocabulary
        known = vocabulary.allowed.clone()
        known[list({*vocabulary.specials, vocabulary.pad})] = True
        self.words = known.nonzero()[:, 0]
        self.by_position = depends_on_position(inputs)

    def find_pairs(self, positions: int) -> list[Pairs]:
        """Finds what fits each observation at the first positions.

        Where positions play no part, one stands for all of them.
        """
        misses = self._screen(positions if self.by_position else 1)
        return [self._keep_fitting(*each) for each in zip(self.spaces, misses, strict=True)]

    @torch.no_grad()
    def measure_word(self, word: int, positions: int) -> Float[Tensor, "observations positions"]:
        """Says how far one word is outside of each span at every position."""
        fed = first_inputs(self.inputs, torch.tensor([word], device=self.target.device), positions)[
            :, 0
        ]
        return torch.stack([space.measure_distances(fed) for space in self.spaces])

    @torch.no_grad()
    def _screen(self, positions: int) -> Float[Tensor, "observations positions words"]:
        """Measures each pair's miss along the sketches alone."""
        if self.by_position:
            additive = additive_of(self.inputs, self.words, positions)
            if additive is not None:
                sketches = torch.split(self.sketches, self.widths, dim=1)
                return torch.stack([additive.misses(sketch) for sketch in sketches])
        chunks = []
        for words in torch.split(self.words, max(1, VECTORS_AT_ONCE // positions)):
            fed = first_inputs(self.inputs, words, positions)
            products = torch.split((fed @ self.sketches).square(), self.widths, dim=-1)
            sizes = fed.square().sum(-1)
            chunks.append(torch.stack([(part.sum(-1) / sizes).sqrt() for part in products]))
        return torch.cat(chunks, dim=-1)

    @torch.no_grad()
    def _keep_fitting(self, space: RowSpace, misses: Float[Tensor, "positions words"]) -> Pairs:
        """Measures in double precision what passed the screen, and keeps what is inside."""
        places, columns = _pass_screen(space, misses).nonzero(as_tuple=True)
        used, where = torch.unique(columns, return_inverse=True)
        if not len(used):
            none = space.strengths.new_zeros(0)
            return Pairs(used, places, none.view(0, space.rank), none)
        kept, coordinates, distances = [], [], []
        step = max(1, VECTORS_AT_ONCE // len(misses))
        # In pieces, of which only what fits is kept: of a full span most words pass the screen.
        for start in range(0, len(used), step):
            pairs = ((where >= start) & (where < start + step)).nonzero()[:, 0]
            fed = first_inputs(self.inputs, self.words[used[start : start + step]], len(misses))
            fed = fed[places[pairs], where[pairs] - start]
            found = space.measure_distances(fed)
            fits = found < (INSIDE if space.exact else float("inf"))
            kept.append(pairs[fits])
            coordinates.append(space.project(fed[fits]))
            distances.append(found[fits])
        pairs, order = torch.cat(kept).sort()
        return Pairs(
            self.words[columns[pairs]],
            places[pairs],
            torch.cat(coordinates)[order],
            torch.cat(distances)[order],
        )


def count_positions(scan: Scan, observations: Sequence[Observation], longest: int) -> list[int]:
    """Counts the positions each batch used: up to the last where its closing token fits.

    Where that says nothing, they go up to the last where any word fits.
    """
    if not scan.by_position:
        return [1] * len(observations)
    longest = min(longest, _count_embedded_positions(scan.target))
    suffix = scan.target.vocabulary.suffix
    if suffix:
        closing = scan.measure_word(suffix[-1], longest)
    else:
        closing = torch.full((len(observations), longest), float("inf"))
    found = []
    for observation, space, distances in zip(observations, scan.spaces, closing, strict=True):
        if space.exact:
            inside = (distances < INSIDE).nonzero()[
                :, 0
            ] + 1  # lengths that the closing token allows
            found.append(int(inside.max()) if len(inside) else 0)
        else:
            found.append(_estimate_length(observation, distances))
    return _extend(scan, found, longest) if 0 in found else found


def _pass_screen(
    space: RowSpace, misses: Float[Tensor, "positions words"]
) -> Bool[Tensor, "positions words"]:
    if space.exact:
        # A batch's weakest direction may be known less well than the screen is fine.
        return misses < max(SCREEN, INSIDE * space.widest)
    # A ranking is all there is.
    nearest = misses.topk(min(KEPT, misses.shape[1]), largest=False).indices
    return torch.zeros_like(misses, dtype=torch.bool).scatter_(1, nearest, True)


def _estimate_length(observation: Observation, closing: Float[Tensor, "positions"]) -> int:
    """Estimates a length where no span is exact.

    The rows of the position embeddings give it, or the position where the closing token fits best.
    """
    rows = longest_length(observation)
    if rows is not None:
        return min(rows.values[0], len(closing))
    if bool(closing.isinf().all()):
        return min(FIRST_POSITIONS, len(closing))
    vocabulary = observation.target.vocabulary
    shortest = len(vocabulary.prefix) + len(vocabulary.suffix) + 1
    return int(closing[shortest - 1 :].argmin()) + shortest


def _extend(scan: Scan, found: Sequence[int], longest: int) -> list[int]:
    """Fills in the zeros: twice as many positions are tried for as long as the last ones fit."""
    positions = min(FIRST_POSITIONS, longest)
    while True:
        pairs = [one.positions for one in scan.find_pairs(positions)]
        last = [int(fitting.max()) + 1 if len(fitting) else 1 for fitting in pairs]
        ended = all(known or end < positions for known, end in zip(found, last, strict=True))
        if positions == longest or ended:
            return [known or end for known, end in zip(found, last, strict=True)]
        positions = min(2 * positions, longest)


def _count_embedded_positions(target: Target) -> int:
    tables = [target.module.get_parameter(name) for name in target.groups["position_embedding"]]
    # RoBERTa's positions begin at 2, and nobody misses the last two of BERT's.
    return min((len(table) - 2 for table in tables), default=10**9)
