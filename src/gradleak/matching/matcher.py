"""Distances from observed updates to the gradients of candidate batches, and the plain reference:
the client's own code, run once a candidate."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching.chunking import GRADIENTS, GRADIENTS_AND_BACK, cost_of
from gradleak.matching.distances import (
    LEAST_SIGNAL,
    Distance,
    Reading,
    Statistics,
    certainties,
    common_channel,
    likely_signal,
    noise_squares,
    ordinary_candidates,
    rounding_stds,
)
from gradleak.matching.precision import cancelled_share
from gradleak.matching.terms import vector_sums


class Matcher(ABC):
    """Compares candidates with what was observed. Batches have axes [observations, candidates,
    examples, tokens(, hidden)]."""

    def __init__(
        self,
        observations: Sequence[Observation],
        distance: Distance,
        names: tuple[str, ...],
        reading: Reading,
    ) -> None:
        self.target: Target = observations[0].target
        self.observations, self.names = observations, names
        self.distance, self.reading = distance, reading
        observed = stack_observed(observations, names)
        self.observed_squared = torch.stack(
            [observed[name].flatten(1).square().sum(1) for name in names], dim=1
        )
        self.weights = weigh_tensors(observations, observed)
        self.noise_squared = torch.zeros_like(self.weights)
        self.signal_squared = self.observed_squared
        self.pass_cost = cost_of(self.target)

    @abstractmethod
    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        """Returns what one candidate of so many sentences takes to be compared; with the slope of
        its distance."""

    def work(self, examples: int, tokens: int, slope: bool = False) -> float:
        """Returns the multiplications in it: forward and backward, and for a slope both once more,
        and back."""
        # A pass back costs two forward: 1 + 2 for a gradient, three times that for its own slope.
        return self.pass_cost.work(examples, tokens, 9 if slope else 3)

    def take_off_noise(self) -> None:
        """Lets the distance know how much of every tensor is noise, or likely to be what
        rounding at random added."""
        known = self.weights.new_tensor(
            [one.noise_std / one.gradient_scale for one in self.observations]
        )
        levels = (
            common_channel(self.observations).quantisation_levels
            if self.distance.by_certainty
            else None
        )
        if not bool(known.any()) and levels is None:
            return
        seen, entrywise = stack_observed(self.observations, self.names), self.reading.entrywise
        observed = [tensor.flatten(1) for tensor in seen.values()]
        stds = known[:, None].expand_as(self.weights)
        if levels is not None:
            rounded = [rounding_stds(tensor, levels, entrywise) for tensor in observed]
            stds = torch.hypot(stds, torch.stack(rounded, dim=1))
        pairs = zip(observed, stds.unbind(1), strict=True)
        self.noise_squared = torch.stack([noise_squares(*pair, entrywise) for pair in pairs], dim=1)
        if self.distance.by_certainty:
            # By what is expected, not by what is seen: luck must not make a tensor count more.
            self.signal_squared = self.expected_signal(stds)
            self.weights = self.weights * certainties(self.signal_squared, stds)

    def expected_signal(
        self, stds: Float[Tensor, "observations tensors"]
    ) -> Float[Tensor, "observations tensors"]:
        """Says how much of every tensor's square is the gradient's."""
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
        """Returns the distance's two sums [observations, candidates, tensors] for the observations
        of a slice."""

    def take(self, places: Int[Tensor, "some"]) -> "Matcher":
        """Returns the same for some of the observations."""
        part = copy.copy(self)
        part.observations = [self.observations[place] for place in places.tolist()]
        for name in ("observed_squared", "weights", "noise_squared", "signal_squared"):
            setattr(part, name, getattr(self, name)[places])
        return part

    def distances(
        self, batch: Batch, rows: slice = slice(None)
    ) -> Float[Tensor, "observations candidates"]:
        """Returns the distance of every candidate, differentiable in embeddings and soft labels
        that ask for gradients."""
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


class SimulatedMatcher(Matcher):
    """For any protocol: runs the client's own computation once a candidate and compares what
    comes out before any defense."""

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
        first, second = map(torch.stack, zip(*results, strict=True))
        return first, second

    def _sums_of(self, observation: Observation, batch: Batch) -> tuple[Tensor, Tensor]:
        # Streams of its own, the same each time: an objective must not change between two looks.
        rngs = [Streams.root("matching", 0).child(candidate) for candidate in range(batch.lead[0])]
        sizes = self.weights.new_full((len(rngs),), 1 / observation.gradient_scale)
        sent = observation.simulate_undefended(batch, rngs).scale(sizes).tensors
        pairs = []
        for name in self.names:
            seen = show_part(observation, self.target.part(name)).flatten()
            # What this observation does not show has weight zero: any gradient will do.
            gradients = sent[name].flatten(1) if name in sent else seen.expand(len(rngs), -1)
            alone = gradients[None, None], seen[None, None]
            pairs.append(vector_sums(*alone, self.distance.residuals, self.reading))
        first, second = (torch.stack(sums, -1)[0, 0] for sums in zip(*pairs, strict=True))
        return first, second


def show_part(observation: Observation, part: Part) -> Tensor:
    """Returns one tensor as observed, in the size of a gradient; zeros where it is not shown (its
    weight is then zero too)."""
    shown, scale = observation.update.tensors.get(part.name), observation.gradient_scale
    if shown is None:
        return observation.target.parameters[part.parameter].new_zeros(part.shape)
    return shown[0] if scale == 1 else shown[0] / scale


def distance_of_nothing(observation: Observation, distance: Distance) -> Float[Tensor, ""]:
    """Says how far a candidate without any gradient is from what was seen, known noise taken off:
    the size that weights of a prior or a penalty beside the distance have to be held against."""
    seen = [
        tensor.double() / observation.gradient_scale
        for tensor in observation.update.tensors.values()
    ]
    entries = sum(tensor.numel() for tensor in seen)
    squares = torch.stack([tensor.square().sum() for tensor in seen]).sum()
    absolutes = torch.stack([tensor.abs().sum() for tensor in seen]).sum()
    # n entries of noise have the square nσ²; no more is taken off than leaves something.
    noise = entries * (observation.noise_std / observation.gradient_scale) ** 2
    return distance.of_nothing(torch.maximum(squares - noise, LEAST_SIGNAL * squares), absolutes)


def stack_observed(observations: Sequence[Observation], names: Sequence[str]) -> dict[str, Tensor]:
    """Returns each tensor as all observations show it, [observations, …]."""
    return {
        part.name: torch.stack([show_part(observation, part) for observation in observations])
        for part in map(observations[0].target.part, names)
    }


def weigh_tensors(
    observations: Sequence[Observation], observed: Mapping[str, Tensor], silent: float | None = None
) -> Float[Tensor, "observations tensors"]:
    """Returns one where a tensor is seen and carries signal, and zero elsewhere."""
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


def matchable(target: Target, names: Iterable[str], keep_silent: bool) -> tuple[str, ...]:
    """Returns the named parts whose gradient can be computed from embeddings and (unless kept) is
    not zero by construction.

    The word embeddings are out: a candidate made of embeddings does not look anything up in them.
    So is an output layer tied to them: its gradient is the sum of both sides, of which only one can
    be computed.
    """
    silent = set() if keep_silent else structurally_silent(target)
    unreachable = silent.union(target.groups["word_embedding"])
    return tuple(name for name in names if name not in unreachable)


def structurally_silent(target: Target) -> set[str]:
    """Returns parameters and slices whose gradient vanishes whatever the data: BERT's key bias, for
    softmax ignores shifts.

    Their rounding noise would count as much as any other tensor in the cosine distance.
    """
    probe = target.probe(2, 8, Streams.root("silence", 0).generator())
    copies = {name: value.detach().requires_grad_() for name, value in target.parameters.items()}
    with torch.enable_grad():
        losses = target.losses(probe, copies)
        # Weighted, so that two examples of opposite labels do not cancel in the head.
        found = torch.autograd.grad(
            losses[0] + 0.5 * losses[1], list(copies.values()), materialize_grads=True
        )
    gradients = dict(zip(copies, found, strict=True))
    cuts = (part for part in target.parts if part.cut is not None)
    every = (gradients | {part.name: part.of(gradients[part.parameter]) for part in cuts}).items()
    sizes = {name: float(gradient.square().mean().sqrt()) for name, gradient in every}
    median = sorted(sizes[name] for name in gradients)[len(gradients) // 2]
    return {name for name, size in sizes.items() if size <= cancelled_share(target.dtype) * median}
