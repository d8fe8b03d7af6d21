"""The tests check shapes at all: in the first calls of every function, in each test anew."""

import jaxtyping
import pytest
import torch

from gradleak.matching.linear_algebra import find_triangle

pytestmark = pytest.mark.skipif(
    jaxtyping.config.jaxtyping_disable, reason="JAXTYPING_DISABLE is set"
)


@pytest.mark.parametrize("again", range(5))
def test_a_wrong_shape_is_refused_in_every_test(again: int) -> None:
    for _ in range(3):  # five times three are more calls than are checked in one test
        with pytest.raises(jaxtyping.TypeCheckError, match="find_triangle"):
            find_triangle(torch.zeros(3))  # one axis, where rows and columns are
