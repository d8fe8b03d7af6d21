"""Layer inputs, outputs and output gradients of one pass, taken with hooks that are gone when the
pass is over."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.matching.kinds import Use, kind_of

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
        ids = arguments[0]
        if ids.ndim == 1:
            ids = ids[None]
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
    sizes = ((2, 5), (3, 7))
    seen = []
    for examples, tokens in sizes:
        with capture_calls(known, examples) as calls:
            target.losses(target.probe(examples, tokens))
        seen.append(calls)
    return {
        name: tuple(call.inputs.ndim for call in seen[0][name])
        for name in seen[0]
        if all(
            call.inputs.shape[0] == examples and call.output.shape[0] == examples
            for calls, (examples, _) in zip(seen, sizes, strict=True)
            for call in calls[name]
        )
    }


def _refuse_batch_norm(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise GradleakError(
                f"{name} is a BatchNorm in training mode, which mixes the examples of a batch: call"
                " eval() on the model."
            )
