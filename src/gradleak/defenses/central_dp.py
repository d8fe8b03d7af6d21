"""Central differential privacy: the server adds the noise, after it has seen every update."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradleak.core.defense import Channel, Defense, Guarantee
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update
from gradleak.defenses.accounting import gaussian_guarantees, refuse_accounting


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
