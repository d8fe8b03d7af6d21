"""What pictures are like in the mean: the blind guess of an attack on pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.dataset import Dataset
from gradleak.core.errors import GradleakError
from gradleak.core.picture import Picture
from gradleak.core.pixels import pixels_of
from gradleak.core.prior import PicturePrior, PicturePriorSpec
from gradleak.core.ranges import Count
from gradleak.core.registry import register
from gradleak.core.specs import resolve
from gradleak.core.streams import Streams
from gradleak.core.target import Target


class OnePicture(PicturePrior):
    """The same picture, whatever is asked."""

    def __init__(self, picture: Float[Tensor, "channels height width"]) -> None:
        self.picture = picture

    def likely(self) -> Float[Tensor, "channels height width"]:
        return self.picture

    def draw(self, streams: Streams) -> Float[Tensor, "channels height width"]:
        return self.picture


class PublicPictures(PicturePrior):
    """Pictures like the private ones: their mean, and each of them as likely as the next."""

    def __init__(self, pictures: Sequence[Picture]) -> None:
        self.pictures = pictures
        self.mean = torch.stack([pixels_of(picture) for picture in pictures]).mean(0)

    def likely(self) -> Float[Tensor, "channels height width"]:
        return self.mean

    def draw(self, streams: Streams) -> Float[Tensor, "channels height width"]:
        share = float(torch.rand(1, generator=streams.generator()))
        return pixels_of(self.pictures[int(share * len(self.pictures))])


@register("prior", "grey")
@dataclass(frozen=True)
class Grey(PicturePriorSpec):
    """Even grey, halfway between black and white."""

    def open(self, target: Target) -> PicturePrior:
        return OnePicture(torch.full(shape_of(target), 0.5))


@register("prior", "mean_picture")
@dataclass(frozen=True)
class MeanPicture(PicturePriorSpec):
    """The mean of public pictures: of all single guesses the one with the least squared error on
    them."""

    data: str = "shapes:part=public"  # one line
    limit: Count = 10_000  # pictures

    def open(self, target: Target) -> PicturePrior:
        public = _public(self.data, self.limit)
        shape = tuple(public.mean.shape)
        if shape != shape_of(target):
            wanted = shape_of(target)
            found = f"The pictures of {self.data} have shape {shape}"
            raise GradleakError(f"{found}, the target's {wanted}.")
        return public


def shape_of(target: Target) -> tuple[int, int, int]:
    """Channels, height and width of what the target reads."""
    pixels = target.probe(1, 1).pixels
    if pixels is None:
        raise GradleakError(
            "This prior is of pictures, and the target reads text: use --prior auto."
        )
    return int(pixels.shape[1]), int(pixels.shape[2]), int(pixels.shape[3])


@cache
def _public(line: str, limit: int) -> PublicPictures:
    data = resolve("dataset", line)
    assert isinstance(data, Dataset)
    pictures = [one.content for one in data.load()[:limit] if isinstance(one.content, Picture)]
    if not pictures:
        raise GradleakError(f"{line} holds no pictures.")
    return PublicPictures(pictures)
