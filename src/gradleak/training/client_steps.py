"""What clients do in a training step: the defenses they use, so that the optimiser sees what would
have left them and nothing else; and rounds of several clients, of whose updates the server takes
the mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import (
    Defense,
    Guarantee,
    protect_in_turn,
    refuse_wrong_order,
    want_each_example,
)
from gradleak.core.errors import GradleakError
from gradleak.core.protocol import Protocol
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.differential_privacy import DpSgd


def refuse_unfit(defenses: Sequence[Defense]) -> None:
    """Refuses what cannot be trained under."""
    refuse_wrong_order(defenses)
    late = next((defense for defense in defenses if defense.channel().after_server), None)
    if late is not None:
        raise GradleakError(
            f"{late.name} leaves what clients send as it is, so that training under it would show"
            " no cost: the cost of its noise is that of client_dp with the same noise_multiplier."
        )


def choose_by_chance(examples: int, batch_size: int, streams: Streams) -> list[int]:
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
    update = Update(dict(zip(parameters, stacked, strict=True)), per_example=True)
    return update, torch.stack(values).mean()


def gradient_of_all(parameters: Mapping[str, Tensor]) -> Update:
    """The gradient that a backward pass left; zero where it reached nothing."""
    return Update(
        {
            name: (torch.zeros_like(value) if value.grad is None else value.grad).detach()[None]
            for name, value in parameters.items()
        }
    )


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
    rate = min(1.0, batch_size / examples)
    of_run = (
        replace(one, sampling_rate=rate, steps=steps) if isinstance(one, DpSgd) else one
        for one in defenses
    )
    proven = (guarantee for defense in of_run for guarantee in defense.guarantees())
    return tuple(one for one in proven if one.reading == "whole run")


def refuse_unfit_federation(
    protocol: Protocol, clients: int, defenses: Sequence[Defense], gradient_noise: float
) -> None:
    """Refuses what several clients, or clients that train by themselves, cannot do."""
    if clients < 1:
        raise GradleakError(f"clients counts from 1, not {clients}.")
    if clients == 1 and protocol.one_gradient:
        return
    if gradient_noise:
        raise GradleakError(
            "Noise of clients is a defense of theirs: use --defense gaussian_noise:std=… instead of"
            " --gradient-noise."
        )
    if want_each_example(defenses):
        raise GradleakError(
            f"{defenses[0].name} is accounted for as one party that holds all examples: leave"
            " --clients and --protocol out, or use client_dp, which is a client's own."
        )


def deal_out(batch: Batch, clients: int) -> list[Batch]:
    """The batch in as many shares as there are clients, or examples, if these are fewer; sizes
    differ by one at most."""
    places = torch.arange(batch.lead[0], device=batch.mask.device)
    return [batch[share] for share in torch.tensor_split(places, min(clients, len(places)))]


def mean_update(
    target: Target,
    shares: Sequence[Batch],
    protocol: Protocol,
    defenses: Sequence[Defense],
    streams: Streams,
) -> dict[str, Tensor]:
    """What the server has of a round: the mean of what clients sent, each weighing the same."""
    total: dict[str, Tensor] = {}
    for place, share in enumerate(shares):
        rngs = [streams.child("client", place)]
        sent = protect_in_turn(defenses, protocol.update(target, share[None], rngs=rngs), rngs)
        for name, tensor in sent.tensors.items():
            part = tensor[0].detach() / len(shares)
            total[name] = part if name not in total else total[name] + part
    return total


@torch.no_grad()
def take_round(target: Target, update: dict[str, Tensor], protocol: Protocol) -> None:
    """Leaves a mean gradient for the server's optimiser; of weight differences the server takes
    the mean itself."""
    for name, parameter in target.parameters.items():
        if protocol.one_gradient:
            parameter.grad = update[name].to(parameter)
        else:
            parameter.sub_(update[name].to(parameter))
