"""Beta and Student distributions against mpmath and against printed values of scipy 1.17.1."""

import mpmath
import pytest

from grpo_recipes.evaluation.distributions import beta_cdf, beta_quantile, student_quantile, student_tail

SHAPES = [(0.02, 3.0), (0.5, 0.5), (1.0, 1.0), (2.5, 0.1), (6.25, 90.5), (40.0, 61.0), (3_000.5, 12.0), (300.0, 700.5)]


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_the_incomplete_beta_function_is_mpmaths(a: float, b: float) -> None:
    mean = a / (a + b)
    for x in (mean * 0.9, mean, 1 - (1 - mean) * 0.9, mean / 30, 0.5):
        exact = float(mpmath.betainc(a, b, 0, x, regularized=True))
        assert beta_cdf(x, a, b) == pytest.approx(exact, rel=1e-8, abs=1e-11), x
    assert (beta_cdf(0.0, a, b), beta_cdf(1.0, a, b)) == (0, 1)


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_a_beta_quantile_has_its_probability(a: float, b: float) -> None:
    for probability in (0.025, 0.5, 0.975):
        x = beta_quantile(probability, a, b)
        reached = [
            float(mpmath.betainc(a, b, 0, end, regularized=True)) for end in (max(0, x - 1e-11), min(1, x + 1e-11))
        ]
        assert reached[0] <= probability + 1e-9
        assert probability - 1e-9 <= reached[1]


@pytest.mark.parametrize(("a", "b", "expected"), [(1e5, 1e-20, 1.0), (1e-20, 1e5, 0.0)])
def test_the_median_of_a_very_small_and_a_large_parameter_is_an_end(a: float, b: float, expected: float) -> None:
    assert beta_quantile(0.5, a, b) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # scipy.stats.t.ppf(0.975, freedom)
    [
        (1, 12.706204736174694),
        (2, 4.302652729749462),
        (2.5, 3.5746548420036817),
        (7.25, 2.348194849105371),
        (31, 2.039513446396408),
        (399, 1.965927295920882),
        (1e5, 1.9599877075346095),
    ],
)
def test_students_quantile_is_scipys(freedom: float, quantile: float) -> None:
    assert student_quantile(freedom, 0.05) == pytest.approx(quantile, rel=1e-9)
    assert student_tail(quantile, freedom) == pytest.approx(0.05, rel=1e-8)


def test_students_tail_is_scipys() -> None:
    """The expected value is 2 * scipy.stats.t.sf(2.1, 5.5)."""
    assert student_tail(-2.1, 5.5) == pytest.approx(0.08469192512974699, rel=1e-10)
