"""The span of what a linear layer was fed, read off its gradient: dW = Σ_t δ_t x_tᵀ has its rows in the span of the x_t."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.observation import Observation
from gradleak.core.parts import FUSED, Part
from gradleak.matching.inputs import linear_parts, matrix_of
from gradleak.matching.linear_algebra import decompose_rows, orthonormalise
from gradleak.matching.rounding import gradient_difference

ATTENTION = ("query", "key", "value", FUSED)
ROUNDING = 0.05  # singular values under this many units of rounding of the largest are taken as equal: their ratios mean nothing
CLEAR_GAP = 30.0  # a smaller largest ratio of neighbours is no edge between signal and rounding
CLEAR_OF_FLOOR = 3.0  # times what a declared channel adds; a weakest direction nearer to it may not be the weakest there is
INSIDE = 1.5  # expected errors away from the span that an input may be. More than the true ones may pass: the search decides
# The same for a deeper input, which went through more sums than the width of the layer. A declared channel's errors are far above
# those, and known in size.
HOLDS, HOLDS_IN_CHANNEL = 8.0, 1.5


@dataclass(frozen=True, eq=False)
class RowSpace:
    """Directions that are in the gradient, how strong each is, and the size of what is only noise."""

    directions: Float[Tensor, "width width"]  # the first `rank` of them span the rows, the others the rest
    strengths: Float[Tensor, "rank"]
    noise: float  # in a gradient's direction
    rounding: float  # of an input of length one, as two machines compute it
    exact: bool  # signal and noise are far apart, and something is left outside of the span
    through_channel: bool = False  # the noise is what a defense is known to add

    @property
    def rank(self) -> int:
        return len(self.strengths)

    @property
    def holds(self) -> float:
        """Expected errors up to which an input is in the span."""
        return HOLDS_IN_CHANNEL if self.through_channel else HOLDS

    @property
    def widest(self) -> float:
        """The miss to be expected of an input that lies in the weakest direction."""
        return self.noise / float(self.strengths[-1])

    @property
    def outside(self) -> Float[Tensor, "width rest"]:
        """Directions that no input of the layer has a part in."""
        return self.directions[self.rank :].mT

    def coordinates(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows rank"]:
        """Unit inputs along the directions of the span."""
        wide = inputs.to(self.directions.dtype)
        along: Tensor = (wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True)) @ self.directions[: self.rank].mT
        return along

    def distances(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
        """How far unit inputs are outside of the span, in units of the error that rounding and noise would make.

        A direction of strength s is known up to noise / s: an input that leans on weak directions may well stick out.
        """
        along = self.coordinates(inputs)
        expected = (along * (self.noise / self.strengths)).square().sum(-1) + self.rounding**2
        return self.misses(inputs) / expected.sqrt()

    def misses(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
        """The part of unit inputs outside of the span: a sine."""
        wide = inputs.to(self.directions.dtype)
        sines: Tensor = torch.linalg.vector_norm(wide @ self.outside, dim=-1) / torch.linalg.vector_norm(wide, dim=-1)
        return sines

    def sketch(self, width: int, generator: torch.Generator) -> Float[Tensor, "width directions"]:
        """A few random directions outside of the span, scaled so that products with them have the size of the miss."""
        rest = self.outside
        if rest.shape[1] <= width:
            return rest
        drawn = torch.randn(rest.shape[1], width, generator=generator, dtype=torch.float64).to(rest.device)
        some: Tensor = orthonormalise(drawn)
        return rest @ some * math.sqrt(rest.shape[1] / width)


def row_space(matrix: Float[Tensor, "outputs inputs"], dtype: torch.dtype) -> RowSpace:
    """The span of a gradient's rows, its dimension read off the largest gap between neighbouring singular values."""
    values, directions = decompose_rows(matrix)
    floor = (values[0] * torch.finfo(dtype).eps * ROUNDING).clamp_min(1e-300)
    ladder = torch.cat([values, values.new_zeros(1)]).clamp_min(floor)
    ratios = ladder[:-1] / ladder[1:]
    rank = int(ratios.argmax()) + 1
    exact = rank < min(matrix.shape) and float(ratios.max()) > CLEAR_GAP
    if not exact:
        rank = _above_noise(values, matrix.shape)
    noise = float(ladder[rank]) if exact else float(values.median())
    return RowSpace(directions, ladder[:rank], noise, input_rounding(matrix), exact)


def row_space_in(matrix: Float[Tensor, "outputs inputs"], errors: Float[Tensor, "outputs inputs"]) -> RowSpace:
    """The span of the rows of a gradient whose entries are known to be wrong by so much: what stands out of such errors."""
    values, directions = decompose_rows(matrix)
    # The largest singular value of independent errors of unequal size (Bandeira & van Handel 2016)
    floor = float(errors.double().norm(dim=0).max() + errors.double().norm(dim=1).max())
    rank = min(int((values > floor).sum()), min(matrix.shape) - 1)
    exact = rank > 0 and float(values[rank - 1]) > CLEAR_OF_FLOOR * floor >= CLEAR_OF_FLOOR * float(values[rank])
    rank = max(rank, 1)
    return RowSpace(directions, values[:rank], floor, input_rounding(matrix), exact, through_channel=True)


def input_rounding(matrix: Float[Tensor, "outputs inputs"]) -> float:
    """How far an input of length one may be from the client's: its norm and mean are sums as long as the layer is wide."""
    return gradient_difference([matrix.shape[1]], matrix.dtype)


def _above_noise(values: Float[Tensor, "values"], shape: torch.Size) -> int:
    """How many singular values stand out of noise (Gavish & Donoho 2014); at least one, and not all."""
    beta = min(shape) / max(shape)
    edge = (0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43) * values.median()
    return max(1, min(int((values > edge).sum()), min(shape) - 1))


def attention_parts(observation: Observation, layer: int) -> tuple[Part, ...]:
    """What is seen of a layer's query, key and value."""
    return parts_seen(observation, layer, ATTENTION)


def parts_seen(observation: Observation, layer: int, modules: Sequence[str]) -> tuple[Part, ...]:
    """The visible weights of these modules in a layer."""
    linear = linear_parts(observation.target, list(observation.update.tensors))
    return tuple(part for part in linear if part.layer == layer and part.module in modules)


def space_of(observation: Observation, parts: Sequence[Part]) -> RowSpace:
    """The span of the inputs of parts that are fed by one tensor. AuditGroup they see more: key sees centred inputs only."""
    target, seen = observation.target, observation.update.tensors
    rows = torch.cat([matrix_of(target, part, seen[part.name])[0] for part in parts])
    channel = observation.channel
    if channel.exact:
        space = row_space(rows, rows.dtype)
    else:
        space = row_space_in(rows, channel.errors(rows, observation.knows.batch_size or 1))
    # Dropout leaves a clear span, but of inputs that no word has: what fits it exactly is nothing, what fits best is a ranking.
    # Where entries are missing or only signs are seen, no span is exact either.
    return replace(space, exact=False) if observation.protocol.dropout or not channel.every_entry else space
