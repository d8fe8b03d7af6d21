"""From what is seen of an update to the numbers an inverter is fed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.learning_to_invert.hashing import Hashing, flattened
from gradleak.attacks.learning_to_invert.simulation import Simulation
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Survivors, channel_of
from gradleak.core.streams import Streams
from gradleak.core.trainable import Setting
from gradleak.core.update import Update
from gradleak.matching.chunking import pieces, refuse_without_room

Largest = Literal["signs", "sizes"]  # what is read of entries of which only the largest were sent


def entries(update: Update, *, signs: bool) -> Float[Tensor, "clients entries"]:
    """All entries side by side: their sizes, or only which are there and their signs."""
    flat = flattened(update).float()
    return flat.sign() if signs else flat


def only_largest(channel: Channel) -> bool:
    """Whether clients send the largest entries and zeros: which they are then says more of the words than how large they are."""
    return channel.survivors is Survivors.SEEN and not channel.randomised


class Features(ABC):
    """A linear map of an update's entries, or of their signs."""

    size: int
    groups: Sequence[int] | None = None  # neighbours that are scaled together; none: every feature alone

    @abstractmethod
    def __call__(self, update: Update) -> Float[Tensor, "clients features"]:
        """Features of every client, float32."""

    @property
    @abstractmethod
    def noise_scale(self) -> Float[Tensor, "features"]:
        """How far each feature is moved by noise of spread 1 on every entry that is seen. Moves of features are independent."""

    def tensors(self) -> dict[str, Tensor]:
        """What has to be saved to make the same map again."""
        return {}


class HashedFeatures(Features):
    """All entries, summed in bins."""

    def __init__(self, setting: Setting, fraction: float, seed: int, signed: bool, largest: Largest = "sizes") -> None:
        target = setting.target
        self.signs = largest == "signs" and only_largest(channel_of(setting.defenses))
        coordinates = sum(target.part(name).size for name in setting.view.visible(target))
        self.size = max(1, round(fraction * coordinates))
        self.hashing = Hashing(coordinates, self.size, Streams.root("hashing", seed), signed, target.device)

    def __call__(self, update: Update) -> Float[Tensor, "clients features"]:
        return self.hashing(entries(update, signs=self.signs))

    @property
    def noise_scale(self) -> Float[Tensor, "features"]:
        return self.hashing.counts.sqrt()


class WholeFeatures(Features):
    """All entries as they are, for updates small enough; each tensor's are scaled together."""

    def __init__(self, setting: Setting, largest: Largest = "sizes") -> None:
        target = setting.target
        self.signs = largest == "signs" and only_largest(channel_of(setting.defenses))
        self.groups = [target.part(name).size for name in setting.view.visible(target)]
        self.size = sum(self.groups)
        self.device = target.device

    def __call__(self, update: Update) -> Float[Tensor, "clients features"]:
        return entries(update, signs=self.signs)

    @property
    def noise_scale(self) -> Float[Tensor, "features"]:
        return torch.ones(self.size, device=self.device)


class Simulated:
    """Features of clients that the attacker plays, defended with fresh randomness."""

    def __init__(self, simulation: Simulation, features: Features, bench: Bench | None = None) -> None:
        self.simulation, self.features, self.bench = simulation, features, bench
        self.noise = simulation.noise_std * features.noise_scale if simulation.noise_std else None

    def __call__(self, batches: Batch, streams: Streams) -> Float[Tensor, "clients features"]:
        return self._noisy(self.quiet(batches, streams), streams)

    def quiet(self, batches: Batch, streams: Streams) -> Float[Tensor, "clients features"]:
        """The same but for Gaussian noise that comes last; as many clients at once as fit."""
        clients, step = batches.lead[0], self._at_once(batches)
        found = [
            self.features(self.simulation(batches[start : start + step], streams, start)) for start in range(0, clients, step)
        ]
        return torch.cat(found)

    def _at_once(self, batches: Batch) -> int:
        clients, examples = batches.lead
        if self.bench is None:
            return clients
        tokens = 1 if batches.pixels is not None else batches.mask.shape[-1]
        device, needed = batches.mask.device, self.simulation.bytes(examples, tokens)
        refuse_without_room("An inverter", needed, self.bench, device, "one client that it plays to learn from")
        return pieces(self.bench, device, needed, 0, clients).size

    def defended(self, update: Update, streams: Streams, noisy: bool = True) -> Float[Tensor, "clients features"]:
        """Features of an update that clients have computed already, all parameters of it."""
        found = self.features(self.simulation.defended(update, streams))
        return self._noisy(found, streams) if noisy else found

    def _noisy(self, found: Float[Tensor, "clients features"], streams: Streams) -> Float[Tensor, "clients features"]:
        if self.noise is None:
            return found
        return found + self.noise * torch.randn(
            found.shape, generator=on_device(streams.child("noise"), found), device=found.device
        )


def on_device(streams: Streams, like: Tensor) -> torch.Generator:
    """A generator where the data is. Training draws too much to make it on a CPU and move it; only the client's draws must not
    depend on the device."""
    return torch.Generator(like.device).manual_seed(int.from_bytes(streams.key[:8], "little") >> 1)
