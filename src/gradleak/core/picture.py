"""A picture as data: what a client holds, and what an attack guesses."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Picture:
    """Eight bits a channel, rows from the top, channels of a pixel side by side."""

    shape: tuple[int, int, int]  # height, width, channels
    pixels: bytes

    def __post_init__(self) -> None:
        height, width, channels = self.shape
        if len(self.pixels) != height * width * channels:
            raise ValueError(f"a picture of shape {self.shape} has {height * width * channels} bytes, not {len(self.pixels)}")

    @staticmethod
    def of(values: Float[Tensor, "channels height width"]) -> "Picture":
        """From numbers between 0 and 1, rounded to the nearest of 256; what lies outside is brought to the edge."""
        rounded = (values.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).contiguous()
        height, width, channels = rounded.shape
        return Picture((height, width, channels), rounded.numpy().tobytes())

    def values(self) -> Float[Tensor, "channels height width"]:
        """Its numbers between 0 and 1."""
        array = np.frombuffer(self.pixels, dtype=np.uint8).reshape(self.shape)
        return torch.from_numpy(array.copy()).movedim(-1, 0).float() / 255
