"""The one room for linear algebra that can fail or mislead: eigenvectors, singular values, least
squares, factors, ranks.

Each library's driver fails on some finite matrix (MKL's divide and conquer does not converge on a
symmetric matrix most of whose rows are zero, with one thread, and does with two). So everything
ill-conditioned comes through here: rows and columns that are zero are taken out first, the rest is
brought to a size of one and decomposed in double precision, the answer is tried on a few random
vectors, and where it is none another driver is asked. What counts as zero is in precision.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import scipy.linalg
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.matching.precision import backward_error_bound, gram_error_bound, unit_rounding

Answer = TypeVar("Answer")
Driver = Callable[[Tensor], Answer]  # takes a matrix in double precision, with leading axes
# Random vectors an answer is tried on: one that is wrong is wrong on almost every vector
PROBES = 2
MOST_RIDGE = 1e-3  # of the largest diagonal entry: a Gram matrix that needs more is none


@dataclass(frozen=True, eq=False)
class Singular:
    """A matrix as left · diag(values) · right, values falling; columns of `left` and rows of
    `right` are orthonormal."""

    left: Float[Tensor, "*lead outputs rank"]
    values: Float[Tensor, "*lead values"]
    right: Float[Tensor, "*lead directions inputs"]


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """The shortest solution among those that leave least, and how many directions of the columns
    it used."""

    solution: Float[Tensor, "unknowns sides"]
    rank: int


def find_eigenvectors(
    symmetric: Float[Tensor, "*lead size size"],
) -> tuple[Float[Tensor, "*lead size"], Float[Tensor, "*lead size size"]]:
    """Returns eigenvalues, rising, and eigenvectors as columns, in double precision on the matrix's
    device."""
    matrix = require_finite(symmetric, "eigenvectors")
    live = _live(matrix, -1)
    count = int(live.sum())
    unit, scale = bring_to_unit_size(_select(matrix, live, live))
    values, vectors = unit.new_zeros(*unit.shape[:-2], 0), unit
    if count:
        values, vectors = _first_sound(unit, _EIGEN_DRIVERS, _is_eigen, "eigenvectors")
    values = values * scale[..., 0]  # a power of two: exact
    return (values, vectors) if count == len(live) else _with_zeros(values, vectors, live)


def decompose(matrix: Float[Tensor, "*lead outputs inputs"], complete: bool = False) -> Singular:
    """Returns the singular value decomposition in double precision, on the matrix's device.

    It has as many values as the smaller side; if `complete`, `right` has as many rows as there are
    inputs, all orthonormal.
    """
    wide = require_finite(matrix, "singular values")
    rows, columns = _live(wide, -1), _live(wide, -2)
    most, height, width = min(wide.shape[-2:]), int(rows.sum()), int(columns.sum())
    few = min(height, width)
    # Unit vectors of the zero rows and columns stand for values of zero; where they do not suffice,
    # the rest must be made up too
    missing = most - few
    all_left = len(rows) - height < missing
    all_right = complete or len(columns) - width < missing
    unit, scale = bring_to_unit_size(_select(wide, rows, columns))
    if few:
        drivers = _SINGULAR_DRIVERS[all_left or all_right]
        left, values, right = _first_sound(unit, drivers, _is_singular, "singular values")
    else:
        left, right = (_all_of(unit, size) for size in (height, width))
        values = unit.new_zeros(*unit.shape[:-2], 0)
    values = values * scale[..., 0]
    if height < len(rows) or width < len(columns):
        left = _embed(left, rows)[..., :most]
        right = _embed(right.mT, columns).mT
        values = torch.cat([values, values.new_zeros(*values.shape[:-1], missing)], dim=-1)
    return Singular(left[..., :most], values, right if complete else right[..., :most, :])


def find_singular_values(
    matrix: Float[Tensor, "*lead outputs inputs"],
) -> Float[Tensor, "*lead values"]:
    """Returns singular values alone, falling, in double precision."""
    wide = require_finite(matrix, "singular values")
    rows, columns = _live(wide, -1), _live(wide, -2)
    unit, scale = bring_to_unit_size(_select(wide, rows, columns))
    most, few = min(wide.shape[-2:]), min(unit.shape[-2:])
    values = unit.new_zeros(*unit.shape[:-2], most)
    if few:
        (found,) = _first_sound(unit, _VALUE_DRIVERS, _are_values, "singular values")
        values[..., :few] = found * scale[..., 0]
    return values


def decompose_rows(
    matrix: Float[Tensor, "outputs inputs"],
) -> tuple[Float[Tensor, "values"], Float[Tensor, "inputs inputs"]]:
    """Returns singular values, falling, and orthonormal rows: the first lie in the span of the
    matrix's rows, the last outside of it.

    A tall matrix is brought to a triangle first, which changes neither and saves the work on its
    left side.
    """
    wide = require_finite(matrix, "row space")
    wide = wide[_live(wide, -1)]
    found = decompose(_triangle(wide) if (wide.shape[0] > wide.shape[1]) else wide, complete=True)
    missing = min(matrix.shape) - len(found.values)
    return torch.cat([found.values, found.values.new_zeros(missing)]), found.right


def orthonormalise(
    matrix: Float[Tensor, "*lead size columns"],
) -> Float[Tensor, "*lead size least"]:
    """Returns orthonormal columns that span the matrix's columns, as many as its smaller side; in
    the matrix's precision."""
    require_finite(matrix, "orthonormal columns", double=False)
    basis: Tensor = torch.linalg.qr(matrix).Q  # by reflections: it cannot fail to converge
    return basis


def find_triangle(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "least columns"]:
    """Returns the triangle R of QR: a matrix of few rows with the same products between columns, in
    double precision."""
    return _triangle(require_finite(matrix, "triangle"))


def solve_least_squares(
    columns: Float[Tensor, "rows unknowns"],
    wanted: Float[Tensor, "rows sides"],
    cutoff: float | None = None,
) -> LeastSquares:
    """Returns shares of the columns that come nearest to what is wanted, in double precision, on
    the columns' device.

    Directions weaker than `cutoff` of the strongest are left out; by default what double precision
    cannot tell from zero.
    """
    whole = require_finite(columns, "least squares").cpu()
    sides = require_finite(wanted, "least squares").cpu()
    rows, unknowns = _live(whole, -1), _live(whole, -2)
    solution = whole.new_zeros(columns.shape[1], sides.shape[1])
    if not rows.any():
        return LeastSquares(solution.to(columns.device), 0)
    live, scale = bring_to_unit_size(_select(whole, rows, unknowns))
    limit = backward_error_bound(max(live.shape), live.dtype) if cutoff is None else cutoff
    problem = _Problem(sides[rows], limit)
    found, rank = _first_sound(live, problem.drivers(), problem.is_solved, "least squares")
    solution[unknowns] = found / scale[0]
    return LeastSquares(solution.to(columns.device), rank)


def factor_gram(
    gram: Float[Tensor, "*lead size size"], terms: int
) -> Float[Tensor, "*lead size size"]:
    """Returns the lower Cholesky factor of a Gram matrix plus a small ridge; on its device.

    Each entry of the matrix is a sum of so many products, whose rounding may have made it
    indefinite: the ridge is as large as that. Where a matrix needs more, it alone gets ten times as
    much until it has a factor. Gradients pass through.
    """
    if not gram.shape[-1]:
        return gram
    diagonal = gram.detach().diagonal(dim1=-2, dim2=-1)
    largest = diagonal.amax(-1)
    # A matrix of zeros has the identity's factor, scaled
    largest = torch.where(largest > 0, largest, 1.0)
    rows = (diagonal > 0).sum(-1)  # zero rows are padding, and do not count
    added = gram_error_bound(terms, rows, gram.dtype).clamp_min(unit_rounding(gram.dtype)) * largest
    identity = torch.eye(gram.shape[-1], device=gram.device, dtype=gram.dtype)
    while True:
        factor: Tensor = torch.linalg.cholesky_ex(gram + added[..., None, None] * identity).L
        # Whatever is not finite in a row of the factor is in its diagonal entry, too
        diagonal = factor.detach().diagonal(dim1=-2, dim2=-1)
        failed = ~((diagonal > 0) & diagonal.isfinite()).all(-1)
        if not bool(failed.any()):
            return factor
        require_finite(gram, "Cholesky factor", double=False)
        added = torch.where(failed, 10 * added, added)
        if bool((added > MOST_RIDGE * largest).any()):
            raise GradleakError(
                f"no Cholesky factor was found of a matrix of shape {_shape(gram)}: it is no Gram"
                f" matrix, even with a ridge of {MOST_RIDGE:g} of its largest entry. Please report"
                " this with the command that led here."
            )


def invert(matrix: Float[Tensor, "rows columns"], cutoff: float) -> Float[Tensor, "columns rows"]:
    """Returns the pseudo-inverse in double precision; directions weaker than `cutoff` of the
    strongest are left out."""
    found = decompose(matrix)
    kept = found.values > cutoff * found.values[:1]
    return (found.right[kept].mT / found.values[kept]) @ found.left[:, kept].mT


def count_rank(
    values: Float[Tensor, "*lead values"], floor: float | Tensor
) -> Shaped[Tensor, "*lead"]:
    """Counts singular values above what counts as zero (precision.py says what that is)."""
    above = torch.as_tensor(floor, dtype=values.dtype, device=values.device)
    return (values > above[..., None]).sum(-1) if above.ndim else (values > above).sum(-1)


def require_finite(matrix: Tensor, wanted: str, double: bool = True) -> Tensor:
    """Returns the matrix, in double precision unless told otherwise; raises where entries are not
    finite, and says how many."""
    if matrix.numel() and not bool(torch.stack(torch.aminmax(matrix.detach())).isfinite().all()):
        bad = int((~matrix.isfinite()).sum())
        raise GradleakError(
            f"{wanted} of a matrix of shape {_shape(matrix)} were asked for, but {bad} of its"
            " entries are not finite: the update or the model holds infinities or NaN. Try a"
            " smaller learning rate or less noise."
        )
    return matrix.detach().double() if double else matrix


def _live(matrix: Tensor, axis: int) -> Bool[Tensor, "places"]:
    """Returns the rows (axis −1) or columns (−2) that are not zero in every one of the matrices."""
    found: Tensor = matrix.any(axis)
    return found.flatten(0, -2).any(0) if found.ndim > 1 else found


def _select(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    if bool(rows.all()) and bool(columns.all()):
        return matrix
    return matrix[..., rows, :][..., columns]


def bring_to_unit_size(matrix: Tensor) -> tuple[Tensor, Float[Tensor, "*lead 1 1"]]:
    """Returns the matrix with a largest entry near one, and the power of two it was divided by:
    neither squares nor sums overflow."""
    if not matrix.numel():
        return matrix, matrix.new_ones(*matrix.shape[:-2], 1, 1)
    largest = torch.linalg.vector_norm(matrix, math.inf, dim=(-1, -2), keepdim=True)
    scale = torch.where(largest > 0, largest.clamp_min(1e-300).log2().floor().exp2(), 1.0)
    return matrix / scale, scale


def _triangle(matrix: Tensor) -> Tensor:
    reduced: Tensor = torch.linalg.qr(matrix, mode="r").R
    return reduced


def _all_of(matrix: Tensor, size: int) -> Tensor:
    return torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand(
        *matrix.shape[:-2], size, size
    )


def _with_zeros(values: Tensor, vectors: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Returns eigenvectors of the whole matrix: a unit vector with value zero for every row that
    was left out, in their order."""
    whole = _embed(vectors, live)
    padded = torch.cat(
        [values, values.new_zeros(*values.shape[:-1], len(live) - values.shape[-1])], dim=-1
    )
    order = padded.argsort(dim=-1, stable=True)  # zeros go between the negative and the positive
    return padded.gather(-1, order), whole.gather(-1, order[..., None, :].expand(whole.shape))


def _embed(columns: Tensor, live: Tensor) -> Tensor:
    """Returns columns over the live places put in their places, and a unit vector for each other
    place after them."""
    count, lead = columns.shape[-1], columns.shape[:-2]
    rest = (~live).nonzero()[:, 0]
    whole = columns.new_zeros(*lead, len(live), count + len(rest))
    whole[..., live.nonzero()[:, 0], :count] = columns
    whole[..., rest, count + torch.arange(len(rest), device=rest.device)] = 1
    return whole


def _first_sound(
    matrix: Tensor,
    drivers: Sequence[Driver[Answer]],
    is_sound: Callable[[Tensor, Answer], bool],
    wanted: str,
) -> Answer:
    """Returns the answer of the first driver that has one and whose answer holds."""
    reasons = []
    for driver in drivers:
        try:
            found = driver(matrix)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # of torch's LAPACK or cuSOLVER, and of scipy's
            reasons.append(str(error).strip().split("\n")[0])
            continue
        if is_sound(matrix, found):
            return found
        reasons.append("an answer that is none")
    raise GradleakError(
        f"no {wanted} were found of a finite matrix of shape {_shape(matrix)}: each of"
        f" {len(drivers)} drivers failed ({'; '.join(dict.fromkeys(reasons))}). Please report this"
        " with the command that led here."
    )


def _probes(like: Tensor, size: int) -> Float[Tensor, "size probes"]:
    # They only try an answer out, and no draw is better than another
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, PROBES, generator=generator, dtype=torch.float64).to(like)


def _close(found: Tensor, wanted: Tensor, reach: Tensor, terms: int) -> bool:
    """Whether both are one up to the error of a decomposition, relative to the norms it went
    through."""
    missed = torch.linalg.matrix_norm(found - wanted)
    return bool((missed <= backward_error_bound(terms, wanted.dtype) * reach).all())  # NaN is not


def _is_eigen(matrix: Tensor, found: tuple[Tensor, Tensor]) -> bool:
    values, vectors = found
    size = matrix.shape[-1]
    probes = _probes(matrix, size)
    rebuilt = vectors @ (values[..., None] * (vectors.mT @ probes))
    reach = torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(probes)
    return _is_orthonormal(vectors, size) and _close(rebuilt, matrix @ probes, reach, size)


def _is_singular(matrix: Tensor, found: tuple[Tensor, Tensor, Tensor]) -> bool:
    left, values, right = found
    terms, count = max(matrix.shape[-2:]), values.shape[-1]
    if not _is_orthonormal(left, terms) or not _is_orthonormal(right.mT, terms):
        return False
    probes = _probes(matrix, matrix.shape[-1])
    rebuilt = left[..., :count] @ (values[..., None] * (right[..., :count, :] @ probes))
    size = torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(probes)
    return _close(rebuilt, matrix @ probes, size, terms)


def _is_orthonormal(columns: Tensor, terms: int) -> bool:
    probes = _probes(columns, columns.shape[-1])
    return _close(columns.mT @ (columns @ probes), probes, torch.linalg.matrix_norm(probes), terms)


def _are_values(matrix: Tensor, found: tuple[Tensor]) -> bool:
    (values,) = found
    # Without vectors there is one thing to try: Σσ² is the squared Frobenius norm.
    squares, norm = values.square().sum(-1), matrix.square().sum((-1, -2))
    falling = bool((values[..., :-1] >= values[..., 1:]).all()) and bool((values >= 0).all())
    allowed = backward_error_bound(max(matrix.shape[-2:]), values.dtype) * norm
    return falling and bool(((squares - norm).abs() <= allowed).all())


def _one_by_one(solve: Callable[[Any], Sequence[Any]]) -> Callable[[Tensor], Any]:
    """Returns a driver of scipy's, for each of the matrices in turn."""

    def run(matrix: Tensor) -> tuple[Tensor, ...]:
        flat = matrix.reshape(-1, *matrix.shape[-2:]).cpu().numpy()
        parts = zip(*[solve(one) for one in flat], strict=True)
        stacked = [torch.stack([torch.from_numpy(one) for one in part]) for part in parts]
        return tuple(one.view(*matrix.shape[:-2], *one.shape[1:]).to(matrix) for one in stacked)

    return run


def _eigen(driver: Literal["evr", "ev", "evd"]) -> Driver[tuple[Tensor, Tensor]]:
    return _one_by_one(lambda one: scipy.linalg.eigh(one, driver=driver, check_finite=False))


def _singular(
    driver: Literal["gesdd", "gesvd"], complete: bool
) -> Driver[tuple[Tensor, Tensor, Tensor]]:
    return _one_by_one(
        lambda one: scipy.linalg.svd(
            one, full_matrices=complete, lapack_driver=driver, check_finite=False
        )
    )


def _values(driver: Literal["gesdd", "gesvd"]) -> Driver[tuple[Tensor]]:
    return _one_by_one(
        lambda one: (
            scipy.linalg.svd(one, compute_uv=False, lapack_driver=driver, check_finite=False),
        )
    )


# Looked up when called: torch's own, on the matrix's device, is the quickest and comes first
_EIGEN_DRIVERS: list[Driver[tuple[Tensor, Tensor]]] = [
    lambda matrix: tuple(torch.linalg.eigh(matrix)),
    _eigen("evr"),
    _eigen("ev"),
    _eigen("evd"),
]
_SINGULAR_DRIVERS: dict[bool, list[Driver[tuple[Tensor, Tensor, Tensor]]]] = {
    False: [
        lambda matrix: tuple(torch.linalg.svd(matrix, full_matrices=False)),
        _singular("gesdd", False),
        _singular("gesvd", False),
    ],
    True: [
        lambda matrix: tuple(torch.linalg.svd(matrix, full_matrices=True)),
        _singular("gesdd", True),
        _singular("gesvd", True),
    ],
}
_VALUE_DRIVERS: list[Driver[tuple[Tensor]]] = [
    lambda matrix: (torch.linalg.svdvals(matrix),),
    _values("gesdd"),
    _values("gesvd"),
]


@dataclass(frozen=True, eq=False)
class _Problem:
    """A least squares problem without its columns."""

    wanted: Float[Tensor, "rows sides"]
    cutoff: float

    def drivers(self) -> list[Driver[tuple[Tensor, int]]]:
        return [
            self._by_torch,
            self._by_scipy("gelsd"),
            self._by_scipy("gelsy"),
            self._by_scipy("gelss"),
        ]

    def is_solved(self, columns: Tensor, found: tuple[Tensor, int]) -> bool:
        """Whether what is left is orthogonal to the columns, but for directions under the
        cutoff."""
        solution = found[0]
        size = torch.linalg.matrix_norm(columns)
        # Least squares' normal equations: Aᵀ(b − Ax) = 0
        across = columns.mT @ (self.wanted - columns @ solution)
        allowed = backward_error_bound(max(columns.shape), columns.dtype) + 2 * self.cutoff
        reach = torch.linalg.matrix_norm(self.wanted) + size * torch.linalg.matrix_norm(solution)
        return bool(torch.linalg.matrix_norm(across) <= allowed * size * reach)

    def _by_torch(self, columns: Tensor) -> tuple[Tensor, int]:
        found = torch.linalg.lstsq(columns, self.wanted, driver="gelsd", rcond=self.cutoff)
        return found.solution, int(found.rank)

    def _by_scipy(self, driver: Literal["gelsd", "gelsy", "gelss"]) -> Driver[tuple[Tensor, int]]:
        def run(columns: Tensor) -> tuple[Tensor, int]:
            solution, _, rank, _ = scipy.linalg.lstsq(
                columns.numpy(),
                self.wanted.numpy(),
                cond=self.cutoff,
                lapack_driver=driver,
                check_finite=False,
            )
            return torch.from_numpy(solution), int(rank)

        return run


def _shape(matrix: Tensor) -> str:
    return "×".join(map(str, matrix.shape))
