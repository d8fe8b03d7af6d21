"""What the attacker's own clients hold: auxiliary text, or tokens drawn one by one from its marginal distribution."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Batch, Example
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.core.trainable import Setting

LONGEST = 64  # tokens of a text that are learnt, unless told
HELD_OUT = 0.05  # of the public texts, to judge by, but no more than
MOST_HELD_OUT = 512


@dataclass(frozen=True, eq=False)
class Corpus:
    """Public texts as token ids of one width, padded at the end."""

    ids: Int[Tensor, "texts tokens"]
    lengths: Int[Tensor, "texts"]
    labels: Int[Tensor, "texts"] | None  # none of a language model

    def __len__(self) -> int:
        return len(self.ids)

    def split(self) -> tuple["Corpus", "Corpus"]:
        """Texts to learn from, and others to judge by."""
        held = max(1, min(MOST_HELD_OUT, int(len(self) * HELD_OUT)))
        return self[: len(self) - held], self[len(self) - held :]

    def __getitem__(self, rows: slice | Tensor) -> "Corpus":
        return Corpus(self.ids[rows], self.lengths[rows], None if self.labels is None else self.labels[rows])


def corpus_of(setting: Setting, public: Sequence[Example], length: int | None) -> Corpus:
    """The public texts as this target reads them; `length` or else the longest text is the width, longer ones are cut."""
    target = setting.target
    texts = tuple(example.text for example in public)
    if not texts:
        raise GradleakError("Learning to Invert needs public texts to learn from: add --public DATA.")
    rows = _encoded(_Tokens(setting.spec, target), texts)
    width = length or min(LONGEST, max(map(len, rows)))
    kept = [place for place, row in enumerate(rows) if len(row) > (1 if target.labels_are_tokens else 0)]
    cut = [rows[place][:width] for place in kept]
    lengths = torch.tensor([len(row) for row in cut])
    if not target.padding_is_free and len(set(lengths.tolist())) > 1:
        raise GradleakError("This target reads padding, so that texts of several lengths cannot be learnt together.")
    pad = target.vocabulary.pad
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in cut])
    return Corpus(ids.to(target.device), lengths.to(target.device), _labels(target, public, kept))


class _Tokens:
    """A target's tokenizer, equal to that of the same target opened again: a study's cells need not tokenise anew."""

    def __init__(self, spec: object, target: Target) -> None:
        self.spec, self.target = spec, target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tokens) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)


@functools.lru_cache(maxsize=2)
def _encoded(tokens: _Tokens, texts: tuple[str, ...]) -> list[list[int]]:
    return tokens.target.encode(texts)


def _labels(target: Target, public: Sequence[Example], kept: Sequence[int]) -> Tensor | None:
    """Classes of the texts; an unlabelled public text gets one in turn, since the attacker may pair them as it likes."""
    if target.labels_are_tokens:
        return None
    given = [public[place].label for place in kept]
    try:
        labels = [place % target.classes if label is None else target.class_of(label) for place, label in enumerate(given)]
    except GradleakError as error:
        raise GradleakError(f"The public data has labels outside the {target.classes} classes of this target: {error}") from error
    return torch.tensor(labels).to(target.device)


@runtime_checkable
class Source(Protocol):
    """Where the texts of the attacker's own clients come from."""

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        """As many clients' batches."""


class AuxiliaryText:
    """Clients that hold texts of the corpus, drawn with replacement."""

    def __init__(self, target: Target, corpus: Corpus) -> None:
        self.target, self.corpus = target, corpus

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        rows = torch.randint(len(self.corpus), (clients * examples,), generator=generator, device=generator.device)
        return as_batch(self.target, self.corpus[rows], examples)


class RunningText:
    """Clients that hold blocks of the corpus read as one long text, begun at any of its tokens: as many blocks as tokens."""

    def __init__(self, target: Target, corpus: Corpus) -> None:
        vocabulary = target.vocabulary
        if not target.labels_are_tokens or vocabulary.prefix or vocabulary.suffix:
            raise GradleakError(
                "cut_anywhere cuts public texts anew, which only a language model without special tokens at the ends of a text "
                "can be attacked by: leave it out."
            )
        self.target, self.width = target, corpus.ids.shape[1]
        places = torch.arange(self.width, device=corpus.ids.device)
        self.tokens = corpus.ids[places < corpus.lengths[:, None]]
        self.places = places

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        count, device = clients * examples, generator.device
        starts = torch.randint(len(self.tokens) - self.width + 1, (count, 1), generator=generator, device=device)
        ids = self.tokens[starts + self.places]
        return as_batch(self.target, Corpus(ids, torch.full((count,), self.width, device=device), None), examples)


class MarginalTokens:
    """Clients that hold words drawn independently by their frequency in the corpus, in texts as long as its own (LTI-P)."""

    def __init__(self, target: Target, corpus: Corpus) -> None:
        self.target, self.corpus = target, corpus
        self.shares = marginal(target, corpus)
        self.cumulative = self.shares.double().cumsum(0)
        vocabulary = target.vocabulary
        self.fixed = torch.tensor([*vocabulary.prefix, *vocabulary.suffix, vocabulary.pad], device=target.device)

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        count, device = clients * examples, generator.device
        rows = torch.randint(len(self.corpus), (count,), generator=generator, device=device)
        framed = self.corpus[rows]  # for its lengths and special tokens: all other places are drawn anew
        drawn = torch.rand(framed.ids.shape, generator=generator, device=device, dtype=torch.float64)
        words = torch.searchsorted(self.cumulative, drawn * self.cumulative[-1]).clamp_max(len(self.cumulative) - 1)
        inside = torch.arange(framed.ids.shape[1], device=device) < framed.lengths[:, None]
        ids = torch.where(torch.isin(framed.ids, self.fixed) | ~inside, framed.ids, words)
        labels = framed.labels
        if labels is not None:
            labels = torch.randint(self.target.classes, (count,), generator=generator, device=device)
        return as_batch(self.target, Corpus(ids, framed.lengths, labels), examples)


def marginal(target: Target, corpus: Corpus) -> Float[Tensor, "words"]:
    """How often each word stands in the corpus, special tokens left out, as shares."""
    inside = torch.arange(corpus.ids.shape[1], device=corpus.ids.device) < corpus.lengths[:, None]
    counts = torch.bincount(corpus.ids[inside], minlength=len(target.vocabulary.allowed)).float()
    counts = counts * target.vocabulary.allowed
    if not bool(counts.any()):
        raise GradleakError("The public texts hold no ordinary words of this target's vocabulary: use others.")
    return counts / counts.sum()


def as_batch(target: Target, chosen: Corpus, examples: int) -> Batch:
    """Texts as clients of so many examples hold them."""
    width = chosen.ids.shape[1]
    ids = chosen.ids.view(-1, examples, width)
    mask = torch.arange(width, device=ids.device) < chosen.lengths.view(-1, examples, 1)
    if target.attend_padding:
        mask = torch.ones_like(mask)
    return Batch(ids=ids, mask=mask, labels=ids if chosen.labels is None else chosen.labels.view(-1, examples))
