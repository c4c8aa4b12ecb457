"""Estimates against their definitions: enumeration of small cases, and the coverage of the intervals."""

import itertools
import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_recipes.evaluation.estimates import (
    Estimate,
    confusion,
    describe,
    mcnemar,
    mean_share,
    paired_difference,
    pass_at_k,
)
from grpo_recipes.runs.files import CONFUSION
from grpo_rewards.terminal import rendered

# The two-sided 95 % point of the standard normal distribution, from tables.
Z = 1.959963984540054


def share(successes: int, n: int) -> Estimate:
    return mean_share([1.0] * successes + [0.0] * (n - successes))


def score_root(successes: int, n: int, inside: float, outside: float) -> float:
    """Find by bisection the p whose distance from the share is Z standard errors of p, which defines the interval."""

    def excess(p: float) -> float:
        return abs(successes / n - p) - Z * math.sqrt(p * (1 - p) / n)

    for _ in range(200):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if excess(middle) > 0 else (middle, outside)
    return inside


@given(st.integers(1, 5_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_of_one_sample_a_problem_solves_the_score_equation(case: tuple[int, int]) -> None:
    successes, n = case
    found = share(successes, n)
    assert found.value == pytest.approx(successes / n)
    assert 0 <= found.low <= found.value <= found.high <= 1
    if 0 < successes < n:
        assert found.low == pytest.approx(score_root(successes, n, found.value, 0.0), abs=1e-9)
        assert found.high == pytest.approx(score_root(successes, n, found.value, 1.0), abs=1e-9)


def test_the_interval_of_a_share_of_0_or_1_is_one_sided() -> None:
    # At 0 of n the equation reads p = Z^2 (1 - p) / n.
    assert share(0, 10) == Estimate(0.0, 0.0, pytest.approx(Z**2 / (10 + Z**2)))
    assert share(10, 10) == Estimate(1.0, pytest.approx(10 / (10 + Z**2)), 1.0)


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


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_a_mean_share_lies_in_its_interval(shares: list[float]) -> None:
    found = mean_share(shares)
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value <= found.high + 1e-12 <= 1 + 2e-12


def test_samples_of_one_problem_are_not_counted_as_problems() -> None:
    """Eight samples that always agree carry no more information than one. Eight independent samples carry much more."""
    agreeing = mean_share([1.0] * 30 + [0.0] * 70)
    independent = mean_share([0.25] * 60 + [0.375] * 40)
    assert agreeing.high - agreeing.low == pytest.approx(0.178, abs=2e-3)
    assert independent.high - independent.low < 0.06


def test_the_clustered_interval_covers_the_true_share() -> None:
    """With problems of different difficulty and four samples each, 95 % of the intervals hold the mean difficulty."""
    import random

    generator = random.Random(0)
    truth, covered, runs = 0.5 * 0.9 + 0.5 * 0.2, 0, 1500
    for _ in range(runs):
        chances = [0.9 if generator.random() < 0.5 else 0.2 for _ in range(60)]
        shares = [sum(generator.random() < chance for _ in range(4)) / 4 for chance in chances]
        estimate = mean_share(shares)
        covered += estimate.low <= truth <= estimate.high
    assert 0.935 <= covered / runs <= 0.97


@pytest.mark.parametrize(("gain", "loss"), [(0.1, 0.1), (0.3, 0.1), (0.02, 0.0), (0.0, 0.0)])
def test_the_paired_interval_covers_the_true_difference(gain: float, loss: float) -> None:
    """The coverage is enumerated exactly over the numbers of gained and lost problems of 30."""
    n, covered = 30, 0.0
    for gained, lost in itertools.product(range(n + 1), repeat=2):
        if gained + lost > n:
            continue
        chance = math.comb(n, gained) * math.comb(n - gained, lost)
        chance *= gain**gained * loss**lost * (1 - gain - loss) ** (n - gained - lost)
        first = [0.0] * gained + [1.0] * lost + [1.0] * (n - gained - lost)
        second = [1.0] * gained + [0.0] * lost + [1.0] * (n - gained - lost)
        if chance > 1e-12:
            difference = paired_difference(first, second)
            covered += chance * (difference.low <= gain - loss <= difference.high)
    assert covered >= 0.94


def test_a_difference_is_second_minus_first() -> None:
    difference = paired_difference([0.0] * 50 + [1.0] * 50, [1.0] * 100)
    assert difference.value == 0.5
    assert 0.38 < difference.low < 0.5 < difference.high < 0.62


# Labels


def answered(*rows: tuple[str, str | None], samples: int = 1) -> pd.DataFrame:
    """Return the table of an evaluation with these golds and answers."""
    golds, answers = zip(*rows, strict=True)
    problems = [place // samples for place in range(len(rows))]
    right = [gold.casefold() == (answer or "").casefold() for gold, answer in rows]
    return pd.DataFrame({"problem": problems, "gold": golds, "answer": answers, "lenient": right})


def test_a_confusion_matrix_counts_answers_by_gold() -> None:
    spam = [("spam", "spam")] * 3 + [("spam", "ham"), ("spam", "no idea")]
    ham = [("ham", "HAM "), ("ham", "ham"), ("ham", "spam"), ("ham", None), ("ham", "ham")]
    labels = confusion(answered(*spam, *ham))
    assert labels is not None
    assert CONFUSION.holds(labels)
    assert (labels["names"], labels["problems"]) == (["ham", "spam"], [5, 5])
    assert labels["answers"] == [[3, 1, 1], [1, 3, 1]], "rows: gold, columns: ham, spam, no label"
    assert labels["accuracy"] == [share(3, 5).as_dict()] * 2


def test_the_accuracy_of_a_label_is_clustered_by_problem() -> None:
    rows = [("a", "a"), ("a", "b")] * 5 + [("b", "b")] * 10
    labels = confusion(answered(*rows, samples=2))
    assert labels["problems"] == [5, 5]
    assert labels["accuracy"] == [mean_share([0.5] * 5).as_dict(), mean_share([1.0] * 5).as_dict()]


def test_numbers_are_labels_in_any_form_and_in_order() -> None:
    labels = confusion(answered(*[("10", "10.0")] * 5, *[("2", "2")] * 5))
    assert labels["names"] == ["2", "10"]
    assert labels["answers"] == [[5, 0, 0], [0, 5, 0]]


def test_a_letter_names_the_number_of_the_choice_for_which_it_was_right() -> None:
    rows = [("0", "A"), ("0", "B"), ("0", "A"), ("0", "C"), ("0", "A"), ("1", "B"), ("1", "A"), ("1", "B")]
    table = answered(*rows, ("1", "B"), ("1", "B"))
    table["lenient"] = [gold == str("AB".find(answer)) for gold, answer in zip(table.gold, table.answer, strict=True)]
    assert confusion(table)["answers"] == [[3, 1, 1], [1, 4, 0]]


@pytest.mark.parametrize(
    "golds",
    [
        ["a"] * 20,  # one label
        [f"{place}" for place in range(100)],  # as many golds as problems
        [f"label {place}" for place in range(21)] * 10,
        ["a", "b" * 61] * 10,
        ["a"] * 5 + ["b"] * 4,  # fewer than five problems per label
    ],
)
def test_golds_that_are_no_labels_have_no_confusion_matrix(golds: list[str]) -> None:
    assert confusion(answered(*[(gold, gold) for gold in golds])) is None


def test_the_terminal_shows_the_matrix_and_each_label() -> None:
    labels = confusion(answered(*[("yes", "no")] * 5, *[("no", "no")] * 5))
    parts = describe({"problems": 10, "settings": {"samples": 1}, "labels": labels})
    lines = [line.split() for line in rendered(parts).splitlines()]
    assert ["gold", "no", "yes", "no", "label"] in lines
    assert ["yes", "5", "0", "0"] in lines
    assert ["no", "5", "1.000", "[0.566,", "1.000]"] in lines, "Wilson's interval of 5 of 5"


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["a"] * 21},
        {"names": ["a", 3]},
        {"answers": [[1, 2, 3]]},
        {"answers": [[1, 2], [3, 4]]},
        {"answers": [[1, 2, -3], [1, 2, 3]]},
        {"accuracy": []},
        {"problems": None},
    ],
)
def test_a_damaged_confusion_matrix_is_refused(change: dict) -> None:
    labels = confusion(answered(*[("yes", "no")] * 5, *[("no", "no")] * 5))
    assert CONFUSION.holds(labels)
    assert not CONFUSION.holds({**labels, **change})
