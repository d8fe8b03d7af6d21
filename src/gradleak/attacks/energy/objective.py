"""How much of the seen gradients a sentence leaves unexplained, whatever its outputs' slopes were.

The gradient of a linear layer is G = Σ_t δ_t x_tᵀ. With the δ unknown, the most that a sentence
with inputs H = (x_t) can explain of it is ‖G·P_H‖², where P_H projects on the span of the x_t. The
objective is the mean over the visible matrices of log(1 − ‖G·P_H‖²/‖G‖²): under Gaussian noise of
unknown size the profile likelihood, without noise (numerically) −∞ at the truth. Where the size σ
of the noise is known, it is the likelihood itself: −Σ ‖G·P_H‖²/2σ², in nats, with every matrix
weighing what it tells; what a defense does to entries counts as noise too: spans survive what
values do not. A matrix of signs, of a hundredth of its entries or of four bits each is still a
multiple of the gradient and an error that knows nothing of the words, of which only the size has to
be known. The objective takes forward passes only, no labels.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.attacks.energy.structure import Structure, compare_by_heads, find_structures
from gradleak.attacks.search.matched import WordObjective
from gradleak.core.batch import Batch
from gradleak.core.defense import Survivors
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation
from gradleak.core.parts import FUSED, Part
from gradleak.matching.chunking import FORWARD, FORWARD_AND_BACK, cost_of
from gradleak.matching.factors import row_factor, signal_shares
from gradleak.matching.inputs import (
    ModuleInputs,
    linear_parts,
    matrix_of,
    module_of,
    shared_linear_parts,
)
from gradleak.matching.linear_algebra import factor_gram
from gradleak.matching.precision import signal_floor

# The share of a gradient's square along its signs: 0.64 for Gaussian entries, less for some that
# stand out.
SIGNS = 0.5
NEXT_TO_NOTHING = 1e-3  # of a tensor's entries: less is left to what every search allows for
SMOOTHED = 20.0  # entries of ordinary size that rows and columns are taken to have beside their own
# The share that is lost where nobody knows how many entries were set to zero, and noise hides
# which.
COVERED = 0.9
FLOOR = 1e-13  # of a squared share: what inputs in float32 cannot tell from nothing
SOLVED = -18.0  # log of the unexplained share (1.5e-8) at which all is explained
# Fed by averages of tokens, or by what a nonlinear layer makes of each
MIXED = ("attention_output", "ffn_out")
UNMIXED = ("query", "key", "value", FUSED)  # in the first layer
# The weight of such matrices, and of those that show one token only, where others are seen
ASIDE = 0.1
ABOVE_ROUNDING = 4.0  # times what known rounding leaves unexplained: no more is asked for
# Nats of evidence under noise: some hundreds a word, where a wrong one gains ten or twenty by luck
TELLING = 3000.0


def estimate_error_std(observation: Observation, name: str) -> float:
    """Returns the standard deviation of the error on every entry of a visible tensor.

    It is zero where what arrives is the gradient, up to its size.
    """
    channel = observation.channel
    known = math.hypot(observation.noise_std, _estimate_weight_rounding(observation, name))
    if channel.every_entry and not observation.protocol.sizes_lost:
        return known
    seen = observation.update.tensors[name].double()
    square = float(seen.square().mean())
    lost = 0.0
    if has_only_signs(observation):
        lost = (1 - SIGNS) * square
    elif channel.survivors is Survivors.SEEN:
        lost = _estimate_zeroed(seen, square, channel.randomised)
    elif channel.survivors is Survivors.HIDDEN:
        lost = COVERED * max(0.0, square - known**2)
    if channel.quantisation_levels is not None:
        # Rounding by chance is right in the mean, so |entries| are as large as they were. The mean
        # square of double-exponential entries is twice the square of that: the rest is rounding.
        lost += max(0.0, square - 2 * float(seen.abs().mean()) ** 2)
    return math.sqrt(known**2 + lost)


def has_only_signs(observation: Observation) -> bool:
    """Returns whether entries are little but signs: sent as such, or what a step of Adam leaves."""
    return observation.channel.signs_only or observation.protocol.sizes_lost


def has_uneven_errors(observation: Observation) -> bool:
    """Returns whether errors are as large as entries, and so larger in some rows and columns."""
    return observation.channel.survivors is Survivors.SEEN and observation.channel.randomised


def add_signs(
    directions: Float[Tensor, "o c uses width"],
) -> Float[Tensor, "o c twice width"]:
    """Returns directions and their own signs, which the signs of a gradient lie along.

    Where one token outweighs the others, the signs of δ·xᵀ are those of δ times those of x.
    """
    signs = directions.sign() * directions.abs().mean(-1, keepdim=True)
    return torch.cat([directions, signs], dim=-2)


def compare_sizes(matrix: Float[Tensor, "rows columns"], axis: int) -> Float[Tensor, "sizes"]:
    """Returns how large the entries of every row (axis 0) or column are, as a share of all.

    Where few entries survive, these are nearer to one.
    """
    squares, kept = matrix.double().square(), (matrix != 0).double()
    mean = squares.sum() / kept.sum().clamp_min(1)
    other = 1 - axis
    found = (squares.sum(other) + SMOOTHED * mean) / (kept.sum(other) + SMOOTHED)
    return (found / mean.clamp_min(1e-300)).sqrt()


def find_directions(
    observation: Observation, matrix: Float[Tensor, "*lead outputs inputs"], std: float
) -> Float[Tensor, "*lead rank inputs"]:
    """Returns the directions in which a matrix was seen under errors of that size.

    They are orthogonal, at most one a token, each as long as it is surely signal, and padded with
    zeros.
    """
    values, right = row_factor(matrix)
    floor = signal_floor(matrix.shape[-1], matrix.dtype)
    shares = signal_shares(values, (matrix.shape[-2], matrix.shape[-1]), std, floor)
    if observation.knows.lengths is not None:
        shares[..., sum(observation.knows.lengths) :] = 0
    most = max(1, int((shares > 0).sum(-1).max()))
    rows: Tensor = (right * shares.sqrt()[..., None])[..., :most, :]
    return rows.to(matrix)


def _estimate_weight_rounding(observation: Observation, name: str) -> float:
    """Returns what the weights' own digits leave of a difference between weights.

    It is zero where that is next to nothing.
    """
    if not observation.channel.weight_rounding:
        return 0.0
    std = _measure_errors(observation, name)
    size = float(observation.update.tensors[name].square().mean().sqrt())
    return std if std > NEXT_TO_NOTHING * size else 0.0


def _measure_errors(observation: Observation, name: str) -> float:
    """Returns the root of the mean square of what is known to be wrong with a tensor's entries,
    noise left out."""
    quiet = replace(observation.channel, noise_std=0.0, noise_std_of_sum=0.0)
    part = observation.target.part(name)
    weights = part.of(observation.target.parameters[part.parameter])
    errors = quiet.errors(observation.update.tensors[name][0], 1, weights)
    return float(errors.double().square().mean().sqrt())


def _estimate_zeroed(seen: Float[Tensor, "*shape"], square: float, by_chance: bool) -> float:
    """Returns the mean square of entries that were set to zero: by chance, or as the smallest."""
    kept = float((seen != 0).double().mean())
    if by_chance or kept == 0:
        return (1 - kept) * square
    # The smallest were set to zero: the least of those left is where the cut was made.
    threshold = float(seen.abs()[seen != 0].min())
    if kept == 1:
        return 0.0
    # Of double-exponential entries of which that share lies above the threshold
    scale = threshold / math.log(1 / kept)
    # ∫ e² over the tail above t, and 2s² over all: what is missing of the second was set to zero.
    above = kept * (threshold**2 + 2 * scale * threshold + 2 * scale**2)
    return max(0.0, 2 * scale**2 - above)


class Energy(WordObjective):
    """The objective for several observations; what one does not show does not count for it."""

    cost = 1  # forward passes only
    # What the first layer is fed says nothing of the order of words where positions come in later.
    tells_orders = False

    def __init__(self, observations: Sequence[Observation], matrices: int | None = None) -> None:
        self.target = observations[0].target
        self.parts, self.structures = choose_matrices(observations, matrices)
        self.seen = [SeenDirections(observations, part) for part in self.parts]
        compared = [compare_by_heads(self.target, part) for part in self.parts]
        self.heads = [heads for heads in compared if heads is not None]
        self.bases = [heads.find_bases(observations) for heads in self.heads]
        sources = (heads.source for heads in self.heads)
        self.inputs = ModuleInputs(self.target, (*self.parts, *sources))
        self.pass_cost = cost_of(self.target, self.inputs)
        self.weights = self._weigh()
        self.nats = self._weigh_evidence(observations)
        self.rounding = torch.tensor(
            [max(_measure_rounding(one, part) for part in self.parts) for one in observations]
        ).double()

    def _weigh(self) -> Float[Tensor, "observations terms"]:
        """Returns the weights: matrices fed by every token's own state count the same, others less.

        Others lead astray. Where a matrix is compared by heads too, half of its weight is theirs.
        """
        shown = torch.stack([seen.shown for seen in self.seen], dim=1).to(self.target.dtype)
        pairs = zip(self.parts, self.structures, strict=True)
        guides = [1.0 if is_guide(part, structure) else ASIDE for part, structure in pairs]
        counted = shown * torch.tensor(guides, device=shown.device)
        shares = counted / counted.sum(1, keepdim=True).clamp_min(1e-30)
        split = [self.parts.index(heads.part) for heads in self.heads]
        shares[:, split] /= 2  # the other half goes to the comparison by heads
        return torch.cat([shares, shares[:, split]], dim=1)

    def _weigh_evidence(
        self, observations: Sequence[Observation]
    ) -> Float[Tensor, "observations terms"]:
        """Returns, under errors of known size, what every whole matrix is worth: ‖G‖²/2σ².

        Zero for observations without such errors, and for terms by heads, which are no likelihoods.
        """
        found = torch.zeros_like(self.weights, dtype=torch.float64)
        for row, observation in enumerate(observations):
            worth = [_measure_evidence(observation, part) for part in self.parts]
            found[row, : len(worth)] = torch.tensor(worth, dtype=torch.float64)
        return found

    @property
    def noisy(self) -> Bool[Tensor, "observations"]:
        return self.nats.any(1)

    @property
    def levels(self) -> Float[Tensor, "observations"]:
        """The objective at which all is explained: higher where what was sent is rounded."""
        rounding = self.rounding.to(self.nats.device)
        levels = (ABOVE_ROUNDING * rounding).clamp_min(FLOOR).log().clamp_min(SOLVED)
        return levels.masked_fill(self.noisy, -torch.inf)

    def explains_all(self, batch: Batch, rows: slice, level: float) -> bool:
        shares = self.measure_unexplained(batch, rows)[0, 0]
        counted = shares[self.weights[rows][0] > 0]
        return bool((counted.clamp_min(FLOOR).log() <= level).all())

    def take(self, places: Int[Tensor, "some"]) -> "Energy":
        part = copy.copy(self)
        part.seen = [one.take(places) for one in self.seen]
        part.bases = [bases[places] for bases in self.bases]
        part.weights, part.nats = self.weights[places], self.nats[places]
        part.rounding = self.rounding[places.cpu()]
        return part

    def score(self, batch: Batch, rows: slice) -> Float[Tensor, "observations candidates"]:
        unexplained = self.measure_unexplained(batch, rows)
        profile = (unexplained.clamp_min(FLOOR).log() * self.weights[rows, None]).sum(-1)
        if not bool(self.noisy[rows].any()):
            return profile
        # −‖G·P‖²/2σ², with ‖G·P‖² = (1 − unexplained)·‖G‖²
        likelihood = ((unexplained - 1) * self.nats[rows, None]).sum(-1)
        return torch.where(self.noisy[rows, None], likelihood, profile.double())

    def bytes(self, examples: int, tokens: int, slope: bool = False) -> float:
        """Returns what one candidate of so many sentences takes.

        That is a pass, and in double precision its inputs, their Gram matrices with factors, and
        their products with what was seen; with a slope most of these three times.
        """
        uses, widths = self._list_spans(examples, tokens)
        seen = max(one.rows.shape[1] for one in self.seen)
        held = sum(uses * width + uses**2 for width in widths) + 4 * uses**2 + 4 * uses * seen
        graph = self.pass_cost.bytes(examples, tokens, FORWARD_AND_BACK if slope else FORWARD)
        return graph + (3 if slope else 1) * 8 * held

    def work(self, examples: int, tokens: int, slope: bool = False) -> float:
        uses, widths = self._list_spans(examples, tokens)
        seen = max(one.rows.shape[1] for one in self.seen)
        spans = sum(uses**2 * (width + uses / 3) for width in widths)
        spans += len(self.seen) * uses * seen * (uses + widths[0])
        return (3 if slope else 1) * (self.pass_cost.work(examples, tokens, 1) + 2 * spans)

    def _list_spans(self, examples: int, tokens: int) -> tuple[int, list[int]]:
        """Returns how many directions a candidate has, and the widths of inputs that are factored.

        There is one width for each input that modules do not share.
        """
        signs, uneven = (
            any(getattr(one, name) for one in self.seen) for name in ("signs", "uneven")
        )
        fed = {}
        for part, structure, seen in zip(self.parts, self.structures, self.seen, strict=True):
            source = "attention" if part.module in UNMIXED else part.module
            fed[part.name if uneven else (part.layer, source, structure)] = seen.rows.shape[2]
        return examples * tokens * (2 if signs else 1), list(fed.values())

    def measure_unexplained(
        self, batch: Batch, rows: slice
    ) -> Float[Tensor, "observations candidates terms"]:
        """Returns for every matrix the share of ‖G‖² outside the span of a candidate's inputs.

        The comparisons by heads follow.
        """
        inputs = self.inputs(batch)
        spans: dict[tuple[str, Structure, str], tuple[Tensor, Tensor]] = {}
        shares = []
        for part, structure, seen in zip(self.parts, self.structures, self.seen, strict=True):
            key = (self._find_source(inputs, part), structure, part.name if seen.uneven else "")
            if key not in spans:
                directions = structure.directions(inputs[module_of(part)], batch.mask)
                spans[key] = _factor(seen.defend(directions, rows))
            shares.append(seen.measure_outside(*spans[key], rows))
        for heads, bases in zip(self.heads, self.bases, strict=True):
            shares.append(heads.measure_outside(self.target, inputs, batch.mask, bases[rows]))
        return torch.stack(shares, dim=-1)

    def _find_source(self, inputs: Mapping[str, Tensor], part: Part) -> str:
        """Returns the first module fed by the same tensor: query, key and value share a span."""
        mine = inputs[module_of(part)].data_ptr()
        return next(name for name, tensor in inputs.items() if tensor.data_ptr() == mine)


class SeenDirections:
    """The directions in which one matrix was seen, S·Vᵀ of it, for every observation."""

    def __init__(self, observations: Sequence[Observation], part: Part) -> None:
        target = observations[0].target
        matrices = {
            place: matrix_of(target, part, one.update.tensors[part.name])[0]
            for place, one in enumerate(observations)
            if _shows(one, part)
        }
        count, width = len(observations), next(iter(matrices.values())).shape[1]
        self.signs = any(map(has_only_signs, observations))
        self.uneven = any(map(has_uneven_errors, observations))
        self.shown = torch.tensor(
            [place in matrices for place in range(count)], device=target.device
        )
        self.columns = torch.ones(count, width, device=target.device, dtype=torch.float64)
        for place, matrix in matrices.items():
            if has_uneven_errors(observations[place]):
                self.columns[place] = compare_sizes(matrix, 1)
                rows = compare_sizes(matrix, 0)[:, None]
                matrices[place] = matrix / rows / self.columns[place]
        found = {place: _decompose(matrix) for place, matrix in matrices.items()}
        most = max(map(len, found.values()))
        self.rows = torch.zeros(count, most, width, device=target.device, dtype=torch.float64)
        for place, one in found.items():
            self.rows[place, : len(one)] = one

    def take(self, places: Int[Tensor, "some"]) -> "SeenDirections":
        """Returns those of some of the observations."""
        part = copy.copy(self)
        part.rows, part.shown = self.rows[places], self.shown[places]
        part.columns = self.columns[places]
        return part

    def defend(
        self, directions: Float[Tensor, "o c uses width"], rows: slice
    ) -> Float[Tensor, "o c more width"]:
        """Returns what the gradients of these inputs span after the defense.

        It is in units of the errors in each column.
        """
        spanned = add_signs(directions) if self.signs else directions
        return spanned / self.columns[rows, None, None] if self.uneven else spanned

    def measure_outside(
        self,
        directions: Float[Tensor, "o c uses width"],
        cholesky: Float[Tensor, "o c uses uses"],
        rows: slice,
    ) -> Float[Tensor, "o c"]:
        """Returns the share of ‖S·Vᵀ‖² = ‖G‖² outside the span of the directions."""
        seen = self.rows[rows]
        # One product an observation: the same seen directions serve all its candidates.
        products = (directions.flatten(1, 2) @ seen.mT).view(*directions.shape[:3], -1)
        # With H Hᵀ = L Lᵀ the projection is Hᵀ(HHᵀ)⁻¹H, and ‖G·P‖ = ‖L⁻¹ H (S·Vᵀ)ᵀ‖.
        solved = torch.linalg.solve_triangular(cholesky, products, upper=False)
        inside: Tensor = solved.square().sum((-1, -2))
        return 1 - inside / seen.square().sum((-1, -2)).clamp_min(1e-30)[:, None]


def choose_matrices(
    observations: Sequence[Observation], matrices: int | None
) -> tuple[list[Part], list[Structure]]:
    """Returns the visible matrices, or so many: the best guides of the earliest layers.

    The earliest are the cheapest to reach. Under noise it takes more to tell words apart: then all
    of as many layers as that needs (observations must agree on these).
    """
    target = observations[0].target
    parts = _leave_out_adapters(observations, shared_linear_parts(observations))
    if needed := find_needed_layers(observations[0]):
        parts, matrices = tuple(part for part in parts if part.layer in needed), None
    if not parts:
        raise GradleakError(
            "energy needs the gradient of at least one weight matrix inside a transformer layer,"
            " and none is visible."
        )
    pairs = list(zip(parts, find_structures(target, parts), strict=True))
    order = sorted(range(len(pairs)), key=lambda place: (not is_guide(*pairs[place]), place))
    kept = [pairs[place] for place in sorted(order[:matrices])]
    return [part for part, _ in kept], [structure for _, structure in kept]


def _leave_out_adapters(
    observations: Sequence[Observation], parts: Sequence[Part]
) -> tuple[Part, ...]:
    """Returns the parts without those of LoRA that say nothing where others do.

    At the first step of a training A's gradient is zero, and B's is spanned by any words at all
    where there are as many tokens as its rank.
    """
    shown = [part for part in parts if any(_shows(one, part) for one in observations)]
    telling = [part for part in shown if part.module != "adapter_out"]
    return tuple(telling or shown)


def find_needed_layers(observation: Observation) -> tuple[int | None, ...]:
    """Returns, under errors of known size, the first layers whose matrices say enough together.

    How much one says is by how far it stands out of the errors.
    """
    parts = linear_parts(observation.target, tuple(observation.update.tensors))
    if not any(estimate_error_std(observation, part.name) for part in parts[:1]):
        return ()
    nats, entries = 0.0, 0
    layers: dict[int | None, None] = {}
    for part in parts:
        chance = 2 * math.sqrt(entries / 2)  # what noise alone adds varies by the root
        if nats > TELLING + chance and part.layer not in layers:
            break
        layers[part.layer] = None
        # Of noise alone ‖G‖²/2σ² is half the number of entries.
        nats += _measure_evidence(observation, part) - part.size / 2
        entries += part.size
    return tuple(layers)


def is_guide(part: Part, structure: Structure) -> bool:
    """Returns whether every token's own state is fed into the matrix, one direction each."""
    return part.module not in MIXED and structure.place is None


def _measure_evidence(observation: Observation, part: Part) -> float:
    """Returns a matrix's worth in nats; zero where it is not seen, or free of errors."""
    if part.name not in observation.update.tensors:
        return 0.0
    std = estimate_error_std(observation, part.name)
    square = float(observation.update.tensors[part.name].double().square().sum())
    return square / 2 / std**2 if std else 0.0


def _shows(observation: Observation, part: Part) -> bool:
    seen = observation.update.tensors
    return part.name in seen and bool(seen[part.name].any())


def _measure_rounding(observation: Observation, part: Part) -> float:
    """Returns the share of a matrix's square that rounding takes or adds."""
    if part.name not in observation.update.tensors or observation.channel.exact:
        return 0.0
    square = float(observation.update.tensors[part.name].double().square().mean())
    return _measure_errors(observation, part.name) ** 2 / max(square, 1e-300)


def _decompose(matrix: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "rank inputs"]:
    """Returns S·Vᵀ without rounding, normalised so that tiny gradients do not underflow."""
    values, right = row_factor(matrix)
    kept = values > signal_floor(matrix.shape[-1], matrix.dtype) * values[0]
    return (values / values[0])[kept, None] * right[kept]


def _factor(directions: Float[Tensor, "o c uses width"]) -> tuple[Tensor, Tensor]:
    """Returns the directions and the Cholesky factor of their Gram matrix.

    Masked directions are zero and count for nothing.
    """
    exact = directions.double()
    return exact, factor_gram(exact @ exact.mT, terms=exact.shape[-1])
