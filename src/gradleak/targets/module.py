"""An image classifier of one's own, by the name of the function that makes it."""

import importlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from gradleak.core.errors import GradleakError
from gradleak.core.registry import Count, Medium, register
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.image_classifier import ImageClassifier, hash_weights, load_weights


@register("target", "module")
@dataclass(frozen=True)
class Module(TargetSpec):
    """Any nn.Module that turns pictures into class scores, as made by a function:
    path=package.file:function.

    The function takes no arguments. The loss is cross-entropy. A random module must draw its
    weights from a seed of its own: records tell two runs of one factory apart by its weights only.
    """

    medium: ClassVar[Medium] = "image"

    path: str
    classes: Count = 10
    channels: Count = 3
    height: Count = 32
    width: Count = 32
    weights: str | None = None

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        made = _make(self.path)
        if self.weights is not None:
            load_weights(made, self.weights, self.path)
        shape = (self.channels, self.height, self.width)
        return ImageClassifier(self.path, made.to(device, dtype), shape, self.classes)

    def fingerprint(self) -> str:
        if self.weights is not None:
            return hash_weights(self.weights)
        sums = [float(parameter.double().sum()) for parameter in _make(self.path).parameters()]
        return f"{self.path}:sum={sum(sums):.9g}"


def _make(factory: str) -> nn.Module:
    place, colon, function = factory.partition(":")
    if not colon:
        raise GradleakError(
            f"The path of a module is written package.file:function, not {factory!r}."
        )
    try:
        make = getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as error:
        raise GradleakError(
            f"Cannot import {factory}: {error}. Is its folder on PYTHONPATH?"
        ) from error
    made = make()
    if not isinstance(made, nn.Module):
        raise GradleakError(f"{factory} gave a {type(made).__name__}, not an nn.Module.")
    return made
