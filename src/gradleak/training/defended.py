"""A training step under the defenses clients would use: the optimiser sees what would have left
them, and nothing else."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradleak.core.defense import Defense, Guarantee, protect_in_turn, refuse_wrong_order
from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams
from gradleak.core.update import Update
from gradleak.defenses.dp_sgd import DpSgd


def per_example(defenses: Sequence[Defense]) -> bool:
    """Whether the first defense wants each example's gradient; batches are then drawn by chance,
    as its accountants assume."""
    return bool(defenses) and defenses[0].wants_per_example


def refuse_unfit(defenses: Sequence[Defense]) -> None:
    """Refuses what cannot be trained under."""
    refuse_wrong_order(defenses)
    late = next((defense for defense in defenses if defense.channel().after_server), None)
    if late is not None:
        raise GradleakError(
            f"{late.name} leaves what clients send as it is, so that training under it would show"
            " no cost: the cost of its noise is that of client_dp with the same noise_multiplier."
        )


def chosen_by_chance(examples: int, batch_size: int, streams: Streams) -> list[int]:
    """Every example by itself with probability batch_size / examples (Poisson sampling)."""
    drawn = torch.rand(examples, generator=streams.child("chosen").generator())
    return (drawn < batch_size / examples).nonzero()[:, 0].tolist()


def gradients_of_each(
    parameters: Mapping[str, Tensor], losses: Iterable[Tensor]
) -> tuple[Update, Tensor]:
    """The gradient of every example's loss, one backward pass each, and the losses' mean."""
    rows, values = [], []
    for loss in losses:
        rows.append(torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True))
        values.append(loss.detach())
    stacked = (torch.stack(parts)[None] for parts in zip(*rows, strict=True))
    return (
        Update(dict(zip(parameters, stacked, strict=True)), per_example=True),
        torch.stack(values).mean(),
    )


def gradient_of_all(parameters: Mapping[str, Tensor]) -> Update:
    """The gradient that a backward pass left; zero where it reached nothing."""
    found = {
        name: value.grad if value.grad is not None else torch.zeros_like(value)
        for name, value in parameters.items()
    }
    return Update({name: gradient.detach()[None] for name, gradient in found.items()})


def step_with(
    parameters: Mapping[str, Tensor],
    update: Update,
    defenses: Sequence[Defense],
    streams: Streams,
    scale: float = 1.0,
) -> None:
    """Leaves the defended gradient, times `scale`, for the optimiser."""
    sent = protect_in_turn(defenses, update, [streams])
    for name, parameter in parameters.items():
        parameter.grad = (scale * sent.tensors[name][0]).to(parameter)


def run_guarantees(
    defenses: Sequence[Defense], examples: int, batch_size: int, steps: int
) -> tuple[Guarantee, ...]:
    """What the whole run proves: of DP-SGD at this run's own sampling rate and steps, of others
    as they say themselves."""
    made: list[Guarantee] = []
    for defense in defenses:
        if isinstance(defense, DpSgd):
            defense = replace(defense, sampling_rate=min(1.0, batch_size / examples), steps=steps)
        made += [one for one in defense.guarantees() if one.reading == "whole run"]
    return tuple(made)
