"""The attacks on pictures: a perceptron from the update to the pixels.

It learns from gradients that went through the same defense as those it will read. In this order:
what the attacker's own clients hold (public pictures, changed), the network, the attacks.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from gradleak.attacks.learning_to_invert.features import (
    Features,
    HashedFeatures,
    Largest,
    WholeFeatures,
    average_in_groups,
)
from gradleak.attacks.learning_to_invert.inversion import PAPER, Inversion
from gradleak.attacks.learning_to_invert.medium import (
    ClientSource,
    Lessons,
    Network,
    PublicExamples,
    ReadingScore,
    SeenClients,
    assign_slots,
    draw_rows,
    number_labels,
    split,
)
from gradleak.attacks.learning_to_invert.training import Precision
from gradleak.core.attack import Bench, ClientSetting, Reconstruction
from gradleak.core.batch import Batch, Example, picture_of
from gradleak.core.errors import GradleakError
from gradleak.core.picture import Picture
from gradleak.core.registry import Bounds, Count, Medium, Rate, Share, register
from gradleak.core.target import Target
from gradleak.matching.linear_algebra import find_eigenvectors
from gradleak.matching.precision import products_of_10_bits

# Of a direction's variance, by which it is divided; 0.5 would make noise as large as signal, and
# learns worse.
POWER = 0.25
WEAKEST = 1e-7  # of the largest variance: rounding, no signal
# Of the labels' cross-entropy in the loss; for the loss to be read by, since pictures and labels
# share no weights.
LABEL_WEIGHT = 0.01
MEASURED = 2048  # clients by which features are scaled, at least
AT_ONCE = 512  # of these and of held-out ones


@dataclass(frozen=True, eq=False)
class PictureGallery(PublicExamples):
    """Public pictures, eight bits a channel, and their labels, where the target is."""

    pixels: UInt8[Tensor, "pictures channels height width"]
    labels: Int[Tensor, "pictures"]
    dtype: torch.dtype = torch.float32  # of the pictures a client is given

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> list[int]:
        return list(self.pixels.shape[1:])

    def __getitem__(self, rows: slice | Tensor) -> "PictureGallery":
        return replace(self, pixels=self.pixels[rows], labels=self.labels[rows])

    @property
    def mean(self) -> Float[Tensor, "channels height width"]:
        """The mean picture, between 0 and 1."""
        return (self.pixels.float() / 255).mean(0)

    def batch(self, examples: int) -> Batch:
        """Returns all pictures, in order, as clients of so many hold them; a rest is left out."""
        clients = len(self) // examples
        whole = self[: clients * examples]
        pixels = (whole.pixels.to(self.dtype) / 255).view(clients, examples, *self.shape)
        return Batch.of_pixels(pixels, whole.labels.view(clients, examples))


def read_pictures(target: Target, public: Sequence[Example]) -> PictureGallery:
    """Returns the public pictures as this target reads them."""
    pictures = [one.content for one in public if isinstance(one.content, Picture)]
    if not pictures:
        raise GradleakError(
            "Learning to Invert needs public pictures to learn from: add --public DATA."
        )
    probe = target.probe(1, 1).pixels
    assert probe is not None
    channels, height, width = probe.shape[1:]
    shape = (height, width, channels)
    odd = next((picture.shape for picture in pictures if picture.shape != shape), None)
    if odd is not None:
        raise GradleakError(
            f"A public picture has shape {odd} (height, width, channels), and the target reads"
            f" {shape}."
        )
    flat = np.frombuffer(b"".join(picture.pixels for picture in pictures), dtype=np.uint8).copy()
    pixels = torch.from_numpy(flat).view(-1, *shape).movedim(-1, 1).contiguous()
    return PictureGallery(
        pixels.to(target.device), number_labels(target, public, range(len(public))), target.dtype
    )


@dataclass(frozen=True, eq=False)
class ChangedPictures(ClientSource):
    """Clients that hold pictures drawn with replacement, changed so that there are more of them."""

    gallery: PictureGallery
    classes: int
    relabelled: float = 0.0  # the share that gets a label drawn at random
    mirrored: bool = False  # half of them, left to right
    shifted: int = 0  # pixels down and right, or up and left, at most; the edge is repeated

    def draw(self, clients: int, examples: int, generator: torch.Generator) -> Batch:
        drawn = draw_rows(self.gallery, clients * examples, generator)
        pixels, labels, size, device = drawn.pixels, drawn.labels, (len(drawn),), generator.device
        if self.relabelled:
            others = torch.randint(self.classes, size, generator=generator, device=device)
            chosen = torch.rand(size, generator=generator, device=device) < self.relabelled
            labels = torch.where(chosen, others, labels)
        if self.mirrored:
            turned = torch.rand(size, generator=generator, device=device) < 0.5
            pixels = torch.where(turned[:, None, None, None], pixels.flip(-1), pixels)
        if self.shifted:
            least, most = -self.shifted, self.shifted + 1
            by = torch.randint(least, most, (2, *size), generator=generator, device=device)
            pixels = move(pixels, by)
        return replace(drawn, pixels=pixels, labels=labels).batch(examples)


def move(
    pixels: UInt8[Tensor, "pictures channels height width"], by: Int[Tensor, "2 pictures"]
) -> UInt8[Tensor, "pictures channels height width"]:
    """Returns each picture moved by its rows and columns, with what stood at the edge repeated."""
    pictures, channels, height, width = pixels.shape
    every, channel = (torch.arange(size, device=pixels.device) for size in (pictures, channels))
    rows = (torch.arange(height, device=pixels.device) - by[0, :, None]).clamp(0, height - 1)
    columns = (torch.arange(width, device=pixels.device) - by[1, :, None]).clamp(0, width - 1)
    every, channel = every[:, None, None, None], channel[:, None, None]
    return pixels[every, channel, rows[:, None, :, None], columns[:, None, None, :]]


def decorrelate(
    features: Float[Tensor, "clients features"],
    groups: Sequence[int] | None,
    directions: int,
    noise: Float[Tensor, "features"] | None = None,
) -> tuple[Float[Tensor, "features"], Float[Tensor, "features directions"]]:
    """Returns what to subtract from features, and what to multiply them with.

    Of a gradient nearly all variance is the label's (on LeNet 95 % lies in ten directions); what
    tells pictures apart is small beside it, and steps along all features at once go mostly astray.
    So features are turned to their own directions and the strong ones are taken down. Since this is
    linear, a perceptron after it can learn what it could before.

    Features come without the noise that will be on them, and are first scaled: each alone or in
    groups, or to noise of spread 1, whereupon the strongest directions are those that stand out of
    it. Results have spread 1 in the mean; surplus ones are zero.
    """
    centre = features.mean(0)
    scale = find_scale(features, groups) if noise is None else 1 / noise
    centred = ((features - centre) * scale).double()
    clients, size = centred.shape
    few = clients < size  # then the smaller product of the two has all that is not zero
    product = centred @ centred.mT if few else centred.mT @ centred
    variances, vectors = find_eigenvectors(product / clients)
    kept = min(directions, len(variances))
    variances, vectors = variances.flip(0)[:kept], vectors.flip(1)[:, :kept]
    sound = variances > WEAKEST * variances[0].clamp_min(1e-300)
    if few:
        vectors = centred.mT @ vectors / (clients * variances.where(sound, torch.inf)).sqrt()
    seen = variances.where(sound, 0) + (0 if noise is None else 1)
    turned = vectors * torch.where(sound, seen.pow(-POWER), 0)
    turned = turned / seen.pow(1 - 2 * POWER).where(sound, 0).mean().clamp_min(1e-300).sqrt()
    whole = features.new_zeros(size, directions)
    whole[:, :kept] = (turned * scale.double()[:, None]).to(features.dtype)
    return centre, whole


def find_scale(
    features: Float[Tensor, "clients features"],
    groups: Sequence[int] | None,
    noise: Float[Tensor, "features"] | None = None,
) -> Float[Tensor, "features"]:
    """Returns one over the spread of every feature or group, noise included; zero if none moves."""
    spread = features.std(0) if noise is None else torch.hypot(features.std(0), noise)
    spread = average_in_groups(spread, groups)
    return torch.where(spread > 1e-12, 1 / spread, 0)


class ParallelLinear(nn.Module):
    """Linear layers side by side, each with its own inputs and weights."""

    def __init__(self, inverters: int, inputs: int, outputs: int) -> None:
        super().__init__()
        # All begin with the same weights: curves then compare what was learnt, not luck.
        drawn = (2 * torch.rand(inputs, outputs) - 1) / inputs**0.5
        self.weight = nn.Parameter(drawn.expand(inverters, -1, -1).clone())
        self.bias = nn.Parameter(torch.zeros(inverters, 1, outputs))

    def forward(
        self, given: Float[Tensor, "inverters clients inputs"]
    ) -> Float[Tensor, "inverters clients outputs"]:
        return torch.baddbmm(self.bias, given, self.weight)


@dataclass(frozen=True, eq=False)
class Errors:
    """What is left to learn, of every inverter."""

    squared: Float[Tensor, "inverters"]
    labels: Float[Tensor, "inverters"]  # cross-entropy
    variation: Float[Tensor, "inverters"]  # of the guess
    labels_right: Float[Tensor, "inverters"]  # a share


class PictureNetwork(Network):
    """The paper's perceptron: features → 3000 → 3000 → pixels, with ReLUs."""

    measured_with_noise = False  # its strength is told apart

    def __init__(
        self,
        features: int,
        directions: int | None,
        widths: Sequence[int],
        shape: Sequence[int],
        slots: int,
        classes: int,
        raw: bool = False,
        bounded: bool = False,
        variation_weight: float = 0.0,
        inverters: int = 1,
    ) -> None:
        super().__init__()
        self.slots, self.shape, self.raw, self.bounded = slots, tuple(shape), raw, bounded
        self.directions, self.variation_weight = directions, variation_weight
        sizes = [directions or features, *widths]
        self.hidden = nn.ModuleList(
            ParallelLinear(inverters, *pair) for pair in itertools.pairwise(sizes)
        )
        self.pixels = ParallelLinear(inverters, sizes[-1], slots * torch.Size(shape).numel())
        self.labels = ParallelLinear(inverters, sizes[0], slots * classes)
        self.register_buffer("centre", torch.zeros(inverters, 1, features))
        # One over each feature's spread, or directions that features are turned to
        rows = 1 if directions is None else features
        self.register_buffer("turn", torch.zeros(inverters, rows, sizes[0]))

    def start_from(self, blind_guess: Float[Tensor, "*inverters channels height width"]) -> None:
        if not self.bounded:
            with torch.no_grad():
                each = torch.cat([blind_guess.flatten(-3)] * self.slots, dim=-1)
                self.pixels.bias.copy_(each[..., None, :])

    def measure(
        self,
        features: Float[Tensor, "clients features"],
        groups: Sequence[int] | None,
        noise: Float[Tensor, "features"] | None = None,
        inverter: int = 0,
    ) -> None:
        centre = self.get_buffer("centre")[inverter]
        turn = self.get_buffer("turn")[inverter]
        if self.raw:
            turn.fill_(1.0)
        elif self.directions is None:
            centre[:], turn[:] = features.mean(0), find_scale(features, groups, noise)
        else:
            centre[:], turn[:] = decorrelate(features, groups, self.directions, noise)

    def forward(
        self, features: Float[Tensor, "inverters clients features"]
    ) -> tuple[
        Float[Tensor, "inverters clients slots channels height width"],
        Float[Tensor, "inverters clients slots classes"],
    ]:
        """Returns pictures, and scores of the labels."""
        centred, turn = features - self.get_buffer("centre"), self.get_buffer("turn")
        # In fewer bits small directions would drown in the rounding of large ones.
        with torch.autocast(features.device.type, enabled=False), products_of_10_bits(False):
            given = centred * turn if self.directions is None else centred @ turn
        hidden = given
        for layer in self.hidden:
            hidden = layer(hidden).relu()
        pixels = self.pixels(hidden).unflatten(2, (self.slots, *self.shape))
        labels = self.labels(given).unflatten(2, (self.slots, -1))
        return pixels.sigmoid() if self.bounded else pixels, labels

    def compare(
        self,
        features: Float[Tensor, "inverters clients features"],
        pixels: Float[Tensor, "inverters clients slots channels height width"],
        labels: Int[Tensor, "inverters clients slots"],
        dtype: torch.dtype,
    ) -> Errors:
        """Returns how far guesses are from what clients hold; each inverter has its own clients."""
        with torch.autocast(features.device.type, torch.bfloat16, dtype is torch.bfloat16):
            guessed, scores = self(features)
        guessed, scores, pixels = guessed.float(), scores.float(), pixels.float()
        if self.slots > 1:
            with torch.no_grad():
                apart = torch.cdist(guessed.flatten(3), pixels.flatten(3)).square()
                order = assign_slots(apart.flatten(0, 1)).view(labels.shape)
            pixels = pixels.gather(2, order[..., None, None, None].expand_as(pixels))
            labels = labels.gather(2, order)
        surprise = F.cross_entropy(scores.flatten(0, 2), labels.flatten(), reduction="none")
        columns, rows = (guessed.diff(dim=axis).abs().flatten(1).mean(1) for axis in (-1, -2))
        return Errors(
            squared=(guessed - pixels).square().flatten(1).mean(1),
            labels=surprise.view(labels.shape).flatten(1).mean(1),
            variation=columns + rows,
            labels_right=(scores.argmax(-1) == labels).float().flatten(1).mean(1),
        )

    def sum_errors(self, errors: Errors) -> Float[Tensor, ""]:
        """Returns equation 2 of the paper, of all inverters together.

        The total variation is what its section 5 proposes.
        """
        variation = self.variation_weight * errors.variation
        return (errors.squared + LABEL_WEIGHT * errors.labels + variation).sum()

    def loss(self, seen: SeenClients, dtype: torch.dtype) -> Float[Tensor, ""]:
        return self.sum_errors(self._compare_one(seen, dtype))

    @torch.no_grad()
    def judge(self, seen: SeenClients, dtype: torch.dtype) -> ReadingScore:
        """Adds up squared errors, and counts labels that are read right."""
        errors, clients = self._compare_one(seen, dtype), seen.clients.lead[0]
        return ReadingScore(
            clients * float(errors.squared), clients * float(errors.labels_right), clients
        )

    def _compare_one(self, seen: SeenClients, dtype: torch.dtype) -> Errors:
        clients = seen.clients
        assert clients.pixels is not None
        return self.compare(seen.features[None], clients.pixels[None], clients.labels[None], dtype)

    def read(
        self, features: Float[Tensor, "clients features"], bench: Bench
    ) -> list[Reconstruction]:
        pixels, scores = self(features[None])
        return [
            Reconstruction((), labels=tuple(labels), pictures=tuple(map(picture_of, pictures)))
            for pictures, labels in zip(pixels[0].cpu(), scores[0].argmax(-1).tolist(), strict=True)
        ]


@dataclass(frozen=True)
class PictureInversion(Inversion):
    """Abstract: a subclass says how much of its paper it keeps to."""

    steps: Count = 600  # for small targets; the paper's 200 epochs of 50,000 pictures are 39,000
    epochs: Rate | None = None  # of the public pictures; takes the place of steps
    training_batch: Count = 256  # clients in a step; rates that are tried grow with its root
    # None: the best of three after probe_epochs; the paper's is 1e-4.
    learning_rate: Rate | None = None
    probe_epochs: Rate = 2.0  # of the public pictures, at each rate that is tried
    decay: Share = 0.5  # the last share of the steps, over which the rate falls to nothing
    drops: bool = False  # the rate is a tenth there instead, as the paper's after three quarters
    # Of the features, the strongest, decorrelated; none: all features, scaled only.
    directions: Count | None = 2000
    raw: bool = False  # all features as they come, neither decorrelated nor scaled, as the paper's
    bounded: bool = False  # a sigmoid after the last layer, as the paper's
    width: Count = 3000
    hidden_layers: Count = 2  # the paper's three layers are two hidden ones and the pixels
    # The share of the attacker's pictures under random labels, so that all labels are learnt.
    relabelled: Share = 0.0
    # More to learn from than the paper has: half of the attacker's pictures are mirrored, and
    # each is moved by up to so many pixels.
    mirrored: bool = False
    shifted: int = 0
    # Of the guess's total variation beside its squared error (the paper's section 5).
    variation_weight: float = 0.0
    # Of the entries that are seen, as bins they are summed in; 1: as they are.
    fraction: Annotated[float, Bounds(most=1, above=True)] = 1.0
    signed: bool = False  # hashed entries get random signs before they are summed
    hashing_seed: int = 0
    # What is read of entries where only the largest are sent: sizes, as the paper does, or signs.
    largest: Largest = "sizes"
    precision: Precision = "tf32"  # of the inverter's products on a GPU, never of gradients
    weights: str | None = None  # a fit that was saved, instead of a new one

    medium: ClassVar[Medium] = "image"
    cites = f"{PAPER}, section 4.1"
    noun = "pictures"
    rates = (1e-3, 3e-4, 1e-4)  # the last is the paper's, for its batches
    batch_of_rates = 256

    def __post_init__(self) -> None:
        if self.raw and self.directions is not None:
            raise ValueError(
                "raw features are not turned to directions: write directions=null beside raw=true."
            )

    @property
    def clients_at_once(self) -> int:
        return AT_ONCE

    @property
    def clients_measured(self) -> int:
        return max(MEASURED, 2 * (self.directions or 0))  # of fewer clients directions are guesses

    def make_source(self, target: Target, gallery: PictureGallery) -> ChangedPictures:
        """Returns what the attacker's own clients draw their pictures from."""
        return ChangedPictures(
            gallery, target.classes, self.relabelled, self.mirrored, self.shifted
        )

    def make_lessons(self, setting: ClientSetting, public: Sequence[Example]) -> Lessons:
        gallery = read_pictures(setting.target, public)
        training, held_out = split(gallery, self.noun, fewest=2 * setting.batch_size + 1)
        return Lessons(
            training, held_out, self.make_source(setting.target, training), training.mean
        )

    def make_features(
        self, setting: ClientSetting, shape: Sequence[int], bases: Mapping[str, Tensor]
    ) -> Features:
        if self.fraction == 1:
            return WholeFeatures(setting, self.largest)
        return HashedFeatures(setting, self.fraction, self.hashing_seed, self.signed, self.largest)

    def make_network(
        self,
        setting: ClientSetting,
        features: Features,
        shape: Sequence[int],
        inverters: int = 1,
    ) -> PictureNetwork:
        return PictureNetwork(
            features.size,
            None if self.directions is None else min(self.directions, features.size),
            [self.width] * self.hidden_layers,
            shape,
            setting.batch_size,
            setting.target.classes,
            raw=self.raw,
            bounded=self.bounded,
            variation_weight=self.variation_weight,
            inverters=inverters,
        )

    def describe_score(self, facts: dict[str, Any]) -> str:
        return (
            f"the squared error is {facts['held_out_error']:.4f} "
            f"and {100 * facts['held_out_right']:.1f} % of the labels are right"
        )


@register("attack", "lti_pictures")
@dataclass(frozen=True)
class LtiPictures(PictureInversion):
    """Learns to invert from public pictures: a perceptron from the update to the pixels (LTI).

    It is trained on updates that went through the defense.
    """


@register("attack", "lti_pictures_paper")
@dataclass(frozen=True)
class LtiPicturesPaper(PictureInversion):
    """As lti_pictures, just as in its paper: the raw gradient, a sigmoid, 200 epochs at 1e-4."""

    epochs: Rate | None = 200.0
    learning_rate: Rate | None = 1e-4
    decay: Share = 0.25  # after 150 of 200 epochs
    drops: bool = True
    directions: Count | None = None
    raw: bool = True
    bounded: bool = True
