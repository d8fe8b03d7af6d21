"""How many bits an update can carry, and what that allows: statements about noise that hold for
every attacker and every prior.

A contribution of norm at most C under Gaussian noise of spread s on every entry tells at most
C²/2s² nats (the divergence from an update without it), and T rounds at most T times that. It raises
the chance of any event about the secret from κ to at most Φ(Φ⁻¹(κ) + √T·C/s) (Hayes, Mahloujifar &
Balle, NeurIPS 2023, at q = 1). For DP-SGD C/s is one over the noise multiplier.
"""

import importlib
import math
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from gradleak.core.defense import Sampling
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


FINEST = 1e-3  # nats between two points of a grid of privacy losses
COARSEST = 100.0  # nats: a step that loses far more than that guarantees nothing
POINTS = 20_000  # about so many reach from 0 to where most of the loss of a step lies


def most_success_of_run(chance: float, run: Sampling) -> float | None:
    """Returns the same for all updates of a run, where it is not known whether, and when, the
    example took part; none where the library for it is not installed.

    The most that any test of power `chance` without the example has with it: by dp-accounting's
    trade-off curve of adding or removing an example, rounded to the safe side (Doroshenko et al.,
    PETS 2022).
    """
    if chance <= 0 or chance >= 1 or run.noise_multiplier == 0:
        return 1.0 if run.noise_multiplier == 0 and chance > 0 else min(max(chance, 0.0), 1.0)
    try:
        losses: Any = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    except ImportError:
        return None
    grid = max(FINEST, 1 / (POINTS * run.noise_multiplier**2))
    if grid > COARSEST:
        return 1.0
    step = losses.from_gaussian_mechanism(
        run.noise_multiplier, value_discretization_interval=grid, sampling_prob=run.rate
    )
    whole = step.self_compose(run.steps)
    # An event of chance κ has at most e^ε κ + δ(ε), for every ε
    epsilons = np.linspace(math.log(chance), -math.log(chance), 2001)
    deltas = np.array(whole.get_delta_for_epsilon(epsilons))
    return min(1.0, float((np.exp(epsilons) * chance + deltas).min()))
