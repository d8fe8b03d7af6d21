"""Pictures as tensors and back."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.picture import Picture


def picture_of(values: Float[Tensor, "channels height width"]) -> Picture:
    """From numbers between 0 and 1, rounded to the nearest of 256; what lies outside is brought
    to the edge."""
    rounded = (
        (values.detach().cpu().clamp(0, 1) * 255)
        .round()
        .to(torch.uint8)
        .movedim(0, -1)
        .contiguous()
    )
    height, width, channels = rounded.shape
    return Picture((height, width, channels), rounded.numpy().tobytes())


def pixels_of(picture: Picture) -> Float[Tensor, "channels height width"]:
    """Its numbers between 0 and 1."""
    array = np.frombuffer(picture.pixels, dtype=np.uint8).reshape(picture.shape)
    return torch.from_numpy(array.copy()).movedim(-1, 0).float() / 255
