"""Which words could stand at a place, by what they would feed the first layer.

This is a sieve for the whole vocabulary at once. Before tokens have mixed, what a word feeds in
depends on the word and its position alone. The rows of the first layer's gradient G = Σ_t δ_t x_tᵀ
lie in the span S of the inputs x_t. Let d_p be the direction in S that is orthogonal to all of them
but x_p: of G it shows δ_p alone. With another word, fed x', at that place the gradient can be
explained by the other inputs and x' only. It is missed by at least ‖G d_p‖ times the sine of the
angle between d_p and the part of x' that is orthogonal to the other inputs.

Where an input stands at two places (the same word at the same position of two sentences, or of one
that is there twice), neither is needed by itself. An x' outside of S would then show by its own δ,
for whose size that of the word it replaces is taken.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.certificate.contributions import Contributions
from gradleak.attacks.certificate.counting import CLEAR, Occurrences
from gradleak.core.parts import ATTENTION_INPUTS, Part
from gradleak.core.target import Target
from gradleak.matching.exact import Lookups, OuterSums
from gradleak.matching.inputs import (
    Additive,
    ModuleInputs,
    centre,
    depends_on_position,
    first_inputs,
    keep_sums,
    squares_normalised,
    squares_of_sums,
    visible_linear_parts,
)
from gradleak.matching.linear_algebra import decompose
from gradleak.matching.precision import signal_floor

# How far a leverage may be from one for an input to be needed by itself: double precision leaves
# 1e-10.
NEEDED = 1e-6
BLURRED = 1e-5  # of a squared share: what inputs in single precision cannot tell from nothing
VECTORS_AT_ONCE = 2**14


@dataclass(frozen=True, eq=False)
class SeenToken:
    """One token of the guess as the first layer sees it."""

    word: int
    position: int  # zero for all where positions come later, as in rotary models
    # Of length one; along the input itself where it is not needed.
    direction: Float[Tensor, "width"]
    needed: bool  # no other input can stand for it
    strength: float  # of what is seen of it
    delta: float  # the size of its own output gradient


class WordSieve:
    """The sieve of one guess."""

    def __init__(
        self,
        target: Target,
        part: Part,
        places: dict[tuple[int, int], SeenToken],
        basis: Tensor,
        floor: float,
        allowed: Tensor,
    ) -> None:
        self.target, self.places, self.basis, self.floor = target, places, basis, floor
        self.inputs = ModuleInputs(target, [part])
        self.allowed = allowed
        self.positions = max(place.position for place in places.values()) + 1
        special = {*target.vocabulary.specials, target.vocabulary.pad}
        self.keys = [key for key, place in places.items() if place.word not in special]
        self.own = list(dict.fromkeys(place.word for place in places.values()))

    def sees(self, sentence: int, token: int) -> bool:
        """Whether anything of that token is seen above the floor.

        Special words ([UNK], say) are not looked at here.
        """
        place = self.places.get((sentence, token)) if (sentence, token) in self.keys else None
        return place is not None and max(place.strength, place.delta) > CLEAR * self.floor

    def list_words(self, sentence: int, token: int) -> list[int]:
        """Lists words that cannot be excluded at a place."""
        possible = self.possible[self.keys.index((sentence, token))]
        return [int(word) for word in self.allowed[possible]]

    def may_stand(self, word: int, sentence: int, token: int) -> bool:
        """Whether a word, moved there together with another change, cannot be excluded.

        It must not stick out of the span.
        """
        place = self.places[sentence, token]
        outside = float(self.own_misses[place.position, self.own.index(word)])
        return outside * place.delta <= CLEAR * self.floor

    @functools.cached_property
    def own_misses(self) -> Float[Tensor, "positions words"]:
        """How far every word of the guess sticks out of the span at every position."""
        words = torch.tensor(self.own, device=self.target.device)
        fed = first_inputs(self.inputs, words, self.positions).double()
        outside = fed - (fed @ self.basis) @ self.basis.mT
        squares = outside.square().sum(-1) - BLURRED * fed.square().sum(-1)
        return squares.clamp_min(0).sqrt().cpu()

    @functools.cached_property
    @torch.no_grad()
    def possible(self) -> Bool[Tensor, "places words"]:
        """The words of every place that are not excluded there."""
        places = [self.places[key] for key in self.keys]
        directions = torch.stack([place.direction for place in places], dim=1)
        few = len(self.allowed) * self.positions < VECTORS_AT_ONCE
        additive = None if few else keep_sums(self.target, self.inputs, self.positions)
        pieces = []
        for start in range(0, len(self.allowed), VECTORS_AT_ONCE):
            words = self.allowed[start : start + VECTORS_AT_ONCE]
            if additive is not None:
                numbers = self._number_words(words)
                squares = _measure_sums(additive, numbers, places, self.basis, directions)
            else:
                squares = self._measure_inputs(words, places, directions)
            pieces.append(self._keep_possible(places, *squares))
        return torch.cat(pieces, dim=1).cpu()

    def _number_words(self, words: Int[Tensor, "words"]) -> Int[Tensor, "words"]:
        """Returns where words stand among all that are allowed, as their sums are kept."""
        return self.target.vocabulary.allowed.cumsum(0)[words] - 1

    def _keep_possible(
        self, places: Sequence[SeenToken], sizes: Tensor, inside: Tensor, along: Tensor
    ) -> Bool[Tensor, "places _"]:
        """Says which words are possible.

        That follows from squared sizes of inputs, of their parts in the span, and of those along
        each place's direction.
        """
        outside = (sizes - inside - BLURRED * sizes).clamp_min(0)
        strengths, deltas = (
            sizes.new_tensor([[getattr(place, name)] for place in places])
            for name in ("strength", "delta")
        )
        needed = torch.tensor([[place.needed] for place in places], device=sizes.device)
        # The squared sine of the angle between d_p and the part of x' beside the other inputs
        sines = outside / (outside + along).clamp_min(1e-300)
        missed = torch.where(needed, strengths.square() * sines, deltas.square() * outside)
        return missed <= (CLEAR * self.floor) ** 2

    def _measure_inputs(
        self, words: Int[Tensor, "words"], places: Sequence[SeenToken], directions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.tensor([place.position for place in places], device=words.device)
        sizes, inside, along = [], [], []
        for some in torch.split(words, max(1, VECTORS_AT_ONCE // self.positions)):
            fed = first_inputs(self.inputs, some, self.positions).double()
            sizes.append(fed.square().sum(-1)[rows])
            inside.append((fed @ self.basis).square().sum(-1)[rows])
            if len(fed) == 1:  # what a word feeds in is the same at all places
                along.append((fed[0] @ directions).mT.square())
            else:
                along.append(torch.einsum("pwd,dp->pw", fed[rows], directions).square())
        return torch.cat(sizes, 1), torch.cat(inside, 1), torch.cat(along, 1)


def _measure_sums(
    additive: Additive,
    words: Int[Tensor, "words"],
    places: Sequence[SeenToken],
    basis: Tensor,
    directions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns squared sizes of the inputs of words at places, and of two parts of them.

    The parts are that in a span and that along each place's direction.
    """
    rows = torch.tensor([place.position for place in places], device=basis.device)
    norm, shift, columns = additive.norm, additive.norm.bias, centre(additive.words[words])
    chosen = centre(additive.positions)[rows]  # as Additive.misses, for places instead of all
    deviation = (squares_of_sums(chosen, columns) / columns.shape[-1] + norm.eps).sqrt()
    chosen, columns = chosen * norm.weight, columns * norm.weight
    span, own = basis.to(columns.dtype), directions.to(columns.dtype)
    sizes = squares_normalised(chosen, columns, deviation, shift)
    inside = squares_normalised(chosen @ span, columns @ span, deviation, shift @ span)
    along = ((chosen * own.mT).sum(1)[:, None] + (columns @ own).mT) / deviation
    return sizes, inside, (along + (shift @ own)[:, None]).square()


def make_word_sieve(
    columns: Contributions, count: Occurrences, floors: Float[Tensor, "tensors"]
) -> WordSieve | None:
    """Makes the sieve for a guess, where the first layer's query, key or value are seen."""
    target = columns.observation.target
    visible = visible_linear_parts(columns.observation, 1, ATTENTION_INPUTS)
    seen = {part: columns.gradients[part.name] for part in visible}
    sums = {part: made for part, made in seen.items() if isinstance(made, OuterSums)}
    if not sums:
        return None
    parts = list(sums)
    floor = float(floors[[columns.names.index(part.name) for part in parts]].norm())
    weights = count.shares().view(-1, columns.labels)
    keys, inputs, deltas = [], [], []
    for sentence, words in enumerate(columns.sentences):
        tokens = columns.width if target.attend_padding else len(words)
        start = sentence * columns.labels
        inputs.append(sums[parts[0]].inputs[start, :tokens])
        stop = start + columns.labels
        labelled = [made.deltas[start:stop, :tokens] for made in sums.values()]
        own = [torch.einsum("l,lto->to", weights[sentence].to(some), some) for some in labelled]
        deltas.append(torch.cat(own, dim=1).norm(dim=1))
        keys += [(sentence, token) for token in range(tokens)]
    fed, sizes = torch.cat(inputs), torch.cat(deltas)
    # Row p of `duals` is orthogonal to all inputs but x_p. An input's leverage is one where the
    # others cannot stand for it at all.
    found = decompose(fed)
    cutoff = signal_floor(fed.shape[1], target.dtype) * float(found.values[0])
    rank = int((found.values > cutoff).sum())
    left, values, right = found.left[:, :rank], found.values[:rank], found.right[:rank]
    leverage = left.square().sum(1)
    duals = (left / values) @ right  # the pseudo-inverse, transposed
    by_position = depends_on_position(ModuleInputs(target, [parts[0]]))
    places = {}
    for row, key in enumerate(keys):
        copies = count.totals[key[0]]  # of which one would be changed
        needed = copies == 1 and bool(leverage[row] > 1 - NEEDED)
        length = float(duals[row].norm())
        size = float(sizes[row]) / max(1, copies)
        direction = duals[row] / length if needed else fed[row] / fed[row].norm()
        strength = size / length if needed else 0.0
        word = _find_word(columns, *key)
        position = key[1] if by_position else 0
        places[key] = SeenToken(word, position, direction, needed, strength, size)
    basis, allowed = right.mT.contiguous(), _list_words_seen(columns)
    return WordSieve(target, parts[0], places, basis, floor, allowed)


def _list_words_seen(columns: Contributions) -> Int[Tensor, "words"]:
    """Lists the words that may stand in a sentence.

    Where the word embeddings' own gradient is seen, these are the ones that have one.
    """
    target, tensors = columns.observation.target, columns.observation.update.tensors
    allowed = target.vocabulary.allowed
    for name in target.groups["word_embedding"]:
        if name in tensors and isinstance(columns.gradients[name], Lookups):
            allowed = allowed & tensors[name][0].any(1)
    return allowed.nonzero()[:, 0]


def _find_word(columns: Contributions, sentence: int, token: int) -> int:
    words = columns.sentences[sentence]
    return words[token] if token < len(words) else columns.observation.target.vocabulary.pad
