"""Laws of thin factors."""

import pytest
import torch

from gradleak.core.streams import Streams
from gradleak.matching.factors import thin_factors


def outer_products(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = Streams.root("factors", rank).generator()
    left, right = (
        torch.randn(3, 2, width, rank, generator=generator, dtype=dtype) for width in (64, 128)
    )
    return left @ right.mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rank", [1, 5, 14, 20])
def test_factors_of_a_matrix_of_low_rank_give_it_back(rank: int, dtype: torch.dtype) -> None:
    gradients = outer_products(rank, dtype)
    thin = thin_factors(gradients)
    if rank == 20:  # 16 are too few and 24 would cost more than they save
        assert thin is None
        return
    assert thin is not None
    assert thin.left.shape == (3, 2, 64, 16)
    assert thin.right.shape == (3, 2, 128, 16)
    missed = torch.linalg.matrix_norm(
        thin.left @ thin.right.mT - gradients
    ) / torch.linalg.matrix_norm(gradients)
    assert float(missed.max()) < 100 * torch.finfo(dtype).eps


def test_a_noisy_matrix_has_none() -> None:
    gradients = outer_products(2, torch.float32)
    assert (
        thin_factors(
            gradients
            + 1e-3 * torch.randn(gradients.shape, generator=Streams.root("noise", 0).generator())
        )
        is None
    )


def test_one_matrix_of_full_rank_among_many_is_enough_to_keep_them_dense() -> None:
    gradients = outer_products(2, torch.float32)
    gradients[1, 1] = torch.eye(64, 128)
    assert thin_factors(gradients) is None


def test_factors_of_nothing_are_nothing() -> None:
    thin = thin_factors(torch.zeros(1, 1, 64, 128))
    assert thin is not None
    assert float((thin.left @ thin.right.mT).abs().max()) == 0
