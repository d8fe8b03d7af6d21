"""Pictures as private data: CIFAR-10, and pictures of one's own."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from gradleak.core.batch import Example
from gradleak.core.dataset import Dataset, Rows
from gradleak.core.errors import GradleakError
from gradleak.core.local_data import FOLDER_VARIABLE
from gradleak.core.picture import Picture
from gradleak.core.registry import Medium, register
from gradleak.datasets.lamp_selection import take
from gradleak.datasets.picture_files import Pictures, read_cifar, read_folder, read_npz

HALF = 5  # classes 0 to 4 are the first half of CIFAR-10, 5 to 9 the second


@register("dataset", "cifar10")
@dataclass(frozen=True)
class Cifar10(Dataset):
    """CIFAR-10 from a local folder: `folder`, or cifar10/ in the folder that GRADLEAK_DATA names.

    `first_half_share` mixes the classes 0 to 4 and 5 to 9 in that proportion, `size` pictures in
    all (Learning to Invert, section 4.1.2). Pictures come in an order drawn from `seed`, or in the
    files' own order where it is null.
    """

    medium: ClassVar[Medium] = "image"
    cites: ClassVar[str] = "Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images"
    is_public: ClassVar[bool] = True

    split: Literal["train", "test"] = "test"
    classes: tuple[int, ...] = ()  # none: all ten
    first_half_share: float | None = None
    size: int | None = None  # none: as many as there are
    seed: int | None = 0
    folder: str | None = None
    rows: Rows = ()

    def __post_init__(self) -> None:
        if self.first_half_share is not None and not 0 <= self.first_half_share <= 1:
            raise ValueError(f"first_half_share lies between 0 and 1, not {self.first_half_share}.")
        if self.first_half_share is not None and self.size is None:
            raise ValueError("first_half_share needs size: how many pictures the mixture has.")
        if any(not 0 <= label <= 9 for label in self.classes):
            raise ValueError(f"classes are numbers from 0 to 9, not {list(self.classes)}.")

    def load(self, count: int | None = None) -> list[Example]:
        pictures = _cifar(str(self._folder()), self.split)
        order = np.arange(len(pictures.labels))
        if self.seed is not None:
            order = np.random.default_rng(self.seed).permutation(order)
        kept = self._selected(order, pictures.labels[order])
        chosen = take(kept, count, f"cifar10, {self.split} split, with this selection", self.rows)
        return examples(pictures, chosen)

    def public(self) -> Dataset | None:
        return Cifar10("train", folder=self.folder) if self.split == "test" else None

    def _selected(self, order: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> list[int]:
        allowed = (
            np.isin(labels, self.classes) if self.classes else np.ones(len(labels), dtype=bool)
        )
        if self.first_half_share is None:
            return [int(place) for place in order[allowed][: self.size]]
        assert self.size is not None
        first = round(self.size * self.first_half_share)
        halves = [order[allowed & (labels < HALF)], order[allowed & (labels >= HALF)]]
        for half, wanted in zip(halves, (first, self.size - first), strict=True):
            if len(half) < wanted:
                raise GradleakError(
                    f"A mixture asks for {wanted} pictures of one half of CIFAR-10, which has"
                    f" {len(half)}."
                )
        mixed = np.concatenate([halves[0][:first], halves[1][: self.size - first]])
        return [int(place) for place in np.random.default_rng(self.seed or 0).permutation(mixed)]

    def _folder(self) -> Path:
        if self.folder is not None:
            return Path(self.folder).expanduser()
        named = os.environ.get(FOLDER_VARIABLE)
        if not named:
            raise GradleakError(
                f"cifar10 is read from a folder: set {FOLDER_VARIABLE} to the folder that holds"
                " cifar10/, or write folder=…"
            )
        return Path(named).expanduser() / "cifar10"


@register("dataset", "pictures")
@dataclass(frozen=True)
class PictureFiles(Dataset):
    """Pictures of one's own: an npz archive (images, labels), or a folder with one folder of
    picture files a class."""

    medium: ClassVar[Medium] = "image"

    path: str
    rows: Rows = ()

    def load(self, count: int | None = None) -> list[Example]:
        path = Path(self.path).expanduser()
        if not path.exists():
            raise GradleakError(
                f"There is no {self.path}: name an npz archive, or a folder with one folder a"
                " class."
            )
        found = read_folder(path) if path.is_dir() else read_npz(path)
        return examples(found, take(range(len(found.labels)), count, self.path, self.rows))


def examples(pictures: Pictures, places: Sequence[int]) -> list[Example]:
    """Some of the pictures as private examples."""
    height, width, channels = pictures.pixels.shape[1:]
    shape = (int(height), int(width), int(channels))
    return [
        Example(
            Picture(shape, pictures.pixels[place].tobytes()),
            int(pictures.labels[place]),
            row=place,
        )
        for place in places
    ]


@cache
def _cifar(folder: str, split: str) -> Pictures:
    """Read once a run: strips take seconds."""
    return read_cifar(Path(folder), split)
