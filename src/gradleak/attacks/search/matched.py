"""How well whole words match all that was seen, gradients and not only spans: the judge where labels are known.

Energy asks which words a matrix could come from, whatever the gradients of its outputs were. With the labels known these follow
from the words, so that every tensor can be held against the one that was seen, after whatever a defense is known to have done.
"""

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.matching import Cosine, SquaredL2, for_observations
from gradleak.matching.chunking import pieces

LEAST = 1e-9  # of a distance: less is rounding
SPREADS = 2.0  # standard deviations of the noise's own norm that a guess may be off and yet fit
TELLING = 500.0  # times that spread the gradient must be: one wrong word is a hundredth to a thousandth of it
MATCHED = 1e-5  # a distance at which nothing is left to match; one wrong word makes a hundred times that


class Matched:
    """The objective: under known noise the likelihood in nats, −log p(seen | words); elsewhere the log of the distance."""

    cost = 4  # passes that a forward pass alone would allow: gradients are taken, and compared entry by entry under a defense

    def __init__(self, observations: Sequence[Observation], adaptive: bool = True, unroll: bool = False) -> None:
        by_noise = adaptive and is_likelihood(observations[0])
        distance = SquaredL2() if by_noise else Cosine()
        self.matcher = for_observations(observations, distance, adaptive=adaptive, unroll=unroll)
        stds = [one.noise_std / one.gradient_scale if by_noise else 0.0 for one in observations]
        self.stds = torch.tensor(stds, device=observations[0].target.device, dtype=torch.float64)
        if by_noise:
            self.matcher.signal_squared = self.matcher.expected_signal(
                self.stds.to(self.matcher.weights.dtype)[:, None].expand_as(self.matcher.weights)
            )

    def tempered(self, most: float) -> "Matched":
        """The same with no tensor's evidence worth more than so many nats; without noise it is itself."""
        if not bool(self.noisy.any()):
            return self
        evidence = self.matcher.signal_squared / (2 * self.stds.square()[:, None])
        part = copy.copy(self)
        part.matcher = copy.copy(self.matcher)
        part.matcher.weights = self.matcher.weights * (most / evidence).clamp(max=1).to(self.matcher.weights.dtype)
        return part

    @property
    def noisy(self) -> Bool[Tensor, "observations"]:
        """Observations whose objective is a likelihood, in nats."""
        return self.stds > 0

    def levels(self, solved: float) -> Float[Tensor, "observations"]:
        """The objective at which nothing is left to match."""
        return torch.full_like(self.stds, MATCHED).log().masked_fill(self.noisy, -torch.inf)

    def take(self, places: Int[Tensor, "some"]) -> "Matched":
        """The objective of some of the observations."""
        part = copy.copy(self)
        part.matcher, part.stds = self.matcher.take(places), self.stds[places]
        return part

    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        """What one candidate of so many sentences takes."""
        return self.matcher.bytes(examples, tokens, slope)

    def work(self, examples: int, tokens: int, slope: bool = False) -> float:
        """The multiplications in it."""
        return self.matcher.work(examples, tokens, slope)

    def scores(self, batch: Batch, rows: slice) -> Float[Tensor, "observations candidates"]:
        """The objective of batches [observations, candidates, examples, tokens(, hidden)]; lower matches better."""
        distances = self.matcher.distances(batch, rows).double()
        stds = self.stds[rows, None]
        nats = distances / (2 * stds.clamp_min(1e-30).square())
        return torch.where(stds > 0, nats, distances.clamp_min(LEAST).log())

    @torch.no_grad()
    def fits(self, batch: Batch, bench: Bench) -> Bool[Tensor, "observations"]:
        """Whether the one candidate leaves nothing unmatched, or no more than noise would where a wrong word shows."""
        variances = self.stds.square()
        entries = (self.matcher.noise_squared * self.matcher.weights).sum(1).double() / variances.clamp_min(1e-60)
        spread = variances * (2 * entries).sqrt()  # of the squared norm of the noise
        telling = self.matcher.signal_squared.sum(1) >= TELLING * spread
        shape = batch.mask.shape[-2:]
        chunks = pieces(bench, batch.mask.device, self.bytes(*shape), self.work(*shape), len(batch.mask))
        left = chunks.run(lambda rows: self.matcher.distances(batch[rows], rows)[:, 0].double(), len(batch.mask))
        return torch.where(self.noisy, telling & (left <= SPREADS * spread), left <= MATCHED)

    def explained(self, batch: Batch, rows: slice, level: float) -> bool:
        """Whether one row's words leave nothing to match: its score says so."""
        return True


def is_likelihood(observation: Observation) -> bool:
    """Whether words are judged by their likelihood: under noise of known size on every entry."""
    return observation.channel.noisy and observation.channel.every_entry
