"""The attacks: auxiliary text (lti) or words by their frequency (lti_p), an inverter trained on their defended gradients."""

from dataclasses import dataclass
from typing import Literal

from gradleak.attacks.learning_to_invert.inversion import PAPER, TextInversion
from gradleak.attacks.learning_to_invert.texts import AuxiliaryText, Corpus, MarginalTokens, RunningText, Source
from gradleak.core.registry import register
from gradleak.core.target import Target


@register("attack", "lti")
@dataclass(frozen=True)
class Lti(TextInversion):
    """Learns to invert from public text: an MLP from the hashed update to the words, trained through the defense."""

    cut_anywhere: bool = False  # ours: a language model's public texts are one long text, of which blocks begin at any token
    cites = PAPER

    def source(self, target: Target, corpus: Corpus) -> Source:
        return RunningText(target, corpus) if self.cut_anywhere else AuxiliaryText(target, corpus)


@register("attack", "lti_p")
@dataclass(frozen=True)
class LtiP(TextInversion):
    """As lti, from words drawn one by one by their frequency in public text: endless data, and no knowledge of sentences."""

    cites = PAPER

    def source(self, target: Target, corpus: Corpus) -> Source:
        return MarginalTokens(target, corpus)


@register("attack", "lti_plus")
@dataclass(frozen=True)
class LtiPlus(TextInversion):
    """As lti_p, ours: fed with the gradient's factors token by token, and reading words by the target's own embeddings.

    The paper's hashing scatters what belongs to one token over all bins, and its last layer has to learn every word of the
    vocabulary from examples; here a word that was never drawn is read as well as a frequent one.
    """

    features: Literal["hashed", "factors"] = "factors"
    words: Literal["learned", "known"] = "known"
    token_width: int = 512

    def source(self, target: Target, corpus: Corpus) -> Source:
        return MarginalTokens(target, corpus)
