"""Beta and Student distributions with real parameters. The project's run-time dependencies have neither."""

from __future__ import annotations

import math

MAX_TERMS = 100_000
"""Largest number of terms of the continued fraction. It needs about the square root of the larger parameter."""
MAX_STEPS = 200
"""Largest number of steps of a root search, of which bisection alone needs about 60."""


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
    tiny = 1e-300
    numerator, denominator = 1.0, 1 / _off_zero(1 - (a + b) * x / (a + 1), tiny)
    fraction = denominator
    for m in range(1, MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            denominator = 1 / _off_zero(1 + term * denominator, tiny)
            numerator = _off_zero(1 + term / numerator, tiny)
            change = denominator * numerator
            fraction *= change
        if abs(change - 1) < 1e-15:
            return min(1.0, math.exp(_log_beta_density(x, a, b) + math.log(x) + math.log1p(-x)) * fraction / a)
    raise ArithmeticError(f"the incomplete beta function at {x} of {a} and {b} does not converge")


def _off_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def _log_beta_density(x: float, a: float, b: float) -> float:
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return scale + (a - 1) * math.log(x) + (b - 1) * math.log1p(-x)


def beta_quantile(probability: float, a: float, b: float) -> float:
    """Return the x in [0, 1] with I_x(a, b) = probability, within 1e-12.

    Newton's method is used while it stays between the points that are known to enclose x, and bisection otherwise.

    Args:
        probability: Value of I_x(a, b), in (0, 1).
        a: First parameter, above 0.
        b: Second parameter, above 0.
    """
    low, high = 0.0, 1.0
    x = a / (a + b)
    if not 0 < x < 1:  # the mean of a very small and a large parameter is rounded
        x = 0.5
    for _ in range(MAX_STEPS):
        excess = beta_cdf(x, a, b) - probability
        if excess > 0:
            high = x
        else:
            low = x
        step = math.inf
        log_density = _log_beta_density(x, a, b)
        if -600 < log_density < 600:
            step = excess * math.exp(-log_density)
        following = x - step
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - x) <= 1e-13 * max(x, 1e-3):
            return following
        x = following
    return x


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
