"""Comparing pictures pixel by pixel and window by window; pixels lie between 0 and 1."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gradleak.core.metric import Metric, Pair
from gradleak.core.registry import Medium, register

HIGHEST_PSNR = 100.0  # decibels of a guess that is right to the last bit, which would be infinite
WINDOW, WINDOW_SPREAD = 11, 1.5  # of SSIM, in pixels
STABILISERS = (0.01**2, 0.03**2)


@register("metric", "mse")
@dataclass(frozen=True)
class MeanSquaredError(Metric):
    """Mean squared difference of pixels between 0 and 1: 0 is the same picture."""

    medium: ClassVar[Medium] = "image"
    unit: ClassVar[str] = "squared pixel"
    direction: ClassVar[str] = "lower"

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [squared_error(*values_of(pair)) for pair in pairs]


@register("metric", "psnr")
@dataclass(frozen=True)
class PeakSignalToNoise(Metric):
    """Ten times the decimal logarithm of 1 over the mean squared difference; 100 where there is none."""

    medium: ClassVar[Medium] = "image"
    unit: ClassVar[str] = "decibel"

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        errors = [squared_error(*values_of(pair)) for pair in pairs]
        return [HIGHEST_PSNR if error == 0 else min(HIGHEST_PSNR, -10 * math.log10(error)) for error in errors]


@register("metric", "ssim")
@dataclass(frozen=True)
class StructuralSimilarity(Metric):
    """Likeness of means, spreads and structure in small windows: 1 is the same picture, 0 has nothing in common."""

    medium: ClassVar[Medium] = "image"
    unit: ClassVar[str] = "similarity"
    cites: ClassVar[str] = "Wang et al., IEEE Transactions on Image Processing 2004"

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [structural_similarity(*values_of(pair)) for pair in pairs]


def values_of(pair: Pair) -> tuple[Float[Tensor, "channels height width"], Float[Tensor, "channels height width"]]:
    """Secret and guess as numbers between 0 and 1."""
    assert pair.secret.picture is not None
    assert pair.guess.picture is not None
    return pair.secret.picture.values(), pair.guess.picture.values()


def squared_error(secret: Tensor, guess: Tensor) -> float:
    """The mean over all pixels and channels."""
    return float((secret.double() - guess.double()).square().mean())


def structural_similarity(secret: Float[Tensor, "channels height width"], guess: Float[Tensor, "channels height width"]) -> float:
    """Mean over windows that lie within the picture; a window is a Gaussian of 11 × 11, or smaller in a smaller picture."""
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
