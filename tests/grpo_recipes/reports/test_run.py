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
