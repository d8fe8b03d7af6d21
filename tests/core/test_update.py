"""Sums in a fixed order are right, and the same bits alone and in company."""

import pytest
import torch

from gradleak.core.update import PIECE, sum_over, sum_squares


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [1, 2, 3, 1000, PIECE - 1, PIECE + 7])
def test_a_row_has_the_same_sum_of_squares_alone_and_in_company(size: int):
    rows = draw(5, size)
    together = sum_squares(rows, 1)
    torch.testing.assert_close(together, rows.double().square().sum(1), rtol=1e-13, atol=0)
    for place, row in enumerate(rows):
        assert torch.equal(sum_squares(row[None], 1)[0], together[place])
        assert torch.equal(sum_squares(row, 0), together[place])


def test_numbers_alone_and_nothing_have_sums_too():
    assert sum_squares(torch.tensor([2.0, 3.0]), 1).tolist() == [4.0, 9.0]
    assert sum_squares(torch.zeros(3, 0), 1).tolist() == [0.0, 0.0, 0.0]


def test_squares_that_single_precision_cannot_hold_do_not_overflow():
    assert float(sum_squares(torch.full((4,), 1e30), 0)) == pytest.approx(4e60)


def test_a_sum_over_one_axis_is_taken_one_after_the_other():
    tensor = draw(3, 4, 5)
    by_hand = ((tensor[:, 0] + tensor[:, 1]) + tensor[:, 2]) + tensor[:, 3]
    assert torch.equal(sum_over(tensor, 1), by_hand)
