"""Priors over pictures: grey, the mean of public ones, and a small network that makes pictures of a
few numbers (`gradleak prior pictures`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gradleak.core.batch import pixels_of
from gradleak.core.dataset import as_dataset
from gradleak.core.errors import GradleakError
from gradleak.core.picture import Picture
from gradleak.core.prior import Generator, PicturePrior, PicturePriorSpec
from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target

MEAN = "mean_picture"
FIRST_SIDE = 4  # pixels; doubled until the picture is large enough


@dataclass(frozen=True, eq=False)
class OnePicture(PicturePrior):
    """The same picture, whatever is asked."""

    picture: Float[Tensor, "channels height width"]

    def likely(self) -> Float[Tensor, "channels height width"]:
        return self.picture

    def draw(self, streams: Streams) -> Float[Tensor, "channels height width"]:
        return self.picture


class EqualPictures(PicturePrior):
    """Pictures like the private ones: their mean, and each of them as likely as the next."""

    def __init__(self, pictures: Sequence[Picture]) -> None:
        self.pictures = pictures
        self.mean = torch.stack([pixels_of(picture) for picture in pictures]).mean(0)

    def likely(self) -> Float[Tensor, "channels height width"]:
        return self.mean

    def draw(self, streams: Streams) -> Float[Tensor, "channels height width"]:
        share = float(torch.rand(1, generator=streams.generator()))
        return pixels_of(self.pictures[int(share * len(self.pictures))])


@register("prior", "grey")
@dataclass(frozen=True)
class Grey(PicturePriorSpec):
    """Even grey, halfway between black and white."""

    def open(self, target: Target) -> PicturePrior:
        return OnePicture(torch.full(shape_of(target), 0.5))


@register("prior", "mean_picture")
@dataclass(frozen=True)
class MeanPicture(PicturePriorSpec):
    """The mean of public pictures: of all single guesses the one with the least squared error on
    them."""

    data: str = "shapes:part=public"  # one line
    limit: Count = 10_000  # pictures

    def open(self, target: Target) -> PicturePrior:
        public = _public(self.data, self.limit)
        shape = tuple(public.mean.shape)
        if shape != shape_of(target):
            raise GradleakError(
                f"The pictures of {self.data} have shape {shape}, the target's {shape_of(target)}."
            )
        return public


def shape_of(target: Target) -> tuple[int, int, int]:
    """Channels, height and width of what the target reads."""
    pixels = target.probe(1, 1).pixels
    if pixels is None:
        raise GradleakError(
            "This prior is of pictures, and the target reads text: use --prior auto."
        )
    return int(pixels.shape[1]), int(pixels.shape[2]), int(pixels.shape[3])


@cache
def _public(line: str, limit: int) -> EqualPictures:
    public = as_dataset(line).load()[:limit]
    pictures = [one.content for one in public if isinstance(one.content, Picture)]
    if not pictures:
        raise GradleakError(f"{line} holds no pictures.")
    return EqualPictures(pictures)


class GeneratorNetwork(nn.Module):
    """One linear layer to 4 × 4, then convolutions that double the side, then colours."""

    def __init__(self, shape: tuple[int, int, int], latents: int, width: int) -> None:
        super().__init__()
        channels, height, side = shape
        doublings = (height // FIRST_SIDE).bit_length() - 1
        if height != side or height != FIRST_SIDE << doublings:
            raise GradleakError(
                f"A generator makes square pictures of 4, 8, 16, 32 … pixels a side, not {height} ×"
                f" {side}."
            )
        self.width = width
        self.first = nn.Linear(latents, width * FIRST_SIDE**2)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1) for _ in range(doublings)
        )
        self.colours = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.first(latents).view(-1, self.width, FIRST_SIDE, FIRST_SIDE), 0.2)
        for convolution in self.convolutions:
            larger = hidden.repeat_interleave(2, dim=-1).repeat_interleave(2, dim=-2)
            hidden = F.leaky_relu(convolution(larger), 0.2)
        return torch.sigmoid(self.colours(hidden))


class OpenedGenerator(Generator):
    """The network with its weights, and the mean picture of what it was trained on."""

    def __init__(
        self, network: GeneratorNetwork, latents: int, mean: Float[Tensor, "channels height width"]
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.latents, self.mean = latents, mean
        self._shapes = {name: parameter.shape for name, parameter in network.named_parameters()}

    @property
    def weights(self) -> Float[Tensor, "weights"]:
        return torch.cat([parameter.flatten() for parameter in self.network.parameters()])

    def likely(self) -> Float[Tensor, "channels height width"]:
        return self.mean

    def draw(self, streams: Streams) -> Float[Tensor, "channels height width"]:
        """What the network makes of numbers drawn as it was trained on: standard normal ones."""
        latents = torch.randn(1, self.latents, generator=streams.generator())
        made: Tensor = self.network(latents.to(next(self.network.parameters())))
        return made[0].float().cpu()

    def pictures(
        self,
        latents: Float[Tensor, "rows examples latents"],
        weights: Float[Tensor, "rows weights"] | None = None,
    ) -> Float[Tensor, "rows examples channels height width"]:
        if weights is None:
            made: Tensor = self.network(latents.flatten(0, 1))
            return made.view(*latents.shape[:2], *made.shape[1:])
        return torch.func.vmap(self._with_weights)(latents, weights)

    def _with_weights(self, latents: Tensor, weights: Tensor) -> Tensor:
        pieces = torch.split(weights, [shape.numel() for shape in self._shapes.values()])
        named = {
            name: piece.view(shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }
        made: Tensor = torch.func.functional_call(self.network, named, (latents,))
        return made


@register("prior", "generator")
@dataclass(frozen=True)
class GeneratorFile(PicturePriorSpec):
    """A generator of pictures that `gradleak prior pictures` trained on public data."""

    path: str

    def open(self, target: Target) -> PicturePrior:
        opened = load_generator(Path(self.path).expanduser())
        if tuple(opened.mean.shape) != shape_of(target):
            raise GradleakError(
                f"{self.path} makes pictures of {tuple(opened.mean.shape)}, not of"
                f" {shape_of(target)}."
            )
        opened.network.to(target.device, target.dtype)
        return opened


def save_generator(
    path: Path,
    network: GeneratorNetwork,
    latents: int,
    mean: Float[Tensor, "channels height width"],
) -> None:
    """Writes network and mean picture as one safetensors file."""
    from safetensors.torch import save_file

    settings = {"shape": list(mean.shape), "latents": latents, "width": network.width}
    tensors = {
        name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()
    }
    save_file({**tensors, MEAN: mean.cpu().contiguous()}, path, {"generator": json.dumps(settings)})


def load_generator(path: Path) -> OpenedGenerator:
    """Reads what `save_generator` wrote."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise GradleakError(
            f"There is no generator {path}: make one with gradleak prior pictures --data … --out"
            f" {path}."
        )
    try:
        with safe_open(path, "pt") as file:
            settings = json.loads((file.metadata() or {})["generator"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise GradleakError(
            f"{path} is no generator that gradleak prior pictures wrote."
        ) from error
    with torch.random.fork_rng(devices=[]):  # what the library draws is overwritten
        network = GeneratorNetwork(tuple(settings["shape"]), settings["latents"], settings["width"])
    network.load_state_dict({name: value for name, value in tensors.items() if name != MEAN})
    return OpenedGenerator(network, settings["latents"], tensors[MEAN])
