"""Metrics of pictures. What computes them is imported when it is asked for: naming a metric
loads no model library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradleak.core.metric import Metric, Pair
from gradleak.core.registry import Medium, register

HIGHEST_PSNR = 100.0  # decibels of a guess that is right to the last bit, which would be infinite
PAIRS_AT_ONCE = 50  # of LPIPS


class PictureMetric(Metric):
    """Abstract: compares pictures."""

    medium: ClassVar[Medium] = "image"


@register("metric", "mse")
@dataclass(frozen=True)
class MeanSquaredError(PictureMetric):
    """Mean squared difference of pixels between 0 and 1: 0 is the same picture."""

    unit: ClassVar[str] = "squared pixel"
    direction: ClassVar[str] = "lower"

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        from gradleak.metrics.picture_distances import squared_error, values_of

        return [squared_error(*values_of(pair)) for pair in pairs]


@register("metric", "psnr")
@dataclass(frozen=True)
class PeakSignalToNoise(PictureMetric):
    """Ten times the decimal logarithm of 1 over the mean squared difference; 100 where there is
    none."""

    unit: ClassVar[str] = "decibel"

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [
            min(HIGHEST_PSNR, -10 * math.log10(error)) if error else HIGHEST_PSNR
            for error in MeanSquaredError().values(pairs)
        ]


@register("metric", "ssim")
@dataclass(frozen=True)
class StructuralSimilarity(PictureMetric):
    """Likeness of means, spreads and structure in small windows: 1 is the same picture, 0 has
    nothing in common."""

    unit: ClassVar[str] = "similarity"
    cites: ClassVar[str] = "Wang et al., IEEE Transactions on Image Processing 2004"

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        from gradleak.metrics.picture_distances import structural_similarity, values_of

        return [structural_similarity(*values_of(pair)) for pair in pairs]


@register("metric", "lpips")
@dataclass(frozen=True)
class Lpips(PictureMetric):
    """Weighted difference of VGG-16's features: 0 is the same picture, about 0.7 nothing in
    common. Needs weights, see docs."""

    unit: ClassVar[str] = "perceptual distance"
    direction: ClassVar[str] = "lower"
    cites: ClassVar[str] = "Zhang et al., CVPR 2018, version 0.1, VGG"
    darkest: ClassVar[float] = -1.0  # what black is for the network; white is 1

    def values(self, pairs: Sequence[Pair]) -> list[float | None]:
        import torch

        from gradleak.metrics.picture_distances import (
            load_weights,
            perceptual_distance,
            values_of,
        )

        found: list[float | None] = []
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            some = zip(*map(values_of, pairs[start : start + PAIRS_AT_ONCE]), strict=True)
            both = [self.darkest + (1 - self.darkest) * torch.stack(side) for side in some]
            found += perceptual_distance(both[0], both[1], load_weights()).tolist()
        return found


@register("metric", "lpips_legacy")
@dataclass(frozen=True)
class LpipsLegacy(Lpips):
    """LPIPS of pixels from 0 to 1, as Learning to Invert's notebook feeds a network that wants
    −1 to 1: to compare only."""

    cites: ClassVar[str] = "Wu et al., UAI 2023, released code"
    darkest: ClassVar[float] = 0.0
