"""The factored engine: one forward and one backward pass give every candidate's sums for every
tensor."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from gradleak.core.batch import Batch
from gradleak.core.target import Target
from gradleak.matching.capture import CHANNELS_FIRST, Kind, Use, captured
from gradleak.matching.convolution import channel_terms, patches
from gradleak.matching.factors import Thin, thin_factors
from gradleak.matching.plan import Group, Member, Plan
from gradleak.matching.readings import WHOLE, Reading, Surviving
from gradleak.matching.survivors import Sparse, sparse_survivors
from gradleak.matching.terms import Sums, lookup_angles, lookup_entries, outer_sums, vector_sums

Observed = Thin | Sparse | Tensor
Calls = Mapping[str, Sequence[tuple[Use, Tensor]]]  # by module: each use with its output gradient


class FactoredSums:
    """Sums of a distance over all tensors, for batches [observations, candidates, examples,
    tokens(, hidden)]."""

    def __init__(
        self,
        target: Target,
        plan: Plan,
        observed: Mapping[str, Tensor],
        residuals: bool,
        reading: Reading = WHOLE,
    ) -> None:
        self.target = target
        self.plan = plan
        self.residuals = residuals
        self.reading = reading
        self.modules = {name: target.module.get_submodule(name) for name in plan.modules}
        self.observed = [_arrange(group, observed, reading) for group in plan.groups]
        self.by_autograd = tuple(target.part(name) for name in plan.by_autograd)
        self.observed_by_autograd = {name: observed[name].flatten(1) for name in plan.by_autograd}

    def take(self, places: Int[Tensor, "some"]) -> "FactoredSums":
        """The same for some of the observations."""
        part = copy.copy(self)
        part.observed = [
            one[:, places] if isinstance(one, Tensor) else one.take(places) for one in self.observed
        ]
        part.observed_by_autograd = {
            name: tensor[places] for name, tensor in self.observed_by_autograd.items()
        }
        return part

    def bytes_beside(self, uses: int, slope: bool) -> float:
        """What a candidate takes beside its pass: gradients that have to be built whole, tables
        and what autograd is left."""
        times = (4 if slope else 2) * self.target.dtype.itemsize
        found = times * float(sum(part.size for part in self.by_autograd))
        if not self.residuals and not self.reading.entrywise:
            return found
        for group, observed in zip(self.plan.groups, self.observed, strict=True):
            one = group.members[0].part.shape
            if group.form == "lookup":
                found += times * len(group.members) * one[0] * (one[1] + uses)
            # Inputs and output gradients, beside the factors of what was seen, and their slopes
            elif group.form == "outer":
                rank = observed.right.shape[-1] if isinstance(observed, Thin) else 0
                found += times * len(group.members) * (uses + rank) * (one[0] + math.prod(one[1:]))
        return found

    def __call__(self, batch: Batch, rows: slice) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            batch, wanted = self._differentiable(batch)
            wholes = dict.fromkeys(part.parameter for part in self.by_autograd)
            copies = {
                name: self.target.parameters[name].detach().requires_grad_() for name in wholes
            }
            with captured(self.modules, batch.mask[..., 0].numel()) as uses:
                losses = self.target.losses(batch, copies).mean(-1)
            calls = _with_gradients(losses.sum(), uses.calls, wanted, bool(copies))
        with torch.set_grad_enabled(wanted):
            pairs = [
                self._group_sums(group, observed, calls, losses.shape, rows)
                for group, observed in zip(self.plan.groups, self.observed, strict=True)
            ]
            if copies:
                pairs.append(self._autograd_sums(losses, copies, wanted, rows))
            first, second = (torch.cat(parts).movedim(0, -1) for parts in zip(*pairs, strict=True))
        return first, second

    def _differentiable(self, batch: Batch) -> tuple[Batch, bool]:
        """Embeddings or pixels that ask for gradients (the layers' gradients need a graph), and
        whether the caller asked too."""
        if batch.pixels is not None:
            wanted = batch.asks_for_gradients
            pixels = (
                batch.pixels
                if batch.pixels.requires_grad
                else batch.pixels.detach().requires_grad_()
            )
            return replace(batch, pixels=pixels), wanted
        embeddings = self.target.embed(batch.ids) if batch.ids is not None else batch.embeddings
        assert embeddings is not None
        labels = (
            batch.ids if batch.ids is not None and self.target.labels_are_tokens else batch.labels
        )
        wanted = embeddings.requires_grad or labels.requires_grad
        if not embeddings.requires_grad:
            embeddings = embeddings.detach().requires_grad_()
        return replace(batch, ids=None, embeddings=embeddings, labels=labels), wanted

    def _group_sums(
        self, group: Group, observed: Observed, calls: Calls, shape: torch.Size, rows: slice
    ) -> Sums:
        kept = observed[:, rows] if isinstance(observed, Tensor) else observed.rows(rows)
        if group.form == "vector":
            gradients = torch.stack(
                [self._vector(member, calls[member.module], shape) for member in group.members]
            )
            residuals, reading = self.residuals, self.reading
            return vector_sums(gradients, kept, residuals, reading)  # type: ignore[arg-type]
        inputs, deltas = (
            torch.stack(parts)
            for parts in zip(
                *(self._joined(member, calls, shape) for member in group.members), strict=True
            )
        )
        if group.form == "lookup":
            return self._lookup_sums(group, inputs, deltas, kept)  # type: ignore[arg-type]
        return outer_sums(inputs, deltas, kept, self.residuals, self.reading)

    def _lookup_sums(self, group: Group, ids: Tensor, deltas: Tensor, observed: Tensor) -> Sums:
        module = self.modules[group.members[0].module]
        assert isinstance(module, nn.Embedding)
        if module.padding_idx is not None:
            deltas = deltas * (ids != module.padding_idx)[..., None]
        if not self.residuals and not self.reading.entrywise:
            return lookup_angles(ids, deltas, observed)
        if ids.shape[-1] < module.num_embeddings:
            return lookup_entries(ids, deltas, observed, self.residuals, self.reading)
        m, o, c = deltas.shape[:3]
        # A product with one-hot rows, not scatter_add: that sums in any order on a GPU.
        rows = torch.arange(module.num_embeddings, device=ids.device)
        table = (ids[..., None] == rows).to(deltas.dtype).mT @ deltas
        return vector_sums(
            table.view(m, o, c, -1), observed.flatten(2), self.residuals, self.reading
        )

    def _joined(self, member: Member, calls: Calls, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Inputs and output gradients of all uses of a module, [observations, candidates, uses,
        …]; of a slice, its outputs."""
        uses = calls[member.module]
        if member.kind is Kind.CONV2D:
            uses = [
                (
                    replace(use, inputs=patches(self.modules[member.module], use.inputs)),
                    delta.flatten(2).mT,
                )
                for use, delta in uses
            ]
        inputs = [
            (
                use.inputs.reshape(*shape, -1, use.inputs.shape[-1])
                if use.inputs.is_floating_point()
                else use.inputs.reshape(*shape, -1)
            )
            for use, _ in uses
        ]
        deltas = torch.cat([delta.reshape(*shape, -1, delta.shape[-1]) for _, delta in uses], dim=2)
        cut = member.part.cut
        return torch.cat(inputs, dim=2), deltas if cut is None else cut.of(deltas, axis=-1)

    def _vector(
        self, member: Member, calls: Sequence[tuple[Use, Tensor]], shape: torch.Size
    ) -> Tensor:
        """The gradient of a bias (Σδ) or of a norm's weight (Σδ∘x̂), for every candidate."""
        module = self.modules[member.module]
        total: Tensor | int = 0
        for use, delta in calls:
            if isinstance(module, nn.LayerNorm) and member.part.parameter.endswith("weight"):
                delta = delta * F.layer_norm(use.inputs, module.normalized_shape, eps=module.eps)
            elif member.kind is Kind.RMS_NORM:
                delta = delta * use.output / module.get_parameter("weight")
            elif member.kind in CHANNELS_FIRST:
                delta = channel_terms(module, member.part.parameter, use.inputs, delta)
            total = total + delta.reshape(*shape, -1, delta.shape[-1]).sum(-2)
        assert isinstance(total, Tensor)
        return member.part.of(total)

    def _autograd_sums(
        self, losses: Tensor, copies: Mapping[str, Tensor], wanted: bool, rows: slice
    ) -> Sums:
        """What has no closed form here: one backward pass a candidate."""
        pairs = []
        with torch.enable_grad():
            per_candidate = [
                torch.autograd.grad(
                    loss,
                    list(copies.values()),
                    create_graph=wanted,
                    retain_graph=True,
                    materialize_grads=True,
                )
                for loss in losses.flatten()
            ]
        places = {name: place for place, name in enumerate(copies)}
        for part in self.by_autograd:
            whole = torch.stack([gradients[places[part.parameter]] for gradients in per_candidate])
            gradients = part.of(whole).flatten(1).view(1, *losses.shape, -1)
            pairs.append(
                vector_sums(
                    gradients,
                    self.observed_by_autograd[part.name][None, rows],
                    self.residuals,
                    self.reading,
                )
            )
        first, second = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return first, second


def _arrange(group: Group, observed: Mapping[str, Tensor], reading: Reading) -> Observed:
    """The observed tensors of a group, stacked [members, observations, …], matrices as factors
    or survivors where that pays."""
    stacked = torch.stack([observed[member.part.name] for member in group.members])
    if group.form != "outer":
        return stacked
    if group.members[0].kind is Kind.CONV2D:
        stacked = stacked.flatten(3)  # every place of the kernel is an input of its own
    matrices = stacked.mT if group.members[0].kind is Kind.CONV1D else stacked
    if isinstance(reading, Surviving):
        found: Observed | None = sparse_survivors(matrices)
    else:
        found = None if reading.entrywise else thin_factors(matrices)
    return matrices.contiguous() if found is None else found


def _with_gradients(
    total: Tensor, calls: Mapping[str, Sequence[Use]], wanted: bool, again: bool
) -> Calls:
    """Adds to every use the gradient of the loss with respect to its output; zero where the loss
    does not depend on it."""
    outputs = [use.output for uses in calls.values() for use in uses]
    if not outputs:
        return {}  # all that is seen is left to autograd
    deltas = iter(
        torch.autograd.grad(
            total,
            outputs,
            create_graph=wanted,
            retain_graph=wanted or again,
            materialize_grads=True,
        )
    )
    return {name: [(use, next(deltas)) for use in uses] for name, uses in calls.items()}
