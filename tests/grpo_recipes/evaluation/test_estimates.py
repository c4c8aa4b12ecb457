"""Estimates against their definitions: enumeration, formulas derived a second time, coverage, and tables by hand."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_recipes.evaluation.distributions import beta_quantile, student_quantile, student_tail
from grpo_recipes.evaluation.estimates import (
    Estimate,
    compare_tables,
    describe,
    describe_comparison,
    majority,
    mcnemar,
    mean_score,
    mean_share,
    mean_value,
    p_text,
    paired_difference,
    paired_mean,
    pass_at_k,
    summarise,
)
from grpo_rewards.terminal import rendered


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


# ---- tables of completions


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["7", "7.0", "8"], [True, True, False], True),
        (["8", "7", "7.0"], [True, False, False], False),
        (["8", "7"], [True, False], True),  # the first of a tie
        (["Yes ", "yes", "no", None], [True, False, False, True], True),
        ([None, None], [True, True], False),
        ([None, None, "8"], [True, True, False], False),
        ([], [], False),
        (["", "", "7"], [False, False, True], False),  # an empty answer is one
        (["8", "0", "0.0"], [False, True, True], True),
    ],
)
def test_the_most_frequent_answer_wins(answers: list[Any], right: list[bool], expected: bool) -> None:
    assert majority(answers, right) is expected


def table(**changed: Any) -> pd.DataFrame:
    """Return two completions of each of four problems: 2, 1, 1 and 0 of them are strictly right."""
    rows: dict[str, Any] = {
        "problem": [0, 0, 1, 1, 2, 2, 3, 3],
        "prompt": ["a", "a", "b", "b", "c", "c", "d", "d"],
        "gold": "7",
        "answer": ["7", "7", "7", "8", "8", "7", None, "8"],
        "strict": [True, True, True, False, False, True, False, False],
        "lenient": [True, True, True, False, False, True, False, False],
        "reward/right": [1.0, 1.0, 1.0, 0.0, 0.0, math.nan, 0.0, math.nan],
        "passed/right": [True, True, True, False, False, False, False, False],
        "calls": [2, 0, 1, 1, 0, 0, 0, 0],
    }
    return pd.DataFrame({**rows, **changed})


def values(summary: Any) -> Any:
    """Return a summary with the value in place of each estimate."""
    if isinstance(summary, dict):
        return summary["value"] if "value" in summary else {key: values(one) for key, one in summary.items()}
    return summary


def test_a_small_evaluation_is_counted_by_hand() -> None:
    found = values(summarise(table()))
    assert found == {
        "strict": 0.5,
        "lenient": 0.5,
        "pass_at": {"1": 0.5, "2": 0.75},
        "majority": 0.5,  # the first answer wins a tie: 7, 7, 8, 8
        "rewards": {
            "right": {
                "unscored": 2,
                "mean": 0.375,  # 1, 1/2, 0, 0
                "passed": 0.375,
                "pass_at": {"1": 0.375, "2": 1.0},  # two problems have two scored completions
                "majority": 0.5,
            }
        },
        "tools": {
            "called": 0.375,
            "calls": 0.5,
            # One completion of the first problem, both of the second.
            "with_call": {
                "problems": 2,
                "strict": 0.75,
                "lenient": 0.75,
                "rewards": {"right": {"mean": 0.75, "passed": 0.75}},
            },
            "without_call": {
                "problems": 3,
                "strict": 0.5,
                "lenient": 0.5,
                "rewards": {"right": {"mean": 1 / 3, "passed": 1 / 3}},
            },
        },
    }
    assert summarise(table(calls=0))["tools"].keys() == {"called", "calls", "without_call"}


def test_the_numbers_of_draws_double_and_end_with_all_samples() -> None:
    for samples, draws in ((2, "1 2"), (3, "1 2 3"), (8, "1 2 4 8"), (33, "1 2 4 8 16 32 33")):
        rows = pd.DataFrame({"problem": 0, "prompt": "a", "gold": "7", "answer": "7", "strict": [True] * samples})
        assert " ".join(summarise(rows.assign(lenient=True))["pass_at"]) == draws


def test_each_interval_of_a_summary_is_that_of_its_shares() -> None:
    """Six problems have four completions each. Two of the problems have the same prompt and count as one."""
    right = [4, 3, 1, 0, 2, 2]
    prompts = ["a", "b", "c", "d", "e", "e"]
    verdicts = [sample < count for count in right for sample in range(4)]
    rows = pd.DataFrame({"problem": [n for n in range(6) for _ in range(4)], "strict": verdicts, "lenient": verdicts})
    rows["prompt"] = [prompts[n] for n in rows["problem"]]
    rows["gold"], rows["answer"] = "7", ["7" if verdict else "8" for verdict in verdicts]
    rows["reward/r"], rows["passed/r"] = [2.0 * verdict for verdict in verdicts], verdicts
    rows["calls"] = [2 * verdict for verdict in verdicts]
    found = summarise(rows)
    strict = mean_share([count / 4 for count in right], 24, prompts).as_dict()
    assert found["strict"] == found["lenient"] == found["rewards"]["r"]["passed"] == found["tools"]["called"] == strict
    pairs = [1 - (4 - count) * (3 - count) / 12 for count in right]
    assert found["pass_at"]["2"] == pytest.approx(mean_share(pairs, 12, prompts).as_dict())
    assert found["pass_at"]["4"] == mean_share([float(count > 0) for count in right], 6, prompts).as_dict()
    assert found["pass_at"] == found["rewards"]["r"]["pass_at"]
    alike = rows.assign(strict=[True, True, False, False] * 6, prompt=rows["problem"].astype(str))
    assert summarise(alike)["pass_at"]["2"] == pytest.approx(mean_share([5 / 6] * 6, 12).as_dict())
    votes = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]  # the first answer wins a tie
    assert found["majority"] == found["rewards"]["r"]["majority"] == mean_share(votes, clusters=prompts).as_dict()
    assert found["rewards"]["r"]["mean"] == mean_value([count / 2 for count in right], prompts).as_dict()


def test_what_was_not_measured_has_no_estimate() -> None:
    found = summarise(table(**{"reward/right": math.nan}))
    assert found["rewards"] == {"right": {"unscored": 8}}
    assert found["tools"]["with_call"]["rewards"] == {"right": {}}
    two = {"reward/right": [1.0, math.nan, 0.0, *[math.nan] * 5]}
    assert summarise(table(**two))["rewards"]["right"]["mean"] == mean_value([1.0, 0.0]).as_dict()
    copies = summarise(table(prompt="a", **two))["rewards"]["right"]
    assert "mean" not in copies
    assert copies["passed"]["value"] == 1.0
    goldless = summarise(table().drop(columns=["strict", "lenient", "gold", "answer", "passed/right"]))
    assert goldless.keys() == {"rewards", "tools"}
    assert goldless["tools"]["with_call"].keys() == {"problems", "rewards"}
    assert goldless["rewards"]["right"].keys() == {"unscored", "mean"}


def test_two_small_evaluations_are_compared_by_hand() -> None:
    first = table().iloc[::2]  # strictly right: 1, 1, 0, 0
    second = table(strict=True).iloc[::2].assign(**{"reward/right": [1.0, 0.0, 2.0, 1.0], "passed/right": True})
    found = compare_tables(first, second)
    assert found["mcnemar"] == {"only_first": 0, "only_second": 2, "p": 0.5}
    assert compare_tables(second, first)["mcnemar"] == {"only_first": 2, "only_second": 0, "p": 0.5}
    assert [values(found["strict"][key]) for key in ("first", "second", "difference")] == [0.5, 1.0, 0.5]
    assert [values(found["lenient"][key]) for key in ("first", "second", "difference")] == [0.5, 0.5, 0.0]
    right = found["rewards"]["right"]
    assert [values(right["mean"][key]) for key in ("first", "second", "difference")] == [0.5, 1.0, 0.5]
    assert [values(right["passed"][key]) for key in ("first", "second", "difference")] == [0.5, 1.0, 0.5]
    copies = {"prompt": ["a", "a", "c", "d"]}
    assert "mcnemar" not in compare_tables(first.assign(**copies), second.assign(**copies))


def test_the_order_of_two_evaluations_does_not_matter_if_one_has_transcripts() -> None:
    """With transcripts, rows with one prompt and different golds are different problems."""
    first = table(strict=True).iloc[::2].assign(prompt="a", gold=["1", "2", "3", "4"])
    second = table().iloc[::2].assign(prompt="a", gold=["1", "2", "3", "4"], transcript="[]")
    found, reverse = compare_tables(first, second), compare_tables(second, first)
    assert found["mcnemar"] == {"only_first": 2, "only_second": 0, "p": 0.5}
    assert reverse["mcnemar"] == {"only_first": 0, "only_second": 2, "p": 0.5}
    assert found["rewards"].keys() == reverse["rewards"].keys() == {"right"}
    one, other = found["strict"]["difference"], reverse["strict"]["difference"]
    assert (one["low"], one["high"]) == (-other["high"], -other["low"])


def test_a_reward_is_compared_on_the_problems_that_both_sides_scored() -> None:
    first = table().iloc[::2].assign(**{"reward/right": [5.0, 1.0, 0.0, math.nan], "passed/right": True})
    second = table().iloc[::2].assign(**{"reward/right": [math.nan, 3.0, 4.0, 9.0]})
    right = compare_tables(first, second)["rewards"]["right"]
    assert right["mean"]["difference"] == paired_mean([1.0, 0.0], [3.0, 4.0]).as_dict()
    assert [values(right["mean"][side]) for side in ("first", "second")] == [0.5, 3.5]
    assert [values(right["passed"][side]) for side in ("first", "second")] == [1.0, 0.5]
    # Two copies of one problem have no spread.
    copies = {"prompt": ["a", "b", "b", "c"]}
    assert "rewards" not in compare_tables(first.assign(**copies), second.assign(**copies))


def test_only_what_both_evaluations_measured_is_compared() -> None:
    """A reward that one side lacks, or that scored a single problem, hides no other."""
    first = table().iloc[::2].assign(**{"reward/mine": 1.0, "reward/rare": [1.0, math.nan, math.nan, math.nan]})
    first["reward/zero"] = [0.0, 1.0, 0.0, 1.0]
    second = first.drop(columns=["reward/mine", "passed/right"])
    for one, other in ((first, second), (second, first)):
        found = compare_tables(one, other)["rewards"]
        assert list(found) == ["right", "zero"]
        assert found["right"].keys() == {"mean"}
    without = first.drop(columns=["strict", "lenient"])
    for one, other in ((first, without), (without, first)):
        assert compare_tables(one, other).keys() == {"rewards"}
    rewards = [column for column in first.columns if column.startswith("reward/")]
    assert compare_tables(first.drop(columns=rewards), first).keys() == {"strict", "lenient", "mcnemar"}


def verdicts(right: dict[str, list[list[bool]]]) -> pd.DataFrame:
    """Return completions from the verdicts of each problem, by prompt. A prompt may have several problems."""
    problems = [(prompt, row) for prompt, rows in right.items() for row in rows]
    records = []
    for problem, (prompt, row) in enumerate(problems):
        for sample, is_right in enumerate(row):
            answer = "7" if is_right else "6"
            records.append((problem, sample, prompt, "7", answer, is_right, is_right, float(is_right), is_right))
    columns = ["problem", "sample", "prompt", "gold", "answer", "strict", "lenient", "reward/r", "passed/r"]
    return pd.DataFrame(records, columns=columns)


def test_one_sample_and_eight_samples_are_compared_by_their_shares() -> None:
    """The same policy is right on 3 of 8 samples everywhere: by majority vote it would be wrong on every problem."""
    single = verdicts({f"p{n}": [[n % 8 < 3]] for n in range(40)})
    several = verdicts({f"p{n}": [[sample < 3 for sample in range(8)]] for n in range(40)})
    for first, second in ((single, several), (several, single)):
        result = compare_tables(first, second)
        difference = result["strict"]["difference"]
        assert difference["value"] == pytest.approx(0.0)
        assert difference["p"] > 0.9
        assert "mcnemar" not in result


def test_an_environment_may_hide_its_state_from_the_prompt() -> None:
    """Equal prompts with other golds are other problems there, and so are rows without golds."""
    table = verdicts({"guess": [[n % 2 == 0] for n in range(20)]}).assign(calls=1, transcript="[]")
    table["gold"] = [str(n) for n in range(20)]
    known = summarise(verdicts({f"p{n}": [[n % 2 == 0]] for n in range(20)}))
    assert summarise(table)["strict"] == known["strict"]
    goldless = table.drop(columns=["gold", "answer", "strict", "lenient"])
    assert summarise(goldless)["rewards"]["r"]["passed"] == known["rewards"]["r"]["passed"]
    copies = table.assign(gold=[str(n % 10) for n in range(20)])
    width = summarise(copies)["strict"]["high"] - summarise(copies)["strict"]["low"]
    assert width > known["strict"]["high"] - known["strict"]["low"]


# ---- the terminal


def lines(parts: Sequence[Any]) -> list[str]:
    return [" ".join(line.split()) for line in rendered(parts, 200).splitlines()]


def test_an_evaluation_is_shown_with_its_figures() -> None:
    summary = {**summarise(table()), "problems": 4, "settings": {"samples": 2, "strict": [{"name": "well_formed"}]}}
    shown = lines(describe(summary))
    for name, entry in (("pass@2", summary["pass_at"]["2"]), ("majority", summary["majority"])):
        assert f"{name} {Estimate.from_dict(entry)}" in shown
    right = summary["rewards"]["right"]
    mean, passed, votes = (str(Estimate.from_dict(right[key])) for key in ("mean", "passed", "majority"))
    assert any(line.startswith(f"right {mean} {passed} {votes} @1 ") and line.endswith(" 2") for line in shown)
    ways = [str(Estimate.from_dict(summary["tools"][way]["strict"])) for way in ("with_call", "without_call")]
    assert f"strict {' '.join(ways)}" in shown
    plain = {"problems": 8, "settings": {"samples": 1}, "rewards": {"none": {"unscored": 8}}}
    assert lines(describe(plain))[-1].endswith(" 8")


def test_two_evaluations_are_shown_side_by_side() -> None:
    def pair(first: float, second: float, **p: float) -> dict[str, Any]:
        three = zip(("first", "second", "difference"), (first, second, second - first), strict=True)
        found: dict[str, Any] = {key: {"value": one, "low": one - 0.125, "high": one + 0.125} for key, one in three}
        return {**found, "difference": {**found["difference"], **p}}

    result: dict[str, Any] = {"problems": 8, "warnings": ["other seeds"], "strict": pair(0.5, 0.75, p=0.0)}
    result["rewards"] = {"right": {"mean": pair(1.0, 0.5, p=0.04999), "passed": pair(0.5, 0.75)}}
    result["mcnemar"] = {"only_first": 1, "only_second": 3, "p": 0.0703125}
    _, warning, _, strict, mean, passed, mcnemar = lines(describe_comparison(result))
    assert strict == "strict 0.500 [0.375, 0.625] 0.750 [0.625, 0.875] 0.250 [0.125, 0.375] 0"
    assert mean.endswith("-0.500 [-0.625, -0.375] 0.04999")
    assert passed.endswith("0.250 [0.125, 0.375]")
    assert warning.endswith("other seeds")
    assert re.findall(r"[\d.]+", mcnemar) == ["1", "3", "0.0703"]


def test_an_estimate_is_written_for_json_and_read_back() -> None:
    found = Estimate(0.5, math.nan, math.nan)
    assert found.as_dict() == {"value": 0.5, "low": None, "high": None}
    assert str(Estimate.from_dict({**found.as_dict(), "p": 1})) == str(found)
    assert [Estimate(0.0, *ends).sign for ends in ((0.1, 0.2), (0.0, 0.2), (-0.1, 0.0), (-0.2, -0.1))] == [1, 0, 0, -1]
