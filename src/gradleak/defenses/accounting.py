"""ε of Gaussian noise, by accountants that are named: Opacus's for a whole training run, the analytic formula for one release."""

import importlib
import math
import warnings

from scipy.optimize import brentq
from scipy.special import log_ndtr

from gradleak.core.defense import Guarantee
from gradleak.core.errors import GradleakError

ACCOUNTANTS = {"PRV": "PRVAccountant", "RDP": "RDPAccountant"}


def gaussian_guarantees(
    protects: str, noise_multiplier: float, sampling_rate: float, steps: int, delta: float
) -> tuple[Guarantee, ...]:
    """Every reading of noise of `noise_multiplier` times the clipping norm.

    Whoever sees one update and knows whose it is faces one release without the help of sampling.
    """
    made = [Guarantee("one release", protects, "analytic Gaussian", analytic_epsilon(noise_multiplier, delta), delta)]
    for reading, rate, count in (("one release", 1.0, 1), ("whole run", sampling_rate, steps)):
        for name in ACCOUNTANTS:
            epsilon = opacus_epsilon(name, noise_multiplier, rate, count, delta)
            made.append(Guarantee(reading, protects, f"{name} (Opacus)", epsilon, delta))
    return tuple(made)


def analytic_epsilon(noise_multiplier: float, delta: float) -> float:
    """The smallest ε of one Gaussian mechanism (Balle & Wang, ICML 2018, theorem 8); infinite without noise."""
    if noise_multiplier == 0:
        return math.inf

    def excess(epsilon: float) -> float:
        return analytic_delta(noise_multiplier, epsilon) - delta

    if excess(0.0) <= 0:
        return 0.0
    highest = 1.0
    while excess(highest) > 0:
        highest *= 2
    return float(brentq(excess, 0.0, highest, xtol=1e-12, rtol=1e-12))


def analytic_delta(noise_multiplier: float, epsilon: float) -> float:
    """δ of one Gaussian mechanism at that ε: Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ), the second term by its logarithm."""
    half, shift = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    return math.exp(log_ndtr(half - shift)) - math.exp(epsilon + log_ndtr(-half - shift))


def opacus_epsilon(accountant: str, noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float | None:
    """ε by one of Opacus's accountants; infinite without noise, none where the accountant gives up."""
    if noise_multiplier == 0:
        return math.inf
    made = getattr(_opacus(), ACCOUNTANTS[accountant])()
    made.history = [(noise_multiplier, sampling_rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # logarithms of zero, and advice on orders of Rényi divergence
        try:
            return float(made.get_epsilon(delta=delta))
        except (RuntimeError, ValueError, OverflowError, MemoryError):  # PRV's grid does not hold losses in the thousands
            return None


def _opacus() -> object:
    try:
        return importlib.import_module("opacus.accountants")
    except ImportError as error:
        raise GradleakError("The ε of a training run needs Opacus: pip install 'gradleak[dp]'.") from error


def refuse_accounting(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> None:
    """Refuses numbers no accountant can use."""
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier must not be negative, not {noise_multiplier}.")
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"sampling_rate must be above 0 and at most 1, not {sampling_rate}.")
    if steps < 1:
        raise ValueError(f"steps count from 1, not {steps}.")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, not {delta}.")
