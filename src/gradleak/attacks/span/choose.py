"""Step 2: how likely each word is at each position, and where sentences may end.

Where one word stands at two positions and two words at one, the span alone cannot tell: an input is
(nearly) the sum of a word's part and a position's, so every word of the batch fits every position.
But the gradient says how much of each direction there is, and few pairs explain that. Sparse
Bayesian learning for many measurements (Wipf & Rao 2007) gives each pair a weight. The weights
become the likelihoods by which sentences are drawn.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.span.row_space import RowSpace
from gradleak.attacks.span.scan import Pairs
from gradleak.core.attack import TokenIds
from gradleak.core.target import Vocabulary
from gradleak.matching.linear_algebra import factor_gram, find_triangle

STEPS = 80  # more gains nothing: what is left unclear stays so
TEMPERED = 0.5  # power of the weights, which fall over many decades and only say what is likelier
# The least likelihood of a word, of its position's likeliest: 0.03 where a sentence that was found
# before has that word there, since its weight is then taken out.
LEAST, LEAST_AGAIN = 1e-3, 0.03
LEAST_LENGTH, LEAST_LENGTH_AGAIN = 0.01, 0.2  # the same for where sentences end


def weigh_pairs(
    space: RowSpace,
    coordinates: Float[Tensor, "pairs rank"],
    left: Float[Tensor, "outputs rank"] | None = None,
) -> Float[Tensor, "pairs"]:
    """Says how much of the gradient each pair explains when as few as possible do.

    The largest weight is one. Where `left` is given, it stands for the gradient.
    """
    if left is None:
        return _explain_sparsely(coordinates.mT, torch.diag(space.strengths / space.strengths[0]))
    return _explain_sparsely(coordinates.mT, find_triangle(left / space.strengths[0]).mT)


def _explain_sparsely(
    atoms: Float[Tensor, "rank pairs"], measured: Float[Tensor, "rank measurements"]
) -> Float[Tensor, "pairs"]:
    weights = atoms.new_ones(atoms.shape[1])
    if len(weights) <= len(atoms):
        return weights  # the pairs are independent: each is there
    for _ in range(STEPS):
        factor = factor_gram((atoms * weights) @ atoms.mT, terms=len(weights))
        solved = torch.linalg.solve_triangular(factor, atoms, upper=False)
        # Wipf & Rao's update: γ_i ← ‖μ_i‖² / (1 − Σ_ii/γ_i), whose denominator is this leverage
        leverage = weights * solved.square().sum(0)
        explained = weights[:, None] * (atoms.mT @ torch.cholesky_solve(measured, factor))
        weights = explained.square().sum(1) / leverage.clamp_min(1e-14)
        weights = (weights / weights.max()).nan_to_num(0.0).clamp_min(1e-20)
    return weights


@dataclass(frozen=True, eq=False)
class Choices:
    """The words that fit each position, and the lengths of sentences, with likelihoods."""

    words: list[Int[Tensor, "_"]]  # of each position
    weights: list[Float[Tensor, "_"]]
    lengths: Int[Tensor, "lengths"]
    length_weights: Float[Tensor, "lengths"]
    prefix: TokenIds
    suffix: TokenIds

    def inside(self, length: int) -> range:
        """Returns the places of a sentence between its prefix and its suffix."""
        return range(len(self.prefix), length - len(self.suffix))

    def draw(self, rng: torch.Generator) -> TokenIds:
        """Draws a sentence, each word of it alone."""
        places = self.inside(self.draw_length(rng))
        return (*self.prefix, *(self.draw_word(place, rng) for place in places), *self.suffix)

    def draw_length(self, rng: torch.Generator) -> int:
        """Draws how long a sentence is."""
        return int(self.lengths[_draw(self.length_weights, rng)])

    def draw_word(self, place: int, rng: torch.Generator) -> int:
        """Draws a word for one place."""
        return int(self.words[place][_draw(self.weights[place], rng)])

    def redraw(self, sentence: TokenIds, share: float, rng: torch.Generator) -> TokenIds:
        """Draws a share of a sentence's words anew."""
        again = torch.rand(len(sentence), generator=rng) < share
        inside = self.inside(len(sentence))
        return tuple(
            self.draw_word(place, rng) if place in inside and again[place] else word
            for place, word in enumerate(sentence)
        )

    def take_likeliest(self, length: int) -> TokenIds:
        """Returns the sentence of the likeliest word at every position."""
        places = self.inside(length)
        words = (int(self.words[place][self.weights[place].argmax()]) for place in places)
        return (*self.prefix, *words, *self.suffix)

    def limit_to(self, left: int) -> "Choices":
        """Drops lengths beyond the tokens left; one that takes all of them is likely."""
        leaves_room = self.lengths + self.lengths.min() <= left
        takes_all = self.lengths == left
        if not bool((leaves_room | takes_all).any()):
            return self
        kept = self.length_weights * leaves_room
        likely = kept.sum().clamp_min(1.0)
        return replace(self, length_weights=torch.where(takes_all, likely, kept))


def make_choices(
    pairs: Pairs,
    weights: Float[Tensor, "pairs"],
    known: Bool[Tensor, "pairs"],
    vocabulary: Vocabulary,
    positions: int,
    by_position: bool,
) -> Choices | None:
    """Makes the choices of one observation; none where they hold no whole sentence.

    `known` are the pairs that sentences found before hold.
    """
    prefix, suffix = vocabulary.prefix, vocabulary.suffix
    frame = torch.tensor([*prefix, *suffix, vocabulary.pad])
    words, kept, ends, again = [], [], list[float](), list[bool]()
    for place in range(positions):
        here = pairs.positions == (place if by_position else 0)
        fitting, seen_before = pairs.words[here].cpu(), known[here].cpu()
        likely = weights[here].cpu().clamp_min(1e-300) ** TEMPERED
        inside = ~torch.isin(fitting, frame)
        words.append(fitting[inside])
        least = torch.where(seen_before, LEAST_AGAIN, LEAST)[inside].double()
        kept.append(_raise_to(likely[inside], least))
        closing = fitting == suffix[-1] if suffix else torch.ones_like(fitting, dtype=torch.bool)
        ends.append(float(likely[closing].max()) if bool(closing.any()) else 0.0)
        again.append(bool(seen_before[closing].any()))
    # No sentence goes beyond the first place that no word fits.
    empty = [place for place in range(len(prefix), positions) if not len(words[place])]
    last = min((empty[0] if empty else positions) + len(suffix), positions)
    shortest = len(prefix) + len(suffix) + 1
    lengths = [length for length in range(shortest, last + 1) if ends[length - 1] > 0]
    if not lengths:
        return None
    likely = torch.tensor([ends[length - 1] for length in lengths], dtype=torch.float64)
    floors = [LEAST_LENGTH_AGAIN if again[length - 1] else LEAST_LENGTH for length in lengths]
    likely = _raise_to(likely, torch.tensor(floors, dtype=torch.float64))
    if not again[lengths[-1] - 1]:  # somebody used the last position, and nobody found so far did
        likely[-1] = max(1.0, float(likely.sum()) / 2)
    return Choices(words, kept, torch.tensor(lengths), likely, prefix, suffix)


def _raise_to(
    likely: Float[Tensor, "choices"], least: Float[Tensor, "choices"]
) -> Float[Tensor, "choices"]:
    """Scales likelihoods to the largest of them, and raises each to the least it may be."""
    return (likely / likely.max()).maximum(least) if len(likely) else likely


def _draw(weights: Float[Tensor, "choices"], rng: torch.Generator) -> int:
    return int(torch.multinomial(weights.double(), 1, generator=rng))
