"""Packs a part of CIFAR-10 into one npz archive that the cifar10 dataset reads, to carry it to
another machine.

    GRADLEAK_DATA=FOLDER python benchmarks/pack_pictures.py --split train --first 0 \\
        --count 10000 --out carried/cifar10

Pixels hardly compress: 10,000 pictures are about 28 MB. Several parts of one split
(cifar10_train.00000.npz, …) lie side by side in the folder `cifar10/` of GRADLEAK_DATA and are read
as one.
"""

import argparse
import os
from pathlib import Path

import numpy as np

from gradleak.datasets.picture_sets import Pictures, read_cifar


def write_npz(path: Path, pictures: Pictures) -> int:
    """Writes an archive as `pictures` and `cifar10` read them and returns its size in bytes."""
    np.savez_compressed(path, images=pictures.pixels, labels=pictures.labels.astype(np.uint8))
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument(
        "--first", type=int, default=0, help="place of the first picture in the files' own order"
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    asked = parser.parse_args()
    folder = os.environ.get("GRADLEAK_DATA")
    if not folder:
        parser.error("set GRADLEAK_DATA to the folder that holds cifar10/")
    whole = read_cifar(Path(folder) / "cifar10", asked.split)
    kept = slice(asked.first, asked.first + asked.count)
    if asked.count < 1 or not 0 <= asked.first < len(whole.labels):
        parser.error(f"the {asked.split} split has the pictures 0 to {len(whole.labels) - 1}")
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"cifar10_{asked.split}.{asked.first:05d}.npz"
    size = write_npz(path, Pictures(whole.pixels[kept], whole.labels[kept]))
    print(f"{path}: {len(whole.labels[kept])} pictures, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
