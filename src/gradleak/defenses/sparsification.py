"""Entries that are not sent: zeros by chance, or in the place of all but the largest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from gradleak.core.defense import Channel, Defense, Survivors
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update


@register("defense", "masking")
@dataclass(frozen=True)
class Masking(Defense):
    """Sets each entry to zero with a probability, the others stay as they are (LAMP's "zeroed
    %")."""

    fraction_zeroed: float = 0.9
    cites = "LAMP Table 8"

    def __post_init__(self) -> None:
        if not 0 <= self.fraction_zeroed < 1:
            raise ValueError(
                f"fraction_zeroed must be at least 0 and under 1, not {self.fraction_zeroed}."
            )

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        generators = [rng.generator() for rng in rngs]

        def mask(tensor: Tensor) -> Tensor:
            drawn = [torch.rand(tensor.shape[1:], generator=generator) for generator in generators]
            return tensor * (torch.stack(drawn) >= self.fraction_zeroed).to(tensor.device)

        return Update(
            {name: mask(tensor) for name, tensor in update.tensors.items()}, update.per_example
        )

    def channel(self) -> Channel:
        on = self.fraction_zeroed > 0
        return Channel(survivors=Survivors.SEEN if on else Survivors.ALL, randomised=on)


@register("defense", "pruning")
@dataclass(frozen=True)
class Pruning(Defense):
    """Sends only the largest entries and zero for the others, chosen in each tensor or over the
    whole update."""

    fraction_kept: float = 0.01  # 99 % pruned
    scope: Literal["tensor", "update"] = "tensor"
    cites = "Aji & Heafield, EMNLP 2017; Zhu et al., NeurIPS 2019"

    def __post_init__(self) -> None:
        refuse_fraction(self.fraction_kept)

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return keep_largest(update, self.fraction_kept, together=self.scope == "update")

    def channel(self) -> Channel:
        return survivors_seen(self.fraction_kept)


def keep_largest(update: Update, fraction_kept: float, together: bool) -> Update:
    """Zero for all but that share of the largest entries of each tensor, or of all tensors
    together."""
    if not together:
        return update.map(lambda tensor: tensor * largest([tensor], fraction_kept)[0])

    def prune_one(tensors: list[Tensor]) -> list[Tensor]:
        return [
            tensor * kept
            for tensor, kept in zip(tensors, largest(tensors, fraction_kept), strict=True)
        ]

    # All clients in one go: an inverter plays hundreds of them in every step.
    pruned = torch.vmap(prune_one)(list(update.tensors.values()))
    return Update(dict(zip(update.tensors, pruned, strict=True)), update.per_example)


def largest(tensors: list[Tensor], fraction_kept: float) -> list[Bool[Tensor, "..."]]:
    """Which entries are among that share of the largest over all given tensors; at least one is."""
    sizes = torch.cat([tensor.detach().abs().flatten() for tensor in tensors])
    chosen = sizes.topk(max(1, round(fraction_kept * len(sizes))), sorted=False).indices
    kept = torch.zeros_like(sizes, dtype=torch.bool).scatter(
        0, chosen, torch.ones_like(chosen, dtype=torch.bool)
    )
    pieces = torch.split(kept, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def survivors_seen(fraction_kept: float) -> Channel:
    """Zeros show what was left out; of everything kept there is nothing to show."""
    return Channel(survivors=Survivors.SEEN if fraction_kept < 1 else Survivors.ALL)


def refuse_fraction(fraction_kept: float) -> None:
    if not 0 < fraction_kept <= 1:
        raise ValueError(
            f"fraction_kept must be above 0 and at most 1, not {fraction_kept}: 99 % pruned is 0.01"
            " kept."
        )


@register("defense", "top_k")
@dataclass(frozen=True)
class TopK(Defense):
    """Sends the k largest entries of the whole update, k a share of all: `pruning` with
    scope=update, under its usual name."""

    fraction_kept: float = 0.1
    cites = "Aji & Heafield, EMNLP 2017; Stich et al., NeurIPS 2018"

    def __post_init__(self) -> None:
        refuse_fraction(self.fraction_kept)

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return keep_largest(update, self.fraction_kept, together=True)

    def channel(self) -> Channel:
        return survivors_seen(self.fraction_kept)
