"""What a defense left on the entries of a tensor beside the gradient: as if it were noise, whatever it was.

Spans survive what values do not. A matrix of signs, of a hundredth of its entries or of four bits each is still a multiple of the
gradient and an error that knows nothing of the words: its size is all that has to be known.
"""

import math

from jaxtyping import Float
from torch import Tensor

from gradleak.core.defense import Survivors
from gradleak.core.observation import Observation

SIGNS = 0.5  # the share of a gradient's square along its signs: 0.64 for Gaussian entries, less for some that stand out
BELOW = 3.0  # entries below a threshold, spread evenly, have a square of a third of its own
NEXT_TO_NOTHING = 1e-3  # of a tensor's entries: less is left to what every search allows for
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
    if channel.signs_only or observation.protocol.sizes_lost:
        lost = (1 - SIGNS) * square
    elif channel.survivors is Survivors.SEEN:
        lost = _of_zeroed(seen, square, channel.randomised)
    elif channel.survivors is Survivors.HIDDEN:
        lost = COVERED * max(0.0, square - known**2)
    if channel.quantisation_levels is not None:
        # Rounding is right in the mean, so |entries| are as large as they were; double-exponential ones have twice that, squared.
        lost += max(0.0, square - 2 * float(seen.abs().mean()) ** 2)
    return math.sqrt(known**2 + lost)


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
    return (1 - kept) * threshold**2 / BELOW
