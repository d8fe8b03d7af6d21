"""How much of the seen gradients a sentence leaves unexplained, whatever the gradients of its outputs were.

The gradient of a linear layer is G = Σ_t δ_t x_tᵀ. With the δ unknown, the most that a sentence with inputs H = (x_t) can explain
of it is ‖G·P_H‖², where P_H projects on the span of the x_t. The objective is the mean over the visible matrices of
log(1 − ‖G·P_H‖²/‖G‖²): under Gaussian noise of unknown size the profile likelihood, without noise (numerically) −∞ at the truth.
Where the size σ of the noise is known, it is the likelihood itself: −Σ ‖G·P_H‖²/2σ², in nats, with every matrix weighing what it
tells; what compression does to entries counts as noise too (errors.py). It takes forward passes only, no labels.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.energy.errors import error_std, only_signs, sizes_along, uneven, with_signs
from gradleak.attacks.energy.heads import heads_of
from gradleak.attacks.energy.structure import Structure, structures_of
from gradleak.core.batch import Batch
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.parts import FUSED, Part
from gradleak.matching.chunking import FORWARD, FORWARD_AND_BACK, cost_of
from gradleak.matching.inputs import ModuleInputs, linear_parts, matrix_of, module_of
from gradleak.matching.linear_algebra import factor_gram
from gradleak.matching.rounding import signal_floor
from gradleak.matching.row_factor import row_factor

FLOOR = 1e-13  # of a squared share: what inputs in float32 cannot tell from nothing
MIXED = ("attention_output", "ffn_out")  # fed by averages of tokens, or by what a nonlinear layer makes of each
UNMIXED = ("query", "key", "value", FUSED)  # in the first layer
ASIDE = 0.1  # the weight of such matrices, and of those that show one token only, where others are seen
ABOVE_ROUNDING = 4.0  # times what known rounding leaves unexplained: no more is asked for
TELLING = 3000.0  # nats of evidence under noise: some hundreds a word, where a wrong one gains ten or twenty by chance


class Energy:
    """The objective for several observations at once; what one of them does not show does not count for it."""

    cost = 1  # forward passes only

    def __init__(self, observations: Sequence[Observation], matrices: int | None = None) -> None:
        self.target = observations[0].target
        self.parts, self.structures = looked_at(observations, matrices)
        self.seen = [Seen(observations, part) for part in self.parts]
        self.heads = [heads for part in self.parts if (heads := heads_of(self.target, part)) is not None]
        self.bases = [heads.seen(observations) for heads in self.heads]
        self.inputs = ModuleInputs(self.target, (*self.parts, *(heads.source for heads in self.heads)))
        self.pass_cost = cost_of(self.target, self.inputs)
        self.weights = self._weights()
        self.nats = self._nats(observations)
        self.rounding = torch.tensor([max(_rounded_off(one, part) for part in self.parts) for one in observations]).double()

    def _nats(self, observations: Sequence[Observation]) -> Float[Tensor, "observations terms"]:
        """Under errors of known size: what the whole of every matrix is worth as evidence, its squared norm over 2σ².

        Zero for observations without such errors, and for terms by heads, which are no likelihoods.
        """
        found = torch.zeros_like(self.weights, dtype=torch.float64)
        for row, observation in enumerate(observations):
            worth = [_worth(observation, part) for part in self.parts]
            found[row, : len(worth)] = torch.tensor(worth, dtype=torch.float64)
        return found

    @property
    def noisy(self) -> Bool[Tensor, "observations"]:
        """Observations whose objective is a likelihood, in nats."""
        return self.nats.any(1)

    def _weights(self) -> Float[Tensor, "observations terms"]:
        """Matrices fed by every token's own state count the same, others less (they lead astray); half is the heads', if any."""
        shown = torch.stack([seen.shown for seen in self.seen], dim=1).to(self.target.dtype)
        guides = [is_guide(part, structure) for part, structure in zip(self.parts, self.structures, strict=True)]
        counted = shown * torch.tensor([1.0 if guide else ASIDE for guide in guides], device=shown.device)
        shares = counted / counted.sum(1, keepdim=True).clamp_min(1e-30)
        split = [self.parts.index(heads.part) for heads in self.heads]
        shares[:, split] /= 2
        return torch.cat([shares, shares[:, split]], dim=1)

    @property
    def sees_tokens_mixed(self) -> Bool[Tensor, "observations"]:
        """Observations that show a matrix whose inputs have mixed."""
        deeper = [
            seen.shown for part, seen in zip(self.parts, self.seen, strict=True) if part.layer != 1 or part.module not in UNMIXED
        ]
        return torch.stack([torch.zeros_like(self.seen[0].shown), *deeper]).any(0)

    def levels(self, solved: float) -> Float[Tensor, "observations"]:
        """The objective at which all is explained: higher where what was sent is known to be rounded."""
        levels = (ABOVE_ROUNDING * self.rounding.to(self.nats.device)).clamp_min(FLOOR).log().clamp_min(solved)
        return levels.masked_fill(self.noisy, -torch.inf)

    def explained(self, batch: Batch, rows: slice, level: float) -> bool:
        """Whether one row's words explain every matrix that is looked at, not only most."""
        shares = self.unexplained(batch, rows)[0, 0]
        return bool((shares[self.weights[rows][0] > 0].clamp_min(FLOOR).log() <= level).all())

    def take(self, places: Int[Tensor, "some"]) -> "Energy":
        """The objective of some of the observations."""
        part = copy.copy(self)
        part.seen = [one.take(places) for one in self.seen]
        part.bases = [bases[places] for bases in self.bases]
        part.weights, part.nats = self.weights[places], self.nats[places]
        part.rounding = self.rounding[places.cpu()]
        return part

    def scores(self, batch: Batch, rows: slice) -> Float[Tensor, "observations candidates"]:
        """The objective of batches [observations, candidates, examples, tokens(, hidden)]; lower explains more."""
        unexplained = self.unexplained(batch, rows)
        profile = (unexplained.clamp_min(FLOOR).log() * self.weights[rows, None]).sum(-1)
        if not bool(self.noisy[rows].any()):
            return profile
        likelihood = ((unexplained - 1) * self.nats[rows, None]).sum(-1)
        return torch.where(self.noisy[rows, None], likelihood, profile.double())

    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        """What one candidate of so many sentences takes: a pass, and in double precision its inputs, their Gram matrices with
        factors, and their products with what was seen; with a slope most of these three times."""
        uses, widths = self._spans(examples, tokens)
        seen = max(one.rows.shape[1] for one in self.seen)
        held = sum(uses * width + uses**2 for width in widths) + 4 * uses**2 + 4 * uses * seen
        graph = self.pass_cost.bytes(examples, tokens, FORWARD_AND_BACK if slope else FORWARD)
        return graph + (3 if slope else 1) * 8 * held

    def work(self, examples: int, tokens: int, slope: bool = False) -> float:
        """The multiplications in it."""
        uses, widths = self._spans(examples, tokens)
        seen = max(one.rows.shape[1] for one in self.seen)
        spans = sum(uses**2 * (width + uses / 3) for width in widths) + len(self.seen) * uses * seen * (uses + widths[0])
        return (3 if slope else 1) * (self.pass_cost.work(examples, tokens, 1) + 2 * spans)

    def _spans(self, examples: int, tokens: int) -> tuple[int, list[int]]:
        """How many directions a candidate has, and the widths of the inputs that are factored: one for each that is fed anew."""
        signs, uneven = (any(getattr(one, name) for one in self.seen) for name in ("signs", "uneven"))
        fed = {}
        for part, structure, seen in zip(self.parts, self.structures, self.seen, strict=True):
            source = "attention" if part.module in UNMIXED else part.module
            fed[part.name if uneven else (part.layer, source, structure)] = seen.rows.shape[2]
        return examples * tokens * (2 if signs else 1), list(fed.values())

    def unexplained(self, batch: Batch, rows: slice) -> Float[Tensor, "observations candidates terms"]:
        """For every matrix the share of its squared norm that lies outside the span of the candidate's inputs; then by heads."""
        inputs = self.inputs(batch)
        spans: dict[tuple[str, Structure, str], tuple[Tensor, Tensor]] = {}
        shares = []
        for part, structure, seen in zip(self.parts, self.structures, self.seen, strict=True):
            key = (self._source(inputs, part), structure, part.name if seen.uneven else "")
            if key not in spans:
                spans[key] = _factored(seen.told_by(structure.directions(inputs[module_of(part)], batch.mask), rows))
            shares.append(seen.outside(*spans[key], rows))
        for heads, bases in zip(self.heads, self.bases, strict=True):
            shares.append(heads.outside(self.target, inputs, batch.mask, bases[rows]))
        return torch.stack(shares, dim=-1)

    def _source(self, inputs: Mapping[str, Tensor], part: Part) -> str:
        """Modules fed by one tensor (query, key, value) share its span: the first of them stands for all."""
        mine = inputs[module_of(part)]
        return next(name for name, tensor in inputs.items() if tensor.data_ptr() == mine.data_ptr())


def looked_at(observations: Sequence[Observation], matrices: int | None) -> tuple[list[Part], list[Structure]]:
    """The visible matrices, or so many of them: the best guides of the earliest layers, which are the cheapest to reach.

    Under noise it takes more to tell words apart: then all of as many layers as that needs (observations must agree on these).
    """
    target = observations[0].target
    names = dict.fromkeys(name for observation in observations for name in observation.update.tensors)
    parts = linear_parts(target, tuple(names))
    if needed := layers_needed(observations[0]):
        parts, matrices = tuple(part for part in parts if part.layer in needed), None
    if not parts:
        raise GradleakError(
            "energy needs the gradient of at least one weight matrix inside a transformer layer, and none is visible."
        )
    pairs = list(zip(parts, structures_of(target, parts), strict=True))
    order = sorted(range(len(pairs)), key=lambda place: (not is_guide(*pairs[place]), place))
    kept = [pairs[place] for place in sorted(order[:matrices])]
    return [part for part, _ in kept], [structure for _, structure in kept]


def layers_needed(observation: Observation) -> tuple[int | None, ...]:
    """Under errors of known size: the first layers whose matrices say enough between them, by how far they stand out of these."""
    parts = linear_parts(observation.target, tuple(observation.update.tensors))
    if not any(error_std(observation, part.name) for part in parts[:1]):
        return ()
    nats, entries = 0.0, 0
    layers: dict[int | None, None] = {}
    for part in parts:
        if nats > TELLING + 2 * math.sqrt(entries / 2) and part.layer not in layers:  # what noise alone adds varies by the root
            break
        layers[part.layer] = None
        nats, entries = nats + _worth(observation, part) - part.size / 2, entries + part.size
    return tuple(layers)


def is_guide(part: Part, structure: Structure) -> bool:
    """Whether every token's own state is fed into the matrix, one direction each."""
    return part.module not in MIXED and structure.place is None


class Seen:
    """The directions in which one matrix was seen, of every observation: S·Vᵀ of its singular value decomposition."""

    def __init__(self, observations: Sequence[Observation], part: Part) -> None:
        target = observations[0].target
        matrices = [matrix_of(target, part, one.update.tensors[part.name])[0] for one in observations if _shows(one, part)]
        width = matrices[0].shape[1]
        self.signs, self.uneven = any(map(only_signs, observations)), any(map(uneven, observations))
        self.columns = torch.ones(len(observations), width, device=target.device, dtype=torch.float64)
        self.shown = torch.tensor([_shows(one, part) for one in observations], device=target.device)
        for number, place in enumerate(self.shown.nonzero()[:, 0].tolist()):
            if uneven(observations[place]):
                self.columns[place] = sizes_along(matrices[number], 1)
                matrices[number] = matrices[number] / sizes_along(matrices[number], 0)[:, None] / self.columns[place]
        found = [_directions(matrix) for matrix in matrices]
        most = max(len(one) for one in found)
        self.rows = torch.zeros(len(observations), most, width, device=target.device, dtype=torch.float64)
        for place, one in zip(self.shown.nonzero()[:, 0].tolist(), found, strict=True):
            self.rows[place, : len(one)] = one

    def take(self, places: Int[Tensor, "some"]) -> "Seen":
        """Of some of the observations."""
        part = copy.copy(self)
        part.rows, part.shown, part.columns = self.rows[places], self.shown[places], self.columns[places]
        return part

    def told_by(self, directions: Float[Tensor, "o c uses width"], rows: slice) -> Float[Tensor, "o c more width"]:
        """What the gradients of these inputs span after the defense, in units of the errors in each column."""
        spanned = with_signs(directions) if self.signs else directions
        return spanned / self.columns[rows, None, None] if self.uneven else spanned

    def outside(
        self, directions: Float[Tensor, "o c uses width"], cholesky: Float[Tensor, "o c uses uses"], rows: slice
    ) -> Float[Tensor, "o c"]:
        """The share of ‖S·Vᵀ‖² = ‖G‖² outside the span of the directions."""
        seen = self.rows[rows]
        products = (directions.flatten(1, 2) @ seen.mT).view(*directions.shape[:3], -1)  # one product an observation
        inside: Tensor = torch.linalg.solve_triangular(cholesky, products, upper=False).square().sum((-1, -2))
        return 1 - inside / seen.square().sum((-1, -2)).clamp_min(1e-30)[:, None]


def _worth(observation: Observation, part: Part) -> float:
    """A matrix as evidence, in nats; zero where it is not seen, or free of errors."""
    if part.name not in observation.update.tensors or not (std := error_std(observation, part.name)):
        return 0.0
    return float(observation.update.tensors[part.name].double().square().sum()) / 2 / std**2


def _shows(observation: Observation, part: Part) -> bool:
    return part.name in observation.update.tensors and bool(observation.update.tensors[part.name].any())


def _rounded_off(observation: Observation, part: Part) -> float:
    if part.name not in observation.update.tensors or not observation.channel.rounding:
        return 0.0
    tensor = observation.update.tensors[part.name]
    errors = replace(observation.channel, noise_std=0.0, noise_std_of_sum=0.0).errors(tensor, 1)
    return float(errors.double().square().sum() / tensor.double().square().sum().clamp_min(1e-300))


def _directions(matrix: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "rank inputs"]:
    """S·Vᵀ, normalised to a largest value of one so that tiny gradients do not underflow; rounding is left out."""
    values, right = row_factor(matrix)
    kept = values > signal_floor(matrix.shape[-1], matrix.dtype) * values[0]
    return (values / values[0])[kept, None] * right[kept]


def _factored(directions: Float[Tensor, "o c uses width"]) -> tuple[Tensor, Tensor]:
    """The directions and the Cholesky factor of their Gram matrix; masked ones are zero and count for nothing."""
    exact = directions.double()
    return exact, factor_gram(exact @ exact.mT, terms=exact.shape[-1])
