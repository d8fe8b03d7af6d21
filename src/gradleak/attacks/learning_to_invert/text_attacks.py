"""The attacks on texts: lti from auxiliary text, lti_p from words by their frequency, and ours.

An inverter learns from gradients that went through the same defense as those it will read. What the
attacker's own clients hold comes first: public texts, blocks of them, or words drawn one by one.
"""

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.learning_to_invert.features import (
    FactorFeatures,
    Features,
    HashedFeatures,
    Largest,
    measure_bases,
    sends_only_largest,
)
from gradleak.attacks.learning_to_invert.inversion import PAPER, Inversion
from gradleak.attacks.learning_to_invert.medium import (
    ClientSource,
    Lessons,
    PublicExamples,
    draw_rows,
    number_labels,
    split,
)
from gradleak.attacks.learning_to_invert.text_network import (
    ByPosition,
    Perceptron,
    TextNetwork,
    WordBeam,
    WordTable,
    collect_word_vectors,
)
from gradleak.attacks.learning_to_invert.training import Precision
from gradleak.core.attack import ClientSetting
from gradleak.core.batch import Batch, Example
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.registry import Bounds, Count, Rate, Share, register
from gradleak.core.target import Target, TargetSpec

LONGEST = 64  # tokens of a text that are learnt, unless told
BASES = 256  # clients by which the bases of factors are found
MEASURED = 512  # clients by which features are scaled
AT_ONCE = 128  # of these and of held-out ones, if training has smaller batches


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
        return replace(
            self,
            ids=self.ids[rows],
            lengths=self.lengths[rows],
            labels=None if self.labels is None else self.labels[rows],
        )

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
        return Batch(
            ids=ids,
            mask=torch.ones_like(inside) if self.attend_padding else inside,
            labels=ids if whole.labels is None else whole.labels.view(clients, examples),
        )


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
    return PublicTexts(
        ids,
        lengths.to(target.device),
        None if target.labels_are_tokens else number_labels(target, public, kept),
        target.attend_padding,
    )


@dataclass(frozen=True)
class Tokenizer:
    """A target's tokenizer, equal to that of the same target opened again."""

    spec: TargetSpec
    target: Target = field(compare=False)


@functools.lru_cache(maxsize=2)  # a study's cells need not tokenise anew
def encode_texts(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[list[int]]:
    return tokenizer.target.encode(texts)


def count_words(target: Target, corpus: PublicTexts) -> Float[Tensor, "words"]:
    """Returns how often each word stands in the corpus, special tokens left out, as shares."""
    allowed = target.vocabulary.allowed
    counts = torch.bincount(corpus.ids[corpus.inside], minlength=len(allowed)).float() * allowed
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
        return replace(
            self.corpus,
            ids=self.tokens[starts + torch.arange(width, device=device)],
            lengths=torch.full((count,), width, device=device),
        ).batch(examples)


class MarginalTokens(ClientSource):
    """Clients that hold words drawn one by one by their frequency in the corpus (LTI-P).

    Texts are as long as its own. Data is endless, and nothing is known of sentences.
    """

    def __init__(self, target: Target, corpus: PublicTexts) -> None:
        self.classes, self.corpus = target.classes, corpus
        self.cumulative = count_words(target, corpus).double().cumsum(0)
        words = target.vocabulary
        self.special = torch.tensor([*words.prefix, *words.suffix, words.pad], device=target.device)

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        count, device = clients * examples, generator.device
        # Real texts give lengths and special tokens; all other places are drawn anew.
        texts = draw_rows(self.corpus, count, generator)
        drawn = torch.rand(texts.ids.shape, generator=generator, device=device, dtype=torch.float64)
        words = torch.searchsorted(self.cumulative, drawn * self.cumulative[-1])
        words = words.clamp_max(len(self.cumulative) - 1)
        framed = torch.isin(texts.ids, self.special) | ~texts.inside
        labels = None
        if texts.labels is not None:
            labels = torch.randint(self.classes, (count,), generator=generator, device=device)
        return replace(texts, ids=texts.ids.where(framed, words), labels=labels).batch(examples)


@dataclass(frozen=True)
class TextInversion(Inversion):
    """Abstract: a subclass says what the attacker's own clients hold."""

    steps: Count = 600  # for small targets; the paper's 20 epochs of 180,000 blocks are 56,000
    epochs: int | None = None  # of the public texts; takes the place of steps
    training_batch: Count = 64  # clients in a step; rates that are tried grow with its root
    learning_rate: Rate | None = None  # none: the best of three after probe_steps
    probe_steps: Count = 30
    # The last share of the steps, over which the rate falls to nothing; the paper's is constant.
    decay: Share = 0.5
    features: Literal["hashed", "factors"] = "hashed"
    # bins, of the entries that are seen
    fraction: Annotated[float, Bounds(most=1, above=True)] = 0.1
    signed: bool = False  # entries get random signs before they are summed
    hashing_seed: int = 0
    # What is hashed of entries where only the largest are sent; the paper takes their sizes.
    largest: Largest = "signs"
    first_width: Count = 600
    token_width: Count = 1000
    # The table that states are read by: known is the target's own.
    words: Literal["learned", "known"] = "learned"
    length: int | None = None  # tokens of a text; none: of the longest public one, at most 64
    # Of the prior's log-likelihood beside the inverter's when words are read; 0: none.
    prior_weight: float = 0.0
    beams: Count = 8  # sentences kept on the way, and
    candidates: Count = 16  # words tried at each place, where the prior is asked
    precision: Precision = "tf32"  # of the inverter's products on a GPU, never of gradients
    weights: str | None = None  # a fit that was saved, instead of a new one

    cites = PAPER
    noun = "texts"
    rates = (1e-3, 1e-4, 1e-5)  # the paper's, for its batches
    batch_of_rates = 64
    only_for_reading = ("weights", "prior_weight", "beams", "candidates")

    def before(self, channel: Channel) -> Mapping[str, Any]:
        return {"largest": "sizes"} if sends_only_largest(channel) else {}

    @property
    def clients_at_once(self) -> int:
        return max(self.training_batch, AT_ONCE)

    @property
    def clients_measured(self) -> int:
        return MEASURED

    @abstractmethod
    def make_source(self, target: Target, corpus: PublicTexts) -> ClientSource:
        """Returns what the attacker's own clients draw their texts from."""

    def make_lessons(self, setting: ClientSetting, public: Sequence[Example]) -> Lessons:
        target, corpus = setting.target, read_texts(setting, public, self.length)
        training, held_out = split(corpus, self.noun, fewest=2 * setting.batch_size)
        return Lessons(
            training, held_out, self.make_source(target, training), count_words(target, training)
        )

    def measure_bases(
        self, setting: ClientSetting, lessons: Lessons, generator: torch.Generator
    ) -> dict[str, Tensor]:
        if self.features == "hashed":
            return {}
        return measure_bases(setting, lessons.source.draw(BASES, setting.batch_size, generator))

    def make_features(
        self, setting: ClientSetting, shape: Sequence[int], bases: Mapping[str, Tensor]
    ) -> Features:
        if self.features == "factors":
            return FactorFeatures(setting, shape[0], bases)
        return HashedFeatures(setting, self.fraction, self.hashing_seed, self.signed, self.largest)

    def make_network(
        self, setting: ClientSetting, features: Features, shape: Sequence[int]
    ) -> TextNetwork:
        target, slots = setting.target, setting.batch_size
        words = len(target.vocabulary.allowed)
        width = min(self.token_width, words)  # a small vocabulary needs no more
        body: Perceptron | ByPosition
        if isinstance(features, FactorFeatures):
            unmixing = [one.cpu() for one in features.unmixing]
            body = ByPosition(features.blocks, sum(features.others), unmixing, slots, width)
        else:
            body = Perceptron(features.size, slots * shape[0], self.first_width, width)
        known = collect_word_vectors(target) if self.words == "known" else None
        return TextNetwork(
            features.size,
            body,
            WordTable(width, words, known),
            slots,
            None if target.labels_are_tokens else target.classes,
            target.vocabulary.pad,
            WordBeam(self.prior_weight, self.beams, self.candidates),
        )

    def describe_score(self, facts: dict[str, Any]) -> str:
        return f"{100 * facts['held_out_right']:.1f} % of the tokens are right"


@register("attack", "lti")
@dataclass(frozen=True)
class Lti(TextInversion):
    """Learns to invert from public texts: a perceptron from the hashed update to the words.

    It is trained on updates that went through the defense.
    """

    # Ours: a language model's public texts are one long text, whose blocks begin at any token.
    cut_anywhere: bool = False

    def make_source(self, target: Target, corpus: PublicTexts) -> ClientSource:
        return (RunningText if self.cut_anywhere else AuxiliaryText)(target, corpus)


@register("attack", "lti_p")
@dataclass(frozen=True)
class LtiP(TextInversion):
    """As lti, from words drawn one by one by their frequency in public texts: endless data.

    It knows nothing of sentences.
    """

    def make_source(self, target: Target, corpus: PublicTexts) -> ClientSource:
        return MarginalTokens(target, corpus)


@register("attack", "lti_plus")
@dataclass(frozen=True)
class LtiPlus(TextInversion):
    """As lti_p, ours: fed with a gradient's factors, reading words by the target's embeddings.

    The paper's hashing scatters what belongs to one token over all bins, and its last layer has to
    learn every word of the vocabulary from examples; here a word that was never drawn is read as
    well as a frequent one.
    """

    features: Literal["hashed", "factors"] = "factors"
    words: Literal["learned", "known"] = "known"
    token_width: Count = 512

    def make_source(self, target: Target, corpus: PublicTexts) -> ClientSource:
        return MarginalTokens(target, corpus)
