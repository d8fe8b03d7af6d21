"""Sentences whose positions hold several words at once, until one is left at each: a smooth way to tell sentences apart.

The first layer's span says which words stand at a position in one sentence or another, not which belong together. What a token
feeds onwards lies in the next span only if it read its own sentence. So the words of a blend get weights, which follow the slope
of the weighted mean miss: a blend that leans towards one sentence slides into it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.span.checks import FITS, Check, Sentence
from gradleak.attacks.span.choices import Choices
from gradleak.attacks.span.mixing import Mixing

FIRST_KEPT = 24  # words a position that blends begin with, at most
LIKELY = 0.02  # of a position's likeliest word, for a word to be among them
KEPT = 4  # words a position after all words were held against a blend
ROUNDS = 3
STEPS = 40
STEP_SIZE = 0.3  # in the logarithm of weights
FLATTENED = 0.3  # power of the words' likelihood a blend begins with: it leads astray where it is wrong
SPREAD = 0.5  # of the random beginning, which decides what sentence a blend slides into
SHARPNESS = 7.0  # weights after a round, per decade of miss
CLEARLY = 0.1  # decades by which another end must fit better
READERS_AT_ONCE = 2**14
ANY, OUTSIDE = -1, -2  # in a sentence's frame: any word stands there, and none


Going = Callable[[int, float], bool]


@dataclass(frozen=True, eq=False)
class Places:
    """Words at positions, those that frame a sentence included."""

    words: Int[Tensor, "entries"]
    places: Int[Tensor, "entries"]
    inputs: Float[Tensor, "entries width"]  # of the first layer

    def at(self, rows: Int[Tensor, "chosen"]) -> "Places":
        """Some of them."""
        return Places(self.words[rows], self.places[rows], self.inputs[rows])

    def by_place(self) -> list[Int[Tensor, "_"]]:
        """The rows of each position that has any, first position first."""
        return [(self.places == place).nonzero()[:, 0] for place in sorted(set(self.places.tolist()))]


@dataclass(frozen=True, eq=False)
class Settled:
    """Blends after some steps."""

    read: Places
    weights: Float[Tensor, "blends entries"]
    sentences: list[Sentence]  # the heaviest word at every position


class Blends:
    """Finds sentences among the choices of one observation, many at a time."""

    def __init__(self, mixing: Mixing, check: Check, choices: Choices) -> None:
        self.mixing, self.check, self.prefix, self.suffix = mixing, check, choices.prefix, choices.suffix
        self.framing = torch.tensor(sorted({*self.prefix, *self.suffix}), dtype=torch.long)
        here = [torch.cat([words, self.framing]) for words in choices.words]
        words, places = torch.cat(here), torch.cat([torch.full((len(some),), place) for place, some in enumerate(here)])
        used, columns = torch.unique(words, return_inverse=True)
        table = mixing.table(used.to(check.target.device), len(here))
        self.all = Places(words.to(table.device), places.to(table.device), table[places, columns])

    @torch.no_grad()
    def search(self, choices: Choices, lengths: Sequence[int], rng: torch.Generator, going_on: Going) -> list[Sentence]:
        """A sentence for each length: one that fits, or the nearest that was found."""
        found: list[Sentence] = [()] * len(lengths)
        likely = self._likelihoods(choices)
        noise = torch.randn(len(lengths), len(likely), generator=rng).to(likely)
        starts, kept = FLATTENED * likely + SPREAD * noise, self._best(likely[None], FIRST_KEPT, LIKELY)
        rows, ends = list(range(len(lengths))), list(lengths)
        for _ in range(ROUNDS):
            settled = self._settled(ends, starts, kept, going_on)
            for row, sentence in zip(rows, settled.sentences, strict=True):
                found[row] = sentence
            scores = self.check.scores(settled.sentences)
            unsure = [place for place, score in enumerate(scores) if score >= FITS]
            if not unsure or not going_on(0, min(scores)):
                break
            misses = self._misses(settled.read, settled.weights[unsure])
            ends = self._ends(misses, [ends[place] for place in unsure], choices.lengths.tolist())
            starts, rows = -SHARPNESS * misses, [rows[place] for place in unsure]
            kept = self._best(starts, KEPT, 0.0)
        return found

    def _ends(self, misses: Float[Tensor, "blends entries"], ends: list[int], lengths: list[int]) -> list[int]:
        """Where the closing token fits each blend best, if clearly better than where it stands."""
        if not self.suffix:
            return ends
        closing = {int(self.all.places[row]) + 1: row for row in (self.all.words == self.suffix[-1]).nonzero()[:, 0].tolist()}
        found = []
        for row, end in zip(misses.tolist(), ends, strict=True):
            best = min(lengths, key=lambda length: row[closing[length]])
            found.append(best if row[closing[best]] < row[closing[end]] - CLEARLY else end)
        return found

    def _likelihoods(self, choices: Choices) -> Float[Tensor, "entries"]:
        """Logarithms of the choices' weights, in the order of all places; frames are certain."""
        frame = torch.ones(len(self.framing), dtype=torch.float64)
        return torch.cat([torch.cat([weights, frame]) for weights in choices.weights]).log().to(self.all.inputs)

    def _best(self, scores: Float[Tensor, "blends entries"], count: int, share: float) -> Bool[Tensor, "blends entries"]:
        """The best words of each position, as far as they have a share of the best one's likelihood; frames are always there."""
        chosen = torch.isin(self.all.words, self.framing.to(self.all.words)).expand_as(scores).clone()
        inside = scores.masked_fill(chosen, float("-inf"))
        for rows in self.all.by_place():
            values, order = inside[:, rows].topk(min(count, len(rows)))
            good = (values - values[:, :1]).exp() >= share
            chosen[:, rows] |= torch.zeros_like(chosen[:, rows]).scatter_(1, order, good)
        return chosen

    def _open(self, lengths: Sequence[int]) -> Bool[Tensor, "blends entries"]:
        """Which entries a sentence of each length may use."""
        frames = torch.full((len(lengths), int(self.all.places.max()) + 1), OUTSIDE)
        for row, length in zip(frames, lengths, strict=True):
            row[:length] = ANY
            row[: len(self.prefix)] = torch.tensor(self.prefix, dtype=torch.long)
            row[length - len(self.suffix) : length] = torch.tensor(self.suffix, dtype=torch.long)
        wanted = frames.to(self.all.words)[:, self.all.places]
        inside = ~torch.isin(self.all.words, self.framing.to(self.all.words))
        return torch.where(wanted == ANY, inside, wanted == self.all.words)

    def _settled(
        self, lengths: Sequence[int], starts: Float[Tensor, "blends entries"], kept: Bool[Tensor, "_ entries"], going_on: Going
    ) -> Settled:
        """Follows the slope of the mean miss for some steps."""
        allowed = self._open(lengths) & kept
        rows = allowed.any(0).nonzero()[:, 0]
        read, allowed = self.all.at(rows), allowed[:, rows]
        affinities, values = self.mixing.affinities(read.inputs, read.inputs), self.mixing.values(read.inputs)
        logs = starts[:, rows].clone().requires_grad_()
        optimizer = torch.optim.Adam([logs], lr=STEP_SIZE, betas=(0.9, 0.99))
        sizes = torch.tensor(lengths, device=logs.device)
        for step in range(STEPS):
            with torch.enable_grad():
                weights = _shares(logs, allowed, read.places)
                fed = self.mixing.fed(read.inputs, affinities, values, weights)
                misses = (weights * self.check.decades(fed)).sum(-1) / sizes
                (logs.grad,) = torch.autograd.grad(misses.sum(), [logs])
            if not going_on(step, float(misses.min())) or float(misses.max()) < FITS:
                break
            optimizer.step()
        return Settled(read, weights.detach(), _heaviest(read, weights, lengths))

    def _misses(self, read: Places, weights: Float[Tensor, "blends entries"]) -> Float[Tensor, "blends all_entries"]:
        """How far each word at each position would be outside of the span if it read the blends: decades."""
        values, found = self.mixing.values(read.inputs), []
        for readers in torch.split(self.all.inputs, max(1, READERS_AT_ONCE // len(weights))):
            affinities = self.mixing.affinities(readers, read.inputs)
            found.append(self.check.decades(self.mixing.fed(readers, affinities, values, weights)))
        return torch.cat(found, dim=-1)


def _shares(
    logs: Float[Tensor, "blends entries"], allowed: Bool[Tensor, "blends entries"], places: Int[Tensor, "entries"]
) -> Float[Tensor, "blends entries"]:
    """Weights that sum to one at every position."""
    parts = logs.clamp(-60, 60).exp() * allowed
    sums = parts.new_zeros(len(parts), int(places.max()) + 1).index_add(1, places, parts)
    return parts / sums[:, places].clamp_min(1e-30)


def _heaviest(read: Places, weights: Float[Tensor, "blends entries"], lengths: Sequence[int]) -> list[Sentence]:
    words = torch.stack([read.words[rows[weights[:, rows].argmax(1)]] for rows in read.by_place()], dim=1)
    return [tuple(row[:length]) for row, length in zip(words.tolist(), lengths, strict=True)]
