"""Inputs of chosen modules for candidate sentences: a forward pass that stops as soon as the
deepest of them was called.

The gradient of a linear layer is Σ_t δ_t x_tᵀ, so its rows lie in the span of the layer's inputs
x_t: what a sentence would have fed into the layer can be held against what was seen, whatever the
δ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.capture import Kind, kind_of


class _SeenEnough(Exception):
    """Ends a forward pass whose rest nobody asks for."""


class ModuleInputs:
    """Computes what linear modules are fed; modules fed by one tensor (query, key, value) share
    it."""

    def __init__(self, target: Target, parts: Sequence[Part]) -> None:
        self.target = target
        self.names = tuple(dict.fromkeys(module_of(part) for part in parts))
        self.modules = {name: target.module.get_submodule(name) for name in self.names}
        for name, module in self.modules.items():
            if kind_of(module) not in (Kind.LINEAR, Kind.CONV1D):
                raise GradleakError(
                    f"{name} is not a linear layer: its gradient says nothing of the span of its"
                    " inputs."
                )

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        """By module name, inputs [*lead, tokens, width]; differentiable in embeddings that ask
        for gradients."""
        seen: dict[str, Tensor] = {}

        def note(name: str, inputs: Tensor) -> None:
            seen[name] = inputs
            if len(seen) == len(self.modules):
                raise _SeenEnough

        handles = [
            module.register_forward_pre_hook(
                lambda _, arguments, name=name: note(name, arguments[0])
            )
            for name, module in self.modules.items()
        ]
        try:
            self.target.losses(batch)
        except _SeenEnough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        missing = [name for name in self.names if name not in seen]
        if missing:
            raise GradleakError(
                f"{missing[0]} takes no part in the forward pass: it cannot be attacked."
            )
        return {
            name: inputs.reshape(*batch.lead, *inputs.shape[1:]) for name, inputs in seen.items()
        }


def module_of(part: Part) -> str:
    """The module that holds a part's parameter."""
    return part.parameter.rpartition(".")[0]


def matrix_of(target: Target, part: Part, tensor: Tensor) -> Tensor:
    """A gradient [clients, …] of a linear part as [clients, outputs, inputs], whichever way
    round the module keeps it."""
    module: nn.Module = target.module.get_submodule(module_of(part))
    return tensor.mT if kind_of(module) is Kind.CONV1D else tensor


def linear_parts(target: Target, names: Sequence[str]) -> tuple[Part, ...]:
    """Of the named parts those that are weights of linear layers, one row an input token, in the
    order of the layers."""
    found = []
    for name in names:
        part = target.part(name)
        module: Any = target.module.get_submodule(module_of(part))
        if (
            kind_of(module) in (Kind.LINEAR, Kind.CONV1D)
            and part.parameter.endswith("weight")
            and part.layer is not None
        ):
            found.append(part)
    return tuple(sorted(found, key=lambda part: part.layer or 0))


def visible_linear_parts(
    observation: Observation, layer: int, modules: Sequence[str]
) -> tuple[Part, ...]:
    """Returns those linear weights of some modules in one layer whose gradient is seen."""
    linear = linear_parts(observation.target, tuple(observation.update.tensors))
    return tuple(part for part in linear if part.layer == layer and part.module in modules)


@torch.no_grad()
def first_inputs(inputs: ModuleInputs, ids: Tensor, positions: int) -> Mapping[str, Tensor]:
    """Inputs of the modules for every word of `ids` alone at every position: by module [positions,
    words, width].

    Right for modules of the first layer only, where tokens have not mixed: each position is filled
    with the word itself.
    """
    target = inputs.target
    rows = ids[:, None].expand(-1, positions)
    mask = torch.ones_like(rows, dtype=torch.bool)
    made = inputs(Batch(ids=rows, mask=mask, labels=target.any_labels(len(ids), positions)))
    return {name: tensor.movedim(1, 0) for name, tensor in made.items()}
