"""What an attacker believes of text before seeing any gradient."""

from abc import ABC, abstractmethod

from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.registry import Component
from gradleak.core.streams import Streams
from gradleak.core.target import Target


class Prior(ABC):
    """An opened prior over the target's tokens."""

    @abstractmethod
    def nll(self, ids: Int[Tensor, "sentences tokens"], lengths: Int[Tensor, "sentences"]) -> Float[Tensor, "sentences"]:
        """Mean negative log-likelihood of a token, in nats, of sentences framed by their special tokens and padded at the end."""

    @abstractmethod
    def likely(self, length: int, streams: Streams) -> list[int]:
        """A likely sentence of that many tokens, special ones included."""

    @abstractmethod
    def likely_length(self) -> int:
        """A likely number of tokens when the length is not known, special ones included."""


class PriorSpec(Component, ABC):
    """Says which prior, without holding it."""

    @abstractmethod
    def open(self, target: Target) -> Prior:
        """Loads the prior for the target's vocabulary."""
