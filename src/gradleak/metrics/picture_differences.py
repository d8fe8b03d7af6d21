"""Differences of pictures in pixels between 0 and 1: by pixel, and by window."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gradleak.core.metric import Pair
from gradleak.core.pixels import pixels_of

WINDOW, WINDOW_SPREAD = 11, 1.5  # of SSIM, in pixels
STABILISERS = (0.01**2, 0.03**2)


def values_of(
    pair: Pair,
) -> tuple[Float[Tensor, "channels height width"], Float[Tensor, "channels height width"]]:
    """Secret and guess as numbers between 0 and 1."""
    secret, guess = pair.pictures
    return pixels_of(secret), pixels_of(guess)


def squared_error(secret: Tensor, guess: Tensor) -> float:
    """The mean over all pixels and channels."""
    return float((secret.double() - guess.double()).square().mean())


def structural_similarity(
    secret: Float[Tensor, "channels height width"], guess: Float[Tensor, "channels height width"]
) -> float:
    """Mean over windows that lie within the picture; a window is a Gaussian of 11 × 11, or
    smaller in a smaller picture."""
    size = min(WINDOW, (min(secret.shape[1:]) - 1) // 2 * 2 + 1)
    places = torch.arange(size, dtype=torch.float64) - size // 2
    row = torch.exp(-places.square() / (2 * WINDOW_SPREAD**2))
    window = torch.outer(row, row) / row.sum() ** 2

    def averaged(values: Tensor) -> Tensor:
        return F.conv2d(values[:, None], window[None, None])

    x, y = secret.double(), guess.double()
    mean_x, mean_y = averaged(x), averaged(y)
    spread_x, spread_y = averaged(x * x) - mean_x**2, averaged(y * y) - mean_y**2
    together = averaged(x * y) - mean_x * mean_y
    first, second = STABILISERS
    top = (2 * mean_x * mean_y + first) * (2 * together + second)
    return float((top / ((mean_x**2 + mean_y**2 + first) * (spread_x + spread_y + second))).mean())
