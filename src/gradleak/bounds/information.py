"""How many bits an update can carry, and what that allows: statements about noise that hold for
every attacker and every prior.

A contribution of norm at most C under Gaussian noise of spread s on every entry tells at most
C²/2s² nats (the divergence from an update without it), and T rounds at most T times that. It raises
the chance of any event about the secret from κ to at most Φ(Φ⁻¹(κ) + √T·C/s) (Hayes, Mahloujifar &
Balle, NeurIPS 2023, at q = 1). For DP-SGD C/s is one over the noise multiplier.
"""

import math

from scipy.special import ndtr, ndtri

from gradleak.matching.noisy_channel import NoisyChannel


def largest_shift(channel: NoisyChannel, batch_size: int) -> float | None:
    """Returns the most that what is protected can move what arrives, in units of the noise; none
    where nothing is clipped.

    One example where each is clipped, and otherwise the client's whole batch. A channel of several
    rounds has their noise, so that they are counted in.
    """
    if channel.clip is None:
        return None
    share = channel.scale / batch_size if channel.clips_each else 1.0
    return abs(share) * channel.clip / channel.noise_std


def most_bits(shift: float) -> float:
    """Returns the bits that such a shift can tell at most."""
    return shift**2 / (2 * math.log(2))


def most_success(chance: float, shift: float) -> float:
    """Returns the most that an event of this chance without the update can have with it."""
    if chance <= 0 or chance >= 1:
        return min(max(chance, 0.0), 1.0)
    return float(ndtr(ndtri(chance) + shift))
