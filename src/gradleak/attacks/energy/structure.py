"""Which directions a module's gradient can have, beyond lying in the span of its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.parts import Part
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching.capture import captured
from gradleak.matching.inputs import module_of

EXAMPLES, TOKENS = 2, 7
ABSENT = 1e-6  # an output gradient this far below the largest is none


@dataclass(frozen=True)
class Structure:
    """What is known of the output gradients δ_t of a module, whatever the data."""

    centred: bool = False  # they add up to zero over a sentence: softmax ignores shifts of all keys
    place: int | None = None  # only this token has one: a classifier's last layer feeds its first (or last) token on

    def directions(
        self, inputs: Float[Tensor, "o c examples tokens width"], mask: Bool[Tensor, "o c examples tokens"]
    ) -> Float[Tensor, "o c uses width"]:
        """Vectors that span all gradients the module can have on these inputs."""
        shown = mask[..., None].to(inputs.dtype)
        if self.place == 0:
            return inputs[..., 0, :]
        if self.place is not None:  # the last token of each sentence
            last = (mask.sum(-1) - 1)[..., None, None].expand(*mask.shape[:-1], 1, inputs.shape[-1])
            return inputs.gather(-2, last)[..., 0, :]
        kept = inputs * shown
        if self.centred:
            kept = (kept - kept.sum(-2, keepdim=True) / shown.sum(-2, keepdim=True)) * shown
        return kept.flatten(-3, -2)


def structures_of(target: Target, parts: Sequence[Part]) -> list[Structure]:
    """Read off the output gradients of a random batch: a property of the architecture, so any data shows it."""
    with torch.enable_grad():
        deltas = _output_gradients(target, parts)
    return [_structure(delta) for delta in deltas]


def _structure(deltas: Float[Tensor, "examples tokens outputs"]) -> Structure:
    sizes = deltas.norm(dim=-1)
    live = sizes > ABSENT * sizes.max()
    if bool(live[:, 0].all()) and not bool(live[:, 1:].any()):
        return Structure(place=0)
    if bool(live[:, -1].all()) and not bool(live[:, :-1].any()):
        return Structure(place=-1)
    total = deltas.sum(1).norm(dim=-1)
    return Structure(centred=bool((total < 1e-4 * sizes.sum(1)).all()))


def _output_gradients(target: Target, parts: Sequence[Part]) -> list[Float[Tensor, "examples tokens outputs"]]:
    generator = Streams.root("structure", 0).generator()
    shape = (EXAMPLES, TOKENS, target.hidden_size)
    drawn = torch.randn(shape, generator=generator) * target.vocabulary.mean_norm / shape[-1] ** 0.5
    embeddings = drawn.to(target.device, target.dtype).requires_grad_()
    mask = torch.ones(shape[:2], dtype=torch.bool, device=target.device)
    labels = target.any_labels(EXAMPLES, TOKENS)
    names = list(dict.fromkeys(module_of(part) for part in parts))
    with captured({name: target.module.get_submodule(name) for name in names}, EXAMPLES) as uses:
        loss = target.losses(Batch(embeddings=embeddings, mask=mask, labels=labels)).sum()
    outputs = [uses.calls[name][0].output for name in names]
    found = dict(zip(names, torch.autograd.grad(loss, outputs), strict=True))
    deltas = [found[module_of(part)] for part in parts]
    return [delta if part.cut is None else part.cut.of(delta, axis=-1) for part, delta in zip(parts, deltas, strict=True)]
