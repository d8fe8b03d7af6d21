"""Data shaped like a client's, and the secret itself; pictures as tensors and back."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.core.picture import Picture


class ClassNumber(int):
    """A class by its number for certain, also where the target's names of classes are numbers
    themselves."""


# A class by its number, or by the name that the target knows it by; a number that is to be
# predicted; or several of them: of a text, or one of each of its words
Label = int | str | float | tuple[int | str | float, ...]


@dataclass(frozen=True)
class Example:
    """One private text with its label and the spans of it (character offsets) that would hurt
    most; or one private picture."""

    content: str | Picture
    label: Label | None = None
    secrets: tuple[tuple[int, int], ...] = ()
    # Its number in the split it comes from, counted from 0
    row: int | None = field(default=None, compare=False)
    where: str = field(
        default="", compare=False
    )  # how errors name it, such as `notes.csv, line 4`; empty: by its place in a batch

    @property
    def text(self) -> str:
        """The text, of an example that is one."""
        if isinstance(self.content, Picture):
            raise GradleakError(
                "An example is a picture, and its text is asked for: use data of texts."
            )
        return self.content

    @property
    def as_text(self) -> str:
        """All that is private of it, as text to be hashed."""
        return self.content.as_text if isinstance(self.content, Picture) else self.content


@dataclass(frozen=True, eq=False)
class Batch:
    """Anything shaped like client data; attackers make their own.

    Leading axes are free: [examples] for one client, [clients, examples] for many at once. Exactly
    one of `ids`, `embeddings` and `pixels` (between 0 and 1) is given; a picture is a single
    position. `labels` are class numbers or probabilities over the classes, or the numbers that a
    model with several labels or a regression learns; of a language model they are the tokens
    themselves, one a position, as ids or as probabilities over the vocabulary; of a token
    classifier the class of each token, -100 where it has none.
    """

    mask: Bool[Tensor, "*lead tokens"]  # positions the model attends to
    labels: (
        Int[Tensor, "*lead"]
        | Float[Tensor, "*lead classes"]
        | Int[Tensor, "*lead tokens"]
        | Float[Tensor, "*lead tokens words"]
    )
    ids: Int[Tensor, "*lead tokens"] | None = None
    embeddings: Float[Tensor, "*lead tokens hidden"] | None = None
    pixels: Float[Tensor, "*lead channels height width"] | None = None

    def __post_init__(self) -> None:
        if sum(content is not None for content in (self.ids, self.embeddings, self.pixels)) != 1:
            raise ValueError("a batch holds either ids or embeddings or pixels")

    @staticmethod
    def of_pixels(pixels: Float[Tensor, "*lead channels height width"], labels: Tensor) -> "Batch":
        """A batch of pictures."""
        return Batch(
            mask=torch.ones(*pixels.shape[:-3], 1, dtype=torch.bool, device=pixels.device),
            labels=labels,
            pixels=pixels,
        )

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes before the tokens."""
        return tuple(self.mask.shape[:-1])

    @property
    def flat_labels(self) -> Int[Tensor, "examples"] | Float[Tensor, "examples classes"]:
        """Labels of classes, hard or soft, all leading axes as one."""
        hard = self.labels.dtype == torch.int64
        return self.labels.flatten() if hard else self.labels.flatten(0, -2)

    @property
    def apart(self) -> "Batch":
        """Each example as a batch of its own."""
        return replace(
            self,
            mask=self.mask[:, None],
            labels=self.labels[:, None],
            ids=None if self.ids is None else self.ids[:, None],
            embeddings=None if self.embeddings is None else self.embeddings[:, None],
            pixels=None if self.pixels is None else self.pixels[:, None],
        )

    @property
    def asks_for_gradients(self) -> bool:
        """Whether an attacker differentiates what follows from it."""
        return any(
            part is not None and part.requires_grad
            for part in (self.embeddings, self.pixels, self.labels)
        )

    def __getitem__(self, index: "int | slice | Tensor | None") -> "Batch":
        """Along the first axis; `None` puts one of size one before it."""
        return replace(
            self,
            mask=self.mask[index],
            labels=self.labels[index],
            ids=None if self.ids is None else self.ids[index],
            embeddings=None if self.embeddings is None else self.embeddings[index],
            pixels=None if self.pixels is None else self.pixels[index],
        )


@dataclass(frozen=True, eq=False)
class PrivateBatch:
    """The secret: one client's batch with its texts and marked spans. Only protocols, metrics and
    the audit hold one.

    A text that is longer than the model reads is truncated in the batch and whole in its example,
    but for the marked spans: those that were cut are not among its secrets, since nobody sent them.
    """

    batch: Batch
    examples: tuple[Example, ...]
    lengths: tuple[int, ...]  # tokens of each example that the model reads, special ones included
    # Tokens of each example that were cut off; nothing where none were
    dropped: tuple[int, ...] = ()


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> Int[Tensor, "rows tokens"]:
    """Rows of ids as one tensor, padded at the end."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])


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
    # A copy, since bytes cannot be written to and torch warns of such an array
    return torch.from_numpy(array.copy()).movedim(-1, 0).float() / 255
