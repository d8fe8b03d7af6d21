"""Which closed form gives the gradient of which parameter, decided once for a target."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from gradleak.core.parts import Part
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching.capture import NORMS, Kind, call_shapes, kind_of
from gradleak.matching.rounding import cancelled_share


@dataclass(frozen=True)
class Member:
    """One parameter, or slice of one, and the module that uses it."""

    part: Part
    module: str
    kind: Kind


@dataclass(frozen=True)
class Group:
    """Parameters of one shape whose modules are called alike, so that one stacked operation
    serves them all."""

    form: str  # "outer", "lookup" or "vector"
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Plan:
    """Groups with a closed form, and the names of the parts left to autograd."""

    groups: tuple[Group, ...]
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


def matchable(target: Target, names: Iterable[str], keep_silent: bool = False) -> tuple[str, ...]:
    """The named parts whose gradient can be computed from embeddings and (unless kept) is not zero
    by construction.

    The word embeddings are out: a candidate made of embeddings does not look anything up in them.
    So is an output layer tied to them: its gradient is the sum of both sides, of which only one can
    be computed.
    """
    unreachable = set(target.groups["word_embedding"]) | (
        set() if keep_silent else structurally_silent(target)
    )
    return tuple(name for name in names if name not in unreachable)


def structurally_silent(target: Target) -> set[str]:
    """Parameters and slices whose gradient vanishes whatever the data: BERT's key bias, for softmax
    ignores shifts.

    Their rounding noise would count as much as any other tensor in the cosine distance.
    """
    probe = target.probe(2, 8, Streams.root("silence", 0).generator())
    copies = {name: value.detach().requires_grad_() for name, value in target.parameters.items()}
    with torch.enable_grad():
        losses = target.losses(probe, copies)
        # Weighted, so that two examples of opposite labels do not cancel in the head.
        found = torch.autograd.grad(
            losses[0] + 0.5 * losses[1], list(copies.values()), materialize_grads=True
        )
    gradients = dict(zip(copies, found, strict=True))
    sizes = {name: float(gradient.square().mean().sqrt()) for name, gradient in gradients.items()}
    median = sorted(sizes.values())[len(sizes) // 2]
    slices = {
        part.name: part.of(gradients[part.parameter])
        for part in target.parts
        if part.cut is not None
    }
    sizes |= {name: float(gradient.square().mean().sqrt()) for name, gradient in slices.items()}
    return {name for name, size in sizes.items() if size <= cancelled_share(target.dtype) * median}


def make_plan(target: Target, names: Iterable[str]) -> Plan:
    """Sorts parts into groups by form, shape and calls."""
    shapes = call_shapes(target)
    owners = owners_of(target.module)
    groups: dict[tuple[object, ...], list[Member]] = defaultdict(list)
    by_autograd = []
    for part in map(target.part, names):
        uses = owners[part.parameter]
        module_name, attribute = uses[0]
        module = target.module.get_submodule(module_name)
        kind = kind_of(module)
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
        groups[(form, turned, shape, calls)].append(Member(part, module_name, kind))
    return Plan(
        tuple(Group(str(key[0]), tuple(members)) for key, members in groups.items()),
        tuple(by_autograd),
    )


def _form(kind: Kind, attribute: str) -> str:
    if attribute == "bias" or kind in NORMS:
        return "vector"
    return "lookup" if kind is Kind.EMBEDDING else "outer"


def owners_of(module: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """For every parameter name, the modules (and attributes) that hold it; more than one where
    weights are tied."""
    holders: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for module_name, part in module.named_modules():
        for attribute, parameter in part.named_parameters(recurse=False):
            holders[id(parameter)].append((module_name, attribute))
    return {name: holders[id(parameter)] for name, parameter in module.named_parameters()}
