"""The attacks on texts: lti from auxiliary text, lti_p from words by their frequency, and ours.

An inverter learns from gradients that went through the same defense as those it will read.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
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
from gradleak.attacks.learning_to_invert.medium import ClientSource, Lessons, split
from gradleak.attacks.learning_to_invert.text_lessons import (
    AuxiliaryText,
    MarginalTokens,
    PublicTexts,
    RunningText,
    count_words,
    read_texts,
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
from gradleak.core.batch import Example
from gradleak.core.defense import Channel
from gradleak.core.registry import Bounds, Count, Rate, Share, register
from gradleak.core.target import Target
from gradleak.core.trainable import ClientSetting

BASES = 256  # clients by which the bases of factors are found
MEASURED = 512  # clients by which features are scaled
AT_ONCE = 128  # of these and of held-out ones, if training has smaller batches


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
        source = self.make_source(target, training)
        return Lessons(training, held_out, source, count_words(target, training))

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
