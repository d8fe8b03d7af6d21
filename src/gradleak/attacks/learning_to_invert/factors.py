"""Features that know what a gradient is made of: the sum over tokens of an output gradient times an input.

At one place of a text a layer's inputs are much alike whatever the words are (in a classifier, its output gradients are). Those
mean vectors tell the terms of the sum apart, so that the matrix can be read token by token: 16 short rows for 150,000 entries.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.learning_to_invert.features import Features
from gradleak.attacks.learning_to_invert.hashing import Hashing
from gradleak.core.batch import Batch
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.trainable import Setting
from gradleak.core.update import Update
from gradleak.matching.capture import Kind, captured, kind_of
from gradleak.matching.linear_algebra import decompose, invert, orthonormalise
from gradleak.matching.plan import owners_of

REST_BINS = 4096  # for tensors that are no matrices over tokens and too large to be taken as they are
ILL_CONDITIONED = 1e-2  # places whose mean vectors differ by less than this share of the largest are not told apart


class FactorFeatures(Features):
    """For every matrix its places × content, position by position; vectors as they are; anything else hashed."""

    def __init__(self, setting: Setting, length: int, bases: Mapping[str, Tensor]) -> None:
        self.length, self.bases = length, {name: tensor.to(setting.target.device) for name, tensor in bases.items()}
        target = setting.target
        names = setting.view.visible(target)
        tables = set(target.groups["position_embedding"])
        self.matrices = [name for name in names if f"{name}.places" in bases]
        self.rows = {name for name in self.matrices if bool(bases[f"{name}.rows"])}  # whose places are along their rows
        self.tables = [name for name in names if name in tables]
        rest = [name for name in names if name not in self.matrices and name not in tables]
        self.vectors = [name for name in rest if target.part(name).size <= REST_BINS]
        streams = Streams.root("factors", 0)
        self.hashed = {
            name: Hashing(target.part(name).size, REST_BINS, streams.child(name), True, target.device)
            for name in rest
            if name not in self.vectors
        }
        # [places, content] of every block that is read position by position
        self.blocks = [(bases[f"{name}.places"].shape[1], bases[f"{name}.content"].shape[1]) for name in self.matrices]
        self.blocks += [(length, target.part(name).shape[1]) for name in self.tables]
        self.others = [target.part(name).size for name in self.vectors] + [REST_BINS] * len(self.hashed)
        self.groups = [places * content for places, content in self.blocks] + self.others
        self.size = sum(self.groups)

    @staticmethod
    def measured(setting: Setting, batches: Batch) -> "FactorFeatures":
        """Bases from what the layers of the target see when the attacker's own texts pass."""
        length = batches.mask.shape[-1]
        return FactorFeatures(setting, length, _bases(setting, batches, length))

    def __call__(self, update: Update) -> Float[Tensor, "clients features"]:
        tensors = {name: tensor.float() for name, tensor in update.tensors.items()}
        found = [self._block(name, tensors[name]).flatten(1) for name in self.matrices]
        found += [tensors[name][:, : self.length].flatten(1) for name in self.tables]
        found += [tensors[name].flatten(1) for name in self.vectors]
        found += [hashing(tensors[name].flatten(1)) for name, hashing in self.hashed.items()]
        return torch.cat(found, dim=1)

    def _block(self, name: str, gradient: Tensor) -> Float[Tensor, "clients places content"]:
        places, content = self.bases[f"{name}.places"], self.bases[f"{name}.content"]
        by_place = gradient if name in self.rows else gradient.mT
        return places.mT @ by_place @ content

    @property
    def noise_scale(self) -> Float[Tensor, "features"]:
        """Bases are orthonormal: noise stays what it was, but for what is summed in bins."""
        plain = self.size - REST_BINS * len(self.hashed)
        device = next(iter(self.bases.values())).device
        return torch.cat([torch.ones(plain, device=device), *(one.counts.sqrt() for one in self.hashed.values())])

    def tensors(self) -> dict[str, Tensor]:
        return self.bases

    def unmixing(self) -> list[Tensor]:
        """For every block the matrix [positions, places] that turns coordinates along places into one row a position."""
        identity = torch.eye(self.length, device=next(iter(self.bases.values())).device)
        return [self.bases[f"{name}.unmixing"] for name in self.matrices] + [identity] * len(self.tables)


def _bases(setting: Setting, batches: Batch, length: int) -> dict[str, Tensor]:
    target = setting.target
    owners = owners_of(target.module)
    named = {name: owners[name] for name in setting.view.visible(target) if name in owners}  # not slices of a fused matrix
    chosen = {name: uses[0] for name, uses in named.items() if len(uses) == 1 and _is_matrix(target, uses[0][0], uses[0][1])}
    modules = {module: target.module.get_submodule(module) for module, _ in chosen.values()}
    with torch.enable_grad(), captured(modules, batches.mask[..., 0].numel()) as uses:
        total = target.losses(batches).mean(1).sum()
        calls = {name: use[0] for name, use in uses.calls.items() if len(use) == 1 and use[0].inputs.ndim == 3}
        deltas = torch.autograd.grad(total, [use.output for use in calls.values()], materialize_grads=True)
    flows = {name: (use.inputs.detach().float(), delta.float()) for (name, use), delta in zip(calls.items(), deltas, strict=True)}
    sides = torch.ones(batches.mask[..., 0].numel(), device=target.device)
    if not target.labels_are_tokens:  # what comes back is the label's doing: of another class it points another way
        sides = torch.where(batches.labels.flatten() == 0, 1.0, 0.0)
    found: dict[str, Tensor] = {}
    for name, (module, _) in chosen.items():
        if module in flows:
            inputs, delta = flows[module]
            turned = kind_of(modules[module]) is Kind.CONV1D  # its rows are inputs, where those of a linear layer are outputs
            if target.labels_are_tokens:
                found |= _basis(name, inputs.mean(0), delta.flatten(0, 1), rows=turned)
            else:
                mean = (delta * sides[:, None, None]).sum(0) / sides.sum().clamp_min(1)
                found |= _basis(name, mean, inputs.flatten(0, 1), rows=not turned)
    return found


def _basis(
    name: str, means: Float[Tensor, "tokens size"], content: Float[Tensor, "samples width"], rows: bool
) -> dict[str, Tensor]:
    """Orthonormal directions of the places and of the content, and how places are told apart."""
    places = orthonormalise(means.double().mT)
    mixed = places.mT @ means.double().mT  # means.T = places @ mixed
    unmixing = invert(mixed.mT, ILL_CONDITIONED).mT  # [tokens, places]
    unmixing = unmixing / unmixing.norm(dim=1, keepdim=True).clamp_min(1e-12)
    kept = min(content.shape[1], CONTENT_WIDTH)
    directions = decompose(content[:SAMPLES] - content[:SAMPLES].mean(0)).right
    return {
        f"{name}.places": places.to(means.dtype),
        f"{name}.unmixing": unmixing.to(means.dtype),
        f"{name}.content": directions[:kept].mT.contiguous().to(content.dtype),
        f"{name}.rows": torch.tensor(rows),
    }


CONTENT_WIDTH = 96  # directions of the content that are kept
SAMPLES = 4096  # tokens they are found from


def _is_matrix(target: Target, module: str, attribute: str) -> bool:
    kind = kind_of(target.module.get_submodule(module))
    return attribute == "weight" and kind in (Kind.LINEAR, Kind.CONV1D)
