"""What a search over words minimises; where labels are known, how well words match all seen.

Energy asks which words a matrix could come from, whatever the gradients of its outputs were. With
the labels known these follow from the words, so that every tensor can be held against the one that
was seen, after whatever a defense is known to have done.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks import evidence
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.matching import Cosine, SquaredL2, for_observations
from gradleak.matching.chunking import pieces

LEAST = 1e-9  # of a distance: less is rounding
SPREADS = 2.0  # standard deviations of the noise's own norm that a guess may be off and yet fit
# Times that spread the gradient must be: one wrong word is a hundredth to a thousandth of it.
TELLING = 500.0
MATCHED = 1e-5  # a distance at which nothing is left to match; one wrong word makes 100 times that


class WordObjective(ABC):
    """What the search over words minimises, for several observations at once."""

    cost: int  # of a pass, as a multiple of a forward pass
    tells_orders: bool  # whether nothing is better than a guess that leaves nothing to explain

    @property
    @abstractmethod
    def noisy(self) -> Bool[Tensor, "observations"]:
        """Observations whose objective is a likelihood, in nats."""

    @property
    @abstractmethod
    def levels(self) -> Float[Tensor, "observations"]:
        """The objective at which nothing is left to explain; a likelihood has no such level."""

    @abstractmethod
    def take(self, places: Int[Tensor, "some"]) -> "WordObjective":
        """Returns the objective of some of the observations."""

    @abstractmethod
    def score(self, batch: Batch, rows: slice) -> Float[Tensor, "observations candidates"]:
        """Returns the objective of candidates; lower is better."""

    @abstractmethod
    def explains_all(self, batch: Batch, rows: slice, level: float) -> bool:
        """Returns whether one row's words, at that level, explain every part of what was seen."""

    @abstractmethod
    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        """Returns what one candidate of so many sentences takes."""

    @abstractmethod
    def work(self, examples: int, tokens: int, slope: bool = False) -> float:
        """Returns the multiplications in it."""


class Matched(WordObjective):
    """The objective by all that is visible.

    Under known noise it is the likelihood in nats, −log p(seen | words), elsewhere the logarithm of
    the distance.
    """

    # Of a forward pass: gradients are taken, and compared entry by entry under a defense.
    cost = 4
    tells_orders = True

    def __init__(
        self, observations: Sequence[Observation], adaptive: bool = True, unroll: bool = False
    ) -> None:
        by_noise = adaptive and is_likelihood(observations[0])
        distance = SquaredL2() if by_noise else Cosine()
        self.matcher = for_observations(observations, distance, adaptive=adaptive, unroll=unroll)
        stds = [one.noise_std / one.gradient_scale if by_noise else 0.0 for one in observations]
        device = observations[0].target.device
        self.stds = torch.tensor(stds, device=device, dtype=torch.float64)
        if by_noise:
            weights = self.matcher.weights
            spread = self.stds.to(weights.dtype)[:, None].expand_as(weights)
            self.matcher.signal_squared = self.matcher.expected_signal(spread)

    def hold_down(self, most_nats: float) -> "Matched":
        """Returns the same with no tensor's evidence worth more; without noise it is itself."""
        if not bool(self.noisy.any()):
            return self
        nats = self.matcher.signal_squared / (2 * self.stds.square()[:, None])
        shares = (most_nats / nats).clamp(max=1).to(self.matcher.weights.dtype)
        part = copy.copy(self)
        part.matcher = copy.copy(self.matcher)
        part.matcher.weights = self.matcher.weights * shares
        return part

    @property
    def noisy(self) -> Bool[Tensor, "observations"]:
        return self.stds > 0

    @property
    def levels(self) -> Float[Tensor, "observations"]:
        return torch.full_like(self.stds, MATCHED).log().masked_fill(self.noisy, -torch.inf)

    def take(self, places: Int[Tensor, "some"]) -> "Matched":
        part = copy.copy(self)
        part.matcher, part.stds = self.matcher.take(places), self.stds[places]
        return part

    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        return self.matcher.bytes(examples, tokens, slope)

    def work(self, examples: int, tokens: int, slope: bool = False) -> float:
        return self.matcher.work(examples, tokens, slope)

    def score(self, batch: Batch, rows: slice) -> Float[Tensor, "observations candidates"]:
        distances = self.matcher.distances(batch, rows).double()
        stds = self.stds[rows, None]
        nats = distances / (2 * stds.clamp_min(1e-30).square())
        return torch.where(stds > 0, nats, distances.clamp_min(LEAST).log())

    @torch.no_grad()
    def fits(self, batch: Batch, bench: Bench) -> Bool[Tensor, "observations"]:
        """Returns whether the one candidate of each leaves nothing unmatched.

        Under noise it fits where it leaves no more than noise would, and a wrong word would show.
        """
        variances = self.stds.square()
        noise = (self.matcher.noise_squared * self.matcher.weights).sum(1).double()
        entries = noise / variances.clamp_min(1e-60)
        spread = variances * (2 * entries).sqrt()  # of the squared norm of the noise
        telling = self.matcher.signal_squared.sum(1) >= TELLING * spread
        shape, count = batch.mask.shape[-2:], len(batch.mask)
        chunks = pieces(bench, batch.mask.device, self.bytes(*shape), self.work(*shape), count)
        left = chunks.run(
            lambda rows: self.matcher.distances(batch[rows], rows)[:, 0].double(), count
        )
        return torch.where(self.noisy, telling & (left <= SPREADS * spread), left <= MATCHED)

    def explains_all(self, batch: Batch, rows: slice, level: float) -> bool:
        return True  # the score at that level says so, since every tensor is in it


def is_likelihood(observation: Observation) -> bool:
    """Returns whether words are judged by their likelihood: under known noise on every entry."""
    return observation.channel.noisy and observation.channel.every_entry


def can_judge(observation: Observation) -> bool:
    """Returns whether spans do not tell the words, through a defense or of adapters whose B alone
    is seen, and labels are there to match the whole update with."""
    if observation.channel.only_scaled and not _sees_outputs_alone(observation):
        return False
    return find_labels(observation) is not None


def _sees_outputs_alone(observation: Observation) -> bool:
    """Returns whether all that is seen of layers is LoRA's B: that is how its training begins."""
    seen = observation.update.tensors
    parts = [observation.target.part(name) for name in seen]
    shown = {part.module for part in parts if part.layer and bool(seen[part.name].any())}
    return shown == {"adapter_out"}


def find_labels(observation: Observation) -> tuple[int, ...] | None:
    """Returns the labels as known, or as the update shows them; empty for a language model.

    There are none where it is open which sentence has which.
    """
    if observation.target.labels_are_tokens:
        return ()
    labels = evidence.find_labels(observation)
    return labels if labels and len(set(labels)) == 1 else None
