"""What pictures are like in the mean: the blind guess of an attack on pictures."""

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.pixels import pixels_of
from gradleak.core.prior import PicturePrior, PicturePriorSpec
from gradleak.core.ranges import Count
from gradleak.core.registry import register
from gradleak.core.specs import resolve
from gradleak.core.target import Target


class OnePicture(PicturePrior):
    """The same picture, whatever is asked."""

    def __init__(self, picture: Float[Tensor, "channels height width"]) -> None:
        self.picture = picture

    def likely(self) -> Float[Tensor, "channels height width"]:
        return self.picture


@register("prior", "grey")
@dataclass(frozen=True)
class Grey(PicturePriorSpec):
    """Even grey, halfway between black and white."""

    def open(self, target: Target) -> PicturePrior:
        return OnePicture(torch.full(shape_of(target), 0.5))


@register("prior", "mean_picture")
@dataclass(frozen=True)
class MeanPicture(PicturePriorSpec):
    """The mean of public pictures: of all single guesses the one with the least squared error on them."""

    data: str = "shapes:part=public"  # one line
    limit: Count = 10_000  # pictures

    def open(self, target: Target) -> PicturePrior:
        mean = _mean(self.data, self.limit)
        if tuple(mean.shape) != shape_of(target):
            raise GradleakError(f"The pictures of {self.data} have shape {tuple(mean.shape)}, the target's {shape_of(target)}.")
        return OnePicture(mean)


def shape_of(target: Target) -> tuple[int, int, int]:
    """Channels, height and width of what the target reads."""
    pixels = target.probe(1, 1).pixels
    if pixels is None:
        raise GradleakError("This prior is of pictures, and the target reads text: use --prior auto.")
    return int(pixels.shape[1]), int(pixels.shape[2]), int(pixels.shape[3])


@cache
def _mean(line: str, limit: int) -> Tensor:
    data = resolve("dataset", line)
    assert isinstance(data, Dataset)
    pictures = [example.picture for example in data.load()[:limit] if example.picture is not None]
    if not pictures:
        raise GradleakError(f"{line} holds no pictures.")
    return torch.stack([pixels_of(picture) for picture in pictures]).mean(0)
