"""Shares and means of an evaluation with 95 % intervals, and paired differences of two evaluations.

The sampling unit is the problem: k samples of one problem are alike, so they carry less information than k problems.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any

import pandas as pd

from grpo_recipes.evaluation import accuracy
from grpo_recipes.evaluation.accuracy import PASSED, PAY
from grpo_recipes.evaluation.distributions import beta_cdf, beta_quantile, student_quantile, student_tail
from grpo_rewards.math.answers import answer_number
from grpo_rewards.reward import reaches
from grpo_rewards.terminal import Cell, Part, Table

LEVEL = 0.05
"""P-value below which a difference is clear. The intervals have 1 - LEVEL = 95 % confidence."""
MOST_FREEDOM = 1e6
"""Degrees of freedom above which Student's distribution is normal within 1e-6."""
Z = NormalDist().inv_cdf(1 - LEVEL / 2)


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


def mean_share(
    shares: Sequence[float], completions: float | None = None, clusters: Sequence[Hashable] | None = None
) -> Estimate:
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
    least = _least_trials(sums)
    most = max(least, len(shares) if completions is None else completions)
    trials = min(most, max(least, _effective_trials(value, sums, most)))
    return Estimate(value, *_exact_interval(min(1.0, max(0.0, value)), trials))


def _least_trials(sums: Sequence[tuple[float, int]]) -> float:
    """Return the number of clusters if they are equal, and otherwise the effective number."""
    return _effective_number([count for _, count in sums])


def _cluster_sums(values: Sequence[float], clusters: Sequence[Hashable] | None) -> list[tuple[float, int]]:
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
    narrowed = _student_quantile(completions - 1) / _student_quantile(freedom)
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


def mean_value(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
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
    half_width = _student_quantile(freedom) * error
    return Estimate(mean, mean - half_width, mean + half_width)


def mean_score(values: Sequence[float], highest: float | None, clusters: Sequence[Hashable] | None = None) -> Estimate:
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
    trials = _least_trials(sums)
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
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    highest: float | None = None,
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


def _mean_and_error(values: Sequence[float], clusters: Sequence[Hashable] | None) -> tuple[float, float, int]:
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


def _student_quantile(freedom: float) -> float:
    """Return the quantile of Student's distribution for a two-sided 95 % interval."""
    return student_quantile(freedom, LEVEL)


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


def paired_difference(
    first: Sequence[float], second: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Difference:
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
    error *= _student_quantile(freedom) / _student_quantile(min(freedom / min(1.0, size) ** 2, MOST_FREEDOM))
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


# Tables of completions


Pays = Mapping[str, float | None]
"""Largest score of one completion by the name of the reward, or None if it is not known."""


def summarise(table: pd.DataFrame, highest: Pays | None = None) -> dict[str, Any]:
    """Return the shares and means of an evaluation from its completions (columns of `completions.parquet`).

    Args:
        table: Completions.
        highest: Largest scores of the rewards, which bound the intervals of their means.

    Returns:
        `strict` and `lenient`, mean shares over problems; `pass_at`, the probability that one of k completions is
        strictly right; `majority`, the share of problems whose most frequent answer is right. These need golds.
        Under `rewards`, for each reward of the recipe: `mean` score, share of completions that `passed` with its own
        `pass_at` and `majority`, `highest_pay` if it is known, and the number of `unscored` completions, which are in
        none of these.
        Under `tools`, if the recipe has tools: share of completions that `called` one, mean number of `calls`, and the
        results of the completions `with_call` and `without_call`, over the problems that have such completions.
        Each estimate has its 95 % interval. Rows with the same prompt count as one problem.
    """
    highest = highest or {}
    summary = _results(table, highest)
    if "strict" in table:
        summary |= _several_samples(table, "strict", "lenient")
    for name, entry in summary.get("rewards", {}).items():
        scored = _scored(table, name)
        entry["unscored"] = len(table) - len(scored)
        if highest.get(name) is not None:
            entry["highest_pay"] = highest[name]
        if "passed" in entry:
            entry |= _several_samples(scored, PASSED.format(name), PASSED.format(name))
    if "calls" in table:
        summary["tools"] = _by_call(table, highest)
    return summary


def _results(table: pd.DataFrame, highest: Pays) -> dict[str, Any]:
    """Return the accuracy of some completions, and the mean and the share of passes of each reward."""
    results: dict[str, Any] = {}
    for name in ("strict", "lenient"):
        if name in table:
            results[name] = _mean_of_shares(table, name).as_dict()
    rewards = {}
    for name in reward_names(table):
        passed, scored = PASSED.format(name), _scored(table, name)
        rewards[name] = _mean_score(scored, name, highest)
        if passed in table and len(scored):
            rewards[name]["passed"] = _mean_of_shares(scored, passed).as_dict()
    return {**results, "rewards": rewards} if rewards else results


def _scored(table: pd.DataFrame, reward: str) -> pd.DataFrame:
    """Return the completions that a reward scored. A missing score does not mean that the completion is wrong."""
    return table[table[PAY.format(reward)].notna()]


def _by_problem(table: pd.DataFrame, column: str) -> pd.Series:
    """Return the mean of a column over the completions of each problem, by problem."""
    return table.groupby("problem")[column].mean().astype(float)


def _clusters(table: pd.DataFrame) -> list[Hashable]:
    """Return the label of each problem, by problem. Problems with one label are copies of one another.

    Two rows with the same prompt are copies. A prompt need not name the state of an environment. So in a table with
    transcripts the golds of copies are equal too, and rows without golds are different problems.
    """
    keys = ["prompt"] if "transcript" not in table else ["prompt", "gold"]
    groups = table.groupby("problem")
    if not all(key in table for key in keys):
        return list(groups.size().index)
    return list(groups[keys].first().itertuples(index=False, name=None))


def _common_clusters(first: pd.DataFrame, second: pd.DataFrame) -> list[Hashable]:
    """Return the labels of the problems of two tables, from the one with transcripts if only one has them."""
    return _clusters(second if "transcript" in second else first)


def _mean_of_shares(table: pd.DataFrame, column: str) -> Estimate:
    """Return the mean over problems of the share of completions with a true value in a column."""
    return mean_share(_by_problem(table, column).tolist(), len(table), _clusters(table))


def _mean_score(scored: pd.DataFrame, reward: str, highest: Pays) -> dict[str, Any]:
    """Return the mean score of a reward over problems, or nothing if fewer than two different problems have one."""
    clusters = _clusters(scored)
    if len(set(clusters)) < 2:
        return {}
    values = _by_problem(scored, PAY.format(reward)).tolist()
    return {"mean": mean_score(values, highest.get(reward), clusters).as_dict()}


def _by_call(table: pd.DataFrame, highest: Pays) -> dict[str, Any]:
    """Return how often tools were called, and the results of the completions that called one, and of the others."""
    has_called = table["calls"] > 0
    called = _mean_of_shares(table.assign(called=has_called), "called")
    summary: dict[str, Any] = {"called": called.as_dict(), "calls": float(table["calls"].mean())}
    for name, chosen in (("with_call", table[has_called]), ("without_call", table[~has_called])):
        if len(chosen):
            summary[name] = {"problems": chosen["problem"].nunique(), **_results(chosen, highest)}
    return summary


def _several_samples(table: pd.DataFrame, column: str, vote_column: str) -> dict[str, Any]:
    """Return pass@k for k = 1, 2, 4, ... and all samples, and the majority vote, if problems have several samples.

    A problem with fewer than k completions, because a reward could not score some, is not in the mean of pass@k.
    """
    groups = [rows for _, rows in table.groupby("problem")]
    samples = max(map(len, groups))
    if samples == 1:
        return {}
    result: dict[str, Any] = {"pass_at": {}}
    clusters = _clusters(table)
    for k in sorted({2**power for power in range(samples.bit_length())} | {samples}):
        enough = [place for place, rows in enumerate(groups) if len(rows) >= k]
        chances = [pass_at_k(len(groups[place]), int(groups[place][column].sum()), k) for place in enough]
        # The completions of a problem are len(rows) / k separate draws of k.
        draws = sum(len(groups[place]) for place in enough) / k
        result["pass_at"][str(k)] = mean_share(chances, draws, [clusters[place] for place in enough]).as_dict()
    if "answer" in table:
        votes = [float(majority(rows["answer"], rows[vote_column])) for rows in groups]
        result["majority"] = mean_share(votes, clusters=clusters).as_dict()
    return result


def majority(answers: Iterable[Any], right: Iterable[Any]) -> bool:
    """Return True if the most frequent answer is right, the first one winning a tie.

    Numbers are equal in any form. Completions without an answer do not vote.
    """
    stated = []
    for answer, is_right in zip(answers, right, strict=True):
        if not pd.isna(answer):
            stated.append((_comparable(answer), bool(is_right)))
    if not stated:
        return False
    winner = Counter(answer for answer, _ in stated).most_common(1)[0][0]
    return any(is_right for answer, is_right in stated if answer == winner)


def _comparable(answer: str) -> Any:
    """Return a key that is equal for the same number in any form, and for the same text in any case."""
    number = answer_number(answer)
    return answer.strip().casefold() if number is None else number


def reward_names(table: pd.DataFrame) -> list[str]:
    """Return the names of the rewards that a table has scores of."""
    prefix = PAY.format("")
    return [name.removeprefix(prefix) for name in table.columns if name.startswith(prefix)]


def compare_tables(first: pd.DataFrame, second: pd.DataFrame, highest: Pays | None = None) -> dict[str, Any]:
    """Return the paired differences second - first of two tables on the same problems, with both values.

    Both sides are shares of completions, so that their numbers of samples may differ.

    Args:
        first: Completions of one evaluation.
        second: Completions of the other one. Rewards that are not in both tables are skipped.
        highest: Largest scores of the rewards, as in `summarise`.

    Returns:
        `rewards`, by name; and, with golds, `strict` and `lenient`. Each has the values of `first` and `second` and
        their `difference` with its p-value. `mcnemar`, with golds, one sample per problem on both sides and no prompt
        twice, has the numbers of problems that one side alone solved strictly, and the p-value.
    """
    rewards: dict[str, Any] = {}
    for name in reward_names(first):
        pay, passed = PAY.format(name), PASSED.format(name)
        if pay not in second:
            continue
        tables = _on_shared_problems(_scored(first, name), _scored(second, name))
        clusters = _common_clusters(*tables)
        if len(set(clusters)) < 2:
            continue
        before, after = (_by_problem(table, pay).tolist() for table in tables)
        most = (highest or {}).get(name)
        mean = mean_score(before, most, clusters), mean_score(after, most, clusters)
        rewards[name] = {"mean": _pair(*mean, paired_mean(before, after, clusters, most))}
        if passed in first and passed in second:
            rewards[name]["passed"] = _compared_shares(*tables, passed)
    result: dict[str, Any] = {"rewards": rewards} if rewards else {}
    if "strict" in first and "strict" in second:
        for name in ("strict", "lenient"):
            result[name] = _compared_shares(first, second, name)
        is_single = all(table["problem"].is_unique for table in (first, second))
        clusters = _common_clusters(first, second)
        if is_single and len(set(clusters)) == len(clusters):
            before, after = (_by_problem(table, "strict") for table in (first, second))
            only_first, only_second = int((before > after).sum()), int((after > before).sum())
            p = mcnemar(only_first, only_second)
            result["mcnemar"] = {"only_first": only_first, "only_second": only_second, "p": p}
    return result


def _on_shared_problems(first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of both tables whose problem is in the other table too."""
    return first[first["problem"].isin(second["problem"])], second[second["problem"].isin(first["problem"])]


def _compared_shares(first: pd.DataFrame, second: pd.DataFrame, column: str) -> dict[str, Any]:
    before, after = (_by_problem(table, column).tolist() for table in (first, second))
    difference = paired_difference(before, after, _common_clusters(first, second))
    return _pair(_mean_of_shares(first, column), _mean_of_shares(second, column), difference)


def _pair(first: Estimate, second: Estimate, difference: Difference) -> dict[str, Any]:
    return {"first": first.as_dict(), "second": second.as_dict(), "difference": difference.as_dict()}


# Terminal


def describe(summary: Mapping[str, Any]) -> list[Part]:
    """Return an evaluation for the terminal: a table of its shares, and a table of its rewards."""
    rows = [(name, Estimate.from_dict(summary[name])) for name in ("strict", "lenient") if name in summary]
    rows += [(f"pass@{k}", Estimate.from_dict(share)) for k, share in summary.get("pass_at", {}).items()]
    if "majority" in summary:
        rows.append(("majority", Estimate.from_dict(summary["majority"])))
    settings = summary["settings"]
    samples = settings["samples"]
    head = f"{summary['problems']} problems, {samples} completion{'s' * (samples > 1)} each; 95 % intervals"
    parts: list[Part] = [Cell(head, "head")]
    if rows:
        parts.append(Table(rows, ("accuracy", "share")))
    if sampling := summary.get("sampling"):
        parts.append(Cell(f"  sampling: {', '.join(f'{key} {value}' for key, value in sampling.items())}", "dim"))
    if "strict" in summary:
        parts.append(Cell(f"  strict: {accuracy.describe(settings['strict'])}", "dim"))
    if rewards := summary.get("rewards"):
        parts += ["", _reward_table(rewards)]
    if tools := summary.get("tools"):
        parts += ["", *_tool_table(tools)]
    return parts


def _tool_table(tools: Mapping[str, Any]) -> list[Part]:
    """Return a table of the results of the completions that called a tool, beside those that called none."""
    called, ways = Estimate.from_dict(tools["called"]), ("with_call", "without_call")
    cells: dict[str, dict[str, object]] = {}
    for way in ways:
        entry = tools.get(way, {})
        measured = {verdict: entry[verdict] for verdict in ("strict", "lenient") if verdict in entry}
        for name, values in entry.get("rewards", {}).items():
            measured |= {f"{name}, {measure}": value for measure, value in values.items()}
        for name, value in measured.items():
            cells.setdefault(name, {})[way] = Estimate.from_dict(value)
    rows = [(name, *(found.get(way, "") for way in ways)) for name, found in cells.items()]
    head = f"  {called} of the completions call a tool, {tools['calls']:.2f} calls per completion"
    return [Table(rows, ("", "with a call", "without")), Cell(head, "dim")]


def _reward_table(rewards: Mapping[str, Any]) -> Table:
    """Return a table of the rewards, without the columns that no reward has."""
    rows = []
    for name, entry in rewards.items():
        shown = {key: str(Estimate.from_dict(entry[key])) for key in ("mean", "passed", "majority") if key in entry}
        passes = [f"@{k} {Estimate.from_dict(share)}" for k, share in entry.get("pass_at", {}).items()]
        cells = {
            "reward": name,
            "mean": shown.get("mean", "fewer than two problems scored"),
            "passed": shown.get("passed", ""),
            "majority": shown.get("majority", ""),
            "pass": ", ".join(passes),
            "not scored": str(entry["unscored"] or ""),
        }
        rows.append(cells)
    columns = [column for column in rows[0] if any(cells[column] for cells in rows)]
    return Table([[cells[column] for column in columns] for cells in rows], columns)


def describe_comparison(result: Mapping[str, Any]) -> list[Part]:
    """Return two evaluations side by side for the terminal, with paired differences and their p-values."""
    compared = {name: result[name] for name in ("strict", "lenient") if name in result}
    for name, entry in result.get("rewards", {}).items():
        compared |= {f"{name}, {measure}": values for measure, values in entry.items()}
    rows: list[tuple[object, ...]] = []
    for name, values in compared.items():
        first, second, difference = (Estimate.from_dict(values[key]) for key in ("first", "second", "difference"))
        p = values["difference"].get("p")
        shown_p = "" if p is None else p_text(p, digits=2)
        style = {1: "good", -1: "bad"}.get(difference.sign, "")
        rows.append((name, first, second, Cell(difference, style), shown_p))
    parts: list[Part] = [
        Cell(f"{result['problems']} problems, the same for both; 95 % intervals", "head"),
        *(f"  warning: {warning}" for warning in result["warnings"]),
        Table(rows, ("", "A", "B", "B - A", "p"), frozenset({4})),
    ]
    if "mcnemar" in result:
        test = result["mcnemar"]
        alone = f"A alone right on {test['only_first']}, B alone on {test['only_second']}"
        parts.append(f"  McNemar: {alone}; exact p = {p_text(test['p'], digits=3)}")
    return parts
