"""What a defense left on the entries of a tensor beside the gradient: as if it were noise, whatever it was.

Spans survive what values do not. A matrix of signs, of a hundredth of its entries or of four bits each is still a multiple of the
gradient and an error that knows nothing of the words: its size is all that has to be known.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.defense import Survivors
from gradleak.core.observation import Observation

SIGNS = 0.5  # the share of a gradient's square along its signs: 0.64 for Gaussian entries, less for some that stand out
NEXT_TO_NOTHING = 1e-3  # of a tensor's entries: less is left to what every search allows for
SMOOTHED = 20.0  # entries of ordinary size that every row and column is taken to have beside its own
COVERED = 0.9  # the share that is lost where entries were set to zero, nobody knows how many, and noise hides which


def error_std(observation: Observation, name: str) -> float:
    """The standard deviation on every entry of a visible tensor; zero where what arrives is the gradient, up to its size."""
    channel = observation.channel
    known = math.hypot(observation.noise_std, _of_rounding(observation, name))
    if channel.every_entry and not observation.protocol.sizes_lost:
        return known
    seen = observation.update.tensors[name].double()
    square = float(seen.square().mean())
    lost = 0.0
    if only_signs(observation):
        lost = (1 - SIGNS) * square
    elif channel.survivors is Survivors.SEEN:
        lost = _of_zeroed(seen, square, channel.randomised)
    elif channel.survivors is Survivors.HIDDEN:
        lost = COVERED * max(0.0, square - known**2)
    if channel.quantisation_levels is not None:
        # Rounding is right in the mean, so |entries| are as large as they were; double-exponential ones have twice that, squared.
        lost += max(0.0, square - 2 * float(seen.abs().mean()) ** 2)
    return math.sqrt(known**2 + lost)


def only_signs(observation: Observation) -> bool:
    """Whether entries are little but signs: sent as such, or what a step of Adam leaves of them."""
    return observation.channel.signs_only or observation.protocol.sizes_lost


def with_signs(directions: Float[Tensor, "o c uses width"]) -> Float[Tensor, "o c twice width"]:
    """Directions and their own signs: where one token outweighs the others, the signs of δ·xᵀ are those of δ times those of x."""
    return torch.cat([directions, directions.sign() * directions.abs().mean(-1, keepdim=True)], dim=-2)


def uneven(observation: Observation) -> bool:
    """Whether errors are as large as the entries themselves, and so larger in some rows and columns than in others."""
    return observation.channel.survivors is Survivors.SEEN and observation.channel.randomised


def sizes_along(matrix: Float[Tensor, "rows columns"], axis: int) -> Float[Tensor, "sizes"]:
    """How large entries are in every row (axis 0) or column, as a share of all; where few survive, nearer to one."""
    squares, kept = matrix.double().square(), (matrix != 0).double()
    mean = squares.sum() / kept.sum().clamp_min(1)
    other = 1 - axis
    found = (squares.sum(other) + SMOOTHED * mean) / (kept.sum(other) + SMOOTHED)
    return (found / mean.clamp_min(1e-300)).sqrt()


def _of_rounding(observation: Observation, name: str) -> float:
    """What the weights' own digits leave of a difference between weights, unless that is next to nothing."""
    target = observation.target
    std = observation.protocol.rounding_std(
        target.part(name).of(target.parameters[target.part(name).parameter]), observation.knows.batch_size or 1
    )
    return std if std > NEXT_TO_NOTHING * float(observation.update.tensors[name].square().mean().sqrt()) else 0.0


def _of_zeroed(seen: Float[Tensor, "*shape"], square: float, by_chance: bool) -> float:
    kept = float((seen != 0).double().mean())
    if by_chance or kept == 0:
        return (1 - kept) * square
    threshold = float(seen.abs()[seen != 0].min())
    if kept == 1:
        return 0.0
    scale = threshold / math.log(1 / kept)  # of double-exponential entries of which that share lies above the threshold
    return max(0.0, 2 * scale**2 - kept * (threshold**2 + 2 * scale * threshold + 2 * scale**2))
