"""What leaves clients, and sums over it in a fixed order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.parts import Part

PIECE = 2**18  # entries of a row that are in double precision at a time


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
            {name: _map_clients(change, tensor) for name, tensor in self.tensors.items()},
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

    def scale(self, factors: Tensor) -> "Update":
        """Every client (every example, if per example) multiplied by a factor of its own."""
        return Update(
            {
                name: tensor * factors.view(*factors.shape, *[1] * (tensor.ndim - factors.ndim))
                for name, tensor in self.tensors.items()
            },
            self.per_example,
        )

    def norms(self) -> Mapping[str, Tensor]:
        """The norm of each tensor of each client."""
        return {
            name: sum_squares(tensor, 1).sqrt().to(tensor.dtype)
            for name, tensor in self.tensors.items()
        }


def _map_clients(change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """All clients in one go where `change` is made of tensor operations alone; one after the
    other where it looks at values."""
    try:
        return torch.vmap(change)(tensor)
    except (RuntimeError, ValueError):
        return torch.stack([change(row) for row in tensor])


def stack_by_name(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of several clients, or examples, along a new first axis."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# Sums below are the same bits on every processor, in whatever company a row is summed. A library's
# sum may take a row alone in another order than among others, and every processor has its own
# blocks. Additions entry by entry are rounded by the standard in one way only, so halves are folded
# onto each other until one entry is left: the order follows from the length alone, and errors grow
# with its logarithm (pairwise summation, Higham 2002, §4.2).


def sum_squares(tensor: Tensor, axes: int) -> Float[Tensor, "..."]:
    """The sum of squares over all but the first axes, in double precision, in a fixed order."""
    rows = tensor.detach().reshape(*tensor.shape[:axes], -1)
    total = torch.zeros(rows.shape[:-1], dtype=torch.float64, device=rows.device)
    for piece in torch.split(rows, PIECE, dim=-1):
        total = total + _fold(piece.double().square())
    return total


def sum_over(tensor: Tensor, axis: int) -> Tensor:
    """The sum over one axis, one entry of it after the other."""
    first, *others = tensor.unbind(axis)
    total = first
    for other in others:
        total = total + other
    return total


def _fold(values: Float[Tensor, "... entries"]) -> Float[Tensor, "..."]:
    while (count := values.shape[-1]) > 1:
        half = (count + 1) // 2
        values = torch.cat(
            [values[..., : count - half] + values[..., half:], values[..., count - half : half]],
            dim=-1,
        )
    return values.sum(-1)  # of one entry, or of none
