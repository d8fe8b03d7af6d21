"""Clients that the attacker plays: many at once, by the client's own code for protocol and defenses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Defense, protect_in_turn
from gradleak.core.streams import Streams
from gradleak.core.trainable import Setting
from gradleak.core.update import Update
from gradleak.matching.chunking import GRADIENTS, cost_of
from gradleak.matching.per_client import per_client

COPIES = 4  # of a client's gradients, on their way to features


class Simulation:
    """What clients of a setting send, as seen; but for Gaussian noise that comes last, which is cheaper to add to features.

    A sum of n independent noises of spread σ is one of spread σ·√n: the features have the same distribution either way.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.pass_cost = cost_of(setting.target)
        self.by_code, self.noise_std = _without_last_noise(setting.defenses)
        self.per_example = bool(self.by_code) and self.by_code[0].wants_per_example
        self.gradients = None
        if setting.protocol.one_gradient and not setting.protocol.dropout:
            self.gradients = per_client(setting.target, None if self.by_code else _seen(setting))

    def __call__(self, batches: Batch, streams: Streams, first: int = 0) -> Update:
        """One update a client of `batches` [clients, examples, …], each with randomness of its own; numbered from `first`."""
        rngs = self._rngs(batches.lead[0], streams, first)
        return self._sent(self._update(batches, rngs), rngs)

    def bytes(self, examples: int, tokens: int) -> float:
        """What one client takes: its gradients as computed, defended, seen and laid side by side, and its pass."""
        target = self.setting.target
        gradients = sum(value.numel() for value in target.parameters.values()) * target.dtype.itemsize
        each = examples if self.per_example else 1
        return COPIES * each * gradients + self.pass_cost.bytes(examples, tokens, GRADIENTS)

    def defended(self, update: Update, streams: Streams) -> Update:
        """What clients send who computed that update: for several defenses of the same clients."""
        return self._sent(update, self._rngs(update.clients, streams))

    def _rngs(self, clients: int, streams: Streams, first: int = 0) -> list[Streams]:
        randomised = any(defense.channel().randomised for defense in self.by_code) or self.gradients is None
        # Where nothing is drawn all clients may hold one stream: making thousands takes longer than their gradients.
        return [streams.child(first + client) for client in range(clients)] if randomised else [streams] * clients

    def _sent(self, update: Update, rngs: Sequence[Streams]) -> Update:
        with torch.no_grad():
            return self.setting.view.show(self.setting.target, protect_in_turn(self.by_code, update, rngs))

    def _update(self, batches: Batch, rngs: Sequence[Streams]) -> Update:
        if self.gradients is None:
            return self.setting.protocol.update(self.setting.target, batches, self.per_example, rngs)
        if not self.per_example:
            return self.gradients(batches)
        clients, examples = batches.lead
        apart = self.gradients(_each_alone(batches))
        tensors = {name: one.view(clients, examples, *one.shape[1:]) for name, one in apart.tensors.items()}
        return Update(tensors, per_example=True)


def _seen(setting: Setting) -> list[str]:
    """Parameters of which something is seen: where no defense mixes them with others, no others are needed."""
    parts = [setting.target.part(name) for name in setting.view.visible(setting.target)]
    return list(dict.fromkeys(part.parameter for part in parts))


def _without_last_noise(defenses: Sequence[Defense]) -> tuple[tuple[Defense, ...], float]:
    """The defenses to be run by their own code, and the spread of plain noise after them."""
    if defenses and not defenses[-1].wants_per_example:
        channel = defenses[-1].channel()
        if channel == Channel(noise_std=channel.noise_std, randomised=channel.noise_std > 0):
            return tuple(defenses[:-1]), channel.noise_std
    return tuple(defenses), 0.0


def _each_alone(batches: Batch) -> Batch:
    def apart(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.flatten(0, 1)[:, None]

    mask, labels = apart(batches.mask), apart(batches.labels)
    assert mask is not None
    assert labels is not None
    pixels = apart(batches.pixels)
    return Batch(mask=mask, labels=labels, ids=apart(batches.ids), embeddings=apart(batches.embeddings), pixels=pixels)
