"""Estimates against their definitions: enumeration, formulas derived a second time, coverage, and tables by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import NormalDist, fmean

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_recipes.evaluation.distributions import beta_quantile, student_quantile, student_tail
from grpo_recipes.evaluation.estimates import (
    Estimate,
    mcnemar,
    mean_score,
    mean_share,
    mean_value,
    p_text,
    paired_difference,
    paired_mean,
    pass_at_k,
)
from grpo_recipes.evaluation.summary import compare_tables, summarise


def share(successes: int, n: int) -> Estimate:
    return mean_share([1.0] * successes + [0.0] * (n - successes))


def at_least(count: int, n: int, p: float) -> float:
    """Return the probability of at least `count` successes in `n` trials, as a sum."""
    return math.fsum(math.comb(n, hits) * p**hits * (1 - p) ** (n - hits) for hits in range(count, n + 1))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_of_one_sample_a_problem_is_exact(case: tuple[int, int]) -> None:
    """At each end, the observed number of successes or a more extreme one has a probability of 2.5 %."""
    successes, n = case
    found = share(successes, n)
    assert found.value == pytest.approx(successes / n)
    assert 0 <= found.low <= found.value <= found.high <= 1
    if successes:
        assert at_least(successes, n, found.low) == pytest.approx(0.025, rel=1e-6)
    if successes < n:
        assert 1 - at_least(successes + 1, n, found.high) == pytest.approx(0.025, rel=1e-6)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.3084971078), (1, 2, 0.0125791171, 0.9874208829), (162, 400, 0.356503022, 0.4549133224),
     (12, 1319, 0.0047095502, 0.0158380494), (399, 400, 0.98615023, 0.9999367075)],
)  # fmt: skip
def test_the_interval_of_one_sample_a_problem_is_statsmodels(successes: int, n: int, low: float, high: float) -> None:
    """Values of `proportion_confint(successes, n, method="beta")` of statsmodels 0.15.0."""
    found = share(successes, n)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))


def test_the_effective_number_of_trials_is_korn_and_graubards() -> None:
    """Ends of scipy.special.betaincinv for n* = p (1 - p) / v · (t(47) / t(4.72))² = 10.91, by numpy and scipy."""
    found = mean_share([0.25, 0.75, 0.5, 0.125, 0.875, 0.5], completions=48)
    assert found.value == 0.5
    assert (found.low, found.high) == (pytest.approx(0.1985927571855), pytest.approx(0.8014072428145))


def test_the_effective_number_of_trials_is_bounded() -> None:
    """Shares that vary less than by chance count as 48 trials. Equal shares of 0 or 1 count as one trial each."""
    alike = mean_share([0.5, 0.625, 0.5, 0.375, 0.5, 0.625], completions=48)
    assert (alike.low, alike.high) == pytest.approx((share(25, 48).low, share(25, 48).high))
    assert mean_share([1.0] * 5, completions=80) == share(5, 5)
    # The shares of problems without any chance between 0 and 1 are those of one sample each.
    whole = mean_share([1.0, 0.0, 0.0, 1.0, 0.0], completions=320)
    assert (whole.low, whole.high) == pytest.approx((share(2, 5).low, share(2, 5).high))


def test_an_estimate_needs_problems_and_an_interval_of_a_mean_two() -> None:
    for found in (lambda: mean_share([]), lambda: mean_value([1.0]), lambda: mean_value([1.0, 2.0], ["a", "a"])):
        with pytest.raises(ValueError, match="problems|data"):
            found()


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_counts_the_draws_with_a_right_completion(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (samples - right), k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("discordant", [0, 1, 5, 12])
def test_mcnemar_equals_an_enumeration_of_the_splits(discordant: int) -> None:
    """The p-value is the share of all splits of the discordant problems that are at least as uneven."""
    splits = [sum(ways) for ways in itertools.product((0, 1), repeat=discordant)]
    for first in range(discordant + 1):
        lopsided = sum(abs(2 * split - discordant) >= abs(2 * first - discordant) for split in splits)
        assert mcnemar(first, discordant - first) == pytest.approx(lopsided / len(splits))


@pytest.mark.parametrize(
    ("problems", "samples", "solved"),
    [(5, 64, 0.5), *[pytest.param(*case, marks=pytest.mark.slow) for case in ((60, 4, 0.5), (20, 64, 0.2))]],
)
def test_the_clustered_interval_covers_the_true_share(problems: int, samples: int, solved: float) -> None:
    """A share of the problems has a chance of 90 %, the others one of 1 %."""
    generator = np.random.default_rng(0)
    truth, runs = solved * 0.9 + (1 - solved) * 0.01, 400
    chances = np.where(generator.random((runs, problems)) < solved, 0.9, 0.01)
    shares = generator.binomial(samples, chances) / samples
    estimates = [mean_share(row, problems * samples) for row in shares.tolist()]
    covered = sum(estimate.low <= truth <= estimate.high for estimate in estimates)
    assert covered / runs >= 0.93


def outcomes(n: int) -> Iterator[tuple[int, int, list[float], list[float]]]:
    """Yield every number of gained and lost problems of n, with the verdicts before and after."""
    for gained, lost in itertools.product(range(n + 1), repeat=2):
        if gained + lost <= n:
            same = [1.0] * (n - gained - lost)
            yield gained, lost, [0.0] * gained + [1.0] * lost + same, [1.0] * gained + [0.0] * lost + same


@pytest.mark.parametrize(("gain", "loss"), [(0.1, 0.1), (0.3, 0.1), (0.02, 0.0), (0.1, 0.0), (0.0, 0.0), (0.45, 0.45)])
@pytest.mark.parametrize("n", [5, 20])
def test_the_paired_interval_covers_the_true_difference(n: int, gain: float, loss: float) -> None:
    """The coverage is enumerated exactly over the numbers of gained and lost problems."""
    covered = 0.0
    for gained, lost, first, second in outcomes(n):
        chance = math.comb(n, gained) * math.comb(n - gained, lost)
        chance *= gain**gained * loss**lost * (1 - gain - loss) ** (n - gained - lost)
        if chance > 1e-12:
            difference = paired_difference(first, second)
            covered += chance * (difference.low <= gain - loss <= difference.high)
    assert covered >= 0.93


@pytest.mark.parametrize("n", [1, 5, 12, pytest.param(40, marks=pytest.mark.slow)])
def test_an_interval_excludes_0_if_mcnemars_test_rejects(n: int) -> None:
    """Every table of n problems with one sample each."""
    for gained, lost, first, second in outcomes(n):
        difference, p = paired_difference(first, second), mcnemar(lost, gained)
        assert difference.p == pytest.approx(p, rel=1e-9)
        assert (difference.sign != 0) == (p < 0.05), (n, gained, lost)
        assert difference.sign in (0, math.copysign(1, gained - lost))
        assert -1 <= difference.low <= difference.value <= difference.high <= 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8).flatmap(lambda k: st.lists(st.tuples(st.integers(0, k), st.integers(0, 3)), min_size=1)))
def test_an_interval_excludes_0_if_p_is_below_5_percent(counts: list[tuple[int, int]]) -> None:
    """With several samples per problem, and other numbers of samples on the two sides."""
    samples = max(1, *(count for count, _ in counts))
    first, second = [count / samples for count, _ in counts], [count / 3 for _, count in counts]
    for difference in (paired_difference(first, second), paired_difference(first, [1.0] * len(first))):
        assert (difference.sign != 0) == (difference.p < 0.05)
        assert -1 <= difference.low <= difference.value <= difference.high <= 1
        assert 0 <= difference.p <= 1


def test_a_p_value_is_not_rounded_across_5_percent() -> None:
    assert [p_text(p, 1) for p in (0.0499, 0.051, 0.05, 0.3, 2e-6)] == ["0.0499", "0.05", "0.05", "0.3", "2e-06"]
    assert p_text(0.04998, 3) == "0.04998"
    assert p_text(0.0461, 1) == "0.046", "as few digits as possible"
    assert p_text(math.nan, 2) == "nan"


# ---- formulas, derived a second time

Cases = list[tuple[list[float], list[float], list[int], int]]


def cases() -> Cases:
    """Return shares of problems before and after, their clusters, and the number of completions."""
    draw = random.Random(5)
    found: Cases = []
    for problems, samples in ((7, 1), (12, 4), (30, 8), (30, 2), (9, 16)):
        for chance in (0.05, 0.5, 0.95):
            before = [sum(draw.random() < chance for _ in range(samples)) / samples for _ in range(problems)]
            after = [sum(draw.random() < 0.6 for _ in range(samples)) / samples for _ in range(problems)]
            found.append((before, after, [draw.randrange(problems - 2) for _ in range(problems)], problems * samples))
    return found


def by_cluster(values: Sequence[float], clusters: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of the values of each cluster."""
    members: dict[int, list[float]] = defaultdict(list)
    for value, cluster in zip(values, clusters if clusters is not None else range(len(values)), strict=True):
        members[cluster].append(value)
    return np.array([sum(one) for one in members.values()]), np.array([len(one) for one in members.values()])


def variance(sums: np.ndarray, counts: np.ndarray) -> float:
    mean = sums.sum() / counts.sum()
    clusters = len(sums)
    return float(((sums - mean * counts) ** 2).sum() / counts.sum() ** 2 * clusters / (clusters - 1))


def effective(weights: np.ndarray) -> float:
    return float(weights.sum() ** 2 / (weights**2).sum()) if weights.any() else 0.0


@pytest.mark.parametrize("clustered", [False, True])
def test_the_interval_of_a_share_is_that_of_its_effective_number_of_trials(clustered: bool) -> None:
    kinds = set()
    for shares, _, labels, completions in cases():
        clusters = labels if clustered else None
        sums, counts = by_cluster(shares, clusters)
        p = float(sums.sum() / counts.sum())
        least = len(shares) ** 2 / float((counts**2).sum())
        trials = least
        if 0 < p < 1:
            freedom = max(1.0, min(effective(sums), effective(counts - sums), len(sums) - 1))
            narrowed = student_quantile(completions - 1, 0.05) / student_quantile(freedom, 0.05)
            wanted = p * (1 - p) / variance(sums, counts) * narrowed**2
            trials = min(max(completions, least), max(least, wanted))
            kinds.add("at least" if trials == least else "at most" if trials == completions else "between")
        low = beta_quantile(0.025, p * trials, (1 - p) * trials + 1) if p else 0.0
        high = beta_quantile(0.975, p * trials + 1, (1 - p) * trials) if p < 1 else 1.0
        found = mean_share(shares, completions, clusters)
        assert (found.value, found.low, found.high) == pytest.approx((p, low, high), abs=1e-9)
    assert {"at least", "between"} <= kinds


@pytest.mark.parametrize("clustered", [False, True])
def test_the_interval_of_a_mean_is_that_of_its_clusters(clustered: bool) -> None:
    for shares, after, labels, _ in cases():
        values = [3 * share - 7 + 0.01 * place for place, share in enumerate(shares)]
        clusters = labels if clustered else None
        sums, counts = by_cluster(values, clusters)
        half = student_quantile(len(sums) - 1, 0.05) * math.sqrt(variance(sums, counts))
        found = mean_value(values, clusters)
        assert (found.value, found.low, found.high) == pytest.approx(
            (fmean(values), fmean(values) - half, fmean(values) + half)
        )
        gained = paired_mean(values, after, clusters)
        sums, counts = by_cluster([new - old for old, new in zip(values, after, strict=True)], clusters)
        t = gained.value / math.sqrt(variance(sums, counts))
        assert gained.p == pytest.approx(student_tail(t, len(sums) - 1))


@pytest.mark.parametrize("clustered", [False, True])
def test_a_difference_of_shares_is_bonett_and_prices_with_mcnemars_p(clustered: bool) -> None:
    signs = set()
    for before, after, labels, _ in cases():
        clusters = labels if clustered else None
        sums, _ = by_cluster([new - old for old, new in zip(before, after, strict=True)], clusters)
        n = len(sums)
        d = sums * n / len(before)
        size = float((d**2).sum() / abs(d).sum()) if d.any() else 1.0
        differ = effective(abs(d))
        freedom = max(1.0, min(differ + 1, n - 1))
        centre = float(d.sum()) / (n + 2)
        error = math.sqrt((float((d**2).sum()) + 2 * size**2) / (n + 2) - centre**2) / math.sqrt(n + 2)
        within = min(freedom / min(1.0, size) ** 2, 1e6)
        half = NormalDist().inv_cdf(0.975) * error * student_quantile(freedom, 0.05) / student_quantile(within, 0.05)
        found = paired_difference(before, after, clusters)
        assert found.value == pytest.approx(fmean(after) - fmean(before))
        ends = (max(-1.0, min(centre - half, found.value)), min(1.0, max(centre + half, found.value)))
        if found.p >= 0.05:
            ends = (min(ends[0], 0.0), max(ends[1], 0.0))
        assert (found.low, found.high) == pytest.approx(ends)
        assert (found.sign != 0) == (found.p < 0.05)
        signs.add(found.sign)
    assert signs == {-1, 0, 1}


def test_a_p_value_is_that_of_an_interval_which_includes_0_though_the_sign_test_rejects() -> None:
    """Seven of eleven problems gain up to a quarter, so that the signs alone are clearer than the mean."""
    before = [0.125, 0.25, 0.25, 0.5, 0.875, 0.375, 0.75, 1.0, 0.375, 0.875, 0.0]
    after = [0.125, 0.375, 0.25, 0.625, 0.875, 0.625, 1.0, 1.0, 0.375, 1.0, 0.25]
    found = paired_difference(before, after)
    z = NormalDist().inv_cdf(0.975)
    centre, error = (found.low + found.high) / 2, (found.high - found.low) / (2 * z)
    assert found.low < 0 < centre
    assert found.p == pytest.approx(2 * NormalDist().cdf(-centre / error))
    assert 0.05 < found.p < 0.052


def test_the_p_value_of_a_mean_difference_is_students() -> None:
    """Computed with `scipy.stats.ttest_1samp([1, 2, -1, 3, 2], 0).pvalue`, scipy 1.17.1."""
    assert paired_mean([0.0] * 5, [1.0, 2.0, -1.0, 3.0, 2.0]).p == pytest.approx(0.10793882229227654)


@pytest.mark.parametrize("values", [[-2.0] * 10, [0.1 + 0.2, 0.3, 0.3], [0.0, 0.0]])
def test_equal_values_have_no_interval(values: list[float]) -> None:
    """A reward of unknown range that paid the same on every problem may pay anything on the next one."""
    for found in (mean_value(values), paired_mean([1.0] * len(values), [1.0 + value for value in values])):
        assert found.value == pytest.approx(values[0])
        assert found.as_dict()["low"] is found.as_dict()["high"] is None
        assert found.sign == 0
        assert str(found).endswith(" (all equal)")
        assert str(Estimate.from_dict(found.as_dict())) == str(found)


@pytest.mark.parametrize("right", [0, 1, 39, 40])
@pytest.mark.parametrize("highest", [1.0, 2.0, 0.3])
def test_a_mean_of_all_or_nothing_has_the_interval_of_the_share(right: int, highest: float) -> None:
    verdicts = [1.0] * right + [0.0] * (40 - right)
    share, found = mean_share(verdicts), mean_score([highest * one for one in verdicts], highest)
    for end in ("value", "low", "high"):
        assert getattr(found, end) == pytest.approx(highest * getattr(share, end))
    assert 0 <= found.low <= found.value <= found.high <= highest + 1e-12
    penalties = mean_score([highest * one - highest for one in verdicts], 0.0)
    if right < 40:  # otherwise no penalty was seen, so that the range is not known
        assert penalties.low == pytest.approx(found.low - highest)
        assert penalties.high == pytest.approx(found.high - highest)


def test_a_mean_inside_the_range_has_students_width() -> None:
    scores = [0.5 + 0.01 * math.sin(n) for n in range(100)]
    found, known = mean_score(scores, 1.0), mean_value(scores)
    assert found.value == known.value
    assert found.high - found.low == pytest.approx(known.high - known.low, rel=0.02)
    equal = mean_score([0.5] * 100, 1.0)
    assert (equal.low, equal.high) == pytest.approx((0.398, 0.602), abs=1e-3), "Clopper and Pearson for 50 of 100"


@pytest.mark.parametrize(("scores", "highest"), [([1.0, 0.5], None), ([0.0, 0.0], 0.0), ([3.0, 1.0, 1.0], 1.0)])
def test_a_mean_without_a_known_range_has_students_interval(scores: list[float], highest: float | None) -> None:
    assert str(mean_score(scores, highest)) == str(mean_value(scores))


def test_a_difference_of_means_does_not_exceed_the_range() -> None:
    first, second = [0.0] * 39 + [1.0], [1.0] * 40
    wide, cut = paired_mean(first, second), paired_mean(first, second, highest=1.0)
    assert (wide.low, wide.p) == (cut.low, cut.p)
    assert (wide.high > 1.0, cut.high) == (True, 1.0)
    assert paired_mean(second, first, highest=1.0).low == -1.0
    tables = [pd.DataFrame({"problem": range(40), "reward/r": scores}) for scores in (first, second)]
    mean = compare_tables(*tables, {"r": 1.0})["rewards"]["r"]["mean"]
    assert (mean["second"]["high"], mean["difference"]["high"]) == (1.0, 1.0)
    assert 0 < mean["second"]["low"] < 1
    assert summarise(tables[1], {"r": 1.0})["rewards"]["r"]["highest_pay"] == 1.0
    called = summarise(tables[1].assign(calls=1), {"r": 1.0})["tools"]["with_call"]["rewards"]["r"]
    assert called["mean"] == summarise(tables[1], {"r": 1.0})["rewards"]["r"]["mean"]


def test_an_estimate_is_written_for_json_and_read_back() -> None:
    found = Estimate(0.5, math.nan, math.nan)
    assert found.as_dict() == {"value": 0.5, "low": None, "high": None}
    assert str(Estimate.from_dict({**found.as_dict(), "p": 1})) == str(found)
    assert [Estimate(0.0, *ends).sign for ends in ((0.1, 0.2), (0.0, 0.2), (-0.1, 0.0), (-0.2, -0.1))] == [1, 0, 0, -1]
