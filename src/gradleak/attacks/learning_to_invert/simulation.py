"""Clients that the attacker plays, many at once, by the clients' code for protocol and defenses.

`Simulation` makes what they send, `SimulatedFeatures` the numbers an inverter is fed with. Nothing
is stored: a training step draws its clients anew, each with fresh randomness of its defense.
"""

from collections.abc import Sequence
from dataclasses import fields

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.learning_to_invert.features import Features
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Defense, protect_in_turn
from gradleak.core.streams import Streams
from gradleak.core.trainable import ClientSetting
from gradleak.core.update import Update
from gradleak.matching.chunking import GRADIENTS, cost_of, pieces, refuse_without_room
from gradleak.matching.per_client import per_client

COPIES = 4  # of a client's gradients, on their way to features


class Simulation:
    """What clients of a setting send, as seen, but for Gaussian noise that comes last.

    Noise on features is cheaper. A sum of n independent noises of spread σ is one of spread σ·√n:
    the features have the same distribution either way.
    """

    def __init__(self, setting: ClientSetting) -> None:
        self.setting, target = setting, setting.target
        self.pass_cost = cost_of(target)
        self.by_code, self.noise_std = split_off_last_noise(setting.defenses)
        self.per_example = bool(self.by_code) and self.by_code[0].wants_per_example
        self.gradients = None
        if setting.protocol.one_gradient and not setting.protocol.dropout:
            # Where no defense mixes parameters that are seen with others, no others are needed.
            parts = [target.part(name) for name in setting.view.visible(target)]
            seen = list(dict.fromkeys(part.parameter for part in parts))
            self.gradients = per_client(target, None if self.by_code else seen)

    def __call__(self, batches: Batch, streams: Streams, first: int = 0) -> Update:
        """Returns an update a client of `batches` [clients, examples, …], numbered from `first`."""
        rngs = self._draw_streams(batches.lead[0], streams, first)
        return self._send(self._compute(batches, rngs), rngs)

    def defend(self, update: Update, streams: Streams) -> Update:
        """Returns what clients send who computed that update, all parameters of it."""
        return self._send(update, self._draw_streams(update.clients, streams))

    def bytes(self, examples: int, tokens: int) -> float:
        """Returns what one client takes: its pass, and its gradients in every form."""
        target = self.setting.target
        entries = sum(value.numel() for value in target.parameters.values())
        each = COPIES * (examples if self.per_example else 1) * entries * target.dtype.itemsize
        return each + self.pass_cost.bytes(examples, tokens, GRADIENTS)

    def _draw_streams(self, clients: int, streams: Streams, first: int = 0) -> list[Streams]:
        randomised = any(defense.channel().randomised for defense in self.by_code)
        if randomised or self.gradients is None:
            return [streams.child(first + client) for client in range(clients)]
        # Nothing is drawn, so that all may hold one: making thousands takes longer than gradients.
        return [streams] * clients

    def _compute(self, batches: Batch, rngs: Sequence[Streams]) -> Update:
        if self.gradients is None:
            setting = self.setting
            return setting.protocol.update(setting.target, batches, self.per_example, rngs)
        if not self.per_example:
            return self.gradients(batches)
        clients, examples = batches.lead
        alone = self.gradients(take_apart(batches))
        tensors = {
            name: one.view(clients, examples, *one.shape[1:]) for name, one in alone.tensors.items()
        }
        return Update(tensors, per_example=True)

    def _send(self, update: Update, rngs: Sequence[Streams]) -> Update:
        with torch.no_grad():
            sent = protect_in_turn(self.by_code, update, rngs)
            return self.setting.view.show(self.setting.target, sent)


def split_off_last_noise(defenses: Sequence[Defense]) -> tuple[tuple[Defense, ...], float]:
    """Returns the defenses that their own code runs, and the spread of plain noise after them."""
    if defenses and not defenses[-1].wants_per_example:
        channel = defenses[-1].channel()
        if channel == Channel(noise_std=channel.noise_std, randomised=channel.noise_std > 0):
            return tuple(defenses[:-1]), channel.noise_std
    return tuple(defenses), 0.0


def take_apart(batches: Batch) -> Batch:
    """Returns a client for every example of every client."""
    parts = {field.name: getattr(batches, field.name) for field in fields(batches)}
    given = {name: part for name, part in parts.items() if part is not None}
    return Batch(**{name: part.flatten(0, 1)[:, None] for name, part in given.items()})


class SimulatedFeatures:
    """Features of clients that the attacker plays; as many clients at once as memory allows."""

    def __init__(
        self, simulation: Simulation, features: Features, bench: Bench | None = None
    ) -> None:
        self.simulation, self.features, self.bench = simulation, features, bench
        std = simulation.noise_std
        self.noise = std * features.noise_scale if std else None  # the spread on every feature

    def __call__(
        self, batches: Batch, streams: Streams, noisy: bool = True
    ) -> Float[Tensor, "clients features"]:
        """Returns features of clients' updates, with the noise that comes last or without."""
        clients, step = batches.lead[0], self._count_at_once(batches)
        found = [
            self.features(self.simulation(batches[start : start + step], streams, start))
            for start in range(0, clients, step)
        ]
        return self._add_noise(torch.cat(found), streams, noisy)

    def defend(
        self, update: Update, streams: Streams, noisy: bool = True
    ) -> Float[Tensor, "clients features"]:
        """Returns features of an update that clients have computed already."""
        return self._add_noise(
            self.features(self.simulation.defend(update, streams)), streams, noisy
        )

    def _count_at_once(self, batches: Batch) -> int:
        clients, examples = batches.lead
        if self.bench is None:
            return clients
        tokens = 1 if batches.pixels is not None else batches.mask.shape[-1]
        device, needed = batches.mask.device, self.simulation.bytes(examples, tokens)
        one = "one client that it plays to learn from"
        refuse_without_room("An inverter", needed, self.bench, device, one)
        return pieces(self.bench, device, needed, 0, clients).size

    def _add_noise(
        self, found: Float[Tensor, "clients features"], streams: Streams, noisy: bool
    ) -> Float[Tensor, "clients features"]:
        if self.noise is None or not noisy:
            return found
        generator = open_generator(streams.child("noise"), found.device)
        return found + self.noise * torch.randn(
            found.shape, generator=generator, device=found.device
        )


def open_generator(streams: Streams, device: torch.device) -> torch.Generator:
    """Returns a generator where the data is.

    Training draws too much to make it on a CPU and move it; only what clients draw must not depend
    on the device.
    """
    return torch.Generator(device).manual_seed(int.from_bytes(streams.key[:8], "little") >> 1)
