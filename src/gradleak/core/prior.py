"""What an attacker believes of text or pictures before seeing any gradient."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.registry import Component, Medium
from gradleak.core.streams import Streams
from gradleak.core.target import Target


class Prior(ABC):
    """An opened prior over the target's tokens."""

    @abstractmethod
    def nll(
        self, ids: Int[Tensor, "sentences tokens"], lengths: Int[Tensor, "sentences"]
    ) -> Float[Tensor, "sentences"]:
        """Mean negative log-likelihood of a token, in nats, of sentences framed by their special
        tokens and padded at the end."""

    def score_words(
        self, sentence: Int[Tensor, "tokens"], place: int, words: Int[Tensor, "words"]
    ) -> Float[Tensor, "words"]:
        """Log-probabilities in nats of a whole sentence with each of these words at one place, up
        to one number for all.

        A prior whose mean runs over another number than that of the tokens has to say so itself.
        """
        ids = sentence.repeat(len(words), 1)
        ids[:, place] = words
        return -self.nll(ids, torch.full_like(words, len(sentence))).double() * len(sentence)

    def screen_words(
        self, sentence: Int[Tensor, "tokens"], place: int, words: Int[Tensor, "words"]
    ) -> Float[Tensor, "words"]:
        """Ranks words at one place by less than the whole sentence, where that is quicker."""
        return self.score_words(sentence, place, words)

    @abstractmethod
    def likely(self, length: int, streams: Streams) -> list[int]:
        """A likely sentence of that many tokens, special ones included."""

    @abstractmethod
    def draw(self, lengths: Sequence[int], streams: Sequence[Streams]) -> list[list[int]]:
        """Sentences of these lengths, each drawn by its own stream as the prior believes them."""

    @abstractmethod
    def likely_length(self) -> int:
        """A likely number of tokens when the length is not known, special ones included."""

    def next_words(
        self, ids: Int[Tensor, "sentences tokens"]
    ) -> Float[Tensor, "sentences words"] | None:
        """Log-likelihoods of the token after each of these beginnings; none of a prior that does
        not write from left to right in the target's vocabulary."""
        return None


class PriorSpec(Component, ABC):
    """Says which prior, without holding it."""

    medium: ClassVar[Medium] = "text"

    @abstractmethod
    def open(self, target: Target) -> Prior:
        """Loads the prior for the target's vocabulary."""


class PicturePrior(ABC):
    """An opened prior over pictures of the target's shape."""

    @abstractmethod
    def likely(self) -> Float[Tensor, "channels height width"]:
        """The picture that is least wrong in the mean of squares, if nothing else is known."""

    @abstractmethod
    def draw(self, streams: Streams) -> Float[Tensor, "channels height width"]:
        """A picture, drawn as the prior believes them; of a prior that knows one, that one."""


class Generator(PicturePrior):
    """A prior that makes pictures of a few numbers, which are standard normal beforehand."""

    latents: int  # how many numbers a picture is made of

    @property
    @abstractmethod
    def weights(self) -> Float[Tensor, "weights"]:
        """All its weights in one row, so that a search can move them."""

    @abstractmethod
    def pictures(
        self,
        latents: Float[Tensor, "rows examples latents"],
        weights: Float[Tensor, "rows weights"] | None = None,
    ) -> Float[Tensor, "rows examples channels height width"]:
        """Pictures between 0 and 1, with weights of its own or others for each row;
        differentiable in both."""


class PicturePriorSpec(Component, ABC):
    """Says which prior over pictures, without holding it."""

    medium: ClassVar[Medium] = "image"

    @abstractmethod
    def open(self, target: Target) -> PicturePrior:
        """Loads the prior for pictures of the target's shape."""


AnyPrior = Prior | PicturePrior  # an audit has one, of what its target reads


def prior_of_texts(prior: AnyPrior) -> Prior:
    """Returns the prior as one over text; one over pictures is a mistake of whoever asks."""
    if isinstance(prior, Prior):
        return prior
    raise TypeError("this audit is of pictures")


def pick(
    weights: Float[Tensor, "rows words"], shares: Float[Tensor, "rows"]
) -> Int[Tensor, "rows"]:
    """Returns for each row the word at which the sum of the weights so far passes a share of the
    whole.

    A share that was drawn evenly between 0 and 1 picks each word by its weight. torch.multinomial
    draws other words where the processor has other instructions; here only the sums may differ,
    in their last bits.
    """
    sums = weights.cpu().double().cumsum(-1)
    sought = shares.double()[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, sought, right=True)[:, 0]
