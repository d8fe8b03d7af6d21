"""Updates sent in half precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

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
