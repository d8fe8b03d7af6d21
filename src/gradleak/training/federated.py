"""A round of federated training: every client computes on its share, defends and sends; the
server takes the mean."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.defense import Defense, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.protocol import Protocol
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.training.defended import per_example


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
    if per_example(defenses):
        raise GradleakError(
            f"{defenses[0].name} is accounted for as one party that holds all examples: leave"
            " --clients and --protocol out, or use client_dp, which is a client's own."
        )


def dealt(batch: Batch, clients: int) -> list[Batch]:
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
