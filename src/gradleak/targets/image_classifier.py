"""An opened image classifier: any module that turns pictures into class scores, drawn from a seed
or made by a function of one's own."""

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gradleak.core.batch import Batch, Example, PrivateBatch, pixels_of
from gradleak.core.errors import GradleakError
from gradleak.core.parts import Part
from gradleak.core.picture import Picture
from gradleak.core.registry import Count, Medium, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.loading import sha256_of


class ImageClassifier(Target):
    """Gradients off: clients and attackers differentiate copies of the parameters. BatchNorm
    must be fixed (eval mode)."""

    medium: ClassVar[Medium] = "image"
    attend_padding = False
    padding_is_free = True  # there is none

    def __init__(
        self, name: str, module: nn.Module, shape: tuple[int, int, int], classes: int
    ) -> None:
        _refuse_batch_norm(name, module)
        self.name = name
        self.module = module.eval().requires_grad_(False)
        self.shape = shape  # channels, height, width
        self.classes = classes
        self.hidden_size = shape[0] * shape[1] * shape[2]
        self._parameters = dict(module.named_parameters())
        if self.device.type == "cuda":
            # For the whole process, since backward passes run later: convolutions would keep 10
            # bits of every number, and a gradient could be matched no better than that.
            torch.backends.cudnn.allow_tf32 = False
        self._refuse_misfit()
        self._parts = _parts(module, classes)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        head = tuple(part.name for part in self._parts if part.module == "head")
        return {
            "word_embedding": (),
            "position_embedding": (),
            "head": head,
            "head_bias": tuple(name for name in head if self._parameters[name].ndim == 1),
        }

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._parts

    @property
    def frozen_parts(self) -> tuple[Part, ...]:
        return ()

    @property
    def device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._parameters.values())).dtype

    @property
    def in_words(self) -> str:
        return f"picture classifier ({type(self.module).__name__}, {self.classes} classes)"

    def losses(
        self, batch: Batch, parameters: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "*lead"]:
        logits = self._logits(batch, parameters)
        return F.cross_entropy(logits, batch.flat_labels, reduction="none").view(batch.lead)

    def probabilities(self, batch: Batch) -> Float[Tensor, "*lead classes"]:
        return self._logits(batch, None).softmax(-1).view(*batch.lead, self.classes)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        raise GradleakError(f"{self.name} reads pictures, not text.")

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        raise GradleakError(f"{self.name} reads pictures, not text.")

    def private_batch(self, examples: Sequence[Example]) -> PrivateBatch:
        pixels = torch.stack(
            [self._values(place, example) for place, example in enumerate(examples, start=1)]
        )
        labels = torch.tensor(
            [self._label(place, example) for place, example in enumerate(examples, start=1)]
        )
        batch = Batch.of_pixels(pixels.to(self.device, self.dtype), labels.to(self.device))
        return PrivateBatch(batch, tuple(examples), (1,) * len(examples))

    def probe(self, examples: int, tokens: int, generator: torch.Generator | None = None) -> Batch:
        shape = (examples, *self.shape)
        drawn = torch.zeros(shape) if generator is None else torch.rand(shape, generator=generator)
        return Batch.of_pixels(drawn.to(self.device, self.dtype), self.any_labels(examples, 1))

    def ordinary(self) -> Batch:
        """Plain pictures from dark to bright."""
        shades = torch.linspace(0.1, 0.9, 8, device=self.device, dtype=self.dtype).view(8, 1, 1, 1)
        return Batch.of_pixels(
            shades.expand(8, *self.shape), torch.zeros(8, dtype=torch.int64, device=self.device)
        )

    def _logits(self, batch: Batch, parameters: Mapping[str, Tensor] | None) -> Tensor:
        assert batch.pixels is not None
        logits: Tensor = torch.func.functional_call(
            self.module, dict(parameters or {}), (batch.pixels.flatten(0, -4),)
        )
        return logits

    def _values(self, place: int, example: Example) -> Tensor:
        if not isinstance(example.content, Picture):
            raise GradleakError(
                f"Example {place} of the batch is text, and {self.name} reads pictures: use --data"
                " cifar10 or shapes."
            )
        values = pixels_of(example.content)
        if tuple(values.shape) != self.shape:
            raise GradleakError(
                f"Picture {place} of the batch has shape {tuple(values.shape)} (channels first);"
                f" {self.name} reads {self.shape}."
            )
        return values

    def _label(self, place: int, example: Example) -> int:
        if not isinstance(example.label, int) or not 0 <= example.label < self.classes:
            raise GradleakError(
                f"Picture {place} of the batch has label {example.label}; {self.name} has the"
                f" classes 0 to {self.classes - 1}."
            )
        return example.label

    @torch.no_grad()
    def _refuse_misfit(self) -> None:
        """Asks the module for scores once."""
        try:
            logits = self._logits(self.probe(2, 1), None)
        except (RuntimeError, TypeError, ValueError) as error:
            raise GradleakError(
                f"{self.name} cannot read pictures of shape {self.shape}:"
                f" {str(error).splitlines()[0]}."
            ) from error
        if not isinstance(logits, Tensor) or tuple(logits.shape) != (2, self.classes):
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise GradleakError(
                f"{self.name} must give {self.classes} scores a picture; of two pictures it gave"
                f" {found}."
            )


def _refuse_batch_norm(name: str, module: nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and (
            part.training or not part.track_running_stats
        ):
            raise GradleakError(
                f"{name} has a BatchNorm in training mode ({path}), which mixes the examples of a"
                " batch: call eval() on the module, or use GroupNorm."
            )


def _parts(module: nn.Module, classes: int) -> tuple[Part, ...]:
    """Every parameter; convolutions and their biases are counted from the input on."""
    linear = [
        path
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear) and part.out_features == classes
    ]
    head = linear[-1] if linear else None
    found, layer = [], 0
    for path, part in module.named_modules():
        layer += isinstance(part, nn.Conv2d)
        for attribute, parameter in part.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            role = "head" if path == head else _role(part, attribute)
            depth = None if role in ("head", "other") else layer or None
            found.append(Part(name, name, role, tuple(parameter.shape), depth))
    return tuple(
        {part.name: part for part in found if part.name in dict(module.named_parameters())}.values()
    )


def _role(part: nn.Module, attribute: str) -> str:
    if isinstance(part, (nn.GroupNorm, nn.BatchNorm2d)):
        return "layernorm"
    if attribute == "bias":
        return "bias"
    return "convolution" if isinstance(part, nn.Conv2d) else "other"


class DrawnClassifier(TargetSpec):
    """Abstract: a network whose weights are drawn from a seed, or read from a safetensors file
    where `weights` names one."""

    medium: ClassVar[Medium] = "image"

    classes: int
    seed: int
    weights: str | None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the pictures it reads."""

    @abstractmethod
    def make(self) -> nn.Module:
        """Returns the network, with any weights."""

    @abstractmethod
    def draw(self, module: nn.Module, streams: Streams) -> None:
        """Draws all weights, each from a stream of its name."""

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        with torch.random.fork_rng(devices=[]):  # what the library draws is redrawn below
            module = self.make()
        if self.weights is None:
            self.draw(module, Streams.root(self.name, self.seed))
        else:
            load_weights(module, self.weights, self.name)
        return ImageClassifier(self.name, module.to(device, dtype).eval(), self.shape, self.classes)

    def fingerprint(self) -> str:
        return f"made:seed={self.seed}" if self.weights is None else hash_weights(self.weights)


def load_weights(module: nn.Module, path: str, name: str) -> None:
    """Reads a safetensors file into a module; every tensor must be there, and fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(path).expanduser()
    if not file.is_file():
        raise GradleakError(
            f"There is no file {path}: weights names a safetensors file with the parameters of"
            f" {name}."
        )
    try:
        module.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError) as error:
        raise GradleakError(
            f"{path} does not hold the weights of {name}: {str(error).splitlines()[-1].strip()}."
        ) from error


def hash_weights(path: str) -> str:
    """The hash of a file of weights."""
    return f"sha256:{sha256_of(Path(path).expanduser())[:16]}"


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
