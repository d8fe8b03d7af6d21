"""Client-level differential privacy: a client clips its whole update and noises it before it
leaves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradleak.core.defense import Channel, Defense, Guarantee, Sampling
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update
from gradleak.defenses.accounting import gaussian_guarantees, refuse_accounting
from gradleak.defenses.clipping import clip_update, refuse_clip
from gradleak.defenses.gaussian_noise import with_noise


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

    def sampling(self) -> Sampling:
        return Sampling(self.noise_multiplier, self.sampling_rate, self.steps)
