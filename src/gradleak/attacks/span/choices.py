"""Words that may stand at each position of a sentence, with how likely each is, and where sentences may end."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.span.checks import Sentence
from gradleak.attacks.span.scan import Pairs
from gradleak.core.target import Vocabulary

TEMPERED = 0.5  # power of the weights: they fall over many decades and only say what is likelier
LEAST = 1e-3  # of the likeliest word's weight at a position
AGAIN = 0.03  # the same for a word that a sentence found before has there
LEAST_LENGTH, LENGTH_AGAIN = 0.01, 0.2  # the same for where sentences end


@dataclass(frozen=True, eq=False)
class Choices:
    """Words that fit each position, with weights."""

    words: list[Int[Tensor, "_"]]  # of each position
    weights: list[Float[Tensor, "_"]]
    lengths: Int[Tensor, "lengths"]
    length_weights: Float[Tensor, "lengths"]
    prefix: Sentence
    suffix: Sentence

    def draw(self, rng: torch.Generator) -> Sentence:
        """A sentence of words that are likely one by one."""
        length = self.draw_length(rng)
        inside = range(len(self.prefix), length - len(self.suffix))
        return (*self.prefix, *(self.draw_word(place, rng) for place in inside), *self.suffix)

    def draw_word(self, place: int, rng: torch.Generator) -> int:
        return int(self.words[place][_drawn(self.weights[place], rng)])

    def redraw(self, sentence: Sentence, share: float, rng: torch.Generator) -> Sentence:
        """The sentence with a share of its words drawn anew."""
        again = torch.rand(len(sentence), generator=rng) < share
        inside = range(len(self.prefix), len(sentence) - len(self.suffix))
        return tuple(
            self.draw_word(place, rng) if place in inside and again[place] else word for place, word in enumerate(sentence)
        )

    def likeliest(self, length: int) -> Sentence:
        """The likeliest word at every position."""
        inside = range(len(self.prefix), length - len(self.suffix))
        return (*self.prefix, *(int(self.words[place][self.weights[place].argmax()]) for place in inside), *self.suffix)

    def draw_length(self, rng: torch.Generator) -> int:
        return int(self.lengths[_drawn(self.length_weights, rng)])

    def within(self, left: int) -> "Choices":
        """Without lengths beyond the tokens left to find; one that takes all of them is likely."""
        fits, all_of_it = self.lengths + self.lengths.min() <= left, self.lengths == left
        if not bool((fits | all_of_it).any()):
            return self
        kept = self.length_weights * fits
        return replace(self, length_weights=torch.where(all_of_it, kept.sum().clamp_min(1.0), kept))


def choices_of(
    pairs: Pairs,
    weights: Float[Tensor, "pairs"],
    known: Bool[Tensor, "pairs"],
    vocabulary: Vocabulary,
    positions: int,
    by_position: bool,
) -> Choices | None:
    """The choices of one observation; none where no whole sentence can be made of them."""
    prefix, suffix = vocabulary.prefix, vocabulary.suffix
    frame = torch.tensor([*prefix, *suffix, vocabulary.pad])
    words, kept, ends, again = [], [], list[float](), list[bool]()
    for place in range(positions):
        here = pairs.positions == (place if by_position else 0)
        there, likely = pairs.words[here].cpu(), weights[here].cpu().clamp_min(1e-300) ** TEMPERED
        inside = ~torch.isin(there, frame)
        least = torch.where(known[here].cpu(), AGAIN, LEAST)[inside].double()
        words.append(there[inside])
        kept.append((likely[inside] / likely[inside].max()).maximum(least) if bool(inside.any()) else likely[inside])
        closing = there == suffix[-1] if suffix else torch.ones_like(there, dtype=torch.bool)
        ends.append(float(likely[closing].max()) if bool(closing.any()) else 0.0)
        again.append(bool(known[here].cpu()[closing].any()))
    full = [place for place in range(len(prefix), positions) if not len(words[place])]
    last = (min(full) if full else positions) + len(suffix)  # no word fits there, so that no sentence goes further
    shortest = len(prefix) + len(suffix) + 1
    lengths = [length for length in range(shortest, min(last, positions) + 1) if ends[length - 1] > 0]
    if not lengths:
        return None
    likely = torch.tensor([ends[length - 1] for length in lengths], dtype=torch.float64)
    least = torch.tensor([LENGTH_AGAIN if again[length - 1] else LEAST_LENGTH for length in lengths], dtype=torch.float64)
    likely = (likely / likely.max()).maximum(least)
    if not again[lengths[-1] - 1]:
        likely[-1] = max(1.0, float(likely.sum()) / 2)  # somebody used the last position
    return Choices(words, kept, torch.tensor(lengths), likely, prefix, suffix)


def _drawn(weights: Float[Tensor, "choices"], rng: torch.Generator) -> int:
    return int(torch.multinomial(weights.double(), 1, generator=rng))
