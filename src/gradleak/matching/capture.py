"""Layer inputs and outputs of one forward pass, taken with hooks that are gone when the pass is
over."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.core.errors import GradleakError
from gradleak.core.target import Target


class Kind(StrEnum):
    """How a module's weight gradient follows from its inputs and output gradients."""

    LINEAR = "linear"
    CONV1D = "conv1d"  # GPT-2's transposed linear
    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"  # Llama's
    EMBEDDING = "embedding"
    CONV2D = "conv2d"  # a linear layer over patches
    GROUP_NORM = "group_norm"
    FIXED_BATCH_NORM = "fixed_batch_norm"  # with running statistics: each example by itself


NORMS = (Kind.LAYER_NORM, Kind.RMS_NORM, Kind.GROUP_NORM, Kind.FIXED_BATCH_NORM)
CHANNELS_FIRST = (Kind.CONV2D, Kind.GROUP_NORM, Kind.FIXED_BATCH_NORM)


@dataclass(frozen=True, eq=False)
class Use:
    """One call of a module, leading axis the examples."""

    inputs: Tensor
    output: Tensor


@dataclass
class Uses:
    """What the hooks of one pass saw, by module name."""

    calls: dict[str, list[Use]] = field(default_factory=dict)


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a module the engine knows the closed form of; none means autograd."""
    if type(module) is nn.Linear:
        return Kind.LINEAR
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers"):
        return Kind.CONV1D
    if (
        type(module) is nn.LayerNorm
        and len(module.normalized_shape) == 1
        and module.weight is not None
    ):
        return Kind.LAYER_NORM
    if type(module).__name__.endswith("RMSNorm") and _scales_only(module):
        return Kind.RMS_NORM
    if type(module) is nn.Embedding and not module.scale_grad_by_freq and module.max_norm is None:
        return Kind.EMBEDDING
    if (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and module.padding != "same"
    ):
        return Kind.CONV2D
    if type(module) is nn.GroupNorm and module.affine:
        return Kind.GROUP_NORM
    if (
        type(module) is nn.BatchNorm2d
        and module.affine
        and module.track_running_stats
        and not module.training
    ):
        return Kind.FIXED_BATCH_NORM
    return None


@torch.no_grad()
def _scales_only(module: nn.Module) -> bool:
    """Whether the output is weight · x/rms(x), so that x/rms(x) is output/weight; Gemma's 1 +
    weight, say, goes to autograd."""
    parameters = dict(module.named_parameters())
    if (
        list(parameters) != ["weight"]
        or parameters["weight"].ndim != 1
        or bool((parameters["weight"] == 0).any())
    ):
        return False
    steps = torch.arange(1, parameters["weight"].numel() + 1).to(parameters["weight"])
    inputs, weight = torch.stack([steps.sin(), steps.cos()])[None], 1 + (2 * steps).sin()
    output = torch.func.functional_call(module, {"weight": weight}, (inputs,))
    # The module's ε is far below these inputs
    expected = weight * inputs / inputs.square().mean(-1, keepdim=True).sqrt()
    return torch.allclose(output, expected, rtol=1e-3, atol=1e-3)


@contextmanager
def captured(modules: Mapping[str, nn.Module], examples: int) -> Iterator[Uses]:
    """Within it, every call of the modules is noted; ids shared by all examples are spelled out
    for each."""
    uses = Uses()
    handles = []

    def spell_out(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        # BERT looks positions up once for the whole batch: each example needs a row of its own to
        # have a gradient of its own.
        ids = arguments[0]
        if ids.ndim == 1:
            ids = ids[None]
        return (ids.expand(examples, *ids.shape[1:]) if ids.shape[0] == 1 else ids, *arguments[1:])

    def note(name: str, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        uses.calls.setdefault(name, []).append(Use(arguments[0], output))
        return output

    try:
        for name, module in modules.items():
            if isinstance(module, nn.Embedding):
                handles.append(module.register_forward_pre_hook(spell_out))
            handles.append(
                module.register_forward_hook(
                    lambda _, arguments, output, name=name: note(name, arguments, output)
                )
            )
        yield uses
    finally:
        for handle in handles:
            handle.remove()


def call_shapes(target: Target) -> dict[str, tuple[int, ...]]:
    """Modules whose calls have one leading row an example, with the number of axes of each call's
    input.

    Found by two small passes of different sizes: a table shared by all examples ([tokens, tokens],
    say) does not follow them.
    """
    _refuse_batch_norm(target.module)
    known = {
        name: module
        for name, module in target.module.named_modules()
        if kind_of(module) is not None
    }
    sizes = ((2, 5), (3, 7))
    seen = [_calls(target, known, examples, tokens) for examples, tokens in sizes]
    return {
        name: tuple(call.inputs.ndim for call in seen[0][name])
        for name in seen[0]
        if all(
            call.inputs.shape[0] == examples and call.output.shape[0] == examples
            for calls, (examples, _) in zip(seen, sizes, strict=True)
            for call in calls[name]
        )
    }


def _calls(
    target: Target, modules: Mapping[str, nn.Module], examples: int, tokens: int
) -> dict[str, list[Use]]:
    with captured(modules, examples) as uses:
        target.losses(target.probe(examples, tokens))
    return uses.calls


def _refuse_batch_norm(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise GradleakError(
                f"{name} is a BatchNorm in training mode, which mixes the examples of a batch: call"
                " eval() on the model."
            )
