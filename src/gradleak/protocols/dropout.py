"""Dropout as it is on a client that trains: masks from the client's own stream, the same on
every device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradleak.core.errors import GradleakError
from gradleak.core.streams import Streams


@contextmanager
def dropout_from(stream: Streams, module: nn.Module) -> Iterator[None]:
    """Inside, the model trains with dropout on; after it, model and global generators are as
    they were."""
    before = {part: part.training for part in module.modules()}
    masks = _Masks(stream.child("masks").generator())
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


class _Masks(TorchFunctionMode):
    """Every dropout, of a module or not, draws from one generator. On the CPU: a GPU's own masks
    differ from card to card."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.drawn = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is F.dropout:
            return self._dropped(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _dropped(
        self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return values
        self.drawn += 1
        kept = torch.rand(values.shape, generator=self.generator) >= p
        return values * kept.to(values) / (1 - p) if p < 1 else values * 0
