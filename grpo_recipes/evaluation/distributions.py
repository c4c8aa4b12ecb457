"""Beta and Student distributions with real parameters. The project's run-time dependencies have neither."""

from __future__ import annotations

import math
from functools import lru_cache

MAX_TERMS = 100_000
"""Largest number of terms of the continued fraction. It needs about the square root of the larger parameter."""
PRECISION = 1e-14
"""Largest error of a quantile, as a share of it or of 0.001."""


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b).

    It is computed from the continued fraction of DLMF 8.17.22 by the modified Lentz algorithm. For whole numbers
    0 < k <= n, I_x(k, n - k + 1) is the probability of at least k successes in n trials of probability x.

    Args:
        x: Point in [0, 1].
        a: First parameter, above 0.
        b: Second parameter, above 0.

    Raises:
        ArithmeticError: The continued fraction does not converge.
    """
    if x <= 0:
        return 0.0
    if x > (a + 1) / (a + b + 2):  # there the fraction of the other tail converges faster
        return 1 - beta_cdf(1 - x, b, a)
    numerator, denominator = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = denominator
    for m in range(1, MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            denominator, numerator = 1 / (1 + term * denominator), 1 + term / numerator
            change = denominator * numerator
            fraction *= change
        if abs(change - 1) < 1e-15:
            scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
            return min(1.0, math.exp(scale + a * math.log(x) + b * math.log1p(-x)) * fraction / a)
    raise ArithmeticError(f"the incomplete beta function at {x} of {a} and {b} does not converge")


@lru_cache(maxsize=1024)
def beta_quantile(probability: float, a: float, b: float) -> float:
    """Return the x in [0, 1] with I_x(a, b) = probability, by bisection.

    Args:
        probability: Value of I_x(a, b), in (0, 1).
        a: First parameter, above 0.
        b: Second parameter, above 0.
    """
    low, high = 0.0, 1.0
    while high - low > PRECISION * max(low, 1e-3):
        middle = (low + high) / 2
        if beta_cdf(middle, a, b) > probability:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def student_quantile(freedom: float, tail: float) -> float:
    """Return the t that Student's distribution exceeds in absolute value with probability `tail`.

    Args:
        freedom: Degrees of freedom, a real number above 0.
        tail: Probability of both tails, in (0, 1).
    """
    x = beta_quantile(tail, freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - x) / x)


def student_tail(t: float, freedom: float) -> float:
    """Return the probability that Student's distribution exceeds |t| in absolute value."""
    return beta_cdf(freedom / (freedom + t * t), freedom / 2, 0.5)
