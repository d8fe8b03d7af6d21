"""The gradient of every client's mean loss, all clients in one pass: what a thousand simulated
clients would send."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.matching.capture import CHANNELS_FIRST, Kind, Use, call_shapes, captured, kind_of
from gradleak.matching.convolution import channel_terms, patches
from gradleak.matching.plan import owners_of

# Rows of an embedding table up to which a product with one-hot rows is used: it repeats on a GPU
SMALL_TABLE = 4096
LOGITS_IN_CACHE = 4_000_000
# Each use of a module with the gradient of the loss by its output
Called = Sequence[tuple[Use, Tensor]]


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
        clients, most = batches.lead[0], self._clients_at_once(batches)
        if clients <= most:
            return self._together(batches)
        pieces = [
            self._together(batches[start : start + most]).tensors
            for start in range(0, clients, most)
        ]
        return Update({name: torch.cat([piece[name] for piece in pieces]) for name in self.owners})

    def _clients_at_once(self, batches: Batch) -> int:
        """All of them; on a CPU as many as have their logits in its cache, which is twice as
        fast for a large vocabulary."""
        if batches.mask.device.type != "cpu" or not self.target.labels_are_tokens:
            return batches.lead[0]
        return max(1, LOGITS_IN_CACHE // (batches.mask[0].numel() * self.target.classes))

    def _together(self, batches: Batch) -> Update:
        clients, examples = batches.lead
        with torch.enable_grad():
            with captured(self.modules, clients * examples) as uses:
                total = self.target.losses(batches).mean(1).sum()
            outputs = [use.output for calls in uses.calls.values() for use in calls]
            deltas = iter(torch.autograd.grad(total, outputs, materialize_grads=True))
        calls = {name: [(use, next(deltas)) for use in noted] for name, noted in uses.calls.items()}
        with torch.no_grad():
            return Update({name: self._gradient(name, calls, clients) for name in self.owners})

    def _gradient(self, name: str, calls: Mapping[str, Called], clients: int) -> Tensor:
        """Summed over all the places where a parameter is used."""
        found = None
        for module_name, attribute in self.owners[name]:
            for use, delta in calls.get(module_name, ()):
                one = self._one(
                    module_name, attribute, use.inputs.detach(), use.output.detach(), delta, clients
                )
                found = one if found is None else found + one
        value = self.target.parameters[name]
        return value.new_zeros(clients, *value.shape) if found is None else found

    def _one(
        self,
        module_name: str,
        attribute: str,
        inputs: Tensor,
        output: Tensor,
        delta: Tensor,
        clients: int,
    ) -> Tensor:
        module, kind = self.modules[module_name], self.kinds[module_name]
        if kind in CHANNELS_FIRST:
            return _of_channels(module, kind, attribute, inputs, delta, clients)
        rows = delta.reshape(clients, -1, delta.shape[-1])
        if attribute == "bias":
            return rows.sum(1)
        if kind is Kind.EMBEDDING:
            return _lookup(module, inputs.reshape(clients, -1), rows)
        if kind is Kind.LAYER_NORM:
            assert isinstance(module, nn.LayerNorm)
            inputs = F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
            return (rows * inputs.reshape(rows.shape)).sum(1)
        if kind is Kind.RMS_NORM:
            return (rows * output.reshape(rows.shape) / module.get_parameter("weight")).sum(1)
        inputs = inputs.reshape(clients, -1, inputs.shape[-1])
        return inputs.mT @ rows if kind is Kind.CONV1D else rows.mT @ inputs


class ByTransform:
    """Gradients by torch.func, for modules without a closed form here."""

    def __init__(self, target: Target) -> None:
        self.target = target
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


def _of_channels(
    module: nn.Module, kind: Kind, attribute: str, inputs: Tensor, delta: Tensor, clients: int
) -> Tensor:
    """The gradient of a convolution, or of a norm of channels, summed over the examples and
    places of each client."""
    if kind is Kind.CONV2D and attribute == "weight":
        seen, rows = patches(module, inputs), delta.flatten(2).mT
        seen, rows = (one.reshape(clients, -1, one.shape[-1]) for one in (seen, rows))
        weight = module.get_parameter("weight")
        return (rows.mT @ seen).view(clients, *weight.shape)
    terms = channel_terms(module, attribute, inputs, delta)
    return terms.reshape(clients, -1, terms.shape[-1]).sum(1)


def _lookup(module: nn.Module, ids: Tensor, deltas: Tensor) -> Tensor:
    """The gradient of a table: each looked-up row gets what came back to it."""
    assert isinstance(module, nn.Embedding)
    if module.padding_idx is not None:
        deltas = deltas * (ids != module.padding_idx)[..., None]
    clients, size = len(ids), module.num_embeddings
    if size <= SMALL_TABLE:
        rows = torch.arange(size, device=ids.device)
        return (ids[:, None, :] == rows[:, None]).to(deltas.dtype) @ deltas
    table = deltas.new_zeros(clients * size, deltas.shape[-1])
    places = ids + torch.arange(clients, device=ids.device)[:, None] * size
    return table.index_add_(0, places.flatten(), deltas.flatten(0, 1)).view(clients, size, -1)
