"""Shares and means with their 95 % intervals, and differences of them on the same problems.

The unit is the problem: samples of one problem are alike, so that k of them tell less than k problems would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True)
class Estimate:
    """A share, a mean, or a difference of two, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_dict(cls, numbers: Mapping[str, float]) -> Estimate:
        """The estimate that `as_dict` was made of; further keys are passed over."""
        return cls(numbers["value"], numbers["low"], numbers["high"])

    def as_dict(self) -> dict[str, float]:
        """The three numbers by name, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_share(shares: Sequence[float]) -> Estimate:
    """The mean of one share in [0, 1] for each problem, with the score interval clustered by problem.

    The score interval of n trials keeps its coverage for small n and near 0 and 1: it holds the values p for which the share
    lies within z standard errors of p, where the standard error is that of p itself (Wilson 1927, "Probable inference, the
    law of succession, and statistical inference"; z = 1.96). Here it is taken for as many independent trials as have the
    variance of this mean: n_eff = p (1 - p) / v, where v is the sum of squared deviations / n^2. With one sample a problem the
    shares are 0 or 1, n_eff is n and the interval is Wilson's own. Where all problems have one share, nothing is known of
    their spread, and n_eff is n.

    Raises:
        ValueError: no problem.
    """
    if not shares:
        raise ValueError("no interval without a problem")
    value = math.fsum(shares) / len(shares)
    variance = math.fsum((share - value) ** 2 for share in shares) / len(shares) ** 2
    trials = value * (1 - value) / variance if variance > 1e-15 else float(len(shares))
    return Estimate(value, *_score_interval(min(1.0, max(0.0, value)), trials))


def mean_value(values: Sequence[float]) -> Estimate:
    """The mean of one number for each problem, of any range, with Student's interval.

    Raises:
        ValueError: fewer than two problems, of which no spread is known.
    """
    if len(values) < 2:
        raise ValueError(f"no interval of a mean from {len(values)} problems")
    n = len(values)
    value = math.fsum(values) / n
    error = math.sqrt(math.fsum((one - value) ** 2 for one in values) / (n - 1) / n)
    half_width = _student_quantile(n - 1) * error
    return Estimate(value, value - half_width, value + half_width)


def paired_mean(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The mean of second - first over the same problems, of any range, with Student's interval.

    Raises:
        ValueError: fewer than two problems, or not the same number of both.
    """
    return mean_value([after - before for before, after in zip(first, second, strict=True)])


def _student_quantile(freedom: int) -> float:
    """The quantile of Student's distribution for a two-sided 95 % interval.

    Hill's expansion of the normal quantile (1970, "Algorithm 396: Student's t-quantiles"), within 0.1 % from 4 degrees on;
    exact for 1 and 2.
    """
    tail = 1 - CONFIDENCE
    if freedom == 1:
        return 1 / math.tan(tail * math.pi / 2)
    if freedom == 2:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that k of `samples` completions, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    It estimates the chance for k fresh completions without bias (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: not 1 <= k <= samples, or not 0 <= right <= samples.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"no pass@{k} from {right} right of {samples} samples")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The mean of second - first over the same problems, shares in [0, 1], with its 95 % interval.

    The interval is Agresti and Min's (2005, "Simple improved confidence intervals for comparing matched proportions"): half a
    problem is added to each of the four outcomes, so that it neither vanishes where no verdict differs nor misses the truth
    for few problems.

    Raises:
        ValueError: no problem, or not the same number of both.
    """
    differences = [after - before for before, after in zip(first, second, strict=True)]
    if not differences:
        raise ValueError("no difference without a problem")
    n = len(differences) + 2
    centre = math.fsum(differences) / n
    variance = ((math.fsum(value**2 for value in differences) + 1) / n - centre**2) / n
    half_width = Z * math.sqrt(variance)
    value = math.fsum(differences) / len(differences)
    return Estimate(value, max(-1.0, centre - half_width), min(1.0, centre + half_width))


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test: were the problems that one alone solved split by a fair coin?"""
    discordant, smaller = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(discordant, count) for count in range(smaller + 1)) / 2**discordant
    return min(1.0, 2 * tail)


def _score_interval(share: float, n: float) -> tuple[float, float]:
    z2 = Z**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half_width = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # Rounding must not push the ends past the share that they enclose, at 0 of n and n of n.
    return min(share, max(0.0, centre - half_width)), max(share, min(1.0, centre + half_width))
