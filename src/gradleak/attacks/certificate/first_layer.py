"""Which words could stand at a place, by what they would feed the first layer: a sieve for the whole vocabulary at once.

Before tokens have mixed, what a word feeds in depends on the word and its position alone. The rows of the first layer's gradient
G = Σ_t δ_t x_tᵀ lie in the span S of the inputs x_t. Let d_p be the direction in S that is orthogonal to all of them but x_p: of
G it shows δ_p alone. With another word, fed x', at that place the gradient can be explained by the other inputs and x' only. It
is missed by at least ‖G d_p‖ times the sine of the angle between d_p and the part of x' that is orthogonal to the other
inputs. Where an input stands at two places (the same word at the same position of two sentences, or of one that is there
twice), neither is needed by itself; an
x' outside of S would then show by its own δ, for whose size that of the word it replaces is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.certificate.columns import Columns
from gradleak.attacks.certificate.counting import CLEAR, Count
from gradleak.core.parts import FUSED, Part
from gradleak.core.target import Target
from gradleak.matching.additive import Additive, additive_of, centre, squares_normalised, squares_of_sums
from gradleak.matching.exact import Lookups, OuterSums
from gradleak.matching.inputs import ModuleInputs, first_inputs, linear_parts
from gradleak.matching.linear_algebra import decompose
from gradleak.matching.rounding import signal_floor

ATTENTION = ("query", "key", "value", FUSED)
NEEDED = 1e-6  # how far a leverage may be from one for an input to be needed by itself; double precision leaves 1e-10
BLURRED = 1e-5  # of a squared share: what inputs in single precision cannot tell from nothing
VECTORS_AT_ONCE = 2**14


@dataclass(frozen=True, eq=False)
class Place:
    """One token of the guess as the first layer sees it."""

    word: int
    position: int
    direction: Float[Tensor, "width"]  # of length one; along the input itself where it is not needed
    needed: bool
    strength: float  # of what is seen of it
    delta: float  # the size of its own output gradient


class FirstLayer:
    """The sieve of one guess."""

    def __init__(
        self, target: Target, part: Part, places: dict[tuple[int, int], Place], basis: Tensor, floor: float, allowed: Tensor
    ) -> None:
        self.target, self.places, self.basis, self.floor = target, places, basis, floor
        self.inputs = ModuleInputs(target, [part])
        self.allowed = allowed
        self.positions = max(place.position for place in places.values()) + 1
        special = {*target.vocabulary.specials, target.vocabulary.pad}
        self.keys = [key for key, place in places.items() if place.word not in special]
        self.own = list(dict.fromkeys(place.word for place in places.values()))
        self._possible: Bool[Tensor, "places words"] | None = None
        self._sticking_out: Float[Tensor, "positions words"] | None = None

    def sees(self, sentence: int, token: int) -> bool:
        """Whether anything of that token is seen above the floor; special words ([UNK], say) are not looked at here."""
        place = self.places.get((sentence, token)) if (sentence, token) in self.keys else None
        return place is not None and max(place.strength, place.delta) > CLEAR * self.floor

    def words(self, sentence: int, token: int) -> list[int]:
        """Words that cannot be excluded at a place."""
        return [int(word) for word in self.allowed[self.possible[self.keys.index((sentence, token))]]]

    def may_stand(self, word: int, sentence: int, token: int) -> bool:
        """Whether a word, moved there together with another change, cannot be excluded: it must not stick out of the span."""
        place = self.places[sentence, token]
        if self._sticking_out is None:
            self._sticking_out = self._measure()
        return float(self._sticking_out[place.position, self.own.index(word)]) * place.delta <= CLEAR * self.floor

    def _measure(self) -> Float[Tensor, "positions words"]:
        """How far every word of the guess would stick out of the span at every position."""
        fed = self._fed(torch.tensor(self.own, device=self.target.device)).double()
        outside = fed - (fed @ self.basis) @ self.basis.mT
        squares = outside.square().sum(-1) - BLURRED * fed.square().sum(-1)
        return squares.clamp_min(0).sqrt().cpu()

    @property
    def possible(self) -> Bool[Tensor, "places words"]:
        """Of every place, the words that are not excluded there."""
        if self._possible is None:
            self._possible = self._sieve()
        return self._possible

    @torch.no_grad()
    def _sieve(self) -> Bool[Tensor, "places words"]:
        places = [self.places[key] for key in self.keys]
        directions = torch.stack([place.direction for place in places], dim=1)
        few = len(self.allowed) * self.positions < VECTORS_AT_ONCE
        additive = None if few else sums_of(self.target, self.inputs, self.positions)
        pieces = []
        for start in range(0, len(self.allowed), VECTORS_AT_ONCE):
            words = self.allowed[start : start + VECTORS_AT_ONCE]
            if additive is not None:
                sizes, inside, along = _of_sums(additive, self._numbers(words), places, self.basis, directions)
            else:
                sizes, inside, along = self._of_inputs(words, places, directions)
            pieces.append(self._not_excluded(places, sizes, inside, along))
        return torch.cat(pieces, dim=1).cpu()

    def _numbers(self, words: Int[Tensor, "words"]) -> Int[Tensor, "words"]:
        """Where words stand among all that are allowed, in whose order their sums are kept."""
        return self.target.vocabulary.allowed.cumsum(0)[words] - 1

    def _not_excluded(self, places: Sequence[Place], sizes: Tensor, inside: Tensor, along: Tensor) -> Bool[Tensor, "places _"]:
        """From squared sizes of inputs, of their parts in the span, and of those along each place's direction."""
        outside = (sizes - inside - BLURRED * sizes).clamp_min(0)
        strengths, deltas = (sizes.new_tensor([[getattr(place, name)] for place in places]) for name in ("strength", "delta"))
        needed = torch.tensor([[place.needed] for place in places], device=sizes.device)
        sines = outside / (outside + along).clamp_min(1e-300)
        missed = torch.where(needed, strengths.square() * sines, deltas.square() * outside)
        return missed <= (CLEAR * self.floor) ** 2

    def _fed(self, words: Int[Tensor, "words"]) -> Float[Tensor, "positions words width"]:
        return next(iter(first_inputs(self.inputs, words, self.positions).values()))

    def _of_inputs(
        self, words: Int[Tensor, "words"], places: Sequence[Place], directions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.tensor([place.position for place in places], device=words.device)
        sizes, inside, along = [], [], []
        for some in torch.split(words, max(1, VECTORS_AT_ONCE // self.positions)):
            fed = self._fed(some).double()
            sizes.append(fed.square().sum(-1)[rows])
            inside.append((fed @ self.basis).square().sum(-1)[rows])
            along.append(torch.einsum("pwd,dp->pw", fed[rows], directions).square())
        return torch.cat(sizes, 1), torch.cat(inside, 1), torch.cat(along, 1)


_SUMS: "WeakKeyDictionary[Target, tuple[int, Additive | None]]" = WeakKeyDictionary()


def sums_of(target: Target, inputs: ModuleInputs, positions: int) -> Additive | None:
    """The model's first inputs as sums of a word's and a position's part, if they are; kept for as long as the model is."""
    kept = _SUMS.get(target)
    if kept is None or kept[0] < positions:
        words = target.vocabulary.allowed.nonzero()[:, 0]
        kept = (positions, additive_of(inputs, words, positions))
        _SUMS[target] = kept
    return kept[1]


def _of_sums(
    additive: Additive, words: Int[Tensor, "words"], places: Sequence[Place], basis: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Squared sizes of the inputs of words at places, of their parts in a span and of those along each place's direction."""
    norm, rows = additive.norm, torch.tensor([place.position for place in places], device=basis.device)
    shift, columns = norm.bias, centre(additive.words[words])
    chosen = centre(additive.positions)[rows]
    deviation = (squares_of_sums(chosen, columns) / columns.shape[-1] + norm.eps).sqrt()
    chosen, columns = chosen * norm.weight, columns * norm.weight
    span, own = basis.to(columns.dtype), directions.to(columns.dtype)
    sizes = squares_normalised(chosen, columns, deviation, shift)
    inside = squares_normalised(chosen @ span, columns @ span, deviation, shift @ span)
    along = ((chosen * own.mT).sum(1)[:, None] + (columns @ own).mT) / deviation + (shift @ own)[:, None]
    return sizes, inside, along.square()


def first_layer_of(columns: Columns, count: Count, floors: Float[Tensor, "tensors"]) -> FirstLayer | None:
    """The sieve for a guess, where the first layer's query, key or value are seen."""
    target = columns.observation.target
    linear = linear_parts(target, list(columns.observation.update.tensors))
    parts = [part for part in linear if part.layer == 1 and part.module in ATTENTION]
    parts = [part for part in parts if isinstance(columns.gradients[part.name], OuterSums)]
    if not parts:
        return None
    floor = float(floors[[columns.names.index(part.name) for part in parts]].norm())
    weights = count.shares().view(-1, columns.labels)
    keys, inputs, deltas = [], [], []
    for sentence, words in enumerate(columns.sentences):
        tokens = columns.width if target.attend_padding else len(words)
        start = sentence * columns.labels
        here = [made for part in parts if isinstance(made := columns.gradients[part.name], OuterSums)]
        inputs.append(here[0].inputs[start, :tokens])
        labelled = [row.deltas[start : start + columns.labels, :tokens] for row in here]
        own = [torch.einsum("l,lto->to", weights[sentence].to(some), some) for some in labelled]
        deltas.append(torch.cat(own, dim=1).norm(dim=1))
        keys += [(sentence, token) for token in range(tokens)]
    fed, sizes = torch.cat(inputs), torch.cat(deltas)
    found = decompose(fed)
    cutoff = signal_floor(fed.shape[1], target.dtype) * float(found.values[0])
    rank = int((found.values > cutoff).sum())
    left, values, right = found.left[:, :rank], found.values[:rank], found.right[:rank]
    leverage = left.square().sum(1)
    duals = (left / values) @ right
    places = {}
    for row, key in enumerate(keys):
        copies = count.totals[key[0]]  # of which one would be changed
        needed = copies == 1 and bool(leverage[row] > 1 - NEEDED)
        length = float(duals[row].norm())
        size = float(sizes[row]) / max(1, copies)
        direction = duals[row] / length if needed else fed[row] / fed[row].norm()
        places[key] = Place(_word(columns, *key), key[1], direction, needed, size / length if needed else 0.0, size)
    return FirstLayer(target, parts[0], places, right.mT.contiguous(), floor, _words_seen(columns))


def _words_seen(columns: Columns) -> Int[Tensor, "words"]:
    """The words that may stand in a sentence: where the word embeddings' own gradient is seen, those that have one."""
    target, tensors = columns.observation.target, columns.observation.update.tensors
    allowed = target.vocabulary.allowed
    for name in target.groups["word_embedding"]:
        if name in tensors and isinstance(columns.gradients[name], Lookups):
            allowed = allowed & tensors[name][0].any(1)
    return allowed.nonzero()[:, 0]


def _word(columns: Columns, sentence: int, token: int) -> int:
    words = columns.sentences[sentence]
    return words[token] if token < len(words) else columns.observation.target.vocabulary.pad
