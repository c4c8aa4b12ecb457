"""Trend of a logged metric: the change that its noise alone can't make."""

import math

import pytest

from grpo_recipes.reports.run import Series


def series(values: list[float]) -> Series:
    return Series(list(range(1, len(values) + 1)), values)


def test_the_margin_of_a_trend_is_a_multiple_of_its_standard_error() -> None:
    """Neighbours differ by +-2, so that a point has a standard deviation of 2 / sqrt(2), and a quarter has ten."""
    found = series([0.0, 2.0] * 20)
    differences = [2.0, -2.0] * 19 + [2.0]
    mean = sum(differences) / 39
    noise = math.sqrt(sum((value - mean) ** 2 for value in differences) / 39) / math.sqrt(2)
    assert found.margin == pytest.approx(3 * (1 + 3 / 39) * noise * math.sqrt(2 / 10))
    assert found.margin == pytest.approx(2.043, abs=0.002)


@pytest.mark.parametrize(("rise", "trend"), [(2.5, 0), (2.9, 1), (-2.9, -1)])
def test_a_drift_counts_as_a_trend_and_not_as_noise(rise: float, trend: int) -> None:
    """Three quarters of the rise lie between the first and the last quarter: more or less than the margin of 2.04."""
    values = [10 + rise * place / 39 + (place % 2) * 2 for place in range(40)]
    found = series(values)
    assert found.margin == pytest.approx(2.043, abs=0.01)
    assert found.trend == trend


def test_a_change_below_5_percent_of_the_largest_value_is_no_trend() -> None:
    assert series([1.0 + 0.04 * place / 10 for place in range(11)]).trend == 0
    assert series([1.0 + 0.1 * place / 10 for place in range(11)]).trend == 1
    assert series([0.0, 0.0, 1.0]).trend == 0, "three points"


def test_a_small_change_beside_a_large_value_is_no_trend() -> None:
    """A smooth hill of height 100 whose last quarter lies 4 above the first: less than 5 % of the largest value."""
    hill = [100 * math.sin(math.pi * step / 399) + 4 * step / 300 for step in range(400)]
    found = Series(list(range(400)), hill)
    assert found.end - found.start == pytest.approx(4, abs=0.1)
    assert found.margin == pytest.approx(0.05 * max(hill))
    assert found.trend == 0
    assert (
        Series(list(range(400)), [value - 2.5 * min(1, step / 200) * 50 for step, value in enumerate(hill)]).trend == -1
    )


def test_four_points_need_six_standard_errors() -> None:
    """The differences -2, 2, -2 have a standard deviation of √(32 / 9), and a point the noise √(16 / 9)."""
    assert Series([1, 2, 3, 4], [1.0, -1.0, 1.0, -1.0]).margin == pytest.approx(6 * math.sqrt(16 / 9) * math.sqrt(2))
    assert not Series([1, 2, 3], [1.0, 5.0, 9.0]).has_trend
    assert Series([1, 2, 3], [1.0, 5.0, 9.0]).trend == 0


def test_a_running_median_has_five_points_and_fewer_at_both_ends() -> None:
    series = Series([1, 2, 3, 4, 5, 6], [9.0, 1.0, 3.0, 7.0, 5.0, 4.0])
    # Medians, the lower one of two, of 9 1 3, 9 1 3 7, 9 1 3 7 5, 1 3 7 5 4, 3 7 5 4, and 7 5 4.
    assert series.smoothed == Series([1, 2, 3, 4, 5, 6], [3.0, 3.0, 5.0, 4.0, 4.0, 5.0])
