"""FedSGD: a client sends one gradient of its mean loss."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.protocol import Protocol
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.protocols.dropout import dropout_from


@register("protocol", "fedsgd")
@dataclass(frozen=True)
class FedSGD(Protocol):
    """The gradient of the mean loss over the client's batch (McMahan et al. 2017)."""

    one_gradient = True
    cites = "McMahan et al., AISTATS 2017"

    dropout: bool = False  # as real clients train; the papers' attacks, and ours, compute without

    def update(
        self,
        target: Target,
        batches: Batch,
        per_example: bool = False,
        rngs: Sequence[Streams] = (),
    ) -> Update:
        """One plain backward pass a client (an example, if per example): the slow reference
        everything fast is tested against."""
        rows = []
        for client in range(batches.lead[0]):
            batch = batches[client]
            stream = rngs[client].child("dropout") if rngs and self.dropout else None
            if per_example:
                streams = [
                    None if stream is None else stream.child(place)
                    for place in range(batch.lead[0])
                ]
                examples = [
                    self._gradient(target, batch[place : place + 1], one)
                    for place, one in enumerate(streams)
                ]
                rows.append(
                    {
                        name: torch.stack([example[name] for example in examples])
                        for name in examples[0]
                    }
                )
            else:
                rows.append(self._gradient(target, batch, stream))
        return Update(
            {name: torch.stack([row[name] for row in rows]) for name in rows[0]}, per_example
        )

    def _gradient(self, target: Target, batch: Batch, stream: Streams | None) -> dict[str, Tensor]:
        # Copies that ask for gradients: the target's own parameters never do, and never keep a
        # .grad.
        copies = {
            name: value.detach().requires_grad_() for name, value in target.parameters.items()
        }
        with nullcontext() if stream is None else dropout_from(stream, target.module):
            loss = target.losses(batch, copies).mean()
        gradients = torch.autograd.grad(
            loss, list(copies.values()), create_graph=batch.asks_for_gradients, allow_unused=True
        )
        return {
            name: torch.zeros_like(copy) if gradient is None else gradient
            for (name, copy), gradient in zip(copies.items(), gradients, strict=True)
        }
