"""Summaries of evaluations, counted by hand, differences of two, and how both are shown."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.evaluation.estimates import Estimate, mean_share, mean_value, paired_mean
from grpo_recipes.evaluation.summary import compare_tables, describe, describe_comparison, majority, summarise
from grpo_rewards.terminal import rendered


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
