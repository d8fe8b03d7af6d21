"""What the attacker's own clients hold where pictures are attacked: public ones, changed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from gradleak.attacks.learning_to_invert.medium import (
    ClientSource,
    PublicExamples,
    draw_rows,
    number_labels,
)
from gradleak.core.batch import Batch, Example
from gradleak.core.errors import GradleakError
from gradleak.core.picture import Picture
from gradleak.core.target import Target


@dataclass(frozen=True, eq=False)
class PublicPictures(PublicExamples):
    """Public pictures, eight bits a channel, and their labels, where the target is."""

    pixels: UInt8[Tensor, "pictures channels height width"]
    labels: Int[Tensor, "pictures"]
    dtype: torch.dtype = torch.float32  # of the pictures a client is given

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> list[int]:
        return list(self.pixels.shape[1:])

    def __getitem__(self, rows: slice | Tensor) -> "PublicPictures":
        return replace(self, pixels=self.pixels[rows], labels=self.labels[rows])

    @property
    def mean(self) -> Float[Tensor, "channels height width"]:
        """The mean picture, between 0 and 1."""
        return (self.pixels.float() / 255).mean(0)

    def batch(self, examples: int) -> Batch:
        """Returns all pictures, in order, as clients of so many hold them; a rest is left out."""
        clients = len(self) // examples
        whole = self[: clients * examples]
        pixels = (whole.pixels.to(self.dtype) / 255).view(clients, examples, *self.shape)
        return Batch.of_pixels(pixels, whole.labels.view(clients, examples))


def read_pictures(target: Target, public: Sequence[Example]) -> PublicPictures:
    """Returns the public pictures as this target reads them."""
    pictures = [one.content for one in public if isinstance(one.content, Picture)]
    if not pictures:
        raise GradleakError(
            "Learning to Invert needs public pictures to learn from: add --public DATA."
        )
    probe = target.probe(1, 1).pixels
    assert probe is not None
    channels, height, width = probe.shape[1:]
    shape = (height, width, channels)
    odd = next((picture.shape for picture in pictures if picture.shape != shape), None)
    if odd is not None:
        raise GradleakError(
            f"A public picture has shape {odd} (height, width, channels), and the target reads"
            f" {shape}."
        )
    flat = np.frombuffer(b"".join(picture.pixels for picture in pictures), dtype=np.uint8).copy()
    pixels = torch.from_numpy(flat).view(-1, *shape).movedim(-1, 1).contiguous()
    labels = number_labels(target, public, range(len(public)))
    return PublicPictures(pixels.to(target.device), labels, target.dtype)


@dataclass(frozen=True, eq=False)
class ChangedPictures(ClientSource):
    """Clients that hold pictures drawn with replacement, changed so that there are more of them."""

    gallery: PublicPictures
    classes: int
    relabelled: float = 0.0  # the share that gets a label drawn at random
    mirrored: bool = False  # half of them, left to right
    shifted: int = 0  # pixels down and right, or up and left, at most; the edge is repeated

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        drawn = draw_rows(self.gallery, clients * examples, generator)
        pixels, labels, size, device = drawn.pixels, drawn.labels, (len(drawn),), generator.device
        if self.relabelled:
            others = torch.randint(self.classes, size, generator=generator, device=device)
            chosen = torch.rand(size, generator=generator, device=device) < self.relabelled
            labels = torch.where(chosen, others, labels)
        if self.mirrored:
            turned = torch.rand(size, generator=generator, device=device) < 0.5
            pixels = torch.where(turned[:, None, None, None], pixels.flip(-1), pixels)
        if self.shifted:
            least, most = -self.shifted, self.shifted + 1
            by = torch.randint(least, most, (2, *size), generator=generator, device=device)
            pixels = move(pixels, by)
        return replace(drawn, pixels=pixels, labels=labels).batch(examples)


def move(
    pixels: UInt8[Tensor, "pictures channels height width"], by: Int[Tensor, "2 pictures"]
) -> UInt8[Tensor, "pictures channels height width"]:
    """Returns each picture moved by its rows and columns, with what stood at the edge repeated."""
    pictures, channels, height, width = pixels.shape
    every, channel = (torch.arange(size, device=pixels.device) for size in (pictures, channels))
    rows = (torch.arange(height, device=pixels.device) - by[0, :, None]).clamp(0, height - 1)
    columns = (torch.arange(width, device=pixels.device) - by[1, :, None]).clamp(0, width - 1)
    every, channel = every[:, None, None, None], channel[:, None, None]
    return pixels[every, channel, rows[:, None, :, None], columns[:, None, None, :]]
