"""What to minimise and how to read entries, given what a defense did to the update: by its
channel, never by its name."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from gradleak.core.defense import Channel, Survivors
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.matching.distances import Distance
from gradleak.matching.readings import WHOLE, Reading, Signs, Surviving


def common_channel(observations: Sequence[Observation]) -> Channel:
    """The kind of what is known to have been done to all of these."""
    kinds = {observation.channel.kind for observation in observations}
    if len(kinds) > 1:
        raise GradleakError(
            "Observations under different kinds of defenses cannot be attacked in one pass."
        )
    return kinds.pop()


def adapted(distance: Distance, channel: Channel) -> tuple[Distance, Reading]:
    """The distance and the reading that fit the channel."""
    if channel.signs_only:
        return distance.for_signs(), Signs()
    fitting = distance if channel.clip is None else distance.for_any_size()
    if channel.noisy:
        fitting = fitting.for_noise()
    elif channel.quantisation_levels is not None:
        fitting = fitting.for_random_rounding()
    return fitting, Surviving() if channel.survivors is Survivors.SEEN else WHOLE


def noise_squares(
    observed: Float[Tensor, "observations entries"],
    noise_stds: Float[Tensor, "observations"],
    only_survivors: bool,
) -> Float[Tensor, "observations"]:
    """The expected square of such errors in a tensor: of its entries, or of those that were not
    set to zero."""
    entries = (observed != 0).sum(1) if only_survivors else observed.shape[1]
    return entries * noise_stds.square()


def rounding_stds(
    observed: Float[Tensor, "observations entries"], levels: int, only_survivors: bool
) -> Float[Tensor, "observations"]:
    """What rounding at random is likely to have added to every entry of a tensor, or to those that
    were not set to zero.

    It is right in the mean, so |entries| are as large as they were; double-exponential ones have
    twice that, squared. No entry was moved by more than half a step in the mean square.
    """
    entries = (observed != 0).sum(1).clamp_min(1) if only_survivors else observed.shape[1]
    added = observed.square().sum(1) / entries - 2 * (observed.abs().sum(1) / entries).square()
    most = (observed.abs().amax(1) / (2 * levels)).square()
    return added.clamp_min(0).minimum(most).sqrt()
