"""The span of what a layer was fed, and how inputs are held against it.

The gradient of a linear layer is dW = Σ_t δ_t x_tᵀ, so its rows lie in the span of the inputs x_t.
`RowSpace` is that span: it says how far one input lies outside of it. `Check` holds whole sentences
against the span of a deeper layer. Tokens have mixed there, so that a token's input depends on all
words of its sentence, and only the right sentence feeds inputs that lie inside.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradleak.core.attack import TokenIds
from gradleak.core.batch import Batch
from gradleak.core.observation import Observation
from gradleak.core.parts import ATTENTION_INPUTS, Part
from gradleak.matching.inputs import ModuleInputs, matrix_of, visible_linear_parts
from gradleak.matching.linear_algebra import decompose_rows, find_singular_values, orthonormalise
from gradleak.matching.precision import gradient_difference, unit_rounding

# Singular values under this many units of rounding of the largest are taken as equal: their ratios
# mean nothing.
ROUNDING = 0.05
# The rank is where singular values fall furthest from one to the next. A fall by a smaller factor
# than this is no edge between signal and rounding.
CLEAR_GAP = 30.0
# By how much a draw of declared errors may fall short of those that came: of large matrices a
# hundredth, but few bounds of sizes are that good. Small matrices vary by more (`_spread_of`).
SPREAD = 1.1
# The size of a client's own rounding is read off what lies beyond the span, its pattern over the
# entries is a guess: its largest was up to 1.86 times the drawn one in 539 gradients
# (benchmarks/row_spaces.py; docs/log/2026-11-20-where-a-span-ends.md).
OWN_SPREAD = 2.0
# Of the values beyond the span, the strongest quarter may be weak directions and not rounding.
STRONGEST = 0.25
SETTLED_AFTER = 8  # each time, weak directions join the span or nothing changes
# Expected errors that an input may lie outside of the span. More words than the true ones may pass:
# the search decides between them.
INSIDE = 1.5
# The same for a deeper input, which went through more sums than one layer is wide. A declared
# channel's errors are far above those of the sums, and their size is known.
HOLDS, HOLDS_IN_CHANNEL = 8.0, 1.5

TOKENS_AT_ONCE = 2**13
FITS = -3.5  # decades of mean miss in single precision; below it a sentence is looked at in double
SMALLEST = 1e-14  # of a squared miss in single precision: what lies under it is rounding
# Where tokens have mixed, the cheapest to compute first.
PLACES = ((1, ("ffn_in",)), (2, ATTENTION_INPUTS))


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The directions of a gradient, how strong each is, and the size of what is only noise."""

    directions: Float[Tensor, "width width"]  # the first `rank` span the rows, the others the rest
    strengths: Float[Tensor, "rank"]
    noise: float  # in a gradient's direction
    rounding: float  # of an input of length one, as two machines compute it
    exact: bool  # signal and noise are far apart, and something is left outside of the span
    through_channel: bool = False  # the noise is what a defense is known to add

    @property
    def rank(self) -> int:
        """The dimension of the span."""
        return len(self.strengths)

    @property
    def tolerance(self) -> float:
        """Expected errors up to which a deeper input counts as inside."""
        return HOLDS_IN_CHANNEL if self.through_channel else HOLDS

    @property
    def widest(self) -> float:
        """The miss to be expected of an input that lies in the weakest direction."""
        return self.noise / float(self.strengths[-1])

    @property
    def basis(self) -> Float[Tensor, "width rank"]:
        """Orthonormal columns that span the inputs."""
        return self.directions[: self.rank].mT

    @property
    def outside(self) -> Float[Tensor, "width rest"]:
        """Directions that no input of the layer has a part in."""
        return self.directions[self.rank :].mT

    def project(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows rank"]:
        """Returns coordinates in the span of inputs that are scaled to length one."""
        wide = inputs.to(self.directions.dtype)
        along: Tensor = (wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True)) @ self.basis
        return along

    def measure_misses(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
        """Returns the share of each input's length that lies outside of the span: a sine."""
        wide = inputs.to(self.directions.dtype)
        outside = torch.linalg.vector_norm(wide @ self.outside, dim=-1)
        sines: Tensor = outside / torch.linalg.vector_norm(wide, dim=-1)
        return sines

    def measure_distances(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
        """Returns each input's miss in units of the error that rounding and noise would make.

        A direction of strength s is known up to noise / s, so an input that leans on weak
        directions may well stick out.
        """
        along = self.project(inputs)
        expected = (along * (self.noise / self.strengths)).square().sum(-1) + self.rounding**2
        return self.measure_misses(inputs) / expected.sqrt()

    def draw_sketch(
        self, width: int, generator: torch.Generator
    ) -> Float[Tensor, "width directions"]:
        """Draws a few directions outside of the span; products with them have the miss's size."""
        rest = self.outside
        if rest.shape[1] <= width:
            return rest
        drawn = torch.randn(rest.shape[1], width, generator=generator, dtype=torch.float64)
        # Only `width` directions of the rest are seen: scaled up, squares are right in the mean.
        return rest @ orthonormalise(drawn.to(rest.device)) * math.sqrt(rest.shape[1] / width)


def read_row_space(observation: Observation, parts: Sequence[Part]) -> RowSpace:
    """Reads the span of the inputs of parts that are fed by one tensor off their gradients.

    Together they see more than one of them alone: a key's gradient holds centred inputs only.
    """
    target, seen, channel = observation.target, observation.update.tensors, observation.channel
    rows = torch.cat([matrix_of(target, part, seen[part.name])[0] for part in parts])
    steps = observation.protocol.local_steps(observation.knows.batch_size or 1)
    # Several steps differ in more than their rounding: there, the span ends where its values fall
    if channel.only_scaled and not channel.rounding and steps > 1:
        space = find_row_space_by_fall(rows, rows.dtype)
    elif channel.exact:
        space = find_row_space(rows)
    else:
        errors = torch.cat(
            [matrix_of(target, part, observation.errors(part.name)[None])[0] for part in parts]
        )
        space = find_row_space_among_errors(rows, errors)
    # Dropout leaves a clear span, but of inputs that no word has: nothing fits it exactly, and what
    # fits best is a ranking. Nor is a span exact where entries are missing or only signs are seen.
    blurred = observation.protocol.dropout or not channel.every_entry
    return replace(space, exact=False) if blurred else space


def find_row_space_by_fall(matrix: Float[Tensor, "outputs inputs"], dtype: torch.dtype) -> RowSpace:
    """Finds the span of a gradient's rows; its dimension is where singular values fall furthest."""
    return _end_at_furthest_fall(matrix, *decompose_rows(matrix), dtype)


def _end_at_furthest_fall(
    matrix: Float[Tensor, "outputs inputs"],
    values: Float[Tensor, "values"],
    directions: Float[Tensor, "inputs inputs"],
    dtype: torch.dtype,
) -> RowSpace:
    floor = (values[0] * torch.finfo(dtype).eps * ROUNDING).clamp_min(1e-300)
    ladder = torch.cat([values, values.new_zeros(1)]).clamp_min(floor)
    falls = ladder[:-1] / ladder[1:]
    rank = int(falls.argmax()) + 1
    # Of a full rank nothing is outside of the span, and no word could be told from another.
    exact = rank < min(matrix.shape) and float(falls.max()) > CLEAR_GAP
    if not exact:
        rank = _count_above_noise(values, matrix.shape)
    noise = float(ladder[rank]) if exact else float(values.median())
    rounding = _estimate_input_rounding(matrix)
    return RowSpace(directions, ladder[:rank], noise, rounding, exact)


def find_row_space(matrix: Float[Tensor, "outputs inputs"]) -> RowSpace:
    """Finds the span of the rows of a gradient as it was computed.

    Inputs that are nearly sums of others leave weak directions beyond the furthest fall of the
    singular values. They count as long as they are stronger than what rounding makes, whose size is
    that of the weakest values.
    """
    errors = DrawnErrors(matrix, torch.zeros_like(matrix))
    values = errors.values
    space = _end_at_furthest_fall(matrix, values, errors.directions, matrix.dtype)
    if not space.exact:
        return space
    rank, _ = errors.settle(space.rank)
    if rank == min(matrix.shape):
        return space
    floor = values[0] * torch.finfo(matrix.dtype).eps * ROUNDING
    strengths, noise = values[:rank].clamp_min(floor), float(values[rank].clamp_min(floor))
    return replace(space, strengths=strengths, noise=noise)


def find_row_space_among_errors(
    matrix: Float[Tensor, "outputs inputs"], errors: Float[Tensor, "outputs inputs"]
) -> RowSpace:
    """Finds the span of a gradient's rows whose entries are known to be wrong by so much."""
    drawn = DrawnErrors(matrix, errors)
    rank, floor = drawn.settle()
    rank = min(rank, min(matrix.shape) - 1)
    values = drawn.values
    # A weakest direction that is hardly above the floor may not be the weakest: the search is then
    # told less than there is
    clear = floor * _spread_of([size - rank for size in matrix.shape])
    exact = rank > 0 and float(values[rank - 1]) > clear
    rounding = _estimate_input_rounding(matrix)
    return RowSpace(drawn.directions, values[: max(rank, 1)], floor, rounding, exact, True)


class DrawnErrors:
    """Errors drawn at the sizes that a gradient's may have, and what they leave outside of a span.

    Each entry has the error that is declared for it, and the client's own rounding: half a unit of
    the last digit of the entry, and of the sums on the way to it, which are as large as the entry's
    row and column.
    """

    def __init__(
        self,
        matrix: Float[Tensor, "outputs inputs"],
        declared: Float[Tensor, "outputs inputs"],
    ) -> None:
        self.matrix, self.declared = matrix.double(), declared.double()
        self.values, self.directions = decompose_rows(matrix)
        self.is_declared, self.most = bool(declared.any()), min(matrix.shape)
        rows, columns = (self.matrix.norm(dim=axis, keepdim=True) for axis in (1, 0))
        sums = rows * columns / self.matrix.norm().clamp_min(1e-300)
        rounding = unit_rounding(matrix.dtype) / math.sqrt(2)
        self.own = torch.hypot(self.matrix, sums) * rounding
        generator = torch.Generator().manual_seed(0)
        self.drawn = torch.randn(matrix.shape, generator=generator).to(self.matrix)

    def settle(self, rank: int = 0) -> tuple[int, float]:
        """Returns how many directions stand out of what errors make, and the largest that errors
        make; begins with a span of `rank` directions."""
        floor = 0.0
        for _ in range(SETTLED_AFTER):
            spread = _spread_of([size - rank for size in self.matrix.shape])
            floor = self.find_largest(rank, self.fit_scale(rank), spread, OWN_SPREAD * spread)
            above = int((self.values > floor).sum())
            if not self.is_declared:
                above = max(rank, above)
            if above in (rank, self.most):
                return above, floor
            rank = above
        return rank, floor

    def fit_scale(self, rank: int) -> float:
        """Returns how large the client's rounding is in units of what is drawn: the weaker values
        beyond the span are nothing else."""
        if not rank:
            return 1.0
        weak = slice(int(STRONGEST * (self.most - rank)), None)
        expected = self._leave_outside(rank, torch.hypot(self.declared, self.own))[weak].norm()
        scale = float(self.values[rank:][weak].norm() / expected.clamp_min(1e-300))
        return max(scale, 1.0) if self.is_declared else scale

    def find_largest(
        self, rank: int, scale: float, spread: float = 1.0, own_spread: float = 1.0
    ) -> float:
        """Returns the largest singular value that errors leave outside of the first directions."""
        sizes = torch.hypot(spread * self.declared, own_spread * scale * self.own)
        return float(self._leave_outside(rank, sizes)[0])

    def _leave_outside(self, rank: int, sizes: Tensor) -> Float[Tensor, "values"]:
        left = (self.matrix @ self.directions[:rank].mT) / self.values[:rank].clamp_min(1e-300)
        beyond = (self.drawn * sizes) @ self.directions[rank:].mT
        return find_singular_values(beyond - left @ (left.mT @ beyond))[: self.most - rank]


def _spread_of(sizes: Sequence[int]) -> float:
    """Returns by how much the largest singular values of two draws of errors may differ.

    For Gaussian entries the square of the largest is (√m + √n)² give or take 1.27 · (√m + √n) ·
    (1/√m + 1/√n)^⅓ (Johnstone 2001, Theorem 1.1); three times that, for the difference of two.
    """
    roots = [math.sqrt(max(1, size)) for size in sizes]
    relative = 1.27 / 2 * math.cbrt(sum(1 / root for root in roots)) / sum(roots)
    return max(SPREAD, 1 + 3 * math.sqrt(2) * relative)


def _estimate_input_rounding(matrix: Float[Tensor, "outputs inputs"]) -> float:
    """Says how far an input of length one may be from the client's.

    A normalisation's mean and size are sums as long as the layer is wide.
    """
    return gradient_difference([matrix.shape[1]], matrix.dtype)


def _count_above_noise(values: Float[Tensor, "values"], shape: torch.Size) -> int:
    """Counts the singular values that stand out of noise; at least one, and not all."""
    beta = min(shape) / max(shape)
    # The optimal hard threshold for noise of unknown size (Gavish & Donoho 2014, their equation 5)
    edge = (0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43) * values.median()
    return max(1, min(int((values > edge).sum()), min(shape) - 1))


class Check:
    """One place of the model where tokens have mixed, and the span of what it was fed."""

    def __init__(self, inputs: ModuleInputs, space: RowSpace, width: int) -> None:
        self.target, self.inputs, self.space = inputs.target, inputs, space
        self.width = width  # of the client's batch, for clients that attend to padding
        self.outside = space.outside.to(self.target.dtype).contiguous()

    @property
    def threshold(self) -> float:
        """The score under which a sentence may hold."""
        return max(FITS, math.log10(INSIDE * self.space.widest))

    @torch.no_grad()
    def score(self, sentences: Sequence[TokenIds]) -> list[float]:
        """Returns how well sentences fit: the mean over their tokens of the miss in decades.

        −6 is exact in single precision, and 0 is as far outside as an input can be.
        """
        found: list[float] = []
        step = max(1, TOKENS_AT_ONCE // max(map(len, sentences), default=1))
        for start in range(0, len(sentences), step):
            ids, lengths = self._lay_out(sentences[start : start + step])
            found += self._average(self._feed(ids, lengths), lengths).tolist()
        return found

    @torch.no_grad()
    def score_tokens(self, sentences: Sequence[TokenIds]) -> list[list[float]]:
        """Returns each token's miss in decades; what follows a sentence's end means nothing."""
        rows: list[list[float]] = self.measure_decades(
            self._feed(*self._lay_out(sentences))
        ).tolist()
        return rows

    def compute_slopes(
        self, sentences: Sequence[TokenIds]
    ) -> Float[Tensor, "sentences tokens hidden"]:
        """Computes the gradient of the scores with respect to the word embeddings."""
        ids, lengths = self._lay_out(sentences)
        with torch.enable_grad():
            embeddings = self.target.embed(ids).detach().requires_grad_()
            total = self._average(self._feed(ids, lengths, embeddings), lengths).sum()
        return torch.autograd.grad(total, embeddings)[0]

    def measure_decades(self, fed: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
        """Returns the logarithm of each input's miss, in single precision."""
        misses: Tensor = (fed @ self.outside).square().sum(-1) / fed.square().sum(-1)
        return (misses + SMALLEST).log10() / 2  # of squares: half their logarithm

    @torch.no_grad()
    def compute_inputs(self, sentences: Sequence[TokenIds]) -> Float[Tensor, "inputs width"]:
        """Computes what sentences feed in, all tokens one after the other."""
        ids, lengths = self._lay_out(sentences)
        return self._feed(ids, lengths)[_mask_tokens(lengths, int(lengths.max()))]

    def count_tokens(self, sentences: Sequence[TokenIds]) -> int:
        """Counts the inputs that sentences feed in; padding counts where it is attended to."""
        least = self.width if self.target.attend_padding else 0
        return sum(max(least, len(sentence)) for sentence in sentences)

    def holds(self, sentence: TokenIds) -> bool:
        """Whether every token's input is in the span as far as rounding lets one see."""
        distances = self.space.measure_distances(self.compute_inputs([sentence]))
        return bool((distances < self.space.tolerance).all())

    @torch.no_grad()
    def reads_ahead(self) -> bool:
        """Whether a token's deeper inputs depend on the words after it."""
        words = self.target.vocabulary.allowed.nonzero()[:4, 0].tolist()
        one, other = (self.compute_inputs([(*words[:2], last)])[0] for last in words[2:])
        return not torch.allclose(one, other, rtol=1e-5, atol=1e-6)

    def _lay_out(
        self, sentences: Sequence[TokenIds]
    ) -> tuple[Int[Tensor, "sentences tokens"], Int[Tensor, "sentences"]]:
        width = max(map(len, sentences))
        if self.target.attend_padding:
            width = max(width, self.width)
        pad, device = self.target.vocabulary.pad, self.target.device
        rows = [[*sentence, *[pad] * (width - len(sentence))] for sentence in sentences]
        return torch.tensor(rows).to(device), torch.tensor([*map(len, sentences)], device=device)

    def _feed(
        self, ids: Tensor, lengths: Tensor, embeddings: Tensor | None = None
    ) -> Float[Tensor, "sentences longest width"]:
        mask = _mask_tokens(lengths, ids.shape[1])
        if self.target.attend_padding:
            mask = torch.ones_like(mask)
        labels = self.target.any_labels(*ids.shape)
        batch = Batch(mask, labels, ids if embeddings is None else None, embeddings)
        return next(iter(self.inputs(batch).values()))[:, : int(lengths.max())]

    def _average(
        self, fed: Float[Tensor, "sentences longest width"], lengths: Int[Tensor, "sentences"]
    ) -> Float[Tensor, "sentences"]:
        inside = _mask_tokens(lengths, fed.shape[1])
        return (self.measure_decades(fed) * inside).sum(-1) / lengths


def open_checks(observation: Observation, least_rank: int, width: int) -> list[Check]:
    """Opens the places of an observation whose span is exact, cheapest first.

    A span must have a direction for every token there must be. That leaves out the last layer of a
    classifier, where only averages of tokens have a gradient: its span is far too small.
    """
    found = []
    for layer, modules in PLACES:
        parts = visible_linear_parts(observation, layer, modules)
        space = read_row_space(observation, parts) if parts else None
        if space is not None and space.exact and space.rank >= least_rank:
            found.append(Check(ModuleInputs(observation.target, parts[:1]), space, width))
    return found


def _mask_tokens(lengths: Int[Tensor, "rows"], width: int) -> Bool[Tensor, "rows width"]:
    return torch.arange(width, device=lengths.device) < lengths[:, None]
