"""Shares and means with 95 % intervals, and paired differences. `summary.py` applies them to evaluations.

The sampling unit is the problem: k samples of one problem are alike, so they carry less information than k problems.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any

from grpo_recipes.evaluation.distributions import beta_cdf, beta_quantile, student_quantile, student_tail
from grpo_rewards.reward import reaches

LEVEL = 0.05
"""P-value below which a difference is clear. The intervals have 1 - LEVEL = 95 % confidence."""
MOST_FREEDOM = 1e6
"""Degrees of freedom above which Student's distribution is normal within 1e-6."""
Z = NormalDist().inv_cdf(1 - LEVEL / 2)

Labels = Sequence[Hashable] | None
"""Label of each problem, or None if all differ. Problems with one label count as one problem."""


@dataclass(frozen=True)
class Estimate:
    """Share, mean or difference, with the ends of its 95 % interval, which are NaN if it has no interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Estimate:
        """Return the estimate that `as_dict` wrote. Other keys are ignored."""
        low, high = (math.nan if numbers[end] is None else numbers[end] for end in ("low", "high"))
        return cls(numbers["value"], low, high)

    def as_dict(self) -> dict[str, float | None]:
        """Return the numbers by name, for JSON, which has None for NaN."""
        return {name: None if math.isnan(number) else number for name, number in asdict(self).items()}

    @property
    def sign(self) -> int:
        """1 if the interval is above 0, -1 if it is below 0, and 0 if it includes 0 or does not exist."""
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.3f} (all equal)"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Difference(Estimate):
    """Paired difference with its 95 % interval and the two-sided p-value of no difference.

    The interval excludes 0 if and only if p is below 0.05.
    """

    p: float = math.nan
    """P-value, or NaN without an interval."""


def mean_share(shares: Sequence[float], completions: float | None = None, clusters: Labels = None) -> Estimate:
    """Return the mean of one share in [0, 1] per problem, with the exact binomial interval of an effective number.

    Let p be the mean of m problems, v its variance, estimated from their shares, and N the number of completions. The
    effective number of trials is n* = p (1 - p) / v · (t(N - 1) / t(d))², where t(d) is Student's 95 % quantile for d
    degrees of freedom. The interval is Clopper and Pearson's (1934) for p n* successes in n* trials. So do Korn and
    Graubard (1998, "Confidence intervals for proportions with small expected number of positive counts estimated from
    survey data"), but for two changes, without which the coverage falls to 80 % on hard problems with many samples:

    - d is at most the effective number of problems with a success, (Σx)² / Σx², and of problems with a failure. Korn
      and Graubard use m - 1 for d. Of a hundred problems of which two were ever solved, the variance v is the variance
      of two.
    - n* is at least m, the number for shares of 0 and 1, which vary most. It is at most N. If p is 0 or 1, it is m.

    With one sample per problem n* is m, and the interval is exact. The coverage is measured by
    `benchmarks/interval_coverage.py`.

    Args:
        shares: Shares of the problems. Their mean is the value.
        completions: Number of completions behind all shares, by default one per problem, which gives the widest
            interval.
        clusters: Label of each problem, by default all different. Problems with one label count as one problem, such as
            rows with the same prompt.

    Raises:
        ValueError: There is no problem.
    """
    value = fmean(shares)
    sums = _cluster_sums(shares, clusters)
    least = _effective_number([count for _, count in sums])  # the number of clusters if all have one size
    most = max(least, len(shares) if completions is None else completions)
    trials = min(most, max(least, _effective_trials(value, sums, most)))
    return Estimate(value, *_exact_interval(min(1.0, max(0.0, value)), trials))


def _cluster_sums(values: Sequence[float], clusters: Labels) -> list[tuple[float, int]]:
    """Return the sum and the number of the values of each cluster."""
    if clusters is None:
        return [(value, 1) for value in values]
    members: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        members.setdefault(cluster, []).append(value)
    return [(math.fsum(inside), len(inside)) for inside in members.values()]


def _effective_trials(share: float, sums: Sequence[tuple[float, int]], completions: float) -> float:
    """Return the number of independent trials whose share is known as well as this one, or 0 if that is not known."""
    spread = share * (1 - share)
    if len(sums) < 2 or spread < 1e-12:
        return 0.0
    successes = [total for total, _ in sums]
    failures = [count - total for total, count in sums]
    variance = _variance_of_mean(share, sums)
    freedom = max(1.0, min(_effective_number(successes), _effective_number(failures), len(sums) - 1))
    narrowed = student_quantile(completions - 1, LEVEL) / student_quantile(freedom, LEVEL)
    return math.inf if variance < spread * 1e-15 else spread / variance * narrowed**2


def _variance_of_mean(mean: float, sums: Sequence[tuple[float, int]]) -> float:
    """Return the variance of a mean over all values, estimated from the deviations of at least two clusters."""
    values = sum(count for _, count in sums)
    squares = math.fsum((total - count * mean) ** 2 for total, count in sums)
    return squares / values**2 * len(sums) / (len(sums) - 1)


def _effective_number(weights: Sequence[float]) -> float:
    """Return the number of equal weights that vary as little as these: (Σw)² / Σw², or 0 if all are 0."""
    squares = math.fsum(weight * weight for weight in weights)
    return math.fsum(map(abs, weights)) ** 2 / squares if squares else 0.0


def _exact_interval(share: float, trials: float) -> tuple[float, float]:
    """Return the ends of Clopper and Pearson's interval for a share of `trials`, a real number above 0."""
    tail, successes = LEVEL / 2, share * trials
    failures = trials - successes
    low = beta_quantile(tail, successes, failures + 1) if share > 0 else 0.0
    high = beta_quantile(1 - tail, successes + 1, failures) if share < 1 else 1.0
    return min(share, low), max(share, high)


def mean_value(values: Sequence[float], clusters: Labels = None) -> Estimate:
    """Return the mean of one number of any range per problem, with Student's interval.

    Equal values have no interval: their spread is unknown, and so is the range from which a width could follow.

    Args:
        values: Values of the problems.
        clusters: Label of each problem, as in `mean_share`.

    Raises:
        ValueError: There are fewer than two problems, so their spread is unknown.
    """
    mean, error, freedom = _mean_and_error(values, clusters)
    if error == 0:
        return Estimate(mean, math.nan, math.nan)
    half_width = student_quantile(freedom, LEVEL) * error
    return Estimate(mean, mean - half_width, mean + half_width)


def mean_score(values: Sequence[float], highest: float | None, clusters: Labels = None) -> Estimate:
    """Return the mean of one score per problem, with an interval that does not leave what a reward can pay.

    A reward is taken to pay from 0, or from its lowest score if that is below 0, to `highest`. As shares of this range
    the scores have the interval of `mean_share`. But scores inside the range may vary less than 0 and 1 do, so that the
    effective number of trials may exceed the number of completions, up to `MOST_FREEDOM`. Equal scores count as one
    trial per problem, as if they were 0 and 1: no scores of this range and mean vary more. If the range is not known or
    has no width, the interval is that of `mean_value`.

    Args:
        values: Scores of the problems.
        highest: Largest score that the reward pays, or None if it is not known.
        clusters: Label of each problem, as in `mean_share`.

    Raises:
        ValueError: There are fewer than two problems.
    """
    known = mean_value(values, clusters)
    lowest = _lowest(values, highest)
    if lowest is None or highest is None:
        return known
    span = highest - lowest
    shares = [min(1.0, (value - lowest) / span) for value in values]
    sums = _cluster_sums(shares, clusters)
    share = min(1.0, fmean(shares))
    trials = _effective_number([count for _, count in sums])
    if not math.isnan(known.low):
        trials = min(MOST_FREEDOM, max(trials, _effective_trials(share, sums, MOST_FREEDOM)))
    low, high = (min(highest, lowest + end * span) for end in _exact_interval(share, trials))
    return Estimate(known.value, min(low, known.value), max(high, known.value))


def _lowest(values: Sequence[float], highest: float | None) -> float | None:
    """Return the lowest score that a reward may pay: 0, or a lower value.

    Returns None if the range up to `highest` is not known, has no width, or does not hold all values.
    """
    if highest is None or not reaches(highest, max(values)):
        return None
    lowest = min(0.0, *values)
    return lowest if lowest < highest else None


def paired_mean(
    first: Sequence[float], second: Sequence[float], clusters: Labels = None, highest: float | None = None
) -> Difference:
    """Return the mean of second - first over the same problems, of any range, with Student's interval and test.

    Equal differences have no interval, as in `mean_value`. If the largest score `highest` is known, the interval is cut
    where a difference would exceed the range of the scores (see `mean_score`), which changes neither its sign nor p.

    Raises:
        ValueError: There are fewer than two problems, or the lengths differ.
    """
    differences = [after - before for before, after in zip(first, second, strict=True)]
    found = mean_value(differences, clusters)
    mean, error, freedom = _mean_and_error(differences, clusters)
    p = student_tail(mean / error, freedom) if error else math.nan
    lowest = _lowest([*first, *second], highest)
    if lowest is None or highest is None or math.isnan(found.low):
        return Difference(found.value, found.low, found.high, p)
    span = highest - lowest
    return Difference(found.value, max(-span, found.low), min(span, found.high), p)


def _mean_and_error(values: Sequence[float], clusters: Labels) -> tuple[float, float, int]:
    """Return the mean, its standard error (0 for equal values) and the degrees of freedom.

    Raises:
        ValueError: There are fewer than two clusters.
    """
    sums = _cluster_sums(values, clusters)
    if len(sums) < 2:
        raise ValueError(f"a mean of {len(sums)} problems has no interval: it requires at least two")
    mean = fmean(values)
    # Values that are equal but for rounding, such as means of three thirds, are equal.
    is_constant = max(values) - min(values) <= 1e-12 * max(map(abs, values))
    return mean, 0.0 if is_constant else math.sqrt(_variance_of_mean(mean, sums)), len(sums) - 1


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that k of `samples` completions, drawn without replacement, include a right one.

    The value 1 - C(n-c, k) / C(n, k) is an unbiased estimate for k fresh completions (Chen et al. 2021, arXiv
    2107.03374, equation 1).

    Raises:
        ValueError: Not 1 <= k <= samples, or not 0 <= right <= samples.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"no pass@{k} from {right} right of {samples} samples")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def paired_difference(first: Sequence[float], second: Sequence[float], clusters: Labels = None) -> Difference:
    """Return the mean of second - first over the same problems, shares in [0, 1], with its interval and p-value.

    The interval is that of Bonett and Price (2012, "Adjusted Wald confidence interval for a difference of binomial
    proportions based on paired data"): one problem is added to the gains and one to the losses. Without this correction
    the interval would vanish if no verdict differs. The p-value is that of McNemar's exact test, and the interval is
    extended to 0 if p is at least 0.05. So it excludes 0 if and only if p is below 0.05.

    With several samples per problem the differences d are smaller than 1. Let w = Σd² / Σ|d| be the size of a typical
    difference, and e = (Σ|d|)² / Σd² the effective number of problems that differ. The added problems differ by w.
    McNemar's test is of (e + |Σd| / w) / 2 against (e - |Σd| / w) / 2 problems. The normal quantile z is multiplied by
    t(f) / t(f / w²), where t is Student's quantile and f the smaller of e + 1 and the number of problems - 1. If the
    test rejects while the interval includes 0, p is that of the interval. With one sample per problem w is 1, and
    nothing changes. `benchmarks/interval_coverage.py` measures the coverage.

    Args:
        first: Shares of the problems in the first evaluation.
        second: Shares of the same problems in the second one.
        clusters: Label of each problem, as in `mean_share`.

    Raises:
        ValueError: There is no problem, or the lengths differ.
    """
    differences = [after - before for before, after in zip(first, second, strict=True)]
    value = fmean(differences)
    sums = _cluster_sums(differences, clusters)
    n = len(sums)
    # Scaled so that the mean over clusters is the mean over problems.
    parts = [total * n / len(differences) for total, _ in sums]
    total, squares = math.fsum(parts), math.fsum(part * part for part in parts)
    differing = _effective_number(parts)
    size = squares / math.fsum(map(abs, parts)) if squares else 1.0
    freedom = max(1.0, min(differing + 1, n - 1))
    centre = total / (n + 2)
    error = math.sqrt(((squares + 2 * size * size) / (n + 2) - centre**2) / (n + 2))
    widened = min(freedom / min(1.0, size) ** 2, MOST_FREEDOM)
    error *= student_quantile(freedom, LEVEL) / student_quantile(widened, LEVEL)
    low, high = centre - Z * error, centre + Z * error
    p = _sign_test(differing, abs(total) / size)
    if p >= LEVEL:
        low, high = min(low, 0.0), max(high, 0.0)
    elif low <= 0 <= high:
        p = 2 * NormalDist().cdf(-abs(centre) / error)
    return Difference(value, max(-1.0, min(low, value)), min(1.0, max(high, value)), p)


def p_text(p: float, digits: int) -> str:
    """Return a p-value with a number of significant digits, or with more if it would be rounded across 0.05."""
    text = f"{p:.{digits}g}"
    while p < LEVEL <= float(text):
        digits += 1
        text = f"{p:.{digits}g}"
    return text


def _sign_test(differing: float, excess: float) -> float:
    """Return the two-sided p-value of `differing` problems, of which `excess` more differ in one direction.

    For whole numbers it is the p-value of McNemar's exact test. Real numbers interpolate.
    """
    more = (differing + excess) / 2
    if more <= 0:
        return 1.0
    return min(1.0, 2 * beta_cdf(0.5, more, max(0.0, differing - more) + 1))


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test.

    Args:
        only_first: Number of problems that only the first policy solved.
        only_second: Number of problems that only the second policy solved.
    """
    discordant, smaller = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(discordant, count) for count in range(smaller + 1)) / 2**discordant
    return min(1.0, 2 * tail)
