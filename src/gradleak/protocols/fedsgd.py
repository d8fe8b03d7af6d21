"""FedSGD: a client sends one gradient of its mean loss, with dropout on or off.

Dropout's masks come from the client's own stream, the same on every device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.protocol import Protocol, differentiate_loss
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update, stack_by_name


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
        clients = range(batches.lead[0])
        streams = [rngs[one].child("dropout") if rngs and self.dropout else None for one in clients]
        compute = self._per_example if per_example else self._gradient
        rows = [compute(target, batches[one], streams[one]) for one in clients]
        return Update(stack_by_name(rows), per_example)

    def _per_example(
        self, target: Target, batch: Batch, stream: Streams | None
    ) -> dict[str, Tensor]:
        return stack_by_name(
            [
                self._gradient(target, batch[place : place + 1], stream and stream.child(place))
                for place in range(batch.lead[0])
            ]
        )

    def _gradient(self, target: Target, batch: Batch, stream: Streams | None) -> dict[str, Tensor]:
        start = {name: value.detach() for name, value in target.parameters.items()}
        with nullcontext() if stream is None else dropout_from(stream, target.module):
            return differentiate_loss(target, batch, start, batch.asks_for_gradients)


@contextmanager
def dropout_from(stream: Streams, module: nn.Module) -> Iterator[None]:
    """Inside, the model trains with dropout on; after it, model and global generators are as
    they were."""
    before = {part: part.training for part in module.modules()}
    masks = DropoutMasks(stream.child("masks").generator())
    # Whatever else a model draws in training (a layer left out, say) comes from the global
    # generator: it is lent to the stream.
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(stream.child("others").generator().get_state())
        try:
            for part in before:
                # Its averages would change for good
                part.training = not isinstance(part, nn.modules.batchnorm._BatchNorm)
            with masks:
                yield
        finally:
            for part, training in before.items():
                part.training = training
    if not masks.drawn:
        raise GradleakError(
            "This model has no dropout (none with p above 0 is in its forward pass): a client"
            " trains it without. Leave dropout=true out."
        )


class DropoutMasks(TorchFunctionMode):
    """Every dropout, of a module or not, draws from one generator. On the CPU: a GPU's own masks
    differ from card to card."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator, self.drawn = generator, 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        called = self._drop if function is F.dropout else function
        return called(*args, **(kwargs or {}))

    def _drop(
        self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return values
        self.drawn += 1
        kept = torch.rand(values.shape, generator=self.generator) >= p
        return values * kept.to(values) / (1 - p) if p < 1 else values * 0
