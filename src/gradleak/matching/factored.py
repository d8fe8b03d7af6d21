"""The factored engine: one forward and one backward pass give every candidate's sums for every
tensor.

A plan, made once for a target, says which closed form gives the gradient of which part. What is
observed is then kept in the form that each distance needs: whole, as thin factors, or as the few
entries that are left.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.chunking import GRADIENTS, GRADIENTS_AND_BACK
from gradleak.matching.distances import WHOLE, Distance, Reading, Surviving, adapt, common_channel
from gradleak.matching.factors import Thin, thin_factors
from gradleak.matching.kinds import (
    NORMS,
    Kind,
    Slopes,
    Use,
    call_shapes,
    capture_calls,
    compute_terms,
    copy_parameters,
    differentiate_each,
    find_slopes,
    kind_of,
    leave_out_padding,
    owners_of,
    patches,
)
from gradleak.matching.matcher import (
    Matcher,
    SimulatedMatcher,
    matchable,
    stack_observed,
    weigh_tensors,
)
from gradleak.matching.terms import (
    Sparse,
    Sums,
    find_survivors,
    lookup_angles,
    lookup_entries,
    outer_sums,
    vector_sums,
)

Observed = Thin | Sparse | Tensor


@dataclass(frozen=True)
class PlannedPart:
    """One parameter, or slice of one, and the module that uses it."""

    part: Part
    module: str
    kind: Kind


@dataclass(frozen=True)
class PartGroup:
    """Parameters of one shape whose modules are called alike, so that one stacked operation
    serves them all."""

    form: str  # "outer", "lookup" or "vector"
    members: tuple[PlannedPart, ...]


@dataclass(frozen=True)
class Plan:
    """Groups with a closed form, and the names of the parts left to autograd."""

    groups: tuple[PartGroup, ...]
    by_autograd: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All parts, in the order in which the engine stacks their sums."""
        return (
            *(member.part.name for group in self.groups for member in group.members),
            *self.by_autograd,
        )

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(member.module for group in self.groups for member in group.members)
        )


def make_plan(target: Target, names: Iterable[str]) -> Plan:
    """Sorts parts into groups by form, shape and calls."""
    shapes, owners = call_shapes(target), owners_of(target.module)
    groups: dict[tuple[object, ...], list[PlannedPart]] = defaultdict(list)
    by_autograd = []
    for part in map(target.part, names):
        uses = owners[part.parameter]
        module_name, attribute = uses[0]
        kind = kind_of(target.module.get_submodule(module_name))
        if len(uses) > 1 or kind is None or module_name not in shapes:
            # tied, of an unknown kind, or not called with one row an example
            by_autograd.append(part.name)
            continue
        form = _form(kind, attribute)
        turned = kind is Kind.CONV1D and form == "outer"
        shape = part.shape[::-1] if turned else part.shape
        # Convolutions of one shape may move in other strides over other pictures: each is a group
        # of its own.
        calls = (
            module_name if kind is Kind.CONV2D else shapes[module_name] if form != "vector" else ()
        )
        groups[(form, turned, shape, calls)].append(PlannedPart(part, module_name, kind))
    return Plan(
        tuple(PartGroup(str(key[0]), tuple(members)) for key, members in groups.items()),
        tuple(by_autograd),
    )


def _form(kind: Kind, attribute: str) -> str:
    if attribute == "bias" or kind in NORMS:
        return "vector"
    return "lookup" if kind is Kind.EMBEDDING else "outer"


class FactoredMatcher(Matcher):
    """For updates that are one gradient: nothing of a weight matrix's size is built unless the
    distance needs it."""

    def __init__(
        self,
        observations: Sequence[Observation],
        distance: Distance,
        names: tuple[str, ...],
        reading: Reading,
    ) -> None:
        self.plan = plan = make_plan(observations[0].target, names)
        super().__init__(observations, distance, plan.names, reading)
        target, observed = self.target, stack_observed(observations, plan.names)
        self.modules = {name: target.module.get_submodule(name) for name in plan.modules}
        self.observed = [_arrange(group, observed, reading) for group in plan.groups]
        self.by_autograd = tuple(target.part(name) for name in plan.by_autograd)
        self.observed_by_autograd = {name: observed[name].flatten(1) for name in plan.by_autograd}

    def take(self, places: Int[Tensor, "some"]) -> "FactoredMatcher":
        part = super().take(places)
        assert isinstance(part, FactoredMatcher)
        part.observed = [_take(one, places) for one in self.observed]
        part.observed_by_autograd = {
            name: tensor[places] for name, tensor in self.observed_by_autograd.items()
        }
        return part

    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        passed = self.pass_cost.bytes(examples, tokens, GRADIENTS_AND_BACK if slope else GRADIENTS)
        return passed + self._bytes_beside(examples * tokens, slope)

    def _bytes_beside(self, uses: int, slope: bool) -> float:
        """Returns what a candidate takes beside its pass: gradients that have to be built whole,
        tables and what autograd is left."""
        times = (4 if slope else 2) * self.target.dtype.itemsize
        found = times * float(sum(part.size for part in self.by_autograd))
        if not self.distance.residuals and not self.reading.entrywise:
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

    def sums(self, batch: Batch, rows: slice) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            batch, wanted = self._differentiable(batch)
            copies = copy_parameters(self.target, self.by_autograd)
            with capture_calls(self.modules, batch.mask[..., 0].numel()) as noted:
                losses = self.target.losses(batch, copies).mean(-1)
            # Examples do not touch one another, so that the slope of the sum is each one's own.
            calls = find_slopes(losses.sum(), noted, wanted, again=bool(copies))
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
        """Returns embeddings or pixels that ask for gradients (the layers' gradients need a graph),
        and whether the caller asked too."""
        if batch.pixels is not None:
            return replace(batch, pixels=_ask(batch.pixels)), batch.asks_for_gradients
        embeddings = self.target.embed(batch.ids) if batch.ids is not None else batch.embeddings
        assert embeddings is not None
        labels = (
            batch.ids if batch.ids is not None and self.target.labels_are_tokens else batch.labels
        )
        wanted = embeddings.requires_grad or labels.requires_grad
        return replace(batch, ids=None, embeddings=_ask(embeddings), labels=labels), wanted

    def _group_sums(
        self, group: PartGroup, observed: Observed, calls: Slopes, shape: torch.Size, rows: slice
    ) -> Sums:
        kept = _take(observed, rows)
        residuals, reading = self.distance.residuals, self.reading
        if group.form == "vector":
            gradients = torch.stack(
                [self._vector(member, calls[member.module], shape) for member in group.members]
            )
            return vector_sums(gradients, kept, residuals, reading)  # type: ignore[arg-type]
        pairs = (self._join_uses(member, calls, shape) for member in group.members)
        inputs, deltas = map(torch.stack, zip(*pairs, strict=True))
        if group.form == "lookup":
            return self._lookup_sums(group, inputs, deltas, kept)  # type: ignore[arg-type]
        return outer_sums(inputs, deltas, kept, residuals, reading)

    def _lookup_sums(self, group: PartGroup, ids: Tensor, deltas: Tensor, observed: Tensor) -> Sums:
        module = self.modules[group.members[0].module]
        assert isinstance(module, nn.Embedding)
        deltas = leave_out_padding(module, ids, deltas)
        if not self.distance.residuals and not self.reading.entrywise:
            return lookup_angles(ids, deltas, observed)
        if ids.shape[-1] < module.num_embeddings:
            return lookup_entries(ids, deltas, observed, self.distance.residuals, self.reading)
        m, o, c = deltas.shape[:3]
        # A product with one-hot rows, not scatter_add: that sums in any order on a GPU.
        rows = torch.arange(module.num_embeddings, device=ids.device)
        table = (ids[..., None] == rows).to(deltas.dtype).mT @ deltas
        return vector_sums(
            table.view(m, o, c, -1), observed.flatten(2), self.distance.residuals, self.reading
        )

    def _join_uses(
        self, member: PlannedPart, calls: Slopes, shape: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """Returns inputs and output gradients of all uses of a module, [observations, candidates,
        uses, …]; of a slice, its outputs."""
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
        self, member: PlannedPart, calls: Sequence[tuple[Use, Tensor]], shape: torch.Size
    ) -> Tensor:
        """Returns the gradient of a bias or of a norm's weight, for every candidate."""
        module, parameter = self.modules[member.module], member.part.parameter
        terms = [compute_terms(module, member.kind, parameter, *call) for call in calls]
        total = sum(one.reshape(*shape, -1, one.shape[-1]).sum(-2) for one in terms)
        assert isinstance(total, Tensor)
        return member.part.of(total)

    def _autograd_sums(
        self, losses: Tensor, copies: Mapping[str, Tensor], wanted: bool, rows: slice
    ) -> Sums:
        """Returns the sums of what has no closed form here, by one backward pass a candidate."""
        with torch.enable_grad():
            each = differentiate_each(losses.flatten(), copies, wanted)
        pairs = []
        for part in self.by_autograd:
            whole = torch.stack([gradients[part.parameter] for gradients in each])
            gradients = part.of(whole).flatten(1).view(1, *losses.shape, -1)
            observed = self.observed_by_autograd[part.name][None, rows]
            pairs.append(vector_sums(gradients, observed, self.distance.residuals, self.reading))
        first, second = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return first, second


def _ask(numbers: Tensor) -> Tensor:
    """Returns the numbers as they are if they ask for gradients, or a copy that does."""
    return numbers if numbers.requires_grad else numbers.detach().requires_grad_()


def _arrange(group: PartGroup, observed: Mapping[str, Tensor], reading: Reading) -> Observed:
    """Returns the observed tensors of a group, stacked [members, observations, …], matrices as
    factors or survivors where that pays."""
    stacked = torch.stack([observed[member.part.name] for member in group.members])
    if group.form != "outer":
        return stacked
    if group.members[0].kind is Kind.CONV2D:
        stacked = stacked.flatten(3)  # every place of the kernel is an input of its own
    matrices = stacked.mT if group.members[0].kind is Kind.CONV1D else stacked
    if isinstance(reading, Surviving):
        found: Observed | None = find_survivors(matrices)  # where few are left, these alone
    else:
        found = None if reading.entrywise else thin_factors(matrices)
    return matrices.contiguous() if found is None else found


def _take(observed: Observed, places: slice | Int[Tensor, "some"]) -> Observed:
    """Returns some of the observations, which are the second axis."""
    return observed[:, places] if isinstance(observed, Tensor) else observed.take(places)


def for_observations(
    observations: Sequence[Observation],
    distance: Distance,
    plain: bool = False,
    keep_silent: bool = False,
    adaptive: bool = True,
    unroll: bool = True,
) -> Matcher:
    """Returns the fastest matcher that is right for these observations; `plain` asks for the
    reference instead.

    Where a defense is known, distance and reading are fitted to what it did, unless not `adaptive`.
    Of several local steps, `unroll` goes through each; otherwise the update is taken for one
    averaged gradient.

    `keep_silent` matches tensors without signal too, as LAMP's released code does: only for
    comparison with it.
    """
    target = observations[0].target
    if any(observation.target is not target for observation in observations):
        raise GradleakError("Observations of different models cannot be attacked in one pass.")
    seen = dict.fromkeys(
        name for observation in observations for name in observation.update.tensors
    )
    names = matchable(target, seen, keep_silent)
    if not all(set(names) & set(observation.update.tensors) for observation in observations):
        raise GradleakError(
            "Nothing in the visible update can be matched: only word embeddings, or tensors without"
            " signal, are seen."
        )
    channel = common_channel(observations)
    averaged = not unroll and not plain
    # Of a first step of Adam, say, little but signs arrives.
    if averaged and any(observation.protocol.sizes_lost for observation in observations):
        channel = replace(channel, signs_only=True)
    fitting, reading = adapt(distance, channel) if adaptive else (distance, WHOLE)
    one_gradient = all(observation.protocol.one_gradient for observation in observations)
    made = FactoredMatcher if averaged or (one_gradient and not plain) else SimulatedMatcher
    matcher = made(observations, fitting, names, reading)
    if keep_silent:
        matcher.weights = weigh_tensors(
            observations, stack_observed(observations, matcher.names), silent=0.0
        )
    if adaptive:
        matcher.take_off_noise()
    return matcher
