"""The small convolutional network that papers on gradient inversion attack, and a smaller one
for tests."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradleak.core.registry import Count, Medium, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.image_classifier import ImageClassifier
from gradleak.targets.image_weights import fingerprint_of, load_weights


class ConvolutionsAndHead(nn.Module):
    """Convolutions of 5 × 5 with sigmoids between them, then one linear layer."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, width: int, strides: tuple[int, ...]
    ) -> None:
        super().__init__()
        channels, height, side = shape
        self.convolutions = nn.ModuleList()
        for stride in strides:
            self.convolutions.append(
                nn.Conv2d(channels, width, kernel_size=5, stride=stride, padding=2)
            )
            channels, height, side = width, -(-height // stride), -(-side // stride)
        self.head = nn.Linear(width * height * side, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        for convolution in self.convolutions:
            pictures = torch.sigmoid(convolution(pictures))
        scores: Tensor = self.head(pictures.flatten(1))
        return scores


@register("target", "lenet")
@dataclass(frozen=True)
class LeNet(TargetSpec):
    """LeNet with sigmoids for pictures of 32 × 32: 15,826 parameters, random unless `weights`
    names a safetensors file."""

    medium: ClassVar[Medium] = "image"
    cites = "Zhu et al., NeurIPS 2019; Learning to Invert (Wu et al. 2022), section 4.1"

    classes: Count = 10
    seed: int = 0
    # Weights are uniform between minus and plus this, as in the released code of both papers
    spread: float = 0.5
    weights: str | None = None

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        return _open(
            self.name,
            (3, 32, 32),
            self.classes,
            12,
            (2, 2, 1),
            self.seed,
            self.spread,
            self.weights,
            device,
            dtype,
        )

    def fingerprint(self) -> str:
        return fingerprint_of(self.weights, self.seed)


@register("target", "tiny_image")
@dataclass(frozen=True)
class TinyImage(TargetSpec):
    """The same with two convolutions of four channels, for pictures of 8 × 8 and first tries."""

    medium: ClassVar[Medium] = "image"

    classes: Count = 4
    seed: int = 0
    spread: float = 0.5
    side: Count = 8
    weights: str | None = None

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        shape = (3, self.side, self.side)
        return _open(
            self.name,
            shape,
            self.classes,
            4,
            (2, 1),
            self.seed,
            self.spread,
            self.weights,
            device,
            dtype,
        )

    def fingerprint(self) -> str:
        return fingerprint_of(self.weights, self.seed)


def _open(
    name: str,
    shape: tuple[int, int, int],
    classes: int,
    width: int,
    strides: tuple[int, ...],
    seed: int,
    spread: float,
    weights: str | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Target:
    with torch.random.fork_rng(devices=[]):  # what the library draws is redrawn below
        module = ConvolutionsAndHead(shape, classes, width, strides)
    if weights is None:
        uniform(module, Streams.root(name, seed), spread)
    else:
        load_weights(module, weights, name)
    return ImageClassifier(name, module.to(device, dtype).eval(), shape, classes)


@torch.no_grad()
def uniform(module: nn.Module, streams: Streams, spread: float) -> None:
    """Every parameter uniform between −spread and spread, each from a stream of its own."""
    for name, parameter in module.named_parameters():
        drawn = torch.rand(parameter.shape, generator=streams.child(name).generator())
        parameter.copy_((2 * drawn - 1) * spread)
