"""What a defense left on the entries of a tensor beside the gradient, taken for noise.

Spans survive what values do not. A matrix of signs, of a hundredth of its entries or of four bits
each is still a multiple of the gradient and an error that knows nothing of the words: its size is
all that has to be known.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.defense import Survivors
from gradleak.core.observation import Observation
from gradleak.matching.factors import row_factor, signal_shares
from gradleak.matching.precision import signal_floor

# The share of a gradient's square along its signs: 0.64 for Gaussian entries, less for some that
# stand out.
SIGNS = 0.5
NEXT_TO_NOTHING = 1e-3  # of a tensor's entries: less is left to what every search allows for
SMOOTHED = 20.0  # entries of ordinary size that rows and columns are taken to have beside their own
# The share that is lost where nobody knows how many entries were set to zero, and noise hides
# which.
COVERED = 0.9


def estimate_error_std(observation: Observation, name: str) -> float:
    """Returns the standard deviation of the error on every entry of a visible tensor.

    It is zero where what arrives is the gradient, up to its size.
    """
    channel = observation.channel
    known = math.hypot(observation.noise_std, _estimate_rounding(observation, name))
    if channel.every_entry and not observation.protocol.sizes_lost:
        return known
    seen = observation.update.tensors[name].double()
    square = float(seen.square().mean())
    lost = 0.0
    if has_only_signs(observation):
        lost = (1 - SIGNS) * square
    elif channel.survivors is Survivors.SEEN:
        lost = _estimate_zeroed(seen, square, channel.randomised)
    elif channel.survivors is Survivors.HIDDEN:
        lost = COVERED * max(0.0, square - known**2)
    if channel.quantisation_levels is not None:
        # Rounding by chance is right in the mean, so |entries| are as large as they were. The mean
        # square of double-exponential entries is twice the square of that: the rest is rounding.
        lost += max(0.0, square - 2 * float(seen.abs().mean()) ** 2)
    return math.sqrt(known**2 + lost)


def has_only_signs(observation: Observation) -> bool:
    """Returns whether entries are little but signs: sent as such, or what a step of Adam leaves."""
    return observation.channel.signs_only or observation.protocol.sizes_lost


def has_uneven_errors(observation: Observation) -> bool:
    """Returns whether errors are as large as entries, and so larger in some rows and columns."""
    return observation.channel.survivors is Survivors.SEEN and observation.channel.randomised


def add_signs(
    directions: Float[Tensor, "o c uses width"],
) -> Float[Tensor, "o c twice width"]:
    """Returns directions and their own signs, which the signs of a gradient lie along.

    Where one token outweighs the others, the signs of δ·xᵀ are those of δ times those of x.
    """
    signs = directions.sign() * directions.abs().mean(-1, keepdim=True)
    return torch.cat([directions, signs], dim=-2)


def compare_sizes(matrix: Float[Tensor, "rows columns"], axis: int) -> Float[Tensor, "sizes"]:
    """Returns how large the entries of every row (axis 0) or column are, as a share of all.

    Where few entries survive, these are nearer to one.
    """
    squares, kept = matrix.double().square(), (matrix != 0).double()
    mean = squares.sum() / kept.sum().clamp_min(1)
    other = 1 - axis
    found = (squares.sum(other) + SMOOTHED * mean) / (kept.sum(other) + SMOOTHED)
    return (found / mean.clamp_min(1e-300)).sqrt()


def find_directions(
    observation: Observation, matrix: Float[Tensor, "*lead outputs inputs"], std: float
) -> Float[Tensor, "*lead rank inputs"]:
    """Returns the directions in which a matrix was seen under errors of that size.

    They are orthogonal, at most one a token, each as long as it is surely signal, and padded with
    zeros.
    """
    values, right = row_factor(matrix)
    floor = signal_floor(matrix.shape[-1], matrix.dtype)
    shares = signal_shares(values, (matrix.shape[-2], matrix.shape[-1]), std, floor)
    if observation.knows.lengths is not None:
        shares[..., sum(observation.knows.lengths) :] = 0
    most = max(1, int((shares > 0).sum(-1).max()))
    rows: Tensor = (right * shares.sqrt()[..., None])[..., :most, :]
    return rows.to(matrix)


def _estimate_rounding(observation: Observation, name: str) -> float:
    """Returns what the weights' own digits leave of a difference between weights.

    It is zero where that is next to nothing.
    """
    target = observation.target
    part = target.part(name)
    weights = part.of(target.parameters[part.parameter])
    std = observation.protocol.rounding_std(weights, observation.knows.batch_size or 1)
    size = float(observation.update.tensors[name].square().mean().sqrt())
    return std if std > NEXT_TO_NOTHING * size else 0.0


def _estimate_zeroed(seen: Float[Tensor, "*shape"], square: float, by_chance: bool) -> float:
    """Returns the mean square of entries that were set to zero: by chance, or as the smallest."""
    kept = float((seen != 0).double().mean())
    if by_chance or kept == 0:
        return (1 - kept) * square
    threshold = float(seen.abs()[seen != 0].min())
    if kept == 1:
        return 0.0
    # Of double-exponential entries of which that share lies above the threshold
    scale = threshold / math.log(1 / kept)
    above = kept * (threshold**2 + 2 * scale * threshold + 2 * scale**2)
    return max(0.0, 2 * scale**2 - above)
