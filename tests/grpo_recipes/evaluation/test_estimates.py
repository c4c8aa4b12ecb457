"""Estimates against their definitions: enumeration of small cases, and the coverage of the intervals."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_recipes.evaluation.estimates import (
    Estimate,
    mcnemar,
    mean_share,
    mean_value,
    p_text,
    paired_difference,
    paired_mean,
    pass_at_k,
)


def share(successes: int, n: int) -> Estimate:
    return mean_share([1.0] * successes + [0.0] * (n - successes))


def at_least(count: int, n: int, p: float) -> float:
    """Return the probability of at least `count` successes in `n` trials, as a sum."""
    return math.fsum(math.comb(n, hits) * p**hits * (1 - p) ** (n - hits) for hits in range(count, n + 1))


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
    [
        (0, 10, 0.0, 0.3084971078),
        (10, 10, 0.6915028922, 1.0),
        (1, 2, 0.0125791171, 0.9874208829),
        (162, 400, 0.356503022, 0.4549133224),
        (12, 1319, 0.0047095502, 0.0158380494),
        (399, 400, 0.98615023, 0.9999367075),
    ],
)
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


@pytest.mark.parametrize("completions", [2, 20, 200])
def test_an_interval_does_not_jump_if_a_share_changes_a_little(completions: int) -> None:
    same, close = mean_share([0.5, 0.5], completions), mean_share([0.5, 0.51], completions)
    assert (close.low, close.high) == pytest.approx((same.low, same.high), abs=0.02)
    every = share(completions // 2, completions)
    assert (same.low, same.high) == pytest.approx((every.low, every.high)), "problems that agree exactly"


def test_problems_of_which_few_were_ever_solved_have_a_wide_interval() -> None:
    """Two of a hundred problems, each solved in 32 of 64 samples: the mean varies as that of two problems."""
    found = mean_share([0.5, 0.5] + [0.0] * 98, completions=6_400)
    assert found.value == 0.01
    assert found.high > 0.04


def test_copies_of_a_problem_count_as_one_problem() -> None:
    shares, labels = [0.25, 1.0, 0.5, 0.0, 0.75], ["a", "b", "c", "d", "e"]
    once = mean_share(shares, 20)
    assert mean_share(shares * 3, 20, labels * 3) == once
    assert mean_share(shares * 3, 60).high < once.high, "the intervals of separate problems"
    first, second = [0.0, 1.0, 0.0, 0.0, 0.0, 0.5], [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    pair = paired_difference(first, second)
    copied = paired_difference(first * 4, second * 4, list("abcdef") * 4)
    assert (copied.low, copied.high, copied.p) == pytest.approx((pair.low, pair.high, pair.p))
    mean, copied_mean = mean_value(second), mean_value(second * 4, list("abcdef") * 4)
    assert (copied_mean.low, copied_mean.high) == pytest.approx((mean.low, mean.high))
    assert paired_mean(first * 4, second * 4, list("abcdef") * 4).p == pytest.approx(paired_mean(first, second).p)


def test_an_interval_needs_a_problem() -> None:
    with pytest.raises(ValueError, match="at least one data point"):
        mean_share([])


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_counts_the_draws_with_a_right_completion(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (samples - right), k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    """The mean over all outcomes of 6 samples is the probability of a right one among k."""
    for p, k in itertools.product((0.1, 0.5, 0.83), (1, 2, 5, 6)):
        expected = sum(
            math.comb(6, right) * p**right * (1 - p) ** (6 - right) * pass_at_k(6, right, k) for right in range(7)
        )
        assert expected == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_numbers(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="no pass@"):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize("discordant", range(13))
def test_mcnemar_equals_an_enumeration_of_the_splits(discordant: int) -> None:
    """The p-value is the share of all splits of the discordant problems that are at least as uneven."""
    splits = [sum(ways) for ways in itertools.product((0, 1), repeat=discordant)]
    for first in range(discordant + 1):
        lopsided = sum(abs(2 * split - discordant) >= abs(2 * first - discordant) for split in splits)
        assert mcnemar(first, discordant - first) == pytest.approx(lopsided / len(splits))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.integers(1, 64))
def test_a_mean_share_lies_in_its_interval(shares: list[float], samples: int) -> None:
    found = mean_share(shares, samples * len(shares))
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value <= found.high + 1e-12 <= 1 + 2e-12


def test_samples_of_one_problem_are_not_counted_as_problems() -> None:
    """Eight samples that always agree carry no more information than one. Eight independent samples carry much more."""
    agreeing = mean_share([1.0] * 30 + [0.0] * 70, 800)
    independent = mean_share([0.25] * 60 + [0.375] * 40, 800)
    assert agreeing == share(30, 100)
    assert independent.high - independent.low < 0.07


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("problems", "samples", "solved"),
    [(60, 4, 0.5), (5, 64, 0.5), (20, 64, 0.2)],
)
def test_the_clustered_interval_covers_the_true_share(problems: int, samples: int, solved: float) -> None:
    """A share of the problems has a chance of 90 %, the others one of 1 %."""
    generator = np.random.default_rng(0)
    truth, runs = solved * 0.9 + (1 - solved) * 0.01, 800
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


@pytest.mark.parametrize("n", [*range(1, 19), pytest.param(40, marks=pytest.mark.slow)])
def test_an_interval_excludes_0_if_mcnemars_test_rejects(n: int) -> None:
    """Every table of n problems with one sample each."""
    for gained, lost, first, second in outcomes(n):
        difference, p = paired_difference(first, second), mcnemar(lost, gained)
        assert difference.p == pytest.approx(p, rel=1e-9)
        assert (difference.sign != 0) == (p < 0.05), (n, gained, lost)
        assert difference.sign in (0, math.copysign(1, gained - lost))
        assert -1 <= difference.low <= difference.value <= difference.high <= 1


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


def test_a_difference_is_second_minus_first() -> None:
    difference = paired_difference([0.0] * 50 + [1.0] * 50, [1.0] * 100)
    assert difference.value == 0.5
    assert 0.38 < difference.low < 0.5 < difference.high < 0.62
