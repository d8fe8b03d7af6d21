"""In how many bits an inverter multiplies; gradients are always made in float32."""

from contextlib import AbstractContextManager
from typing import Literal

import torch

from gradleak.matching.rough import products_of_10_bits

Precision = Literal["float32", "tf32", "bfloat16"]


def as_float(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Within it float32 products on a GPU are made in that precision."""
    return products_of_10_bits(precision == "tf32" and device.type == "cuda")


def dtype_of(precision: str, device: torch.device) -> torch.dtype:
    """What products are asked for in; a CPU gains nothing from fewer bits."""
    return torch.bfloat16 if precision == "bfloat16" and device.type == "cuda" else torch.float32


def peak_memory(device: torch.device) -> int | None:
    """The most bytes held at once on a GPU so far; nobody counts them on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
