"""What the last layer of a classifier shows of each attention head.

There only one token (the first, say) is fed on, so that in the gradients of key and value every head h has one direction a
sentence: dV_h = g_h (Σ_t a_t x_t)ᵀ, the attention's own average of the inputs, and dK_h = q_h (Σ_t s_t x_t)ᵀ with the token's
query q_h on the left. The span of all inputs would allow for much more. What a sentence makes of q_h, and of the average (seen
through W_v as the head's context), can be held against these directions one head at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradleak.attacks.energy.structure import Structure, structures_of
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.target import Target
from gradleak.matching.capture import Kind, kind_of
from gradleak.matching.inputs import matrix_of, module_of
from gradleak.matching.linear_algebra import decompose, orthonormalise


@dataclass(frozen=True)
class Heads:
    """Says how to compare one key or value matrix of the last layer head by head."""

    part: Part  # the key or value matrix
    source: Part  # the matrix whose inputs tell: the query's for keys, the attention output's for values
    place: int  # the token that is fed on
    count: int  # heads

    def seen(self, observations: Sequence[Observation]) -> Float[Tensor, "observations heads width examples"]:
        """An orthonormal basis of the directions seen in each head, one a sentence; zeros where the matrix is not shown."""
        target = observations[0].target
        width = self.part.shape[0] // self.count if self.part.shape[0] % self.count == 0 else 0
        bases = torch.zeros(len(observations), self.count, width, observations[0].batch_size)
        bases = bases.to(target.device, target.dtype)
        for place, observation in enumerate(observations):
            if self.part.name in observation.update.tensors:
                matrix = matrix_of(target, self.part, observation.update.tensors[self.part.name])[0]
                bases[place] = self._basis(target, matrix.view(self.count, -1, matrix.shape[1]), observation.batch_size)
        return bases

    def _basis(self, target: Target, blocks: Float[Tensor, "heads width inputs"], sentences: int) -> Tensor:
        found = decompose(blocks.cpu())
        if self.part.module == "key":
            basis: Tensor = found.left[..., :sentences]
            return basis.to(target.device, target.dtype)
        weight = target.module.get_parameter(self.part.parameter).detach()
        by_head = weight.view(self.count, -1, weight.shape[1]).double().cpu()
        basis = orthonormalise(by_head @ found.right[:, :sentences].mT)
        return basis.to(target.device, target.dtype)

    def outside(
        self,
        target: Target,
        inputs: Mapping[str, Tensor],
        mask: Bool[Tensor, "o c examples tokens"],
        bases: Float[Tensor, "o heads width examples"],
    ) -> Float[Tensor, "o c"]:
        """The share of the candidates' own vectors that lies outside the directions seen, in the mean over heads."""
        vectors = Structure(place=self.place).directions(inputs[module_of(self.source)], mask)
        if self.part.module == "key":
            vectors = target.module.get_submodule(module_of(self.source))(vectors)
        else:
            bias: Any = target.module.get_submodule(module_of(self.part)).bias
            vectors = vectors if bias is None else vectors - bias
        by_head = vectors.reshape(*vectors.shape[:-1], self.count, -1).movedim(-2, -3)  # [o, c, heads, examples, width]
        inside = (by_head @ bases[:, None]).square().sum((-1, -2))
        shares: Tensor = 1 - inside / by_head.square().sum((-1, -2)).clamp_min(1e-30)
        return shares.mean(-1)


def heads_of(target: Target, part: Part) -> Heads | None:
    """The comparison by heads for a key or value matrix, where the model's last layer allows one."""
    if part.module not in ("key", "value"):
        return None
    beside = {one.module: one for one in (*target.parts, *target.frozen_parts) if one.layer == part.layer}
    query, output = beside.get("query"), beside.get("attention_output")
    count = int(getattr(target.module.config, "num_attention_heads", 0))
    if query is None or output is None or not count or part.cut is not None or part.shape[0] != query.shape[0]:
        return None
    if any(kind_of(target.module.get_submodule(module_of(one))) is not Kind.LINEAR for one in (part, query, output)):
        return None
    place = structures_of(target, [query])[0].place
    if place is None:
        return None
    return Heads(part, query if part.module == "key" else output, place, count)
