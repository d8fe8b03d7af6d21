"""What the attacker's own clients hold where pictures are attacked: public pictures."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from gradleak.attacks.learning_to_invert.texts import HELD_OUT, MOST_HELD_OUT
from gradleak.core.batch import Batch, Example
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target


@dataclass(frozen=True)
class Changes:
    """What an attacker does to its pictures so that there are more of them."""

    classes: int
    relabelled: float = 0.0  # the share that gets a label drawn at random
    mirrored: bool = False  # half of them, left to right
    shifted: int = 0  # each by up to so many pixels down and right or up and left, its edge repeated

    def __call__(self, drawn: "Gallery", generator: torch.Generator) -> "Gallery":
        pixels, labels, size, device = drawn.pixels, drawn.labels, (len(drawn),), generator.device
        if self.relabelled:
            others = torch.randint(self.classes, size, generator=generator, device=device)
            labels = torch.where(torch.rand(size, generator=generator, device=device) < self.relabelled, others, labels)
        if self.mirrored:
            turned = torch.rand(size, generator=generator, device=device) < 0.5
            pixels = torch.where(turned[:, None, None, None], pixels.flip(-1), pixels)
        if self.shifted:
            pixels = _moved(
                pixels, torch.randint(-self.shifted, self.shifted + 1, (2, *size), generator=generator, device=device)
            )
        return Gallery(pixels, labels, drawn.dtype)


def _moved(
    pixels: UInt8[Tensor, "pictures channels height width"], by: Int[Tensor, "2 pictures"]
) -> UInt8[Tensor, "pictures channels height width"]:
    """Every picture moved by its own numbers of rows and columns; what comes in from outside is what stood at the edge."""
    pictures, channels, height, width = pixels.shape
    every, channel = (torch.arange(count, device=pixels.device) for count in (pictures, channels))
    rows = (torch.arange(height, device=pixels.device) - by[0, :, None]).clamp(0, height - 1)
    columns = (torch.arange(width, device=pixels.device) - by[1, :, None]).clamp(0, width - 1)
    return pixels[every[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True, eq=False)
class Gallery:
    """Public pictures, eight bits a channel, and their labels, where the target is."""

    pixels: UInt8[Tensor, "pictures channels height width"]
    labels: Int[Tensor, "pictures"]
    dtype: torch.dtype = torch.float32  # of the pictures a client is given

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, rows: slice | Tensor) -> "Gallery":
        return Gallery(self.pixels[rows], self.labels[rows], self.dtype)

    def split(self) -> tuple["Gallery", "Gallery"]:
        """Pictures to learn from, and others to judge by."""
        held = max(1, min(MOST_HELD_OUT, int(len(self) * HELD_OUT)))
        return self[: len(self) - held], self[len(self) - held :]

    def draw(self, clients: int, examples: int, changes: Changes, generator: torch.Generator) -> Batch:
        """Clients that hold pictures drawn with replacement, and changed."""
        rows = torch.randint(len(self), (clients * examples,), generator=generator, device=generator.device)
        return changes(self[rows], generator).batch(examples)

    def batch(self, examples: int) -> Batch:
        """All of them, in order, as clients of so many examples hold them; what is left over is left out."""
        clients = len(self) // examples
        whole = self[: clients * examples]
        pixels = (whole.pixels.to(self.dtype) / 255).view(clients, examples, *whole.pixels.shape[1:])
        return Batch.of_pixels(pixels, whole.labels.view(clients, examples))


def gallery_of(target: Target, public: Sequence[Example]) -> Gallery:
    """The public pictures as this target reads them; one without a label gets one in turn, as the attacker may pair them."""
    pictures = [example.picture for example in public if example.picture is not None]
    if not pictures:
        raise GradleakError("Learning to Invert needs public pictures to learn from: add --public DATA.")
    probe = target.probe(1, 1).pixels
    assert probe is not None
    channels, height, width = probe.shape[1:]
    odd = next((picture.shape for picture in pictures if picture.shape != (height, width, channels)), None)
    if odd is not None:
        raise GradleakError(
            f"A public picture has shape {odd} (height, width, channels), and the target reads {(height, width, channels)}."
        )
    given = [example.label for example in public if example.picture is not None]
    try:
        labels = [place % target.classes if label is None else target.class_of(label) for place, label in enumerate(given)]
    except GradleakError as error:
        raise GradleakError(f"The public data has labels outside the {target.classes} classes of this target: {error}") from error
    flat = np.frombuffer(b"".join(picture.pixels for picture in pictures), dtype=np.uint8).copy()
    pixels = torch.from_numpy(flat).view(-1, height, width, channels).movedim(-1, 1).contiguous()
    return Gallery(pixels.to(target.device), torch.tensor(labels, device=target.device), target.dtype)
