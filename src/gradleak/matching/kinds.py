"""Kinds of layers whose weight gradients follow from their inputs and output gradients; and these,
taken from one pass with hooks that are gone when it is over.

A linear layer's gradient is Σ_t δ_t x_tᵀ over the tokens t it was used for. A convolution is a
linear layer over patches, with places of the picture for tokens. A bias has Σ δ; the weight of a
norm has Σ δ∘x̂, with x̂ the normalised input; an embedding table has in each row the sum of the δ
where that row was looked up.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.core.errors import GradleakError
from gradleak.core.parts import Part
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


def kind_of(module: nn.Module) -> Kind | None:
    """Returns the kind of a module the engine knows the closed form of; none means autograd."""
    name = type(module).__name__
    known = {
        Kind.LINEAR: type(module) is nn.Linear,
        Kind.CONV1D: name == "Conv1D" and type(module).__module__.startswith("transformers"),
        Kind.LAYER_NORM: type(module) is nn.LayerNorm
        and len(module.normalized_shape) == 1
        and module.weight is not None,
        Kind.RMS_NORM: name.endswith("RMSNorm") and _scales_only(module),
        Kind.EMBEDDING: type(module) is nn.Embedding
        and not module.scale_grad_by_freq
        and module.max_norm is None,
        Kind.CONV2D: type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and module.padding != "same",
        Kind.GROUP_NORM: type(module) is nn.GroupNorm and module.affine,
        Kind.FIXED_BATCH_NORM: type(module) is nn.BatchNorm2d
        and module.affine
        and module.track_running_stats
        and not module.training,
    }
    return next((kind for kind, fits in known.items() if fits), None)


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


def owners_of(module: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """Returns, for every parameter name, the modules (and attributes) that hold it: more than one
    where weights are tied."""
    holders: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for module_name, part in module.named_modules():
        for attribute, parameter in part.named_parameters(recurse=False):
            holders[id(parameter)].append((module_name, attribute))
    return {name: holders[id(parameter)] for name, parameter in module.named_parameters()}


def compute_terms(
    module: nn.Module, kind: Kind, parameter: str, use: Use, delta: Tensor
) -> Float[Tensor, "examples *places width"]:
    """Returns what is summed over places for the gradient of a bias (δ) or of a norm's weight
    (δ∘x̂), channels last."""
    if parameter.endswith("weight"):
        if kind is Kind.RMS_NORM:
            delta = delta * use.output / module.get_parameter("weight")
        else:
            delta = delta * _normalise(module, use.inputs)
    return delta.movedim(1, -1) if kind in CHANNELS_FIRST else delta


def _normalise(module: nn.Module, inputs: Tensor) -> Tensor:
    """Returns a norm's inputs as its weight finds them."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(inputs, module.num_groups, eps=module.eps)
    assert isinstance(module, nn.BatchNorm2d)
    return F.batch_norm(inputs, module.running_mean, module.running_var, eps=module.eps)


def leave_out_padding(
    table: nn.Module, ids: Int[Tensor, "*uses"], deltas: Float[Tensor, "*uses width"]
) -> Float[Tensor, "*uses width"]:
    """Returns output gradients of an embedding table, zero where it looked up the row that does not
    learn."""
    assert isinstance(table, nn.Embedding)
    return deltas if table.padding_idx is None else deltas * (ids != table.padding_idx)[..., None]


def patches(
    module: nn.Module, pictures: Float[Tensor, "examples channels height width"]
) -> Float[Tensor, "examples places inputs"]:
    """Returns what a convolution's kernel sees at every place it is put.

    A copy of a view, where torch's own unfold on a GPU takes the examples one by one.
    """
    assert isinstance(module, nn.Conv2d)
    (rows, columns), (down, right) = module.kernel_size, module.dilation
    high, wide = module.stride
    if not isinstance(module.padding, str):  # "valid" is none
        above, left = module.padding
        pictures = F.pad(pictures, (left, left, above, above))
    reach = (down * (rows - 1) + 1, right * (columns - 1) + 1)
    windows = pictures.unfold(2, reach[0], high).unfold(3, reach[1], wide)
    # [examples, channels, places down, places right, rows, columns]
    windows = windows[..., ::down, ::right]
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


Calls = Mapping[str, Sequence[Use]]  # by module, in the order in which it was called
Slopes = Mapping[str, Sequence[tuple[Use, Tensor]]]  # each with the gradient by its output


@contextmanager
def capture_calls(
    modules: Mapping[str, nn.Module], examples: int
) -> Iterator[dict[str, list[Use]]]:
    """Within it, every call of the modules is noted; ids shared by all examples are spelled out
    for each."""
    calls: dict[str, list[Use]] = {}
    handles = []

    def spell_out(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        # BERT looks positions up once for the whole batch: each example needs a row of its own to
        # have a gradient of its own.
        ids = arguments[0][None] if arguments[0].ndim == 1 else arguments[0]
        return (ids.expand(examples, *ids.shape[1:]) if ids.shape[0] == 1 else ids, *arguments[1:])

    def note(name: str, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        calls.setdefault(name, []).append(Use(arguments[0], output))
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
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def find_slopes(
    total: Tensor, calls: Calls, differentiable: bool = False, again: bool = False
) -> Slopes:
    """Adds to every use the gradient of a loss by its output; zero where the loss does not depend
    on it.

    `again` keeps the graph for another pass back.
    """
    outputs = [use.output for uses in calls.values() for use in uses]
    if not outputs:
        return {}  # all that is seen is left to autograd
    deltas = iter(
        torch.autograd.grad(
            total,
            outputs,
            create_graph=differentiable,
            retain_graph=differentiable or again,
            materialize_grads=True,
        )
    )
    return {name: [(use, next(deltas)) for use in uses] for name, uses in calls.items()}


def call_shapes(target: Target) -> dict[str, tuple[int, ...]]:
    """Returns modules whose calls have one leading row an example, with the number of axes of each
    call's input.

    Found by two small passes of different sizes: a table shared by all examples ([tokens, tokens],
    say) does not follow them.
    """
    _refuse_batch_norm(target.module)
    known = {
        name: module
        for name, module in target.module.named_modules()
        if kind_of(module) is not None
    }
    seen = {}
    for examples, tokens in ((2, 5), (3, 7)):
        with capture_calls(known, examples) as seen[examples]:
            target.losses(target.probe(examples, tokens))
    return {
        name: tuple(call.inputs.ndim for call in calls)
        for name, calls in seen[2].items()
        if all(
            call.inputs.shape[0] == examples and call.output.shape[0] == examples
            for examples, noted in seen.items()
            for call in noted[name]
        )
    }


def _refuse_batch_norm(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise GradleakError(
                f"{name} is a BatchNorm in training mode, which mixes the examples of a batch: call"
                " eval() on the model."
            )


def copy_parameters(target: Target, parts: Iterable[Part]) -> dict[str, Tensor]:
    """Returns copies, which ask for gradients, of the parameters that these parts are of."""
    wholes = dict.fromkeys(part.parameter for part in parts)
    return {name: target.parameters[name].detach().requires_grad_() for name in wholes}


def differentiate_each(
    losses: Float[Tensor, "some"], copies: Mapping[str, Tensor], differentiable: bool = False
) -> list[dict[str, Tensor]]:
    """Returns the gradients of each loss, by one pass back for each."""
    each = (
        torch.autograd.grad(
            loss,
            list(copies.values()),
            create_graph=differentiable,
            retain_graph=True,
            materialize_grads=True,
        )
        for loss in losses
    )
    return [dict(zip(copies, found, strict=True)) for found in each] if copies else []
