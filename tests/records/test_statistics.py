"""Laws of the intervals."""

import numpy as np
import pytest
from scipy.stats import beta, norm, t

from gradleak.records.statistics import bootstrap_mean, clopper_pearson, interval, paired_difference


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize(
    ("successes", "n"),
    [(0, 1), (1, 1), (0, 30), (30, 30), (3, 10), (37, 100), (1, 5000), (2500, 5000)],
)
def test_clopper_pearson_is_the_beta_quantile(successes: int, n: int, confidence: float) -> None:
    tail = (1 - confidence) / 2
    found = clopper_pearson(successes, n, confidence)
    low = 0.0 if successes == 0 else beta.ppf(tail, successes, n - successes + 1)
    high = 1.0 if successes == n else beta.ppf(1 - tail, successes + 1, n - successes)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)
    assert (found.mean, found.n) == (successes / n, n)


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3), (0, 0)])
def test_impossible_counts_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        clopper_pearson(successes, n)


def test_the_bootstrap_agrees_with_the_normal_interval_on_many_values() -> None:
    values = np.random.default_rng(1).random(400)
    found = bootstrap_mean(values.tolist())
    half = 1.96 * values.std() / 20
    assert (found.low, found.high) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=0.003
    )


def test_the_bootstrap_is_the_same_every_time_and_moves_with_its_seed() -> None:
    values = [0.1, 0.4, 0.35, 0.8]
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(np.linspace(0, 1, 50).tolist()) != bootstrap_mean(
        np.linspace(0, 1, 50).tolist(), seed=1
    )


def test_clusters_of_one_change_nothing() -> None:
    values = [0.1, 0.4, 0.35, 0.8]
    assert bootstrap_mean(values, clusters=["a", "b", "c", "d"]) == bootstrap_mean(values)


def test_copies_within_a_cluster_earn_no_narrower_interval() -> None:
    values = [0.1, 0.4, 0.35, 0.8, 0.5]
    eightfold = bootstrap_mean(
        np.repeat(values, 8).tolist(), clusters=np.repeat(range(5), 8).tolist()
    )
    single = bootstrap_mean(values)
    assert (eightfold.low, eightfold.high) == pytest.approx((single.low, single.high))
    assert eightfold.n == 40


def test_the_mean_counts_examples_not_clusters() -> None:
    assert bootstrap_mean([1.0, 0.5, 0.5, 0.5], clusters=[0, 1, 1, 1]).mean == pytest.approx(0.625)


def test_resampling_in_parts_fills_every_resample(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.2, 0.9, 0.4]
    whole = bootstrap_mean(values, resamples=101)
    monkeypatch.setattr("gradleak.records.statistics.CELLS_AT_ONCE", 21)
    assert bootstrap_mean(values, resamples=101) == whole


def test_independent_yes_or_no_gets_the_exact_interval() -> None:
    assert interval([1, 0, 0, 1, 0]) == clopper_pearson(2, 5)
    assert interval([1, 0, 0], clusters=[4, 5, 6]) == clopper_pearson(1, 3)


def test_yes_or_no_in_shared_batches_is_bootstrapped() -> None:
    values, clusters = [1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2]
    assert interval(values, clusters) == bootstrap_mean(values, clusters)


def test_a_constant_sample_never_gets_zero_width() -> None:
    zeros, ones = (
        interval([0.0] * 20, clusters=[i // 2 for i in range(20)]),
        interval([1.0] * 20, clusters=[i // 2 for i in range(20)]),
    )
    assert (zeros.low, zeros.high) == pytest.approx((0.0, clopper_pearson(0, 10).high))
    assert (ones.low, ones.high) == pytest.approx((clopper_pearson(10, 10).low, 1.0))
    assert interval([0.7]).low < 0.1 and interval([0.7]).high > 0.9


def test_batches_that_all_score_alike_are_a_constant_sample_too() -> None:
    found = interval([0.0, 0.5] * 10, clusters=[i // 2 for i in range(20)])
    assert found.low < found.mean == 0.25 < found.high


def test_the_widened_interval_covers_a_rare_leak_as_often_as_it_says() -> None:
    # Most samples are all zero: a plain bootstrap would then claim that the mean is exactly 0
    rate, n = 0.02, 40
    draws = np.random.default_rng(2).random((300, n)) < rate
    covered = [interval((0.8 * row).tolist()).high >= 0.8 * rate for row in draws if not row.any()]
    assert len(covered) > 50 and all(covered)


def test_a_paired_difference_sees_what_unpaired_values_hide() -> None:
    blind = np.random.default_rng(3).random(60) * 0.5
    gain = 0.05 + 0.01 * np.random.default_rng(4).standard_normal(60)
    found = paired_difference((blind + gain).tolist(), blind.tolist())
    assert 0.04 < found.low < found.mean < found.high < 0.06


def test_one_pair_proves_no_difference() -> None:
    assert paired_difference([0.9], [0.1]).low <= 0


def test_a_value_minus_itself_is_zero_within_its_interval() -> None:
    found = paired_difference([0.2, 0.5, 0.9], [0.2, 0.5, 0.9])
    assert found.low < found.mean == 0.0 < found.high


def test_a_small_negative_difference_is_not_taken_for_a_fraction() -> None:
    found = paired_difference([3.0, 5.0, 8.0], [4.0, 4.0, 9.0])
    assert found.low < 0 and found.n == 3


@pytest.mark.parametrize(
    "measure", [bootstrap_mean, interval, lambda values: paired_difference(values, values)]
)
def test_no_values_and_non_finite_values_are_refused(measure) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="at least one value"):
        measure([])
    with pytest.raises(ValueError, match="finite"):
        measure([0.5, float("nan")])


def test_values_without_partner_or_cluster_are_refused() -> None:
    with pytest.raises(ValueError, match="in pairs"):
        paired_difference([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match="its cluster"):
        interval([1.0, 0.0], clusters=[1])


@pytest.mark.parametrize("n", [2, 3, 6, 31])
def test_a_bootstrap_interval_is_as_wide_as_students_t_makes_it(n: int) -> None:
    values = np.random.default_rng(n).random(n).tolist()
    plain, found = bootstrap_mean(values), paired_difference(values, [0.0] * n)
    wider = np.sqrt(n / (n - 1)) * t.ppf(0.975, n - 1) / norm.ppf(0.975)
    assert found.mean == pytest.approx(plain.mean)
    ends = [plain.mean + side * wider for side in (plain.low - plain.mean, plain.high - plain.mean)]
    assert (found.low, found.high) == pytest.approx(
        (max(ends[0], -1.0), min(ends[1], 1.0)), rel=1e-3
    )


def test_two_examples_say_almost_nothing() -> None:
    found = interval([0.50, 0.53])
    assert found.low < 0.4
    assert found.high > 0.6


@pytest.mark.parametrize("n", [4, 8, 30])
def test_small_samples_are_covered_as_often_as_promised(n: int) -> None:
    draws = np.random.default_rng(n).beta(2, 3, size=(400, n))
    covered = [
        found.low <= 0.4 <= found.high for found in (interval(row.tolist()) for row in draws)
    ]
    assert np.mean(covered) > 0.92
