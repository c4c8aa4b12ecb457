"""Intervals derived a second time from their formulas, small tables counted by hand, and the pages of the terminal."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import pandas as pd
import pytest

from grpo_recipes.evaluation.distributions import beta_cdf, beta_quantile, student_quantile, student_tail
from grpo_recipes.evaluation.estimates import (
    Estimate,
    compare_tables,
    describe,
    describe_comparison,
    majority,
    mean_share,
    mean_value,
    paired_difference,
    paired_mean,
    summarise,
)
from grpo_rewards.terminal import Cell, Table, rendered

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
        mirrored = mean_share([1 - share for share in shares], completions, clusters)
        assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((found.low, found.high), abs=1e-9)
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
        lost = paired_mean(after, values, clusters)
        assert (lost.value, lost.low, lost.high, lost.p) == pytest.approx(
            (-gained.value, -gained.high, -gained.low, gained.p)
        )


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
        back = paired_difference(after, before, clusters)
        assert (back.value, back.low, back.high, back.p) == pytest.approx(
            (-found.value, -found.high, -found.low, found.p)
        )
    assert signs == {-1, 0, 1}


def test_a_quantile_of_the_largest_number_is_a_root() -> None:
    """The largest of n numbers drawn evenly from 0 to 1 is below x with probability x ** n."""
    assert beta_quantile(0.25, 2.0, 1.0) == pytest.approx(0.5, abs=1e-12)
    assert beta_quantile(0.75, 1.0, 2.0) == pytest.approx(0.5, abs=1e-12)


def test_the_distribution_is_0_before_its_range_and_1_behind_it() -> None:
    assert [beta_cdf(x, 2.0, 3.0) for x in (-0.5, 0.0, 1.0, 1.5)] == [0.0, 0.0, 1.0, 1.0]


def test_numbers_are_written_for_json_and_read_back() -> None:
    found = Estimate(0.5, math.nan, math.nan)
    assert found.as_dict() == {"value": 0.5, "low": None, "high": None}
    assert str(Estimate.from_dict({**found.as_dict(), "p": 1})) == "0.500 (all equal)"
    assert [Estimate(0.0, *ends).sign for ends in ((0.1, 0.2), (0.0, 0.2), (-0.1, 0.0), (-0.2, -0.1))] == [1, 0, 0, -1]


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
    silent = table(calls=0)
    assert values(summarise(silent))["tools"].keys() == {"called", "calls", "without_call"}
    assert "tools" not in summarise(table().drop(columns="calls"))


def test_three_completions_have_pass_at_1_2_and_3() -> None:
    rows = table().head(6).assign(problem=[0, 0, 0, 1, 1, 1], prompt=["a"] * 3 + ["b"] * 3)
    assert values(summarise(rows))["pass_at"] == {
        "1": pytest.approx(2 / 3),
        "2": pytest.approx((1 + 2 / 3) / 2),
        "3": 1.0,
    }


def test_the_numbers_of_draws_double_and_end_with_all_samples() -> None:
    for samples, draws in ((2, "1 2"), (8, "1 2 4 8"), (11, "1 2 4 8 11"), (33, "1 2 4 8 16 32 33")):
        rows = pd.DataFrame({"problem": 0, "prompt": "a", "gold": "7", "answer": "7", "strict": [True] * samples})
        found = summarise(rows.assign(lenient=True))
        assert " ".join(found["pass_at"]) == draws


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
    assert "mcnemar" not in compare_tables(table(), table())
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


def share(value: float, **more: Any) -> dict[str, Any]:
    return {"value": value, "low": value - 0.125, "high": value + 0.125, **more}


STRICT = [{"name": "gsm8k_correctness", "pay_exact": 1.0, "extract": "auto"}, {"name": "well_formed"}]
SUMMARY: dict[str, Any] = {
    "problems": 8,
    "settings": {"samples": 2, "strict": STRICT},
    "strict": share(0.5),
    "lenient": share(0.625),
    "pass_at": {"1": share(0.5), "2": share(0.75)},
    "majority": share(0.25),
    "sampling": {"temperature": 1.0, "top_p": 0.9},
    "rewards": {
        "right": {
            **{"unscored": 0, "mean": share(1.5), "passed": share(0.5), "majority": share(0.25)},
            "pass_at": {"1": share(0.5), "2": share(0.75)},
        },
        "tags": {"unscored": 3, "mean": {"value": 0.5, "low": None, "high": None}},
        "none": {"unscored": 16},
    },
    "tools": {
        "called": share(0.75),
        "calls": 1.25,
        "with_call": {
            **{"problems": 6, "strict": share(0.5), "lenient": share(0.5)},
            "rewards": {"right": {"mean": share(1.0)}},
        },
        "without_call": {"problems": 2, "strict": share(0.25), "lenient": share(0.25)},
    },
}


def lines(parts: Sequence[Any]) -> list[str]:
    return [" ".join(line.split()) for line in rendered(parts).splitlines()]


def test_the_terminal_shows_an_evaluation_with_its_rewards_and_tools() -> None:
    heads = [part.head for part in describe(SUMMARY) if isinstance(part, Table)]
    assert [len(head) for head in heads] == [2, 6, 3], "each column has a head"
    assert lines(describe(SUMMARY)) == [
        "8 problems, 2 completions each; 95 % intervals",
        "accuracy share",
        "strict 0.500 [0.375, 0.625]",
        "lenient 0.625 [0.500, 0.750]",
        "pass@1 0.500 [0.375, 0.625]",
        "pass@2 0.750 [0.625, 0.875]",
        "majority 0.250 [0.125, 0.375]",
        "sampling: temperature 1.0, top_p 0.9",
        "strict: right by `extract: auto` and full pay of `well_formed`",
        "",
        "reward mean passed majority pass not scored",
        "right 1.500 [1.375, 1.625] 0.500 [0.375, 0.625] 0.250 [0.125, 0.375] @1 0.500 [0.375, 0.625], @2 0.750 "
        "[0.625, 0.875]",
        "tags 0.500 (all equal) 3",
        "none fewer than two problems scored 16",
        "",
        "with a call without",
        "strict 0.500 [0.375, 0.625] 0.250 [0.125, 0.375]",
        "lenient 0.500 [0.375, 0.625] 0.250 [0.125, 0.375]",
        "right, mean 1.000 [0.875, 1.125]",
        "0.750 [0.625, 0.875] of the completions call a tool, 1.25 calls per completion",
    ]


def test_the_terminal_leaves_out_what_was_not_measured() -> None:
    plain = {
        "problems": 8,
        "settings": {"samples": 1},
        "rewards": {"right": {"unscored": 0, "mean": share(1.5)}},
    }
    assert lines(describe(plain)) == [
        "8 problems, 1 completion each; 95 % intervals",
        "",
        "reward mean",
        "right 1.500 [1.375, 1.625]",
    ]


def test_the_terminal_shows_two_evaluations_and_the_sign_of_their_difference() -> None:
    def pair(first: float, second: float, **p: float) -> dict[str, Any]:
        return {"first": share(first), "second": share(second), "difference": share(second - first, **p)}

    result: dict[str, Any] = {
        "problems": 8,
        "warnings": ["other seeds"],
        "strict": pair(0.5, 0.75, p=0.0123),
        "lenient": pair(0.5, 0.5, p=0.9),
        "rewards": {"right": {"mean": pair(1.0, 0.5, p=0.04999), "passed": pair(0.5, 0.75)}},
        "mcnemar": {"only_first": 1, "only_second": 3, "p": 0.0703125},
    }
    parts = describe_comparison(result)
    assert lines(parts) == [
        "8 problems, the same for both; 95 % intervals",
        "warning: other seeds",
        "A B B - A p",
        "strict 0.500 [0.375, 0.625] 0.750 [0.625, 0.875] 0.250 [0.125, 0.375] 0.012",
        "lenient 0.500 [0.375, 0.625] 0.500 [0.375, 0.625] 0.000 [-0.125, 0.125] 0.9",
        "right, mean 1.000 [0.875, 1.125] 0.500 [0.375, 0.625] -0.500 [-0.625, -0.375] 0.04999",
        "right, passed 0.500 [0.375, 0.625] 0.750 [0.625, 0.875] 0.250 [0.125, 0.375]",
        "McNemar: A alone right on 1, B alone on 3; exact p = 0.0703",
    ]
    (shown,) = (part for part in parts if isinstance(part, Table))
    assert list(shown.head) == ["", "A", "B", "B - A", "p"]
    assert shown.numbers == {4}, "p-values end in a column"
    colours = [cell.style for row in shown.rows for cell in row if isinstance(cell, Cell)]
    assert colours == ["good", "", "bad", "good"]


def test_a_p_value_of_0_is_shown() -> None:
    certain = {"first": share(0.5), "second": share(1.0), "difference": share(0.5, p=0.0)}
    shown = lines(describe_comparison({"problems": 8, "warnings": [], "strict": certain}))
    assert shown[-1] == "strict 0.500 [0.375, 0.625] 1.000 [0.875, 1.125] 0.500 [0.375, 0.625] 0"


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
    lost = paired_difference(after, before)
    assert (lost.value, lost.low, lost.high, lost.p) == pytest.approx((-found.value, -found.high, -found.low, found.p))


def test_only_what_both_evaluations_measured_is_compared() -> None:
    """A reward that one side lacks, or that scored a single problem, hides no other."""
    first = table().iloc[::2].assign(**{"reward/mine": 1.0, "reward/rare": [1.0, math.nan, math.nan, math.nan]})
    first["reward/zero"] = [0.0, 1.0, 0.0, 1.0]
    second = first.drop(columns=["reward/mine", "passed/right"])
    found = compare_tables(first, second)
    assert list(found["rewards"]) == ["right", "zero"]
    assert "passed" not in found["rewards"]["right"]
    assert "passed" not in compare_tables(second, first)["rewards"]["right"]
    assert found["rewards"]["zero"]["mean"]["first"]["value"] == 0.5
    without = first.drop(columns=["strict", "lenient"])
    for one, other in ((first, without), (without, first)):
        assert compare_tables(one, other).keys() == {"rewards"}
    rewards = [column for column in first.columns if column.startswith("reward/")]
    assert compare_tables(first.drop(columns=rewards), first).keys() == {"strict", "lenient", "mcnemar"}


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
    votes = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]  # the first answer wins a tie
    assert found["majority"] == found["rewards"]["r"]["majority"] == mean_share(votes, clusters=prompts).as_dict()
    assert found["rewards"]["r"]["mean"] == mean_value([count / 2 for count in right], prompts).as_dict()


def test_a_score_of_two_problems_has_a_mean_unless_they_are_copies() -> None:
    two = {"reward/right": [1.0, math.nan, 0.0, *[math.nan] * 5]}
    found = summarise(table(**two))
    assert found["rewards"]["right"]["mean"] == mean_value([1.0, 0.0]).as_dict()
    copies = summarise(table(prompt="a", **two))
    assert "mean" not in copies["rewards"]["right"]
    assert copies["rewards"]["right"]["passed"]["value"] == 1.0


def test_a_reward_that_scored_nothing_has_no_estimate() -> None:
    found = summarise(table(**{"reward/right": math.nan}))
    assert found["rewards"] == {"right": {"unscored": 8}}
    assert found["tools"]["with_call"]["rewards"] == {"right": {}}
    # Only the completions without a call are scored.
    scores = [math.nan if calls else 1.0 for calls in table()["calls"]]
    tools = values(summarise(table(**{"reward/right": scores})))["tools"]
    assert tools["with_call"]["rewards"] == {"right": {}}
    assert tools["without_call"]["rewards"]["right"].keys() == {"mean", "passed"}


def test_calls_are_counted_without_rewards_and_without_golds() -> None:
    rewardless = summarise(table().drop(columns=["reward/right", "passed/right"]))
    assert "rewards" not in rewardless
    assert rewardless["tools"]["with_call"].keys() == {"problems", "strict", "lenient"}
    goldless = summarise(table().drop(columns=["strict", "lenient", "gold", "answer", "passed/right"]))
    assert goldless.keys() == {"rewards", "tools"}
    assert goldless["tools"]["with_call"].keys() == {"problems", "rewards"}
    assert goldless["rewards"]["right"].keys() == {"unscored", "mean"}


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


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_the_spread_of_values_is_judged_by_their_size(scale: float) -> None:
    plain, scaled = mean_value([-1.0, -2.0, -4.0]), mean_value([-scale, -2 * scale, -4 * scale])
    assert (scaled.low, scaled.high) == pytest.approx((scale * plain.low, scale * plain.high))
    assert math.isnan(mean_value([0.3 * scale, (0.1 + 0.2) * scale]).low), "equal but for rounding"
    assert math.isnan(paired_mean([0.3 * scale, 0.0], [0.6 * scale, (0.1 + 0.2) * scale]).p)
    assert math.isnan(mean_value([0.0, 0.0]).low)


@pytest.mark.parametrize("lengths", [(2, 3), (3, 2)])
def test_two_evaluations_of_other_numbers_of_problems_have_no_difference(lengths: tuple[int, int]) -> None:
    first, second = ([0.0, 1.0, 0.5][:length] for length in lengths)
    for difference in (paired_difference, paired_mean):
        with pytest.raises(ValueError, match="zip"):
            difference(first, second)
    means: list[Any] = [mean_share, mean_value]
    for found in means:
        for clusters in ([], ["a", "b", "c", "d"]):
            with pytest.raises(ValueError, match="zip"):
                found(first, clusters=clusters)
    with pytest.raises(ValueError, match="zip"):
        majority(["7"] * lengths[0], [True] * lengths[1])
