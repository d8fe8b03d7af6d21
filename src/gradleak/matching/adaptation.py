"""What to minimise and how to read entries, given what a defense did to the update: by its channel, never by its name."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.defense import Channel, Survivors
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.matching.distances import Distance
from gradleak.matching.readings import WHOLE, Reading, Signs, Surviving


def common_channel(observations: Sequence[Observation]) -> Channel:
    """What is known to have been done to all of these."""
    channels = {observation.channel for observation in observations}
    if len(channels) > 1:
        raise GradleakError("Observations under different defenses cannot be attacked in one pass.")
    return channels.pop()


def adapted(distance: Distance, channel: Channel) -> tuple[Distance, Reading]:
    """The distance and the reading that fit the channel."""
    if channel.signs_only:
        return distance.for_signs(), Signs()
    fitting = distance if channel.clip is None else distance.for_any_size()
    return fitting, Surviving() if channel.survivors is Survivors.SEEN else WHOLE


def signal_shares(
    observed: Float[Tensor, "observations entries"], noise_stds: Float[Tensor, "observations"], only_survivors: bool
) -> Float[Tensor, "observations"]:
    """The share of a tensor's square that its known noise does not explain.

    Never less than the error of that estimate: the square of n entries of noise is known to one part in √(n/2).
    """
    entries = (observed != 0).sum(1).clamp_min(1) if only_survivors else torch.full_like(noise_stds, observed.shape[1])
    shares = 1 - entries * noise_stds.square() / observed.square().sum(1).clamp_min(torch.finfo(observed.dtype).tiny)
    least = (2 / entries).sqrt().clamp(max=1.0) if only_survivors else min(1.0, math.sqrt(2 / observed.shape[1]))
    return torch.where(noise_stds > 0, torch.maximum(shares, torch.as_tensor(least).to(shares)), torch.ones_like(shares))
