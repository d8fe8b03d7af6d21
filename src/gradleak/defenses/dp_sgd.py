"""DP-SGD: each example's gradient is clipped, the mean is noised, and only that leaves the
client."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from gradleak.core.defense import Channel, Defense, Guarantee, Sampling
from gradleak.core.errors import GradleakError
from gradleak.core.registry import Bounds, register
from gradleak.core.streams import Streams
from gradleak.core.update import Update, sum_over
from gradleak.defenses.accounting import gaussian_guarantees, refuse_accounting
from gradleak.defenses.clipping import clip_update, finite, refuse_clip
from gradleak.defenses.gaussian_noise import with_noise


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

    def sampling(self) -> Sampling:
        return Sampling(self.noise_multiplier, self.sampling_rate, self.steps)
