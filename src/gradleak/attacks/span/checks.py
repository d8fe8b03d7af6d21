"""Holding whole sentences against deeper layers: where tokens have mixed, only the right sentence feeds what is in the span."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.span.row_space import ATTENTION, INSIDE, RowSpace, parts_seen, space_of
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching.inputs import ModuleInputs

Sentence = tuple[int, ...]
TOKENS_AT_ONCE = 2**13
FITS = -3.5  # decades of mean miss in single precision, under which a sentence is looked at in double
SMALLEST = 1e-14  # of a squared miss in single precision: what lies under it is rounding
# Where tokens have mixed, the cheapest to compute first.
PLACES = ((1, ("ffn_in",)), (2, ATTENTION))


class Check:
    """One place in the model and the span of what it was fed."""

    def __init__(self, target: Target, inputs: ModuleInputs, space: RowSpace, width: int) -> None:
        self.target, self.inputs, self.space = target, inputs, space
        self.width = width  # of the client's batch, for clients that attend to padding
        self.outside = space.outside.to(target.dtype).contiguous()

    @property
    def fits(self) -> float:
        """The score under which a sentence may hold."""
        return max(FITS, math.log10(INSIDE * self.space.widest))

    @torch.no_grad()
    def scores(self, sentences: Sequence[Sentence]) -> list[float]:
        """How well sentences fit: the mean over their tokens of the logarithm of the miss, in decades; −6 is exact."""
        found: list[float] = []
        step = max(1, TOKENS_AT_ONCE // max(map(len, sentences), default=1))
        for start in range(0, len(sentences), step):
            ids, lengths = self._laid_out(sentences[start : start + step])
            found += self._fit(self._fed(ids, lengths), lengths).tolist()
        return found

    @torch.no_grad()
    def by_token(self, sentences: Sequence[Sentence]) -> list[list[float]]:
        """The logarithm of the miss of every token, in decades; what follows a sentence's end means nothing."""
        rows: list[list[float]] = self.decades(self._fed(*self._laid_out(sentences))).tolist()
        return rows

    def slopes(self, sentences: Sequence[Sentence]) -> Float[Tensor, "sentences tokens hidden"]:
        """The gradient of the scores with respect to the word embeddings."""
        ids, lengths = self._laid_out(sentences)
        with torch.enable_grad():
            embeddings = self.target.embed(ids).detach().requires_grad_()
            total = self._fit(self._fed(ids, lengths, embeddings), lengths).sum()
        return torch.autograd.grad(total, embeddings)[0]

    def decades(self, fed: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
        """The logarithm of how far inputs of this place are outside of the span, in single precision."""
        misses: Tensor = (fed @ self.outside).square().sum(-1) / fed.square().sum(-1)
        return (misses + SMALLEST).log10() / 2

    @torch.no_grad()
    def inputs_of(self, sentences: Sequence[Sentence]) -> Float[Tensor, "inputs width"]:
        """What sentences feed in, all tokens one after the other."""
        ids, lengths = self._laid_out(sentences)
        return self._fed(ids, lengths)[_inside(lengths, int(lengths.max()))]

    def distances(self, sentence: Sentence) -> Float[Tensor, "tokens"]:
        """How far each token's input is outside of the span, in expected errors."""
        return self.space.distances(self.inputs_of([sentence]))

    def tokens(self, sentences: Sequence[Sentence]) -> int:
        """How many inputs sentences feed in, padding counted where it is attended to."""
        return sum(max(self.width, len(sentence)) if self.target.attend_padding else len(sentence) for sentence in sentences)

    def holds(self, sentence: Sentence) -> bool:
        """Whether every token's input is in the span as far as rounding lets one see."""
        return bool((self.distances(sentence) < self.space.holds).all())

    def _laid_out(self, sentences: Sequence[Sentence]) -> tuple[Int[Tensor, "sentences tokens"], Int[Tensor, "sentences"]]:
        width = max(map(len, sentences))
        if self.target.attend_padding:
            width = max(width, self.width)
        filler = self.target.vocabulary.pad
        ids = torch.tensor([[*sentence, *[filler] * (width - len(sentence))] for sentence in sentences])
        return ids.to(self.target.device), torch.tensor(list(map(len, sentences)), device=self.target.device)

    def _fed(self, ids: Tensor, lengths: Tensor, embeddings: Tensor | None = None) -> Float[Tensor, "sentences longest width"]:
        mask = torch.ones_like(ids, dtype=torch.bool) if self.target.attend_padding else _inside(lengths, ids.shape[1])
        labels = self.target.any_labels(*ids.shape)
        batch = Batch(mask, labels, ids=ids) if embeddings is None else Batch(mask, labels, embeddings=embeddings)
        fed = next(iter(self.inputs(batch).values()))
        return fed[:, : int(lengths.max())]

    def _fit(
        self, fed: Float[Tensor, "sentences longest width"], lengths: Int[Tensor, "sentences"]
    ) -> Float[Tensor, "sentences"]:
        return (self.decades(fed) * _inside(lengths, fed.shape[1])).sum(-1) / lengths


def checks_of(observation: Observation, least: int, width: int) -> list[Check]:
    """The usable places of an observation, cheapest first: exact spans with a direction for every token there must be.

    In the last layer of a classifier only averages of tokens have a gradient: its span is far too small and is left out.
    """
    found = []
    for layer, modules in PLACES:
        parts = parts_seen(observation, layer, modules)
        space = space_of(observation, parts) if parts else None
        if space is not None and space.exact and space.rank >= least:
            found.append(Check(observation.target, ModuleInputs(observation.target, parts[:1]), space, width))
    return found


def _inside(lengths: Int[Tensor, "rows"], width: int) -> Bool[Tensor, "rows width"]:
    return torch.arange(width, device=lengths.device) < lengths[:, None]
