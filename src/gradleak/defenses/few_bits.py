"""Fewer bits an entry: half precision, a few levels at random, signs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gradleak.core.defense import Channel, Defense
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.update import Update

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@register("defense", "rounding")
@dataclass(frozen=True)
class Rounding(Defense):
    """Rounds every entry to 16 bits as it leaves, as mixed-precision training and compressed
    transport do; not for privacy."""

    dtype: Literal["bf16", "fp16"] = "bf16"

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        sent = {
            name: tensor.to(DTYPES[self.dtype]).to(tensor.dtype)
            for name, tensor in update.tensors.items()
        }
        return Update(sent, update.per_example)

    def channel(self) -> Channel:
        precision = torch.finfo(DTYPES[self.dtype])
        return Channel(
            rounding=precision.eps, smallest_step=precision.smallest_normal * precision.eps
        )


@register("defense", "quantisation")
@dataclass(frozen=True)
class Quantisation(Defense):
    """Rounds every entry up or down to one of a few levels at random, so that its mean is right
    (QSGD)."""

    bits: int = 4  # one of them is the sign: 7 levels above zero
    bucket: int = 512  # entries that share a scale, as in the paper's experiments
    # The scale is a bucket's largest entry, as in the paper's experiments; its theorems have the
    # bucket's norm.
    cites = "Alistarh et al., NeurIPS 2017"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(
                f"bits must lie between 2 (one level and a sign) and 16, not {self.bits}."
            )
        if self.bucket < 1:
            raise ValueError(f"bucket counts entries from 1, not {self.bucket}.")

    @property
    def levels(self) -> int:
        """How many there are above zero."""
        return int(2 ** (self.bits - 1)) - 1

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        generators = [rng.generator() for rng in rngs]
        rounded = {
            name: torch.stack(
                [
                    self._round(row, generator)
                    for row, generator in zip(tensor, generators, strict=True)
                ]
            )
            for name, tensor in update.tensors.items()
        }
        return Update(rounded, update.per_example)

    def _round(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        flat = tensor.flatten()
        buckets = F.pad(flat, (0, -len(flat) % self.bucket)).view(-1, self.bucket)
        steps = (buckets.abs().amax(1, keepdim=True) / self.levels).clamp_min(
            torch.finfo(tensor.dtype).tiny
        )
        drawn = torch.rand(buckets.shape, generator=generator).to(buckets)
        whole = (buckets.abs() / steps + drawn).floor().clamp(max=self.levels)
        return (buckets.sign() * whole * steps).flatten()[: len(flat)].view(tensor.shape)

    def channel(self) -> Channel:
        return Channel(quantisation_levels=self.levels, randomised=True)


@register("defense", "sign")
@dataclass(frozen=True)
class Sign(Defense):
    """Sends the sign of every entry: 1, -1, or 0 where it is exactly zero (signSGD)."""

    cites = "Bernstein et al., ICML 2018"

    def protect(self, update: Update, rngs: Sequence[Streams]) -> Update:
        return update.map(torch.sign)

    def channel(self) -> Channel:
        return Channel(signs_only=True)
