"""Every decomposition has an answer or a sentence, on matrices that single drivers fail on, at
any scale."""

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradleak
from gradleak.core.errors import GradleakError
from gradleak.matching import linear_algebra, precision
from gradleak.matching.factors import row_factor
from gradleak.matching.linear_algebra import (
    count_rank,
    decompose,
    decompose_rows,
    factor_gram,
    find_eigenvectors,
    find_singular_values,
    find_triangle,
    orthonormalise,
    solve_least_squares,
)

SCALES = (1e-30, 1.0, 1e30)
TOLERANCE = 1e-11  # double precision over matrices of up to a thousand rows


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mostly_zero(size: int = 968, zero: int = 770) -> Tensor:
    """A symmetric positive matrix with many zero rows, as pruned gradients make: torch's driver
    failed on such."""
    places = torch.randperm(size, generator=torch.Generator().manual_seed(1))[: size - zero]
    factor = draw(size - zero, 60)
    whole = torch.zeros(size, size, dtype=torch.float64)
    whole[places[:, None], places] = factor @ factor.mT
    return whole


def repeated(size: int = 40) -> Tensor:
    """Three different eigenvalues, each many times."""
    basis = torch.linalg.qr(draw(size, size)).Q
    return basis * torch.tensor([0.0, 1.0, 2.0]).double()[torch.arange(size) % 3] @ basis.mT


def one_row_of(size: int) -> Tensor:
    whole = torch.zeros(size, size, dtype=torch.float64)
    whole[3, 3] = 5.0
    return whole


SYMMETRIC: dict[str, Callable[[], Tensor]] = {
    "singular": lambda: draw(30, 4) @ draw(30, 4).mT,
    "repeated": repeated,
    "identity": lambda: torch.eye(20, dtype=torch.float64),
    "zeros": lambda: torch.zeros(12, 12, dtype=torch.float64),
    "one live row": lambda: one_row_of(9),
    "one entry": lambda: torch.full((1, 1), -3.0, dtype=torch.float64),
    "mostly zero": mostly_zero,
    "indefinite": lambda: draw(25, 25) + draw(25, 25).mT,
}
MATRICES: dict[str, Callable[[], Tensor]] = {
    "tall": lambda: draw(40, 10),
    "wide": lambda: draw(10, 40),
    "singular": lambda: draw(30, 3) @ draw(3, 20),
    "repeated": lambda: torch.eye(17, 9, dtype=torch.float64),
    "one row": lambda: draw(1, 20),
    "one column": lambda: draw(20, 1),
    "zeros": lambda: torch.zeros(6, 9, dtype=torch.float64),
    "zero rows": lambda: draw(20, 12) * (torch.arange(20) % 4 == 0)[:, None],
    "zero columns": lambda: draw(20, 12) * (torch.arange(12) % 4 == 0),
    "both": lambda: draw(20, 12) * (torch.arange(20) % 3 == 0)[:, None] * (torch.arange(12) < 10),
    "empty": lambda: torch.zeros(0, 7, dtype=torch.float64),
    "no columns": lambda: torch.zeros(7, 0, dtype=torch.float64),
}


def is_orthonormal(columns: Tensor) -> bool:
    return torch.allclose(
        columns.mT @ columns, torch.eye(columns.shape[-1]).double(), atol=TOLERANCE
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", SYMMETRIC)
def test_eigenvectors_rebuild_the_matrix_and_are_orthonormal(name: str, scale: float):
    matrix = SYMMETRIC[name]() * scale
    matrix = (matrix + matrix.mT) / 2
    values, vectors = find_eigenvectors(matrix)
    assert bool((values[1:] >= values[:-1]).all())
    assert is_orthonormal(vectors)
    assert torch.allclose(
        vectors * values @ vectors.mT, matrix, atol=TOLERANCE * float(matrix.norm()), rtol=0
    )


def test_rows_of_zeros_have_unit_vectors_of_their_own():
    matrix = mostly_zero(60, 40)
    values, vectors = find_eigenvectors(matrix)
    dead = (matrix == 0).all(1)
    assert int((values == 0).sum()) >= 40
    inside = vectors[:, vectors[~dead].any(0)]
    assert not bool(inside[dead].any())  # what was zero takes part in no other eigenvector


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", MATRICES)
def test_singular_vectors_rebuild_the_matrix_and_are_orthonormal(
    name: str, scale: float, complete: bool
):
    matrix = MATRICES[name]() * scale
    found = decompose(matrix, complete)
    count = min(matrix.shape)
    assert found.left.shape == (matrix.shape[0], count) and found.values.shape == (count,)
    assert found.right.shape == (matrix.shape[1] if complete else count, matrix.shape[1])
    assert is_orthonormal(found.left) and is_orthonormal(found.right.mT)
    rebuilt = found.left * found.values @ found.right[:count]
    assert torch.allclose(rebuilt, matrix, atol=TOLERANCE * float(matrix.norm()), rtol=0)
    assert torch.allclose(
        find_singular_values(matrix), found.values, atol=TOLERANCE * float(matrix.norm()), rtol=0
    )


@pytest.mark.parametrize("name", MATRICES)
def test_the_rows_of_a_matrix_lie_in_its_first_directions(name: str):
    matrix = MATRICES[name]()
    values, directions = decompose_rows(matrix)
    assert values.shape == (min(matrix.shape),)
    assert is_orthonormal(directions)
    rank = int(count_rank(values, 1e-12 * max(float(matrix.norm()), 1)))
    assert torch.allclose(matrix @ directions[rank:].mT, torch.zeros(()).double(), atol=1e-11)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(40, 10), (10, 40), (3, 20, 8)])
def test_a_row_factor_has_the_gram_matrix_of_the_rows(shape: tuple[int, ...], scale: float):
    matrix = draw(*shape) * scale
    values, rows = row_factor(matrix)
    rebuilt = rows.mT * values.square()[..., None, :] @ rows
    gram = matrix.mT @ matrix
    assert torch.allclose(rebuilt, gram, atol=TOLERANCE * float(gram.norm()), rtol=0)


@pytest.mark.parametrize("name", ["zero rows", "zero columns", "both", "zeros", "empty"])
def test_a_row_factor_does_not_mind_zero_rows_and_columns(name: str):
    matrix = MATRICES[name]()
    values, rows = row_factor(matrix)
    assert values.shape == (min(matrix.shape),) and rows.shape == (
        min(matrix.shape),
        matrix.shape[1],
    )
    assert torch.allclose(rows.mT * values.square() @ rows, matrix.mT @ matrix, atol=1e-11)


def test_batches_are_decomposed_as_their_members_are():
    matrices = torch.stack(
        [draw(8, 6), draw(8, 6, seed=1) * (torch.arange(6) < 3), torch.zeros(8, 6).double()]
    )
    together = decompose(matrices)
    for place, matrix in enumerate(matrices):
        assert torch.allclose(together.values[place], decompose(matrix).values, atol=1e-12)
    grams = matrices.mT @ matrices
    values, vectors = find_eigenvectors(grams)
    assert torch.allclose(vectors * values[:, None] @ vectors.mT, grams, atol=1e-11)


@pytest.mark.parametrize("scale", SCALES)
def test_least_squares_takes_the_shortest_of_equal_answers(scale: float):
    columns = draw(30, 3) * scale
    doubled = torch.cat([columns, columns[:, :1], torch.zeros(30, 1).double()], dim=1)
    wanted = columns @ torch.tensor([[2.0], [3.0], [4.0]]).double()
    found = solve_least_squares(doubled, wanted, cutoff=1e-10)
    assert found.rank == 3
    assert torch.allclose(found.solution[:, 0], torch.tensor([1.0, 3, 4, 1, 0]).double(), atol=1e-9)


def test_least_squares_of_nothing_is_nothing():
    found = solve_least_squares(torch.zeros(4, 2).double(), draw(4, 1))
    assert found.rank == 0 and not found.solution.any()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["singular", "repeated", "mostly zero", "zeros"])
def test_a_gram_matrix_has_a_factor_even_if_it_is_singular(name: str, scale: float):
    matrix = SYMMETRIC[name]() * scale
    matrix = (matrix + matrix.mT) / 2
    factor = factor_gram(matrix, terms=len(matrix))
    assert (
        torch.allclose(
            factor @ factor.mT, matrix, atol=1e-8 * max(float(matrix.norm()), 1e-30), rtol=0
        )
        or name == "zeros"
    )
    assert bool(factor.isfinite().all())


def test_a_matrix_that_rounding_made_indefinite_gets_a_larger_ridge_alone():
    sound, bent = torch.eye(4).double(), torch.eye(4).double()
    bent[0, 0] = -1e-9
    factor = factor_gram(torch.stack([sound, bent]), terms=4)
    assert torch.allclose(factor[0], sound, atol=1e-12)
    assert bool(factor.isfinite().all())


def test_gradients_pass_through_a_factor():
    inputs = draw(5, 9).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: factor_gram(x @ x.mT, terms=9), inputs)


def test_what_is_no_gram_matrix_is_refused_by_its_shape():
    with pytest.raises(GradleakError, match="3×3: it is no Gram matrix"):
        factor_gram(-torch.eye(3).double(), terms=3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "call",
    [
        find_eigenvectors,
        decompose,
        find_singular_values,
        decompose_rows,
        orthonormalise,
        find_triangle,
        row_factor,
        lambda matrix: factor_gram(matrix, 5),
        lambda matrix: solve_least_squares(matrix, torch.ones(5, 1).double()),
        lambda matrix: solve_least_squares(torch.ones(5, 5).double(), matrix),
    ],
)
def test_what_is_not_finite_is_refused_with_a_sentence(call: Callable[[Tensor], Any], value: float):
    matrix = torch.eye(5, dtype=torch.float64)
    matrix[2, 2] = value
    with pytest.raises(
        GradleakError, match="5×5 were asked for, but 1 of its entries are not finite"
    ):
        call(matrix)


def fail(*_: Any, **__: Any) -> Any:
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


def lie(matrix: Tensor, **_: Any) -> Any:
    """Finite vectors that are not orthogonal, as drivers have been seen to give."""
    size = matrix.shape[-1]
    return torch.zeros(size).double(), torch.ones(size, size).double()


@pytest.mark.parametrize("instead", [fail, lie])
def test_where_one_eigen_driver_fails_or_lies_the_next_is_asked(
    instead: Any, monkeypatch: pytest.MonkeyPatch
):
    asked = []
    real = linear_algebra.scipy.linalg.eigh

    def watch(*given: Any, driver: str, **settings: Any) -> Any:
        asked.append(driver)
        return real(*given, driver=driver, **settings)

    monkeypatch.setattr(torch.linalg, "eigh", instead)
    monkeypatch.setattr(linear_algebra.scipy.linalg, "eigh", watch)
    matrix = repeated()
    values, vectors = find_eigenvectors(matrix)
    assert asked == ["evr"]
    assert torch.allclose(vectors * values @ vectors.mT, matrix, atol=1e-11)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_where_one_singular_driver_fails_the_next_is_asked(
    batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    matrix = draw(*batch, 9, 6)
    wanted = torch.linalg.svdvals(matrix)
    monkeypatch.setattr(torch.linalg, "svd", fail)
    monkeypatch.setattr(torch.linalg, "svdvals", fail)
    for complete in (False, True):
        found = decompose(matrix, complete)
        assert torch.allclose(found.values, wanted, atol=1e-12)
        assert torch.allclose(
            found.left * found.values[..., None, :] @ found.right, matrix, atol=1e-12
        )
    assert torch.allclose(find_singular_values(matrix), wanted, atol=1e-12)


def test_where_one_least_squares_driver_fails_the_next_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.linalg, "lstsq", fail)
    columns, shares = draw(12, 4), draw(4, 2, seed=2)
    assert torch.allclose(
        solve_least_squares(columns, columns @ shares).solution, shares, atol=1e-11
    )


def test_where_every_driver_fails_the_error_names_the_shape(monkeypatch: pytest.MonkeyPatch):
    for module, name in [(torch.linalg, "eigh"), (torch.linalg, "svd"), (torch.linalg, "lstsq")]:
        monkeypatch.setattr(module, name, fail)
    for name in ("eigh", "svd", "lstsq"):
        monkeypatch.setattr(linear_algebra.scipy.linalg, name, fail)
    with pytest.raises(
        GradleakError,
        match="shape 40×40: each of 4 drivers failed .the algorithm failed to converge.",
    ):
        find_eigenvectors(repeated())
    with pytest.raises(GradleakError, match="shape 9×6: each of 3 drivers failed"):
        decompose(draw(9, 6))
    with pytest.raises(GradleakError, match="shape 9×6: each of 4 drivers failed"):
        solve_least_squares(draw(9, 6), draw(9, 1))


def test_single_precision_is_decomposed_in_double():
    matrix = draw(50, 20).float()
    values, vectors = find_eigenvectors(matrix.mT @ matrix)
    assert values.dtype == torch.float64 and is_orthonormal(vectors)


@pytest.mark.parametrize("signs", ["random", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_off_by_about_what_rounding_expects(dtype: torch.dtype, signs: str):
    terms = 64
    one, other = draw(400, terms).to(dtype), draw(terms, 300, seed=1).to(dtype)
    if signs == "one":
        one, other = one.abs(), other.abs()
    exact = one.double() @ other.double()
    found = torch.zeros(400, 300, dtype=dtype)
    for place in range(terms):  # one after the other: no kernel's own blocks
        found = found + one[:, place, None] * other[place]
    sizes = one.double().norm(dim=1)[:, None] * other.double().norm(dim=0)
    errors = (found.double() - exact).abs() / sizes
    share = terms * precision.unit_rounding(dtype)
    assert float(errors.max()) <= share / (1 - share)  # γₙ, the most there can be
    spread = float(errors.square().mean().sqrt())
    expected = (
        precision.mixed_sum_error(dtype)
        if signs == "random"
        else precision.sum_error(terms, dtype) / 3
    )
    assert expected / 3 < spread < expected * 1.5


def test_what_rounding_leaves_in_a_product_of_low_rank_is_under_its_floor():
    tokens, shape = 24, (200, 150)
    one, other = draw(shape[0], tokens), draw(tokens, shape[1], seed=1)
    product = (one.float() @ other.float()).double()
    values = find_singular_values(product)
    # √terms·u times the factors' norms, over all entries where these do not cancel
    error = precision.sum_error(tokens, torch.float32) * float(product.norm())
    floor = precision.singular_floor(shape, error / math.sqrt(shape[0] * shape[1]))
    assert int(count_rank(values, floor)) == tokens
    assert float(values[tokens]) > floor / 1000  # it is a floor, not a wall


def test_errors_in_every_entry_have_no_singular_value_far_above_theirs():
    for shape in [(50, 50), (300, 40)]:
        largest = float(find_singular_values(0.01 * draw(*shape))[0])
        assert 0.8 < largest / precision.singular_floor(shape, 0.01) < 1.1


DECIDING = (
    "eig eigh eigvalsh svd svdvals qr lstsq cholesky cholesky_ex matrix_rank pinv inv solve".split()
)


def test_nothing_ill_conditioned_is_done_outside_of_this_room():
    source = Path(gradleak.__file__).parent
    rooms = {source / "matching" / "linear_algebra.py"}
    strays = []
    for path in set(source.rglob("*.py")) - rooms:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in DECIDING
                and "linalg" in ast.unparse(node.value)
            ):
                strays.append(f"{path.relative_to(source)}:{node.lineno}")
    assert not strays, f"use gradleak.matching.linear_algebra instead: {strays}"
