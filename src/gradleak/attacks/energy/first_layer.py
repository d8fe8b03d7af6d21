"""Words read straight off the first layer: before tokens mix, an input depends on its own word and position alone.

Every word at every place is held against the span that was seen; the best is where the search begins. Differences from the first
token's input (the same special token in every sentence) lie in the span even where only centred inputs are seen (the key).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.attacks.energy.errors import error_std
from gradleak.attacks.energy.sure import sure_directions
from gradleak.attacks.search.rows import Rows
from gradleak.core.attack import Bench
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.matching.chunking import pieces
from gradleak.matching.inputs import ModuleInputs, first_inputs, linear_parts, matrix_of

FED_ALIKE = ("query", "key", "value")
VECTORS_AT_ONCE = 2**16
BESIDE = 8  # vectors of an input's width that one word at one position takes on its way


@torch.no_grad()
def words_of_first_layer(rows: Rows, filler: int, bench: Bench) -> Int[Tensor, "rows examples tokens"]:
    """Where to begin: what the first layer's query, key and value say where they are seen, fillers elsewhere."""
    empty = torch.where(rows.fixed, rows.frame, filler)
    observations = [problem.observation for problem in rows.problems]
    parts = _parts(observations)
    prefix = rows.target.vocabulary.prefix
    if not parts or not prefix:
        return empty
    inputs = ModuleInputs(rows.target, parts[:1])
    if not _by_position(inputs, rows.words[:1]):
        return empty
    found = rows.words[_nearest(rows, inputs, [_basis(one, parts) for one in observations], bench)]
    shown = torch.tensor([any(part.name in one.update.tensors for part in parts) for one in observations], device=found.device)
    return torch.where(rows.fixed | ~shown[:, None, None], empty, found.mT)


def _parts(observations: Sequence[Observation]) -> list[Part]:
    names = dict.fromkeys(name for observation in observations for name in observation.update.tensors)
    linear = linear_parts(observations[0].target, tuple(names))
    return [part for part in linear if part.layer == 1 and part.module in FED_ALIKE]


def _by_position(inputs: ModuleInputs, word: Int[Tensor, "1"]) -> bool:
    """Whether positions are added before the first layer; rotary ones are not."""
    made = first_inputs(inputs, word, 2)[inputs.names[0]]
    return not torch.equal(made[0], made[1])


def _basis(observation: Observation, parts: Sequence[Part]) -> Float[Tensor, "rank width"]:
    """Directions of all that the parts show, each as long as it is sure, at most one a token."""
    seen = [part for part in parts if part.name in observation.update.tensors]
    if not seen:
        return torch.zeros(1, parts[0].shape[1], device=observation.target.device, dtype=observation.target.dtype)
    matrices = [matrix_of(observation.target, part, observation.update.tensors[part.name])[0] for part in seen]
    stds = [error_std(observation, part.name) for part in seen]
    if all(stds):
        return sure_directions(observation, torch.cat([one / std for one, std in zip(matrices, stds, strict=True)]), 1.0)
    return sure_directions(observation, torch.cat([one / one.norm().clamp_min(1e-30) for one in matrices]), 0.0)


def _nearest(rows: Rows, inputs: ModuleInputs, bases: Sequence[Tensor], bench: Bench) -> Int[Tensor, "rows positions examples"]:
    """At every position the words whose inputs, less the first token's, lie least outside each span: one for each sentence."""
    positions, examples, name = rows.mask.shape[-1], rows.mask.shape[1], inputs.names[0]
    first = first_inputs(inputs, torch.tensor(rows.target.vocabulary.prefix[:1], device=rows.words.device), 1)[name][0, 0]
    shape, count = (len(bases), positions), min(examples, len(rows.words))
    misses = torch.full((*shape, count), torch.inf, device=first.device, dtype=first.dtype)
    words = torch.arange(count, device=first.device).expand(*shape, count)

    def piece(some: slice) -> Tensor:
        nonlocal misses, words
        vectors = torch.nn.functional.normalize(first_inputs(inputs, rows.words[some], positions)[name] - first, dim=-1)
        found = torch.stack([1 - (vectors @ basis.T).square().sum(-1) for basis in bases])
        numbers = torch.arange(some.start, some.stop, device=first.device).expand(*shape, -1)
        misses, places = torch.cat([misses, found], dim=-1).topk(count, largest=False)
        words = torch.cat([words, numbers], dim=-1).gather(-1, places)
        return found[0, 0]

    width = positions * (BESIDE * len(first) + max(map(len, bases)) + 4 * len(bases))
    most = VECTORS_AT_ONCE / positions
    pieces(bench, first.device, width * first.element_size(), width * len(first), most).run(piece, len(rows.words))
    return words if count == examples else words.repeat(1, 1, -(-examples // count))[..., :examples]
