"""Clients that the attacker plays, many at once, by the clients' code for protocol and defenses.

Nothing is stored: a training step draws its clients anew, each with fresh randomness of its
defense. Where clients send one gradient, `per_client` computes those of thousands in one pass.
"""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor, nn

from gradleak.core.attack import ClientSetting
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Defense, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.matching.chunking import GRADIENTS, cost_of
from gradleak.matching.kinds import (
    NORMS,
    Kind,
    Slopes,
    Use,
    call_shapes,
    capture_calls,
    compute_terms,
    find_slopes,
    kind_of,
    leave_out_padding,
    owners_of,
    patches,
)

# Rows of an embedding table up to which a product with one-hot rows is used: it repeats on a GPU
SMALL_TABLE = 4096
LOGITS_IN_CACHE = 4_000_000
COPIES = 4  # of a client's gradients, on their way to features


class ClosedForms:
    """Gradients from the layers' inputs and output gradients: one forward and one backward pass,
    then one product a matrix."""

    def __init__(self, target: Target, names: Sequence[str] | None = None) -> None:
        self.target = target
        shapes = call_shapes(target)
        owners = owners_of(target.module)
        words = {
            target.module.get_submodule(owners[name][0][0])
            for name in target.groups["word_embedding"]
            if name in owners
        }
        self.owners = {
            name: owners[name] for name in (target.parameters if names is None else names)
        }
        self.kinds: dict[str, Kind] = {}
        for name, uses in self.owners.items():
            for module_name, _ in uses:
                module = target.module.get_submodule(module_name)
                kind = kind_of(module)
                if kind is None or not (module_name in shapes or module in words):
                    raise GradleakError(
                        f"{name} has no closed form: {type(module).__name__} is left to autograd."
                    )
                self.kinds[module_name] = kind
        self.modules = {name: target.module.get_submodule(name) for name in self.kinds}

    def __call__(self, batches: Batch) -> Update:
        clients = most = batches.lead[0]
        # On a CPU as many as have their logits in its cache: twice as fast for a large vocabulary
        if batches.mask.device.type == "cpu" and self.target.labels_are_tokens:
            most = max(1, LOGITS_IN_CACHE // (batches.mask[0].numel() * self.target.classes))
        if clients <= most:
            return Update(self._compute(batches))
        pieces = [self._compute(batches[start : start + most]) for start in range(0, clients, most)]
        return Update({name: torch.cat([piece[name] for piece in pieces]) for name in self.owners})

    def _compute(self, batches: Batch) -> dict[str, Tensor]:
        clients, examples = batches.lead
        with torch.enable_grad():
            with capture_calls(self.modules, clients * examples) as noted:
                total = self.target.losses(batches).mean(1).sum()
            calls = find_slopes(total, noted)
        with torch.no_grad():
            return {name: self._gradient(name, calls, clients) for name in self.owners}

    def _gradient(self, name: str, calls: Slopes, clients: int) -> Tensor:
        """Summed over all the places where a parameter is used."""
        found = [
            self._sum_use(module, attribute, use, delta, clients)
            for module, attribute in self.owners[name]
            for use, delta in calls.get(module, ())
        ]
        value = self.target.parameters[name]
        return sum(found[1:], start=found[0]) if found else value.new_zeros(clients, *value.shape)

    def _sum_use(
        self, module_name: str, attribute: str, use: Use, delta: Tensor, clients: int
    ) -> Tensor:
        """One use of a parameter, summed over the examples and places of each client."""
        module, kind = self.modules[module_name], self.kinds[module_name]
        if attribute == "bias" or kind in NORMS:
            terms = compute_terms(module, kind, attribute, use, delta)
            return terms.reshape(clients, -1, terms.shape[-1]).sum(1)
        inputs = use.inputs
        if kind is Kind.CONV2D:
            inputs, delta = patches(module, inputs), delta.flatten(2).mT
        rows = delta.reshape(clients, -1, delta.shape[-1])
        if kind is Kind.EMBEDDING:
            return _lookup(module, inputs.reshape(clients, -1), rows)
        inputs = inputs.reshape(clients, -1, inputs.shape[-1])
        if kind is Kind.CONV1D:
            return inputs.mT @ rows
        return (rows.mT @ inputs).view(clients, *module.get_parameter("weight").shape)


class ByTransform:
    """Gradients by torch.func, for modules without a closed form here."""

    def __init__(self, target: Target) -> None:
        self.target = target
        # Clients are the mapped axis; parameters are shared by all.
        self.each = torch.func.vmap(torch.func.grad(self._loss), in_dims=(None, 0, 0, 0))

    def __call__(self, batches: Batch) -> Update:
        given = next(
            one for one in (batches.ids, batches.embeddings, batches.pixels) if one is not None
        )
        return Update(self.each(dict(self.target.parameters), given, batches.mask, batches.labels))

    def _loss(
        self, parameters: dict[str, Tensor], given: Tensor, mask: Tensor, labels: Tensor
    ) -> Tensor:
        if self.target.medium == "image":
            batch = Batch(pixels=given, mask=mask, labels=labels)
        elif given.is_floating_point():
            batch = Batch(embeddings=given, mask=mask, labels=labels)
        else:
            batch = Batch(ids=given, mask=mask, labels=labels)
        return self.target.losses(batch, parameters).mean()


def per_client(target: Target, names: Sequence[str] | None = None) -> ClosedForms | ByTransform:
    """The faster form where it applies: closed forms for linear layers, convolutions, norms and
    embeddings (of the named parameters at least), else torch.func."""
    try:
        return ClosedForms(target, names)
    except GradleakError:
        return ByTransform(target)


def _lookup(module: nn.Module, ids: Tensor, deltas: Tensor) -> Tensor:
    """The gradient of a table: each looked-up row gets what came back to it."""
    assert isinstance(module, nn.Embedding)
    deltas = leave_out_padding(module, ids, deltas)
    clients, size = len(ids), module.num_embeddings
    if size <= SMALL_TABLE:
        # One-hot rows times deltas: a product sums in a fixed order, which index_add_ does not.
        rows = torch.arange(size, device=ids.device)
        return (ids[:, None, :] == rows[:, None]).to(deltas.dtype) @ deltas
    table = deltas.new_zeros(clients * size, deltas.shape[-1])
    places = ids + torch.arange(clients, device=ids.device)[:, None] * size
    return table.index_add_(0, places.flatten(), deltas.flatten(0, 1)).view(clients, size, -1)


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
            visible = setting.view.visible(target)
            seen = list(dict.fromkeys(target.part(name).parameter for name in visible))
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
        if any(one.channel().randomised for one in self.by_code) or self.gradients is None:
            return [streams.child(first + client) for client in range(clients)]
        # Nothing is drawn, so that all may hold one: making thousands takes longer than gradients.
        return [streams] * clients

    def _compute(self, batches: Batch, rngs: Sequence[Streams]) -> Update:
        # Several local steps, or a client's own dropout: its own code runs, client by client.
        if self.gradients is None:
            setting = self.setting
            return setting.protocol.update(setting.target, batches, self.per_example, rngs)
        if not self.per_example:
            return self.gradients(batches)
        clients, examples = batches.lead
        # A defense that works on each example (DP-SGD) is given the gradient of each.
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
        # Noise and nothing else: no clipping, rounding or choice of entries beside it.
        channel = defenses[-1].channel()
        if channel == Channel(noise_std=channel.noise_std, randomised=channel.noise_std > 0):
            return tuple(defenses[:-1]), channel.noise_std
    return tuple(defenses), 0.0


def take_apart(batches: Batch) -> Batch:
    """Returns a client for every example of every client."""
    parts = {field.name: getattr(batches, field.name) for field in fields(batches)}
    given = {name: part for name, part in parts.items() if part is not None}
    return Batch(**{name: part.flatten(0, 1)[:, None] for name, part in given.items()})


def open_generator(streams: Streams, device: torch.device) -> torch.Generator:
    """Returns a generator where the data is.

    Training draws too much to make it on a CPU and move it; only what clients draw must not depend
    on the device.
    """
    return torch.Generator(device).manual_seed(int.from_bytes(streams.key[:8], "little") >> 1)
