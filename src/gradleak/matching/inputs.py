"""Inputs of chosen modules for candidate sentences: a forward pass that stops as soon as the
deepest of them was called.

The gradient of a linear layer is Σ_t δ_t x_tᵀ, so its rows lie in the span of the layer's inputs
x_t: what a sentence would have fed into the layer can be held against what was seen, whatever the
δ.

The first layer of most models is fed LayerNorm(word + position). `Additive` has products of such
inputs with directions, and their sizes, from products of words with positions: every word at every
position at the price of every word and every position, and no input has to be made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.kinds import Kind, kind_of

AGREES = 1e-4  # relative difference from the model's own pass: rounding leaves 1e-6
WORDS_AT_ONCE = 2**13
TRIED = 4  # words that the sum is tried with


class _SeenEnough(Exception):
    """Ends a forward pass whose rest nobody asks for."""


class ModuleInputs:
    """Computes what linear modules are fed; modules fed by one tensor (query, key, value) share
    it."""

    def __init__(self, target: Target, parts: Sequence[Part]) -> None:
        self.target = target
        self.names = tuple(dict.fromkeys(module_of(part) for part in parts))
        self.modules = {name: target.module.get_submodule(name) for name in self.names}
        for name, module in self.modules.items():
            if kind_of(module) not in (Kind.LINEAR, Kind.CONV1D):
                raise GradleakError(
                    f"{name} is not a linear layer: its gradient says nothing of the span of its"
                    " inputs."
                )

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        """Returns inputs by module name, [*lead, tokens, width], differentiable in embeddings that
        ask for gradients."""
        seen: dict[str, Tensor] = {}

        def note(name: str, inputs: Tensor) -> None:
            seen[name] = inputs
            if len(seen) == len(self.modules):
                raise _SeenEnough

        handles = [
            module.register_forward_pre_hook(
                lambda _, arguments, name=name: note(name, arguments[0])
            )
            for name, module in self.modules.items()
        ]
        try:
            self.target.losses(batch)
        except _SeenEnough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        if missing := [name for name in self.names if name not in seen]:
            raise GradleakError(
                f"{missing[0]} takes no part in the forward pass: it cannot be attacked."
            )
        return {
            name: inputs.reshape(*batch.lead, *inputs.shape[1:]) for name, inputs in seen.items()
        }


def module_of(part: Part) -> str:
    """Returns the module that holds a part's parameter."""
    return part.parameter.rpartition(".")[0]


def matrix_of(target: Target, part: Part, tensor: Tensor) -> Tensor:
    """Returns a gradient [clients, …] of a linear part as [clients, outputs, inputs], whichever way
    round the module keeps it."""
    kind = kind_of(target.module.get_submodule(module_of(part)))
    return tensor.mT if kind is Kind.CONV1D else tensor


def linear_parts(target: Target, names: Sequence[str]) -> tuple[Part, ...]:
    """Returns those of the named parts that are weights of linear layers, one row an input token,
    in the order of the layers."""
    found = [
        part
        for part in map(target.part, names)
        if kind_of(target.module.get_submodule(module_of(part))) in (Kind.LINEAR, Kind.CONV1D)
        and part.parameter.endswith("weight")
        and part.layer is not None
    ]
    return tuple(sorted(found, key=lambda part: part.layer or 0))


def shared_linear_parts(observations: Sequence[Observation]) -> tuple[Part, ...]:
    """Returns those linear weights whose gradient is seen in any of some observations."""
    return linear_parts(
        observations[0].target,
        tuple(dict.fromkeys(name for one in observations for name in one.update.tensors)),
    )


def visible_linear_parts(
    observation: Observation, layer: int, modules: Sequence[str]
) -> tuple[Part, ...]:
    """Returns those linear weights of some modules in one layer whose gradient is seen."""
    return tuple(
        part
        for part in linear_parts(observation.target, tuple(observation.update.tensors))
        if part.layer == layer and part.module in modules
    )


@torch.no_grad()
def first_inputs(
    inputs: ModuleInputs, ids: Int[Tensor, "words"], positions: int
) -> Float[Tensor, "positions words width"]:
    """Returns inputs of a module for every word of `ids` alone at every position.

    Right for modules of the first layer only, where tokens have not mixed: each position is filled
    with the word itself.
    """
    target = inputs.target
    rows = ids[:, None].expand(-1, positions)
    mask = torch.ones_like(rows, dtype=torch.bool)
    made = inputs(Batch(ids=rows, mask=mask, labels=target.any_labels(len(ids), positions)))
    return made[inputs.names[0]].movedim(1, 0)


@torch.no_grad()
def depends_on_position(inputs: ModuleInputs) -> bool:
    """Whether positions change what a word feeds in: rotary models turn queries later."""
    words = inputs.target.vocabulary.allowed.nonzero()[:2, 0]
    first, *others = first_inputs(inputs, words, 3)
    return not all(torch.allclose(first, other, rtol=1e-5, atol=1e-7) for other in others)


@dataclass(frozen=True, eq=False)
class Additive:
    """What the normalisation is fed for each word and for each position; their sums are what it
    is fed for both."""

    words: Float[Tensor, "words width"]
    positions: Float[Tensor, "positions width"]
    norm: nn.LayerNorm

    @torch.no_grad()
    def misses(self, directions: Float[Tensor, "width some"]) -> Float[Tensor, "positions words"]:
        """Returns the part of each input along some directions, relative to its size."""
        gain, shift = self.norm.weight, self.norm.bias
        # LayerNorm takes the mean off; the variance is that of the centred sum.
        rows, columns = centre(self.positions), centre(self.words)
        deviation = (squares_of_sums(rows, columns) / rows.shape[-1] + self.norm.eps).sqrt()
        rows, columns = rows * gain, columns * gain
        # ‖(r + c)/σ·gain + shift‖², written out in products of r, c and shift
        sizes = squares_normalised(rows, columns, deviation, shift)
        along = squares_normalised(
            rows @ directions, columns @ directions, deviation, shift @ directions
        )
        return (along.clamp_min(0) / sizes).sqrt()


def centre(rows: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    return rows - rows.mean(-1, keepdim=True)


def squares_of_sums(
    rows: Float[Tensor, "rows width"], columns: Float[Tensor, "columns width"]
) -> Float[Tensor, "rows columns"]:
    """Returns the squared norm of every sum of one of each."""
    # ‖r + c‖² = ‖r‖² + ‖c‖² + 2 r·c
    return rows.square().sum(-1)[:, None] + columns.square().sum(-1) + 2 * rows @ columns.mT


def squares_normalised(
    rows: Tensor, columns: Tensor, deviation: Tensor, shift: Tensor
) -> Float[Tensor, "rows columns"]:
    """Returns the same of every sum divided by its deviation and shifted."""
    across = (rows @ shift)[:, None] + columns @ shift
    return (
        squares_of_sums(rows, columns) / deviation.square()
        + 2 * across / deviation
        + shift.square().sum()
    )


@torch.no_grad()
def additive_of(
    inputs: ModuleInputs, words: Int[Tensor, "words"], positions: int
) -> Additive | None:
    """Returns the sum a model's first inputs are made of; none where they are made otherwise."""
    norms = [
        module for module in inputs.target.module.modules() if isinstance(module, nn.LayerNorm)
    ]
    some = words[torch.linspace(0, len(words) - 1, TRIED, device=words.device).long()]
    for norm in norms:
        if norm.weight is None or norm.bias is None:
            continue
        seen, fed = _before(norm, inputs, some, positions)
        # ELECTRA and ALBERT normalise embeddings that are narrower than their layers.
        if seen is None or seen.shape != fed.shape:
            continue
        # If each is word + position, a row and a column less their corner make all the others.
        if float((norm(seen[:, :1] + seen[:1] - seen[:1, :1]) - fed).norm() / fed.norm()) < AGREES:
            pieces = [
                _before(norm, inputs, piece, 1)[0] for piece in torch.split(words, WORDS_AT_ONCE)
            ]
            # Words at the first position, and positions less the first: their sums are the same.
            alone = torch.cat([piece[:, 0] for piece in pieces if piece is not None])
            return Additive(alone, seen[0] - seen[0, :1], norm)
    return None


_SUMS: "WeakKeyDictionary[Target, tuple[int, Additive | None]]" = WeakKeyDictionary()


def keep_sums(target: Target, inputs: ModuleInputs, positions: int) -> Additive | None:
    """Returns the model's first inputs as sums of a word's and a position's part.

    They are kept for as long as the model is; none where its inputs are made otherwise.
    """
    kept = _SUMS.get(target)
    if kept is None or kept[0] < positions:
        words = target.vocabulary.allowed.nonzero()[:, 0]
        _SUMS[target] = kept = (positions, additive_of(inputs, words, positions))
    return kept[1]


def _before(
    norm: nn.LayerNorm, inputs: ModuleInputs, words: Int[Tensor, "words"], positions: int
) -> tuple[Float[Tensor, "words positions _"] | None, Float[Tensor, "words positions width"]]:
    """Returns what a normalisation is fed for each word at each position, and what the first layer
    is."""
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        fed = first_inputs(inputs, words, positions).movedim(0, 1)
    finally:
        handle.remove()
    return (seen[0] if seen else None), fed
