"""Which directions a module's gradient can have, beyond lying in the span of its inputs.

That is a property of the architecture. In the last layer of a classifier only one token (the first,
say) is fed on, so that in the gradients of key and value every head h has one direction a sentence:
dV_h = g_h (Σ_t a_t x_t)ᵀ, the attention's own average of the inputs, and dK_h = q_h (Σ_t s_t x_t)ᵀ
with the token's query q_h on the left. The span of all inputs would allow for much more. What a
sentence makes of q_h, and of the average (seen through W_v as the head's context), can be held
against these directions one head at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import Part
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.matching.inputs import matrix_of, module_of
from gradleak.matching.kinds import Kind, capture_calls, find_slopes, kind_of
from gradleak.matching.linear_algebra import decompose, orthonormalise

EXAMPLES, TOKENS = 2, 7  # of the random batch that shows the structure
ABSENT = 1e-6  # an output gradient this far below the largest is none
CANCELLED = 1e-4  # of the sum of their sizes: output gradients that add up to less add up to zero


@dataclass(frozen=True)
class Structure:
    """What is known of the output gradients δ_t of a module, whatever the data."""

    centred: bool = False  # they add up to zero over a sentence: softmax ignores shifts of all keys
    # Only this token has one: a classifier's last layer feeds its first (0) or last (-1) token on.
    place: int | None = None

    def directions(
        self,
        inputs: Float[Tensor, "o c examples tokens width"],
        mask: Bool[Tensor, "o c examples tokens"],
    ) -> Float[Tensor, "o c uses width"]:
        """Returns vectors that span all gradients the module can have on these inputs."""
        shown = mask[..., None].to(inputs.dtype)
        if self.place == 0:
            return inputs[..., 0, :]
        if self.place is not None:  # the last token of each sentence
            last = (mask.sum(-1) - 1)[..., None, None]
            return inputs.gather(-2, last.expand(*mask.shape[:-1], 1, inputs.shape[-1]))[..., 0, :]
        kept = inputs * shown
        if self.centred:
            # Σδ_t = 0, so that Σδ_t x_tᵀ = Σδ_t (x_t − x̄)ᵀ: the span is that of centred inputs.
            kept = (kept - kept.sum(-2, keepdim=True) / shown.sum(-2, keepdim=True)) * shown
        return kept.flatten(-3, -2)


def find_structures(target: Target, parts: Sequence[Part]) -> list[Structure]:
    """Returns structures, read off the output gradients of a random batch: any data shows them."""
    with torch.enable_grad():
        return [_read_structure(delta) for delta in _compute_output_gradients(target, parts)]


def _read_structure(deltas: Float[Tensor, "examples tokens outputs"]) -> Structure:
    sizes = deltas.norm(dim=-1)
    live = sizes > ABSENT * sizes.max()
    if bool(live[:, 0].all()) and not bool(live[:, 1:].any()):
        return Structure(place=0)
    if bool(live[:, -1].all()) and not bool(live[:, :-1].any()):
        return Structure(place=-1)
    total = deltas.sum(1).norm(dim=-1)
    return Structure(centred=bool((total < CANCELLED * sizes.sum(1)).all()))


def _compute_output_gradients(
    target: Target, parts: Sequence[Part]
) -> list[Float[Tensor, "examples tokens outputs"]]:
    generator = Streams.root("structure", 0).generator()
    shape = (EXAMPLES, TOKENS, target.hidden_size)
    drawn = torch.randn(shape, generator=generator) * target.vocabulary.mean_norm / shape[-1] ** 0.5
    embeddings = drawn.to(target.device, target.dtype).requires_grad_()
    mask = torch.ones(shape[:2], dtype=torch.bool, device=target.device)
    labels = target.any_labels(EXAMPLES, TOKENS)
    names = list(dict.fromkeys(module_of(part) for part in parts))
    modules = {name: target.module.get_submodule(name) for name in names}
    with capture_calls(modules, EXAMPLES) as noted:
        loss = target.losses(Batch(embeddings=embeddings, mask=mask, labels=labels)).sum()
    calls = find_slopes(loss, noted)
    deltas = [(part.cut, calls[module_of(part)][0][1]) for part in parts]
    return [delta if cut is None else cut.of(delta, axis=-1) for cut, delta in deltas]


@dataclass(frozen=True)
class HeadByHead:
    """Compares one key or value matrix of the last layer with candidates, head by head."""

    part: Part  # the key or value matrix
    source: Part  # whose inputs tell: the query for keys, the attention's output for values
    place: int  # the token that is fed on
    count: int  # heads

    def find_bases(
        self, observations: Sequence[Observation]
    ) -> Float[Tensor, "observations heads width examples"]:
        """Returns an orthonormal basis of the directions seen in each head, one a sentence.

        It is zero where the matrix is not shown.
        """
        target, sentences = observations[0].target, observations[0].batch_size
        width = self.part.shape[0] // self.count if self.part.shape[0] % self.count == 0 else 0
        bases = torch.zeros(len(observations), self.count, width, sentences)
        bases = bases.to(target.device, target.dtype)
        for place, observation in enumerate(observations):
            seen = observation.update.tensors
            if self.part.name in seen:
                matrix = matrix_of(target, self.part, seen[self.part.name])[0]
                blocks = matrix.view(self.count, -1, matrix.shape[1])
                bases[place] = self._find_basis(target, blocks, observation.batch_size)
        return bases

    def _find_basis(
        self, target: Target, blocks: Float[Tensor, "heads width inputs"], sentences: int
    ) -> Tensor:
        found = decompose(blocks.cpu())
        if self.part.module == "key":
            basis: Tensor = found.left[..., :sentences]
            return basis.to(target.device, target.dtype)
        weight = target.module.get_parameter(self.part.parameter).detach()
        # The average of inputs, seen through a head's values: W_v,h · v
        by_head = weight.view(self.count, -1, weight.shape[1]).double().cpu()
        basis = orthonormalise(by_head @ found.right[:, :sentences].mT)
        return basis.to(target.device, target.dtype)

    def measure_outside(
        self,
        target: Target,
        inputs: Mapping[str, Tensor],
        mask: Bool[Tensor, "o c examples tokens"],
        bases: Float[Tensor, "o heads width examples"],
    ) -> Float[Tensor, "o c"]:
        """Returns the share of the candidates' own vectors outside the directions seen."""
        vectors = Structure(place=self.place).directions(inputs[module_of(self.source)], mask)
        if self.part.module == "key":
            vectors = target.module.get_submodule(module_of(self.source))(vectors)
        else:
            bias: Any = target.module.get_submodule(module_of(self.part)).bias
            # What attention puts out is W_v·(average of inputs) + b_v, since weights sum to one.
            vectors = vectors if bias is None else vectors - bias
        by_head = vectors.reshape(*vectors.shape[:-1], self.count, -1).movedim(-2, -3)
        # by_head: [o, c, heads, examples, width]
        inside = (by_head @ bases[:, None]).square().sum((-1, -2))
        shares: Tensor = 1 - inside / by_head.square().sum((-1, -2)).clamp_min(1e-30)
        return shares.mean(-1)  # over heads


def compare_by_heads(target: Target, part: Part) -> HeadByHead | None:
    """Returns the comparison for a key or value matrix, where the model's last layer allows one."""
    if part.module not in ("key", "value"):
        return None
    beside = find_beside(target, part)
    query, output = beside.get("query"), beside.get("attention_output")
    count = count_heads(target)
    if query is None or output is None or not count or part.cut is not None:
        return None
    if part.shape[0] != query.shape[0] or not are_linear(target, (part, query, output)):
        return None
    place = find_structures(target, [query])[0].place
    if place is None:
        return None
    return HeadByHead(part, query if part.module == "key" else output, place, count)


def find_beside(target: Target, part: Part) -> dict[str, Part]:
    """Returns the parts of the same layer by their modules, frozen ones included."""
    every = (*target.parts, *target.frozen_parts)
    return {one.module: one for one in every if one.layer == part.layer}


def are_linear(target: Target, parts: Sequence[Part]) -> bool:
    """Returns whether all are weights of plain linear layers."""
    modules = [target.module.get_submodule(module_of(part)) for part in parts]
    return all(kind_of(module) is Kind.LINEAR for module in modules)


def count_heads(target: Target) -> int:
    """Returns the number of attention heads of each layer; zero where the model does not say."""
    return int(getattr(target.module.config, "num_attention_heads", 0))
