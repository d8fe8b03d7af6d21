"""What leaves clients."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core.parts import Part
from gradleak.core.sums import sum_over, sum_squares


@dataclass(frozen=True, eq=False)
class Update:
    """Named tensors, each with a leading clients axis (and an examples axis after it if
    `per_example`)."""

    tensors: Mapping[str, Tensor]
    per_example: bool = False

    @property
    def clients(self) -> int:
        return int(next(iter(self.tensors.values())).shape[0])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Update":
        """The same update with every tensor of every client changed on its own: `change` never
        sees two clients."""
        return Update(
            {name: _mapped(change, tensor) for name, tensor in self.tensors.items()},
            self.per_example,
        )

    def select(self, names: Iterable[str]) -> "Update":
        """Only the named tensors."""
        return Update({name: self.tensors[name] for name in names}, self.per_example)

    def cut(self, parts: Iterable[Part]) -> "Update":
        """Only these parts of an update of whole parameters; slices of one parameter become
        tensors of their own."""
        return Update(
            {part.name: part.of(self.tensors[part.parameter]) for part in parts}, self.per_example
        )

    def detached_clone(self) -> "Update":
        """Copies that share neither history nor storage with this update."""
        return Update(
            {name: tensor.detach().clone() for name, tensor in self.tensors.items()},
            self.per_example,
        )

    def whole_norms(self) -> Tensor:
        """The norm over all tensors together, [clients], or [clients, examples] if per example;
        the same bits in any company."""
        axes = 2 if self.per_example else 1
        dtype = next(iter(self.tensors.values())).dtype
        return (
            sum_over(
                torch.stack([sum_squares(tensor, axes) for tensor in self.tensors.values()]), 0
            )
            .sqrt()
            .to(dtype)
        )

    def scaled(self, factors: Tensor) -> "Update":
        """Every client (every example, if per example) multiplied by a factor of its own."""
        tensors = self.tensors.items()
        return Update(
            {
                name: tensor * factors.view(*factors.shape, *[1] * (tensor.ndim - factors.ndim))
                for name, tensor in tensors
            },
            self.per_example,
        )

    def norms(self) -> Mapping[str, Tensor]:
        """The norm of each tensor of each client."""
        return {
            name: sum_squares(tensor, 1).sqrt().to(tensor.dtype)
            for name, tensor in self.tensors.items()
        }


def _mapped(change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """All clients in one go where `change` is made of tensor operations alone; one after the
    other where it looks at values."""
    try:
        return torch.vmap(change)(tensor)
    except (RuntimeError, ValueError):
        return torch.stack([change(row) for row in tensor])
