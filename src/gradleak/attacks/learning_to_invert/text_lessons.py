"""What the attacker's own clients hold where texts are attacked: public ones, or their words."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.learning_to_invert.medium import (
    ClientSource,
    PublicExamples,
    draw_rows,
    number_labels,
)
from gradleak.core.batch import Batch, Example
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.core.trainable import ClientSetting

LONGEST = 64  # tokens of a text that are learnt, unless told


@dataclass(frozen=True, eq=False)
class PublicTexts(PublicExamples):
    """Public texts as token ids of one width, padded at the end."""

    ids: Int[Tensor, "texts tokens"]
    lengths: Int[Tensor, "texts"]
    labels: Int[Tensor, "texts"] | None  # none of a language model
    attend_padding: bool = False  # as the target's clients do

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def shape(self) -> list[int]:
        return [self.ids.shape[1]]

    def __getitem__(self, rows: slice | Tensor) -> "PublicTexts":
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, ids=self.ids[rows], lengths=self.lengths[rows], labels=labels)

    @property
    def inside(self) -> Bool[Tensor, "texts tokens"]:
        """Which places are of the text and no padding."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def batch(self, examples: int) -> Batch:
        """Returns all texts, in order, as clients of so many hold them; a rest is left out."""
        clients = len(self) // examples
        whole = self[: clients * examples]
        ids = whole.ids.view(clients, examples, *self.shape)
        inside = whole.inside.view_as(ids)
        mask = torch.ones_like(inside) if self.attend_padding else inside
        labels = ids if whole.labels is None else whole.labels.view(clients, examples)
        return Batch(ids=ids, mask=mask, labels=labels)


def read_texts(
    setting: ClientSetting, public: Sequence[Example], length: int | None
) -> PublicTexts:
    """Returns the public texts as this target reads them.

    Their width is `length`, or else that of the longest; longer texts are cut.
    """
    target = setting.target
    texts = tuple(example.text for example in public)
    if not texts:
        raise GradleakError(
            "Learning to Invert needs public texts to learn from: add --public DATA."
        )
    rows = encode_texts(Tokenizer(setting.spec, target), texts)
    width = length or min(LONGEST, max(map(len, rows)))
    # A language model predicts words after the first
    shortest = 2 if target.labels_are_tokens else 1
    kept = [place for place, row in enumerate(rows) if len(row) >= shortest]
    cut = [rows[place][:width] for place in kept]
    lengths = torch.tensor([len(row) for row in cut])
    if not target.padding_is_free and len(set(lengths.tolist())) > 1:
        raise GradleakError(
            "This target reads padding, so that texts of several lengths cannot be learnt together."
        )
    pad = target.vocabulary.pad
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in cut]).to(target.device)
    labels = None if target.labels_are_tokens else number_labels(target, public, kept)
    return PublicTexts(ids, lengths.to(target.device), labels, target.attend_padding)


class Tokenizer:
    """A target's tokenizer, equal to that of the same target opened again."""

    def __init__(self, spec: object, target: Target) -> None:
        self.spec, self.target = spec, target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)


@functools.lru_cache(maxsize=2)  # a study's cells need not tokenise anew
def encode_texts(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[list[int]]:
    return tokenizer.target.encode(texts)


def count_words(target: Target, corpus: PublicTexts) -> Float[Tensor, "words"]:
    """Returns how often each word stands in the corpus, special tokens left out, as shares."""
    words = len(target.vocabulary.allowed)
    counts = torch.bincount(corpus.ids[corpus.inside], minlength=words).float()
    counts = counts * target.vocabulary.allowed
    if not bool(counts.any()):
        raise GradleakError(
            "The public texts hold no ordinary words of this target's vocabulary: use others."
        )
    return counts / counts.sum()


class AuxiliaryText(ClientSource):
    """Clients that hold texts of the corpus, drawn with replacement."""

    def __init__(self, target: Target, corpus: PublicTexts) -> None:
        self.corpus = corpus

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        return draw_rows(self.corpus, clients * examples, generator).batch(examples)


class RunningText(ClientSource):
    """Clients that hold blocks of the corpus, read as one long text and begun at any token.

    There are as many blocks as tokens.
    """

    def __init__(self, target: Target, corpus: PublicTexts) -> None:
        vocabulary = target.vocabulary
        if not target.labels_are_tokens or vocabulary.prefix or vocabulary.suffix:
            raise GradleakError(
                "cut_anywhere cuts public texts anew, which only a language model without special "
                "tokens at the ends of a text can be attacked by: leave it out."
            )
        self.corpus, self.tokens = corpus, corpus.ids[corpus.inside]

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        count, width, device = clients * examples, self.corpus.ids.shape[1], generator.device
        blocks = len(self.tokens) - width + 1
        starts = torch.randint(blocks, (count, 1), generator=generator, device=device)
        ids = self.tokens[starts + torch.arange(width, device=device)]
        lengths = torch.full((count,), width, device=device)
        return replace(self.corpus, ids=ids, lengths=lengths).batch(examples)


class MarginalTokens(ClientSource):
    """Clients that hold words drawn one by one by their frequency in the corpus (LTI-P).

    Texts are as long as its own. Data is endless, and nothing is known of sentences.
    """

    def __init__(self, target: Target, corpus: PublicTexts) -> None:
        self.classes, self.corpus = target.classes, corpus
        self.cumulative = count_words(target, corpus).double().cumsum(0)
        vocabulary = target.vocabulary
        special = [*vocabulary.prefix, *vocabulary.suffix, vocabulary.pad]
        self.special = torch.tensor(special, device=target.device)

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        count, device = clients * examples, generator.device
        # Real texts give lengths and special tokens; all other places are drawn anew.
        texts = draw_rows(self.corpus, count, generator)
        shape = texts.ids.shape
        drawn = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
        words = torch.searchsorted(self.cumulative, drawn * self.cumulative[-1])
        words = words.clamp_max(len(self.cumulative) - 1)
        framed = torch.isin(texts.ids, self.special) | ~texts.inside
        labels = None
        if texts.labels is not None:
            labels = torch.randint(self.classes, (count,), generator=generator, device=device)
        return replace(texts, ids=texts.ids.where(framed, words), labels=labels).batch(examples)
