"""Which words the first layer's gradients ask for at each place of a guess.

The gradient of a first layer's query, key or value is G = Σ_t δ_t x_tᵀ, where x_t is made of the
word at place t alone. A guess that is right in part has output gradients δ that point roughly the
right way. With these held, every word of the vocabulary is asked at one place how much it would
explain of what the other tokens leave: ‖G − Σ_s δ_s x_sᵀ − a·δ_t x_vᵀ‖², with the best a ≥ 0, over
the entries that survived. As x_v = LayerNorm(word + position), that is a few products for all words
together, where the whole update asks for a pass forward and back for each of them.
"""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.attacks.search.search_rows import Ids, Rows
from gradleak.core.defense import Survivors
from gradleak.core.observation import Observation
from gradleak.core.target import Target
from gradleak.matching.inputs import (
    ModuleInputs,
    centre,
    keep_sums,
    module_of,
    shared_linear_parts,
)
from gradleak.matching.kinds import Kind, capture_calls, find_slopes, kind_of
from gradleak.matching.matcher import show_part

FED_ALIKE = ("query", "key", "value")
# Of the mean over words: a word that a place's δ hardly sees must not seem to explain all.
LEAST_SEEN = 1e-3
# Of a matrix's entries. Where more arrive, the spans of inputs lead well by themselves.
FEW = 0.03
UNEXPLAINED = 1e-9  # of a squared share: less is rounding
WORDS_AT_ONCE = 8192
OTHERS = 4  # words that are chosen of all, to one of those that speak for themselves otherwise


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """What observations show of the first layer, and what its inputs are made of."""

    target: Target
    modules: tuple[str, ...]
    words: Float[Tensor, "words inputs"]  # parts of inputs before the normalisation, centred
    squares: Float[Tensor, "words inputs"]
    positions: Float[Tensor, "positions inputs"]
    norm: nn.LayerNorm
    observed: Float[Tensor, "modules rows outputs inputs"]
    survived: Float[Tensor, "modules rows outputs inputs"]  # one where an entry arrived

    def take(self, places: Int[Tensor, "some"]) -> "FirstLayer":
        """Returns the same of some of the rows."""
        part = copy.copy(self)
        object.__setattr__(part, "observed", self.observed[:, places])
        object.__setattr__(part, "survived", self.survived[:, places])
        return part

    def choose_words(
        self,
        rows: Rows,
        ids: Ids,
        places: Int[Tensor, "rows"],
        others: Int[Tensor, "rows others"],
        count: int,
    ) -> Int[Tensor, "rows chosen"]:
        """Returns so many words that explain most at one place of each row, and the best others.

        The first of the others comes before them.
        """
        misfits = self.rank_words(rows, ids, places)
        best = rows.words[misfits.topk(min(count, misfits.shape[1]), largest=False).indices]
        ranks = misfits.gather(1, torch.searchsorted(rows.words, others))
        kept = ranks.topk(min(-(-count // OTHERS), others.shape[1]), largest=False).indices
        return torch.cat([others[:, :1], best, others.gather(1, kept)], dim=1)

    @torch.no_grad()
    def rank_words(
        self, rows: Rows, ids: Ids, places: Int[Tensor, "rows"]
    ) -> Float[Tensor, "rows words"]:
        """Returns how much every word leaves unexplained at one place of each row.

        It is the sum over the modules of the logarithm of the share; lower is better.
        """
        asked = self._hold_others(rows, ids, places[:, None])
        split = [torch.split(table, WORDS_AT_ONCE) for table in (self.words, self.squares)]
        words = zip(*split, strict=True)
        found = torch.cat([self._explain(asked, *some) for some in words], dim=-1)
        return asked.measure_left(found)[:, 0]

    def _hold_others(self, rows: Rows, ids: Ids, places: Int[Tensor, "rows some"]) -> "Asked":
        """Returns what places have to explain: what the other tokens leave of what was seen."""
        inputs, deltas = self._pass(rows, ids)
        made = (deltas.mT @ inputs) * self.survived
        square = made.square().sum((-1, -2)).clamp_min(1e-30)
        # How large the guess's own gradient should be: less where it is mostly wrong.
        size = ((made * self.observed).sum((-1, -2)) / square).clamp_min(0)[..., None, None]
        left = size * made - self.observed
        where = places[None, ..., None].expand(len(inputs), -1, -1, -1)
        own = inputs.gather(2, where.expand(-1, -1, -1, inputs.shape[-1]))
        delta = deltas.gather(2, where.expand(-1, -1, -1, deltas.shape[-1]))
        seen = delta.square() @ self.survived
        # Without the place's own token what is left is R − a·δxᵀ, on the survivors.
        mine = size * own * seen
        along = delta @ left - mine
        alone = left.square().sum((-1, -2))[..., None] - (own * size * (2 * along + mine)).sum(-1)
        total = self.observed.square().sum((-1, -2)).clamp_min(1e-30)
        here = self.positions[places % ids.shape[-1]]
        return Asked(here, along, seen, alone, total)

    def _pass(self, rows: Rows, ids: Ids) -> tuple[Tensor, Tensor]:
        """Returns inputs and output gradients of the modules, [modules, rows, places, width]."""
        modules = {name: self.target.module.get_submodule(name) for name in self.modules}
        batch = rows.batch(self.target.embed(ids[:, None]).detach().requires_grad_())
        with torch.enable_grad(), capture_calls(modules, batch.mask[..., 0].numel()) as noted:
            calls = find_slopes(self.target.losses(batch).mean(-1).sum(), noted)
        tokens = batch.mask.shape[-1]

        def arrange(tensor: Tensor) -> Tensor:
            found = tensor.detach().reshape(len(ids), -1, tokens, tensor.shape[-1])
            return torch.nn.functional.pad(found, (0, 0, 0, ids.shape[-1] - tokens)).flatten(1, 2)

        inputs = [arrange(calls[name][0][0].inputs) for name in self.modules]
        return torch.stack(inputs), torch.stack(
            [arrange(calls[name][0][1]) for name in self.modules]
        )

    def _explain(
        self,
        asked: "Asked",
        words: Float[Tensor, "*rows words inputs"],
        squares: Float[Tensor, "*rows words inputs"],
    ) -> Float[Tensor, "modules rows places words"]:
        """Returns how much each word takes off what is left at a place: (x·along)²/(x²·seen)."""
        here, along, seen = asked.here, asked.along, asked.seen
        gain, shift, columns, squares = self.norm.weight, self.norm.bias, words.mT, squares.mT
        # LayerNorm takes the mean off; the variance is that of the centred sum.
        sums = squares.sum(-2, keepdim=True) + here.square().sum(-1, keepdim=True)
        sums = sums + 2 * here @ columns
        scale = (sums / words.shape[-1] + self.norm.eps).rsqrt()  # [rows, places, words]
        towards = along * gain
        products = scale * (towards @ columns + (towards * here).sum(-1, keepdim=True))
        products = products + (along @ shift)[..., None]
        # Σ_j seen_j (scale·gain_j (word_j + here_j) + shift_j)², in products with words and squares
        bent, tilted = seen * gain.square(), seen * gain * shift
        quadratic = bent @ squares + 2 * (bent * here) @ columns
        quadratic = quadratic + (bent * here.square()).sum(-1, keepdim=True)
        crossed = tilted @ columns + (tilted * here).sum(-1, keepdim=True)
        sizes = scale.square() * quadratic + 2 * scale * crossed
        sizes = sizes + (seen @ shift.square())[..., None]
        least = LEAST_SEEN * sizes.mean(-1, keepdim=True)
        return (-products).clamp_min(0).square() / torch.maximum(sizes, least).clamp_min(1e-30)


@dataclass(frozen=True, eq=False)
class Asked:
    """What some places of each row have to explain, with the other tokens held."""

    here: Float[Tensor, "rows places inputs"]  # the position's part of the input
    along: Float[Tensor, "modules rows places inputs"]  # what is left, along the place's δ
    seen: Float[Tensor, "modules rows places inputs"]  # squares of δ, summed over survivors
    alone: Float[Tensor, "modules rows places"]  # the square of what is left
    total: Float[Tensor, "modules rows"]  # and of all that was seen

    def measure_left(
        self, explained: Float[Tensor, "modules rows places words"]
    ) -> Float[Tensor, "rows places words"]:
        """Returns the logarithms of the shares left, summed over the modules."""
        shares = (self.alone[..., None] - explained) / self.total[..., None, None]
        return shares.clamp_min(UNEXPLAINED).log().sum(0)


def find_first_layer(rows: Rows) -> FirstLayer | None:
    """Returns what can be asked of the first layer; none where that is not seen, or another kind.

    The entries that arrived have to be right, and few.
    """
    if not all(map(_only_survivors, rows.observations)) or not rows.target.vocabulary.prefix:
        return None
    target = rows.target
    parts = [
        part
        for part in shared_linear_parts(rows.observations)
        if part.layer == 1
        and part.module in FED_ALIKE
        and part.cut is None
        and kind_of(target.module.get_submodule(module_of(part))) is Kind.LINEAR
    ]
    if not parts:
        return None
    additive = keep_sums(target, ModuleInputs(target, parts[:1]), rows.mask.shape[-1])
    if additive is None or len(additive.words) != len(rows.words):
        return None
    seen = rows.observations
    observed = torch.stack([torch.stack([show_part(one, part) for one in seen]) for part in parts])
    if float((observed != 0).double().mean()) > FEW:
        return None
    names = tuple(module_of(part) for part in parts)
    words, positions = centre(additive.words), centre(additive.positions)
    survived = (observed != 0).to(observed)
    return FirstLayer(
        target, names, words, words.square(), positions, additive.norm, observed, survived
    )


def _only_survivors(observation: Observation) -> bool:
    channel, protocol = observation.channel, observation.protocol
    return channel.survivors is Survivors.SEEN and protocol.one_gradient and not channel.noisy
