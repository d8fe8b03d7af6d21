"""ResNet-20 for pictures of 32 × 32, with a norm that treats each example by itself."""

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.core.registry import Count, Medium, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.image_classifier import ImageClassifier
from gradleak.targets.image_weights import fingerprint_of, load_weights

Norm = Literal["group", "fixed_batch"]
GROUPS = 4


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
class ResNet20(TargetSpec):
    """ResNet-20 for pictures of 32 × 32, random unless `weights` names a safetensors file.

    BatchNorm in training mode mixes the examples of a client: it has GroupNorm instead, or
    BatchNorm with fixed statistics.
    """

    medium: ClassVar[Medium] = "image"
    cites = "He et al., CVPR 2016; GroupNorm: Wu & He, ECCV 2018"

    norm: Norm = "group"
    classes: Count = 10
    seed: int = 0
    weights: str | None = None

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        with torch.random.fork_rng(devices=[]):  # what the library draws is redrawn below
            module = ResNet(self.classes, self.norm)
        if self.weights is None:
            _draw(module, Streams.root(self.name, self.seed))
        else:
            load_weights(module, self.weights, self.name)
        return ImageClassifier(
            self.name, module.to(device, dtype).eval(), (3, 32, 32), self.classes
        )

    def fingerprint(self) -> str:
        return fingerprint_of(self.weights, self.seed)


def _norm(channels: int, norm: Norm) -> nn.Module:
    return nn.GroupNorm(GROUPS, channels) if norm == "group" else nn.BatchNorm2d(channels)


@torch.no_grad()
def _draw(module: nn.Module, streams: Streams) -> None:
    """He et al. (2015) for convolutions; norms begin as they do: they pass everything on."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            drawn = torch.randn(parameter.shape, generator=streams.child(name).generator())
            parameter.copy_(drawn * (2 / parameter[0].numel()) ** 0.5)
        elif name == "head.bias":
            parameter.zero_()
