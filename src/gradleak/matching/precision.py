"""What counts as zero: it follows from the precision, the sizes, the norms and the number of terms,
never from one machine.

The last two functions say how many digits products keep on a GPU.

With u half the distance between one and the next number, every operation is off by a relative error
of at most u. From there:

Sums. A sum of n products aᵢbᵢ, in whatever order and grouping, is off by at most γₙ Σ|aᵢbᵢ| with γₙ
= nu/(1 − nu), and so by at most γₙ‖a‖‖b‖ (Higham 2002, §3.1). The errors of single steps are nearly
independent and of both signs: what is to be expected grows with the root of n instead, at most
√n·u·‖a‖‖b‖ (Higham & Mary 2019, Theorem 3.1). One step's error has a root mean square of u/√3 of
the partial sum. So summing one by one makes √n·u/3 of the sum where all terms have one sign
(partial sums grow like k), and u/√6·‖a‖‖b‖ whatever n where signs are random (they grow like √k, up
to ‖a‖‖b‖/√n). Kernels sum in blocks and are a little better. Two machines that sum in different
orders make two such errors, √2 of one.

Matrices. An m × n matrix whose entries carry independent errors of standard deviation s has no
singular value of its errors above s(√m + √n) but by rare chance (Davidson & Szarek 2001, Theorem
2.13). Singular values move by no more than that (Weyl).

Decompositions. LAPACK's are backward stable: they are exact for a matrix that is off by p(n)·u·‖A‖,
with p of modest growth; its own tests accept up to 50·n·2u, and so does this package.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.observation import Observation

# Times size times eps: the threshold of LAPACK's own test programs for eigenvalues (sep.in) and
# svd.in
LAPACK_ACCEPTS = 50.0


def unit_rounding(dtype: torch.dtype) -> float:
    """Returns u, the largest relative error of one operation."""
    return torch.finfo(dtype).eps / 2


def sum_error(terms: int, dtype: torch.dtype) -> float:
    """Returns the error to be expected of a sum of products at most, whatever their signs, as a
    share of ‖a‖‖b‖."""
    return math.sqrt(terms) * unit_rounding(dtype)  # Higham & Mary's √n·u


def mixed_sum_error(dtype: torch.dtype) -> float:
    """Returns the root mean square of the error where the terms' signs are random, as a share of
    ‖a‖‖b‖, however many there are."""
    # (u/√3)² a step, times squared partial sums of k/n²: these add up to 1/2
    return unit_rounding(dtype) / math.sqrt(6)


def gram_error_bound(
    terms: int, rows: Int[Tensor, "*lead"], dtype: torch.dtype
) -> Float[Tensor, "*lead"]:
    """Says how negative rounding can make an eigenvalue of a Gram matrix of so many rows, as a
    share of its largest diagonal entry.

    Each entry is off by γ of the terms times the largest diagonal entry at most, the matrix by
    `rows` times that in norm; the Cholesky factorisation itself fails only below `rows`·γ of rows +
    1 (Higham 2002, Theorem 10.7).
    """
    return rows.to(dtype) * (terms + rows + 1) * unit_rounding(dtype)


def singular_floor(shape: tuple[int, int], entry_error: float) -> float:
    """Returns the largest singular value that independent errors of this standard deviation in
    every entry make."""
    return entry_error * (math.sqrt(shape[0]) + math.sqrt(shape[1]))


def gradient_difference(sums: list[int], dtype: torch.dtype) -> float:
    """Returns the relative difference to be expected of one gradient taken twice, in different
    orders, through sums of so many terms.

    Every sum on the way, forward and back, adds an error of √n·u, independent of the others: their
    squares add up to u²Σn, and two orders make √2 of the root. It holds up to the factor by which
    the network itself spreads differences in its activations.
    """
    return math.sqrt(2 * sum(sums)) * unit_rounding(dtype)


def signal_floor(inputs: int, dtype: torch.dtype) -> float:
    """Returns the share of a gradient's largest singular value under which its directions cannot be
    explained by inputs taken anew.

    dW = Σ_t δ_t x_tᵀ was made of a client's x_t. Ours went through sums in another order, and miss
    them by the difference of two computations through sums as long as the layer is wide. Nor is a
    direction found by way of a Gram matrix in double precision (factors.py) better than the root
    of that matrix's own error.
    """
    # A Gram matrix has squared singular values: an error of nu in these is one of √(nu) below.
    return max(
        gradient_difference([inputs], dtype), math.sqrt(inputs * unit_rounding(torch.float64))
    )


def cancelled_share(dtype: torch.dtype) -> float:
    """Returns the share of other tensors' size under which a tensor is only what rounding leaves of
    terms that cancel.

    The gradient of a key's bias is a sum over tokens that is zero in exact numbers; rounding leaves
    √n·u of the terms' size. Batches have some hundreds of tokens, and the root makes little of
    more.
    """
    return sum_error(256, dtype)  # batches of some hundreds of tokens


def backward_error_bound(size: int, dtype: torch.dtype) -> float:
    """Returns what a decomposition of a matrix of this size may be off by, as a share of the
    matrix's norm."""
    return LAPACK_ACCEPTS * size * torch.finfo(dtype).eps


@contextmanager
def products_of_10_bits(wanted: bool) -> Iterator[None]:
    """Within it float32 products on a GPU keep 10 bits, or all of theirs; a CPU makes no
    difference."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def rough_products(observations: Sequence[Observation]) -> Iterator[None]:
    """Within it products keep 10 bits if all that was seen is known to be noisy: the noise hides
    more than that."""
    with products_of_10_bits(all(observation.channel.noisy for observation in observations)):
        yield
