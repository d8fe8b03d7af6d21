"""Differential privacy: an update is clipped and noised, and ε says what that proves.

ε is by accountants that are named: Opacus's for a whole training run, the analytic formula for one
release.
"""

import importlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from scipy.special import log_ndtr

from gradleak.core.defense import Channel, Defense, Guarantee
from gradleak.core.errors import GradleakError
from gradleak.core.registry import Bounds, register
from gradleak.core.streams import Streams
from gradleak.core.update import Update, sum_over
from gradleak.defenses.clipping_and_noise import clip_update, finite, refuse_clip, with_noise

ACCOUNTANTS = {"PRV": "PRVAccountant", "RDP": "RDPAccountant"}
# Of PRV's grid, some 12 s and 2 GB; twenty times as many stalled a machine
MOST_POINTS = 10_000_000
INFINITE = "infinite: there is no noise, so nothing is proven"
NOT_KNOWN = "not known: the privacy loss is too large for this accountant to compute"


@register("defense", "dp_sgd")
@dataclass(frozen=True)
class DpSgd(Defense):
    """Clips every example's gradient over all trained tensors, takes the mean, adds Gaussian
    noise (their algorithm 1)."""

    # The largest norm of one example's gradient; inf: no clipping
    clip: Annotated[float, Bounds(above=True, infinite=True)] = 1.0
    noise_multiplier: float = 1.0  # noise on the sum of the batch, in units of clip
    sampling_rate: float = 0.01  # the chance of an example to be in a batch, and
    # How many batches there are: of the whole run, for its ε; one update does not depend on them
    steps: int = 1000
    delta: float = 1e-5
    cites = "Abadi et al., CCS 2016"

    def __post_init__(self) -> None:
        refuse_clip(self.clip)
        refuse_accounting(self.noise_multiplier, self.sampling_rate, self.steps, self.delta)
        if self.clip == float("inf") and self.noise_multiplier > 0:
            raise ValueError(
                "noise is a multiple of clip: give a finite one, or noise_multiplier=0."
            )

    @property
    def wants_per_example(self) -> bool:
        return True

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        if not update.per_example:
            raise GradleakError(
                "dp_sgd clips the gradient of each example and was given their mean: write it as"
                " the first defense."
            )
        small = clip_update(update, self.clip)
        examples = next(iter(small.tensors.values())).shape[1]
        mean = Update(
            {name: sum_over(tensor, 1) / examples for name, tensor in small.tensors.items()}
        )
        return with_noise(mean, self._noise_on_sum / examples, rngs)

    @property
    def _noise_on_sum(self) -> float:
        # No noise on an unclipped sum: 0, not 0·inf
        return self.noise_multiplier * self.clip if self.noise_multiplier else 0.0

    def without_noise(self) -> Defense:
        return replace(self, noise_multiplier=0.0)

    def channel(self) -> Channel:
        return Channel(
            noise_std_of_sum=self._noise_on_sum,
            clip=finite(self.clip),
            randomised=self.noise_multiplier > 0,
        )

    def guarantees(self) -> tuple[Guarantee, ...]:
        return gaussian_guarantees(
            "example", self.noise_multiplier, self.sampling_rate, self.steps, self.delta
        )


@register("defense", "client_dp")
@dataclass(frozen=True)
class ClientDp(Defense):
    """Clips a client's whole update and adds Gaussian noise on its own machine, as Flower's
    LocalDpMod does."""

    # LocalDpMod asks for ε and δ instead: its noise is noise_multiplier = sqrt(2 ln(1.25 / δ)) / ε,
    # with sensitivity = clip.
    clip: float = 1.0  # the largest norm of an update
    noise_multiplier: float = 1.0
    sampling_rate: float = 0.1  # the chance of a client to take part in a round, and
    steps: int = 100  # how many rounds there are: of the whole run, for its ε
    delta: float = 1e-5
    cites = "McMahan et al., ICLR 2018; noise on the client as in Flower's LocalDpMod"

    def __post_init__(self) -> None:
        refuse_clip(self.clip)
        refuse_accounting(self.noise_multiplier, self.sampling_rate, self.steps, self.delta)
        if self.clip == float("inf"):
            raise ValueError("noise is a multiple of clip: give a finite one.")

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return with_noise(clip_update(update, self.clip), self.noise_multiplier * self.clip, rngs)

    def without_noise(self) -> Defense:
        return replace(self, noise_multiplier=0.0)

    def channel(self) -> Channel:
        noise = self.noise_multiplier * self.clip
        return Channel(noise_std=noise, clip=self.clip, randomised=noise > 0)

    def guarantees(self) -> tuple[Guarantee, ...]:
        return gaussian_guarantees(
            "client", self.noise_multiplier, self.sampling_rate, self.steps, self.delta
        )


@register("defense", "central_dp")
@dataclass(frozen=True)
class CentralDp(Defense):
    """Noise the server adds to the sum of updates: protects from whoever gets the model, not
    from the server, who saw them."""

    noise_multiplier: float = 1.0  # in units of the clipping norm, which the server applies as well
    sampling_rate: float = 0.1  # the chance of a client to take part in a round, and
    steps: int = 100  # how many rounds there are
    delta: float = 1e-5
    cites = "McMahan et al., ICLR 2018"

    def __post_init__(self) -> None:
        refuse_accounting(self.noise_multiplier, self.sampling_rate, self.steps, self.delta)

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return update

    def channel(self) -> Channel:
        return Channel(after_server=True)

    def guarantees(self) -> tuple[Guarantee, ...]:
        """Towards those who see only the model; none of these holds against the server."""
        return gaussian_guarantees(
            "client", self.noise_multiplier, self.sampling_rate, self.steps, self.delta
        )


def gaussian_guarantees(
    protects: str, noise_multiplier: float, sampling_rate: float, steps: int, delta: float
) -> tuple[Guarantee, ...]:
    """Every reading of noise of `noise_multiplier` times the clipping norm.

    Whoever sees one update and knows whose it is faces one release without the help of sampling.
    """

    def state(reading: str, accountant: str, epsilon: float | None) -> Guarantee:
        return Guarantee(reading, protects, accountant, epsilon, delta, in_words(epsilon))

    readings = (("one release", 1.0, 1), ("whole run", sampling_rate, steps))
    return (
        state("one release", "analytic Gaussian", analytic_epsilon(noise_multiplier, delta)),
        *(
            state(
                reading,
                f"{name} (Opacus)",
                opacus_epsilon(name, noise_multiplier, rate, count, delta),
            )
            for reading, rate, count in readings
            for name in ACCOUNTANTS
        ),
    )


def in_words(epsilon: float | None) -> str:
    """What to say of an ε that is no finite number; nothing of others."""
    if epsilon is None:
        return NOT_KNOWN
    return INFINITE if epsilon == math.inf else ""


def analytic_epsilon(noise_multiplier: float, delta: float) -> float:
    """The smallest ε of one Gaussian mechanism (Balle & Wang, ICML 2018, theorem 8); infinite
    without noise."""
    if noise_multiplier == 0:
        return math.inf

    def excess(epsilon: float) -> float:
        return analytic_delta(noise_multiplier, epsilon) - delta

    if excess(0.0) <= 0:
        return 0.0
    # here, since few audits need it and every one would wait for it
    from scipy.optimize import brentq

    highest = 1.0
    while excess(highest) > 0:
        highest *= 2
    return float(brentq(excess, 0.0, highest, xtol=1e-12, rtol=1e-12))


def analytic_delta(noise_multiplier: float, epsilon: float) -> float:
    """δ of one Gaussian mechanism at that ε: Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ), the second term
    by its logarithm."""
    half, shift = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    return math.exp(log_ndtr(half - shift)) - math.exp(epsilon + log_ndtr(-half - shift))


def opacus_epsilon(
    accountant: str, noise_multiplier: float, sampling_rate: float, steps: int, delta: float
) -> float | None:
    """ε by one of Opacus's accountants; infinite without noise, none where the accountant gives
    up."""
    if noise_multiplier == 0:
        return math.inf
    run = (noise_multiplier, sampling_rate, steps)
    if accountant == "PRV" and prv_points(*run, delta) > MOST_POINTS:
        return None
    return _epsilon(accountant, run, delta)


def prv_points(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    """Points of the grid on which Opacus's PRV accountant adds up privacy losses, about: it
    reaches as far as RDP's ε does."""
    error = delta / 1000  # of δ, by the accountant's own default
    reach = _epsilon("RDP", (noise_multiplier, sampling_rate, steps), error)
    mesh = 0.01 / math.sqrt(steps * math.log(12 / error) / 2)
    return math.inf if reach is None else 2 * reach / mesh


def _epsilon(accountant: str, run: tuple[float, float, int], delta: float) -> float | None:
    made = getattr(_opacus(), ACCOUNTANTS[accountant])()
    made.history = [run]
    with warnings.catch_warnings():
        # Logarithms of zero, and advice on orders of Rényi divergence
        warnings.simplefilter("ignore")
        try:
            found = float(made.get_epsilon(delta=delta))
        # Numbers that float64 does not hold
        except (RuntimeError, ValueError, ArithmeticError, MemoryError):
            return None
    return found if math.isfinite(found) else None


def _opacus() -> object:
    try:
        return importlib.import_module("opacus.accountants")
    except ImportError as error:
        raise GradleakError(
            "The ε of a training run needs Opacus: pip install 'gradleak[dp]'."
        ) from error


def refuse_accounting(
    noise_multiplier: float, sampling_rate: float, steps: int, delta: float
) -> None:
    """Refuses numbers no accountant can use."""
    for holds, otherwise in (
        (noise_multiplier >= 0, f"noise_multiplier must not be negative, not {noise_multiplier}."),
        (
            0 < sampling_rate <= 1,
            f"sampling_rate must be above 0 and at most 1, not {sampling_rate}.",
        ),
        (steps >= 1, f"steps count from 1, not {steps}."),
        (0 < delta < 1, f"delta must lie between 0 and 1, not {delta}."),
    ):
        if not holds:
            raise ValueError(otherwise)
