"""Feature hashing: every coordinate in one bin, summed; the same from the same seed; noise in
bins as noise before them."""

import pytest
import torch

from gradleak.attacks.learning_to_invert.features import Hashing
from gradleak.core.streams import Streams

CPU = torch.device("cpu")


def hashing(
    coordinates: int = 1003, bins: int = 100, seed: int = 0, signed: bool = False
) -> Hashing:
    return Hashing(coordinates, bins, Streams.root("hashing", seed), signed, CPU)


@pytest.mark.parametrize("signed", [False, True])
def test_every_coordinate_falls_into_exactly_one_bin(signed: bool) -> None:
    matrix = hashing(signed=signed)(torch.eye(1003))
    assert bool(((matrix != 0).sum(1) == 1).all())
    assert matrix.abs().sum(0).tolist() == hashing().counts.tolist()
    assert set(matrix[matrix != 0].tolist()) == ({-1.0, 1.0} if signed else {1.0})


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bins", [1, 100, 1003])
def test_what_single_coordinates_give_adds_up(signed: bool, bins: int) -> None:
    made, generator = hashing(bins=bins, signed=signed), torch.Generator().manual_seed(0)
    update = torch.randn(3, 1003, generator=generator, dtype=torch.float64)
    matrix = made(torch.eye(1003, dtype=torch.float64))
    torch.testing.assert_close(made(update), update @ matrix, rtol=1e-12, atol=1e-12)


def test_a_seed_gives_one_map() -> None:
    update = torch.randn(2, 1003, generator=torch.Generator().manual_seed(0))
    assert torch.equal(hashing()(update), hashing()(update))
    assert not torch.equal(hashing()(update), hashing(seed=1)(update))


def test_noise_added_in_bins_is_distributed_as_noise_added_before() -> None:
    made = hashing(coordinates=25, bins=10)
    noise = torch.randn(20_000, 25, generator=torch.Generator().manual_seed(0))
    covariance = torch.cov(made(noise).mT)
    torch.testing.assert_close(covariance, torch.diag(made.counts), rtol=0, atol=0.1)


def test_more_bins_than_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and the 5 coordinates"):
        hashing(coordinates=5, bins=6)
