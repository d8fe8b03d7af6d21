"""The numbers an inverter is fed with, made linearly from what is seen of an update.

`SimulatedFeatures` makes them for clients that the attacker plays.

Entries are summed in bins (`HashedFeatures`, the paper's), taken as they are (`WholeFeatures`, of
small updates), or matrices are read token by token (`FactorFeatures`, ours).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.learning_to_invert.simulation import Simulation, open_generator
from gradleak.core.attack import Bench, ClientSetting
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel, Survivors, channel_of
from gradleak.core.streams import Streams
from gradleak.core.update import Update
from gradleak.matching.chunking import pieces, refuse_without_room
from gradleak.matching.kinds import Kind, capture_calls, find_slopes, kind_of, owners_of
from gradleak.matching.linear_algebra import decompose, invert, orthonormalise

Largest = Literal["signs", "sizes"]  # what is read of entries of which only the largest were sent

REST_BINS = 4096  # for tensors that are no matrices over tokens and too large to take as they are
ILL_CONDITIONED = 1e-2  # of the largest mean vector: places that differ by less are not told apart
CONTENT_WIDTH = 96  # directions of a matrix's content that are kept
CONTENT_SAMPLES = 4096  # tokens they are found from


class Features(ABC):
    """A linear map of an update's entries, or of their signs."""

    size: int
    groups: Sequence[int] | None = None  # neighbours that are scaled together; none: each alone
    bases: Mapping[str, Tensor] = {}  # what was measured to make the map, and is kept with a fit

    @abstractmethod
    def __call__(self, update: Update) -> Float[Tensor, "clients features"]:
        """Returns features of every client, float32."""

    @property
    @abstractmethod
    def noise_scale(self) -> Float[Tensor, "features"]:
        """How far noise of spread 1 on every entry moves each feature, independently of others."""


def sends_only_largest(channel: Channel) -> bool:
    """Returns whether clients send their largest entries and zeros.

    Which entries these are then says more of the words than how large they are.
    """
    return channel.survivors is Survivors.SEEN and not channel.randomised


def read_entries(update: Update, *, signs: bool) -> Float[Tensor, "clients entries"]:
    """Returns all entries side by side: their sizes, or only which are there and their signs."""
    flat = torch.cat([tensor.flatten(1) for tensor in update.tensors.values()], dim=1).float()
    return flat.sign() if signs else flat


def average_in_groups(
    spread: Float[Tensor, "features"], groups: Sequence[int] | None
) -> Float[Tensor, "features"]:
    """Returns the spread of each feature's group, so that neighbours keep their proportions."""
    if groups is None:
        return spread
    pieces = torch.split(spread, list(groups))
    return torch.cat([piece.square().mean().sqrt().expand(len(piece)) for piece in pieces])


class WholeFeatures(Features):
    """All entries as they are, for updates small enough; each tensor's are scaled together."""

    def __init__(self, setting: ClientSetting, largest: Largest = "sizes") -> None:
        target = setting.target
        self.signs = largest == "signs" and sends_only_largest(channel_of(setting.defenses))
        self.groups = [target.part(name).size for name in setting.view.visible(target)]
        self.size, self.device = sum(self.groups), target.device

    def __call__(self, update: Update) -> Float[Tensor, "clients features"]:
        return read_entries(update, signs=self.signs)

    @property
    def noise_scale(self) -> Float[Tensor, "features"]:
        return torch.ones(self.size, device=self.device)


class HashedFeatures(Features):
    """All entries, summed in bins."""

    def __init__(
        self,
        setting: ClientSetting,
        fraction: float,
        seed: int,
        signed: bool,
        largest: Largest = "sizes",
    ) -> None:
        target = setting.target
        self.signs = largest == "signs" and sends_only_largest(channel_of(setting.defenses))
        entries = sum(target.part(name).size for name in setting.view.visible(target))
        self.size = max(1, round(fraction * entries))
        self.hashing = Hashing(
            entries, self.size, Streams.root("hashing", seed), signed, target.device
        )

    def __call__(self, update: Update) -> Float[Tensor, "clients features"]:
        return self.hashing(read_entries(update, signs=self.signs))

    @property
    def noise_scale(self) -> Float[Tensor, "features"]:
        return self.hashing.counts.sqrt()


class Hashing:
    """Every coordinate falls into one of k bins, and each bin is summed (Weinberger et al. 2009).

    A seed gives the permutation that fills the bins whenever it is opened: it is never stored. Bins
    of one size make hashing a gather and a sum over neighbours, where bins of random sizes would
    need scattered additions.
    """

    def __init__(
        self, coordinates: int, bins: int, streams: Streams, signed: bool, device: torch.device
    ) -> None:
        if not 1 <= bins <= coordinates:
            raise ValueError(
                f"bins must lie between 1 and the {coordinates} coordinates, not {bins}"
            )
        self.coordinates, self.bins, self.each = coordinates, bins, coordinates // bins
        order = torch.randperm(coordinates, generator=streams.child("bins").generator()).to(device)
        self.even, self.left_over = order[: bins * self.each], order[bins * self.each :]
        self.signs: Tensor | None = None
        if signed:
            generator = streams.child("signs").generator()
            drawn = torch.randint(0, 2, (coordinates,), generator=generator, dtype=torch.int8)
            self.signs = (drawn * 2 - 1).to(device)

    @property
    def counts(self) -> Float[Tensor, "bins"]:
        """How many coordinates each bin sums."""
        counts = torch.full((self.bins,), float(self.each), device=self.even.device)
        counts[: len(self.left_over)] += 1
        return counts

    def __call__(self, flat: Float[Tensor, "clients coordinates"]) -> Float[Tensor, "clients bins"]:
        if self.signs is not None:
            flat = flat * self.signs
        # Clients side by side make long pieces of memory; nothing is gathered before it is summed.
        by_coordinate = flat.mT.contiguous()
        summed = F.embedding_bag(self.even.view(self.bins, self.each), by_coordinate, mode="sum")
        # Coordinates that do not divide evenly go to the first bins, one each.
        summed[: len(self.left_over)] += by_coordinate[self.left_over]
        return summed.mT.contiguous()


class FactorFeatures(Features):
    """Features that know what a gradient is made of: the sum over tokens of δ xᵀ.

    At one place of a text a layer's inputs x are much alike whatever the words are (in a
    classifier, its output gradients δ are). Those mean vectors tell the terms of the sum apart, so
    that a matrix can be read token by token: 16 short rows for 150,000 entries. Every matrix gives
    places × content, position by position; vectors stay as they are, anything else is hashed.
    """

    def __init__(self, setting: ClientSetting, length: int, bases: Mapping[str, Tensor]) -> None:
        target, self.length = setting.target, length
        self.bases = {name: tensor.to(target.device) for name, tensor in bases.items()}
        names = setting.view.visible(target)
        sizes = {name: target.part(name).size for name in names}
        tables = set(target.groups["position_embedding"])
        self.matrices = [name for name in names if f"{name}.places" in bases]
        # Of these some have their places along the rows.
        self.by_rows = {name for name in self.matrices if bool(bases[f"{name}.rows"])}
        self.tables = [name for name in names if name in tables]
        rest = [name for name in names if name not in self.matrices and name not in tables]
        self.vectors = [name for name in rest if sizes[name] <= REST_BINS]
        streams = Streams.root("factors", 0)
        self.hashed = {
            name: Hashing(sizes[name], REST_BINS, streams.child(name), True, target.device)
            for name in rest
            if name not in self.vectors
        }
        # [places, content] of every block that is read position by position
        self.blocks = [
            (bases[f"{name}.places"].shape[1], bases[f"{name}.content"].shape[1])
            for name in self.matrices
        ] + [(length, target.part(name).shape[1]) for name in self.tables]
        self.others = [sizes[name] for name in self.vectors] + [REST_BINS] * len(self.hashed)
        self.groups = [places * content for places, content in self.blocks] + self.others
        self.size = sum(self.groups)
        # For every block what turns its coordinates along places into one row a position
        self.unmixing = [
            *(self.bases[f"{name}.unmixing"] for name in self.matrices),
            *[torch.eye(length, device=target.device)] * len(self.tables),
        ]

    def __call__(self, update: Update) -> Float[Tensor, "clients features"]:
        tensors = {name: tensor.float() for name, tensor in update.tensors.items()}
        found = [
            *(self._read_matrix(name, tensors[name]) for name in self.matrices),
            *(tensors[name][:, : self.length] for name in self.tables),
            *(tensors[name] for name in self.vectors),
            *(hashing(tensors[name].flatten(1)) for name, hashing in self.hashed.items()),
        ]
        return torch.cat([block.flatten(1) for block in found], dim=1)

    def _read_matrix(self, name: str, gradient: Tensor) -> Float[Tensor, "clients places content"]:
        places, content = self.bases[f"{name}.places"], self.bases[f"{name}.content"]
        by_place = gradient if name in self.by_rows else gradient.mT
        return places.mT @ by_place @ content

    @property
    def noise_scale(self) -> Float[Tensor, "features"]:
        # Bases are orthonormal: noise stays what it was, but for what is summed in bins.
        plain = self.size - REST_BINS * len(self.hashed)
        device = next(iter(self.bases.values())).device
        counts = (hashing.counts.sqrt() for hashing in self.hashed.values())
        return torch.cat([torch.ones(plain, device=device), *counts])


def measure_bases(setting: ClientSetting, batches: Batch) -> dict[str, Tensor]:
    """Returns bases for `FactorFeatures`, from what layers see of the attacker's own texts."""
    target, tokens = setting.target, batches.mask[..., 0].numel()
    modules = find_matrices(setting)
    used = {module: target.module.get_submodule(module) for module in modules.values()}
    with torch.enable_grad(), capture_calls(used, tokens) as noted:
        total = target.losses(batches).mean(1).sum()
        once = {
            name: uses
            for name, uses in noted.items()
            if len(uses) == 1 and uses[0].inputs.ndim == 3
        }
        calls = {name: found[0] for name, found in find_slopes(total, once).items()}
    weights = torch.ones(tokens, device=target.device)
    if not target.labels_are_tokens:  # δ is the label's doing: of another class it points elsewhere
        weights = torch.where(batches.labels.flatten() == 0, 1.0, 0.0)
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        if module not in calls:
            continue
        inputs, delta = calls[module][0].inputs.detach().float(), calls[module][1].float()
        # Its rows are inputs; a linear layer's, outputs
        turned = kind_of(used[module]) is Kind.CONV1D
        if target.labels_are_tokens:
            found |= make_basis(name, inputs.mean(0), delta.flatten(0, 1), rows=turned)
        else:
            mean = (delta * weights[:, None, None]).sum(0) / weights.sum().clamp_min(1)
            found |= make_basis(name, mean, inputs.flatten(0, 1), rows=not turned)
    return found


def find_matrices(setting: ClientSetting) -> dict[str, str]:
    """Returns the visible weights of linear layers, each with its module, but for tied ones."""
    target = setting.target
    owners = owners_of(target.module)  # which know no slices of a fused matrix
    uses = {name: owners[name] for name in setting.view.visible(target) if name in owners}
    return {
        name: use[0][0]
        for name, use in uses.items()
        if len(use) == 1
        and use[0][1] == "weight"
        and kind_of(target.module.get_submodule(use[0][0])) in (Kind.LINEAR, Kind.CONV1D)
    }


def make_basis(
    name: str,
    means: Float[Tensor, "tokens size"],
    content: Float[Tensor, "samples width"],
    rows: bool,
) -> dict[str, Tensor]:
    """Returns orthonormal directions of places and of content, and how places are told apart."""
    # Places are the directions of the tokens' mean vectors. Their coordinates in these directions
    # mix; the rows of `unmixing` undo that, as far as mean vectors differ at all.
    places = orthonormalise(means.double().mT)
    mixed = places.mT @ means.double().mT  # means.T = places @ mixed
    unmixing = invert(mixed.mT, ILL_CONDITIONED).mT  # [tokens, places]
    unmixing = unmixing / unmixing.norm(dim=1, keepdim=True).clamp_min(1e-12)
    some = content[:CONTENT_SAMPLES]
    directions = decompose(some - some.mean(0)).right[:CONTENT_WIDTH]
    return {
        f"{name}.places": places.to(means.dtype),
        f"{name}.unmixing": unmixing.to(means.dtype),
        f"{name}.content": directions.mT.contiguous().to(content.dtype),
        f"{name}.rows": torch.tensor(rows),
    }


class SimulatedFeatures:
    """Features of clients that the attacker plays; as many clients at once as memory allows."""

    def __init__(
        self, simulation: Simulation, features: Features, bench: Bench | None = None
    ) -> None:
        self.simulation, self.features, self.bench = simulation, features, bench
        std = simulation.noise_std
        self.noise = std * features.noise_scale if std else None  # the spread on every feature

    def __call__(
        self, batches: Batch, streams: Streams, noisy: bool = True
    ) -> Float[Tensor, "clients features"]:
        """Returns features of clients' updates, with the noise that comes last or without."""
        clients, step = batches.lead[0], self._count_at_once(batches)
        found = [
            self.features(self.simulation(batches[start : start + step], streams, start))
            for start in range(0, clients, step)
        ]
        return self.add_noise(torch.cat(found), streams, noisy)

    def _count_at_once(self, batches: Batch) -> int:
        clients, examples = batches.lead
        if self.bench is None:
            return clients
        tokens = 1 if batches.pixels is not None else batches.mask.shape[-1]
        device, needed = batches.mask.device, self.simulation.bytes(examples, tokens)
        refuse_without_room(
            "An inverter", needed, self.bench, device, "one client that it plays to learn from"
        )
        return pieces(self.bench, device, needed, 0, clients).size

    def add_noise(
        self, found: Float[Tensor, "clients features"], streams: Streams, noisy: bool = True
    ) -> Float[Tensor, "clients features"]:
        """Adds the noise that comes last to features of what clients send before it."""
        if self.noise is None or not noisy:
            return found
        return found + self.noise * torch.randn(
            found.shape,
            generator=open_generator(streams.child("noise"), found.device),
            device=found.device,
        )
