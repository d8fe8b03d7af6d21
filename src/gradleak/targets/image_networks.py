"""Networks for pictures whose weights are drawn: the small one that papers on gradient inversion
attack, a smaller one for tests, and ResNet-20 with a norm that treats each example by itself."""

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.targets.image_classifier import DrawnClassifier

Norm = Literal["group", "fixed_batch"]
GROUPS = 4


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


class UniformClassifier(DrawnClassifier):
    """Abstract: convolutions and a head whose weights are drawn evenly around zero."""

    spread: float

    @torch.no_grad()
    def draw(self, module: nn.Module, streams: Streams) -> None:
        """Draws every parameter between −spread and spread, each from a stream of its own."""
        for name, parameter in module.named_parameters():
            drawn = torch.rand(parameter.shape, generator=streams.child(name).generator())
            parameter.copy_((2 * drawn - 1) * self.spread)


@register("target", "lenet")
@dataclass(frozen=True)
class LeNet(UniformClassifier):
    """LeNet with sigmoids for pictures of 32 × 32: 15,826 parameters, random unless `weights`
    names a safetensors file."""

    cites = "Zhu et al., NeurIPS 2019; Learning to Invert (Wu et al. 2022), section 4.1"

    classes: Count = 10
    seed: int = 0
    # Weights are uniform between minus and plus this, as in the released code of both papers
    spread: float = 0.5
    weights: str | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, 32, 32

    def make(self) -> nn.Module:
        return ConvolutionsAndHead(self.shape, self.classes, width=12, strides=(2, 2, 1))


@register("target", "tiny_image")
@dataclass(frozen=True)
class TinyImage(UniformClassifier):
    """The same with two convolutions of four channels, for pictures of 8 × 8 and first tries."""

    classes: Count = 4
    seed: int = 0
    spread: float = 0.5
    side: Count = 8
    weights: str | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.side, self.side

    def make(self) -> nn.Module:
        return ConvolutionsAndHead(self.shape, self.classes, width=4, strides=(2, 1))


class Block(nn.Module):
    """Two convolutions beside a shortcut; the shortcut is a convolution of 1 × 1 where the shape
    changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = _norm(outputs, norm)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = _norm(outputs, norm)
        self.shortcut = (
            nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            if stride != 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, pictures: Tensor) -> Tensor:
        inside = F.relu(self.first_norm(self.first(pictures)))
        return F.relu(self.second_norm(self.second(inside)) + self.shortcut(pictures))


class ResNet(nn.Module):
    """Three stages of three blocks, 16, 32 and 64 wide (He et al. 2016, section 4.2)."""

    def __init__(self, classes: int, norm: Norm) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.stem_norm = _norm(16, norm)
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.ModuleList(
            Block(before, after, 2 if after > before else 1, norm)
            for before, after in itertools.pairwise(widths)
        )
        self.head = nn.Linear(64, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = F.relu(self.stem_norm(self.stem(pictures)))
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(hidden.mean((2, 3)))
        return scores


@register("target", "resnet20")
@dataclass(frozen=True)
class ResNet20(DrawnClassifier):
    """ResNet-20 for pictures of 32 × 32, random unless `weights` names a safetensors file.

    BatchNorm in training mode mixes the examples of a client: it has GroupNorm instead, or
    BatchNorm with fixed statistics.
    """

    cites = "He et al., CVPR 2016; GroupNorm: Wu & He, ECCV 2018"

    norm: Norm = "group"
    classes: Count = 10
    seed: int = 0
    weights: str | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, 32, 32

    def make(self) -> nn.Module:
        return ResNet(self.classes, self.norm)

    @torch.no_grad()
    def draw(self, module: nn.Module, streams: Streams) -> None:
        """He et al. (2015) for convolutions; norms begin as they do: they pass everything on."""
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=streams.child(name).generator())
                parameter.copy_(drawn * (2 / parameter[0].numel()) ** 0.5)
            elif name == "head.bias":
                parameter.zero_()


def _norm(channels: int, norm: Norm) -> nn.Module:
    return nn.GroupNorm(GROUPS, channels) if norm == "group" else nn.BatchNorm2d(channels)
