"""Distances from observed updates to the gradients of candidate batches: the factored fast form,
and the plain reference."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching.adaptation import adapted, common_channel, noise_squares, rounding_stds
from gradleak.matching.certainty import certainties, likely_signal, ordinary_candidates
from gradleak.matching.chunking import GRADIENTS, GRADIENTS_AND_BACK, cost_of
from gradleak.matching.distances import LEAST_SIGNAL, Distance, Statistics
from gradleak.matching.factored import FactoredSums
from gradleak.matching.plan import make_plan, matchable
from gradleak.matching.readings import WHOLE, Reading
from gradleak.matching.rounding import cancelled_share
from gradleak.matching.terms import vector_sums


class Matcher(ABC):
    """Compares candidates with what was observed. Batches have axes [observations, candidates,
    examples, tokens(, hidden)]."""

    def __init__(
        self, observations: Sequence[Observation], distance: Distance, names: tuple[str, ...]
    ) -> None:
        self.target: Target = observations[0].target
        self.distance = distance
        self.names = names
        observed = _stacked(observations, names)
        self.observed_squared = torch.stack(
            [observed[name].flatten(1).square().sum(1) for name in names], dim=1
        )
        self.weights = _weights(observations, observed)
        self.noise_squared = torch.zeros_like(self.weights)
        self.signal_squared = self.observed_squared
        self.pass_cost = cost_of(self.target)

    @abstractmethod
    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        """What one candidate of so many sentences takes to be compared; with the slope of its
        distance."""

    def work(self, examples: int, tokens: int, slope: bool = False) -> float:
        """The multiplications in it: forward and backward, and for a slope both once more, and
        back."""
        return self.pass_cost.work(examples, tokens, 9 if slope else 3)

    def take_off_noise(self, observations: Sequence[Observation], reading: Reading) -> None:
        """Lets the distance know how much of every tensor is noise, or likely to be what
        rounding at random added."""
        known = self.weights.new_tensor(
            [observation.noise_std / observation.gradient_scale for observation in observations]
        )
        levels = (
            common_channel(observations).quantisation_levels if self.distance.by_certainty else None
        )
        if not bool(known.any()) and levels is None:
            return
        observed = [tensor.flatten(1) for tensor in _stacked(observations, self.names).values()]
        stds = known[:, None].expand_as(self.weights)
        if levels is not None:
            rounded = [rounding_stds(tensor, levels, reading.entrywise) for tensor in observed]
            stds = torch.hypot(stds, torch.stack(rounded, dim=1))
        squares = [
            noise_squares(*pair, reading.entrywise)
            for pair in zip(observed, stds.unbind(1), strict=True)
        ]
        self.noise_squared = torch.stack(squares, dim=1)
        if self.distance.by_certainty:
            self.signal_squared = self.expected_signal(stds)
            self.weights = self.weights * certainties(self.signal_squared, stds)

    def expected_signal(
        self, stds: Float[Tensor, "observations tensors"]
    ) -> Float[Tensor, "observations tensors"]:
        """How much of every tensor's square is the gradient's."""
        _, squares = self.sums(ordinary_candidates(self.target, len(stds)), slice(None))
        shown = self.weights > 0
        return likely_signal(
            squares.detach().mean(1) * shown,
            self.observed_squared * shown,
            self.noise_squared * shown,
            stds,
        )

    @abstractmethod
    def sums(self, batch: Batch, rows: slice) -> tuple[Tensor, Tensor]:
        """The distance's two sums [observations, candidates, tensors] for the observations of a
        slice."""

    def take(self, places: Int[Tensor, "some"]) -> "Matcher":
        """The same for some of the observations."""
        part = copy.copy(self)
        part.observed_squared, part.weights = self.observed_squared[places], self.weights[places]
        part.noise_squared, part.signal_squared = (
            self.noise_squared[places],
            self.signal_squared[places],
        )
        return part

    def distances(
        self, batch: Batch, rows: slice = slice(None)
    ) -> Float[Tensor, "observations candidates"]:
        """The distance of every candidate, differentiable in embeddings and soft labels that ask
        for gradients."""
        first, second = self.sums(batch, rows)
        return self.distance.combine(
            Statistics(
                first,
                second,
                self.observed_squared[rows],
                self.weights[rows],
                self.noise_squared[rows],
                self.signal_squared[rows],
            )
        )


class FactoredMatcher(Matcher):
    """For updates that are one gradient: nothing of a weight matrix's size is built unless the
    distance needs it."""

    def __init__(
        self,
        observations: Sequence[Observation],
        distance: Distance,
        names: tuple[str, ...],
        reading: Reading = WHOLE,
    ) -> None:
        plan = make_plan(observations[0].target, names)
        super().__init__(observations, distance, plan.names)
        self._sums = FactoredSums(
            self.target, plan, _stacked(observations, plan.names), distance.residuals, reading
        )

    def sums(self, batch: Batch, rows: slice) -> tuple[Tensor, Tensor]:
        return self._sums(batch, rows)

    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        passed = self.pass_cost.bytes(examples, tokens, GRADIENTS_AND_BACK if slope else GRADIENTS)
        return passed + self._sums.bytes_beside(examples * tokens, slope)

    def take(self, places: Int[Tensor, "some"]) -> "FactoredMatcher":
        part = super().take(places)
        assert isinstance(part, FactoredMatcher)
        part._sums = self._sums.take(places)
        return part


class SimulatedMatcher(Matcher):
    """For any protocol: runs the client's own computation once a candidate and compares what
    comes out before any defense."""

    def __init__(
        self,
        observations: Sequence[Observation],
        distance: Distance,
        names: tuple[str, ...],
        reading: Reading = WHOLE,
    ) -> None:
        super().__init__(observations, distance, names)
        self.observations = observations
        self.reading = reading

    def take(self, places: Int[Tensor, "some"]) -> "SimulatedMatcher":
        part = super().take(places)
        assert isinstance(part, SimulatedMatcher)
        part.observations = [self.observations[place] for place in places.tolist()]
        return part

    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        """Every local step keeps its activations and its own weights, and a slope goes back
        through all."""
        weights = self.pass_cost.element * sum(self.target.part(name).size for name in self.names)
        steps = max(observation.protocol.local_steps(examples) for observation in self.observations)
        passed = self.pass_cost.bytes(examples, tokens, GRADIENTS_AND_BACK if slope else GRADIENTS)
        return steps * (passed + (6 if slope else 4) * weights)

    def sums(self, batch: Batch, rows: slice) -> tuple[Tensor, Tensor]:
        results = [
            self._sums_of(observation, batch[place])
            for place, observation in enumerate(self.observations[rows])
        ]
        return torch.stack([first for first, _ in results]), torch.stack(
            [second for _, second in results]
        )

    def _sums_of(self, observation: Observation, batch: Batch) -> tuple[Tensor, Tensor]:
        rngs = [Streams.root("matching", 0).child(candidate) for candidate in range(batch.lead[0])]
        sizes = self.weights.new_full((len(rngs),), 1 / observation.gradient_scale)
        sent = observation.simulate_undefended(batch, rngs).scale(sizes).tensors
        pairs = []
        for name in self.names:
            seen = _seen(observation, self.target.part(name)).flatten()
            # What this observation does not show has weight zero: any gradient will do.
            gradients = sent[name].flatten(1) if name in sent else seen.expand(len(rngs), -1)
            pairs.append(
                vector_sums(
                    gradients[None, None], seen[None, None], self.distance.residuals, self.reading
                )
            )
        return torch.stack([first[0, 0] for first, _ in pairs], -1), torch.stack(
            [second[0, 0] for _, second in pairs], -1
        )


def for_observations(
    observations: Sequence[Observation],
    distance: Distance,
    plain: bool = False,
    keep_silent: bool = False,
    adaptive: bool = True,
    unroll: bool = True,
) -> Matcher:
    """The fastest matcher that is right for these observations; `plain` asks for the reference
    instead.

    Where a defense is known, distance and reading are fitted to what it did, unless not `adaptive`.
    Of several local steps, `unroll` goes through each; otherwise the update is taken for one
    averaged gradient.

    `keep_silent` matches tensors without signal too, as LAMP's released code does: only for
    comparison with it.
    """
    target = observations[0].target
    if any(observation.target is not target for observation in observations):
        raise GradleakError("Observations of different models cannot be attacked in one pass.")
    seen = dict.fromkeys(
        name for observation in observations for name in observation.update.tensors
    )
    names = matchable(target, seen, keep_silent)
    if not all(set(names) & set(observation.update.tensors) for observation in observations):
        raise GradleakError(
            "Nothing in the visible update can be matched: only word embeddings, or tensors without"
            " signal, are seen."
        )
    channel = common_channel(observations)
    averaged = not unroll and not plain
    if averaged and any(observation.protocol.sizes_lost for observation in observations):
        channel = replace(channel, signs_only=True)
    fitting, reading = adapted(distance, channel) if adaptive else (distance, WHOLE)
    one_gradient = all(observation.protocol.one_gradient for observation in observations)
    made = FactoredMatcher if averaged or (one_gradient and not plain) else SimulatedMatcher
    matcher = made(observations, fitting, names, reading)
    if keep_silent:
        matcher.weights = _weights(observations, _stacked(observations, matcher.names), silent=0.0)
    if adaptive:
        matcher.take_off_noise(observations, reading)
    return matcher


def _seen(observation: Observation, part: Part) -> Tensor:
    """One tensor as observed, in the size of a gradient; zeros where it is not shown (its weight
    is then zero too)."""
    shown, scale = observation.update.tensors.get(part.name), observation.gradient_scale
    if shown is None:
        return observation.target.parameters[part.parameter].new_zeros(part.shape)
    return shown[0] if scale == 1 else shown[0] / scale


def distance_of_nothing(observation: Observation, distance: Distance) -> Float[Tensor, ""]:
    """How far a candidate without any gradient is from what was seen, known noise taken off: the
    size that weights of a prior or a penalty beside the distance have to be held against."""
    seen = [
        tensor.double() / observation.gradient_scale
        for tensor in observation.update.tensors.values()
    ]
    entries = sum(tensor.numel() for tensor in seen)
    squares = torch.stack([tensor.square().sum() for tensor in seen]).sum()
    absolutes = torch.stack([tensor.abs().sum() for tensor in seen]).sum()
    noise = entries * (observation.noise_std / observation.gradient_scale) ** 2
    return distance.of_nothing(torch.maximum(squares - noise, LEAST_SIGNAL * squares), absolutes)


def _stacked(observations: Sequence[Observation], names: Sequence[str]) -> dict[str, Tensor]:
    """Each tensor as all observations show it, [observations, …]."""
    parts = [observations[0].target.part(name) for name in names]
    return {
        part.name: torch.stack([_seen(observation, part) for observation in observations])
        for part in parts
    }


def _weights(
    observations: Sequence[Observation], observed: Mapping[str, Tensor], silent: float | None = None
) -> Float[Tensor, "observations tensors"]:
    """One where a tensor is seen and carries signal, zero elsewhere."""
    sizes = torch.stack(
        [tensor.flatten(1).square().mean(1).sqrt() for tensor in observed.values()], dim=1
    )
    seen = torch.tensor(
        [[name in observation.update.tensors for name in observed] for observation in observations]
    ).to(sizes.device)
    # Of the median: a smaller tensor carries rounding
    silent = cancelled_share(sizes.dtype) if silent is None else silent
    medians = torch.stack([row[shown].median() for row, shown in zip(sizes, seen, strict=True)])
    return (seen & (sizes > silent * medians[:, None])).to(sizes.dtype)
