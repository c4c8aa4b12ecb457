"""Rewards of a recipe in an evaluation: mean scores with intervals, pass rates, and rewards that must not be called."""

import itertools
import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.evaluation import accuracy, comparison, evaluate
from grpo_recipes.evaluation.estimates import (
    Estimate,
    compare_tables,
    mean_score,
    mean_share,
    mean_value,
    paired_mean,
    summarise,
)
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.reports.report import write_report
from grpo_recipes.reports.run import Run
from grpo_rewards.errors import UserError

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "level": n % 4} for n in range(8)]


def pays_the_level(completions: list, level: list, **columns: Any) -> list[float | None]:
    """Score a message by the level of its row. Level 3 has no score."""
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [None if one == 3 else float(one) for one in level]


async def answers_later(completions: list, **columns: Any) -> list[float]:
    return [0.5] * len(completions)


def needs_a_trainer(completions: list, trainer_state: Any, **columns: Any) -> list[float]:
    return [float(trainer_state.global_step)] * len(completions)


def longer_than_others(completions: list, **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


longer_than_others.needs_whole_groups = True

HERE = "tests.grpo_recipes.evaluation.test_accuracy."
CORRECT = {"name": "gsm8k_correctness", "kwargs": {"extract": "auto"}, "weight": 3.0}


@pytest.fixture
def evaluated(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Return a function that evaluates rows by a recipe's rewards. The policy is right on even problems only."""

    def engine(prompts: list, settings: Settings) -> list[str]:
        output = []
        for place, prompt in enumerate(prompts):
            n = int(prompt[-1]["content"].split()[2])
            output.append(f"#### {2 * n}" if n % 2 == 0 or (settings.samples > 1 and place % 2) else "#### 1000")
        return output

    engine.sampling = lambda settings: {}
    monkeypatch.setattr(evaluate, "load_engine", lambda *_: engine)

    def run(rewards: list, *arguments: str, rows: list = ROWS, name: str = "e", code: int = 0) -> dict:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = {
            "model_name_or_path": str(tiny_model),
            "dataset": {"path": str(tmp_path / "trained-on.jsonl")},
            "rewards": rewards,
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
        where = ["--path", str(tmp_path / f"{name}.jsonl"), "--output", str(tmp_path / name)]
        command = ["evaluate", str(tiny_model), "--recipe", str(tmp_path / f"{name}.yaml"), *where, *arguments]
        assert cli.main(command) == code
        return json.loads((tmp_path / name / "evaluation.json").read_text()) if code == 0 else {}

    return run


def test_every_reward_is_measured(evaluated: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated([CORRECT, f"{HERE}pays_the_level", f"{HERE}answers_later"])["rewards"]
    assert found["gsm8k_correctness"]["mean"]["value"] == pytest.approx(2.0 * 4 / 8)
    assert found["gsm8k_correctness"]["passed"]["value"] == 0.5
    for end in ("low", "high"):
        assert found["gsm8k_correctness"]["mean"][end] == pytest.approx(2 * found["gsm8k_correctness"]["passed"][end])
    level = found["pays_the_level"]
    assert level["unscored"] == 2
    # 0, 1, 2, 0, 1, 2: by hand, with Student's quantile for five degrees of freedom
    error = math.sqrt(sum((one - 1) ** 2 for one in [0, 1, 2] * 2) / 5 / 6)
    assert level["mean"]["value"] == 1.0
    assert level["mean"]["high"] == pytest.approx(1 + 2.5706 * error, abs=1e-3)
    assert "passed" not in level
    assert found["answers_later"]["mean"] == {"value": 0.5, "low": None, "high": None}, "equal scores"
    output = capsys.readouterr().out
    table = [line.split("  ") for line in output.splitlines() if line.strip()]
    head = next([cell.strip() for cell in line if cell] for line in table if "not scored" in " ".join(line))
    assert head == ["reward", "mean", "passed", "not scored"]
    assert re.search(r"gsm8k_correctness +1\.000 \[.* 0\.500 \[", output)
    assert re.search(r"pays_the_level +1\.000 \[.*\] +2$", output, re.MULTILINE)


def test_several_samples_give_pass_at_k(evaluated: Callable) -> None:
    correctness = evaluated([CORRECT], "--samples", "2", "--temperature", "1")["rewards"]["gsm8k_correctness"]
    assert correctness["passed"]["value"] == 0.75  # both samples of even problems, one of odd ones
    assert correctness["pass_at"]["1"]["value"] == 0.75
    assert correctness["pass_at"]["2"]["value"] == 1.0
    # Odd problems have one wrong answer, then the right one. The first one wins a tie.
    assert correctness["majority"]["value"] == 0.5


def pays_a_floor(completions: list, answer: list, **columns: Any) -> list[float]:
    return [
        0.9 if completion[0]["content"].endswith(f" {gold}") else 0.1
        for completion, gold in zip(completions, answer, strict=True)
    ]


def test_a_reward_of_ones_own_that_declares_what_passes_has_accuracy_and_pass_at_k(
    evaluated: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = {"name": f"{HERE}pays_a_floor", "kind": "correctness", "highest_pay": 1.0, "passes_at": 0.9}
    options = ("--samples", "2", "--temperature", "1")
    found = evaluated([CORRECT, mine], *options)["rewards"]
    for key in ("passed", "pass_at", "majority"):
        assert found["pays_a_floor"][key] == found["gsm8k_correctness"][key]
    assert re.search(r"pays_a_floor .*@1 0\.750 \[.*@2 1\.000 \[", capsys.readouterr().out)
    unknown = evaluated([{"name": f"{HERE}pays_a_floor", "kind": "correctness"}], *options, name="unknown")["rewards"]
    assert "passed" not in unknown["pays_a_floor"]
    evaluated([{**mine, "highest_pay": 0.5, "passes_at": 0.5}], *options, name="false", code=2)
    assert "0.9 is more than its `highest_pay` 0.5" in capsys.readouterr().err


def test_a_task_without_golds_is_evaluated_and_compared(
    evaluated: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{key: value for key, value in row.items() if key != "answer"} for row in ROWS]
    found = evaluated([f"{HERE}pays_the_level"], rows=rows)
    assert "strict" not in found
    assert found["rewards"]["pays_the_level"]["mean"]["value"] == 1.0
    evaluated([f"{HERE}pays_the_level"], rows=rows, name="f")
    capsys.readouterr()
    assert cli.main(["compare", str(tmp_path / "e"), str(tmp_path / "f")]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^ +A +B +B - A +p$", output, re.MULTILINE)
    assert re.search(
        r"pays_the_level, mean +1\.000 \[.*\] +1\.000 \[.*\] +0\.000 \(all equal\) *$", output, re.MULTILINE
    )
    assert "McNemar" not in output
    evaluated([], rows=rows, name="g", code=2)
    assert "`rewards` is missing" in capsys.readouterr().err
    evaluated([f"{HERE}needs_a_trainer"], rows=rows, name="h", code=2)
    assert "there is nothing to measure: the held-out rows have no `answer`" in capsys.readouterr().err


def test_an_evaluation_without_golds_is_reported(evaluated: Callable, tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != "answer"} for row in ROWS]
    evaluated([f"{HERE}pays_the_level"], rows=rows)
    run = tmp_path / "run"
    (run / "evaluations").mkdir(parents=True)
    (tmp_path / "e").rename(run / "evaluations" / "after")
    (run / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": n, "reward": 0.1} for n in range(4)]}))
    page = Path(write_report([Run.read(run)], tmp_path / "page")).read_text()
    assert "pays_the_level" in page
    assert "1.000 [" in page


def test_a_reward_that_cannot_be_measured_is_named_once(evaluated: Callable, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = evaluated([CORRECT, f"{HERE}needs_a_trainer", f"{HERE}longer_than_others"])
    assert set(found["rewards"]) == {"gsm8k_correctness"}
    (output,) = [record.getMessage() for record in caplog.records if "not evaluated" in record.getMessage()]
    assert "needs_a_trainer (TypeError" in output
    assert "longer_than_others (it compares completions of one prompt: ask for several with --samples)" in output


def test_nothing_that_a_strangers_run_names_is_called() -> None:
    specs = [
        {"name": "os.system", "kwargs": {}},
        {"name": "gate", "kwargs": {"condition": "os.system", "reward": "well_formed"}},
        {"name": "judge", "kwargs": {"base_url": "http://example.org/v1", "model": "m"}},
        "well_formed",
    ]
    usable, skipped = accuracy.measurable_rewards(specs, {"prompt": "p", "answer": "1"}, 1, is_trusted=False)
    assert [reward.name for reward in usable] == ["well_formed"]
    assert len(skipped) == 3
    assert "--recipe" in skipped[0]
    assert "it asks a model that the run names" in skipped[2]


def test_our_own_rewards_of_a_strangers_run_are_measured_in_a_sum_and_a_gate_too() -> None:
    right = {"name": "gsm8k_correctness"}
    specs = [
        {"name": "sum", "rewards": [right, {"name": "gate", "alias": "g", "reward": "os.system", "only_if": right}]},
        {"name": "sum", "rewards": [right, "well_formed"]},
        {"name": "gate", "reward": right, "only_if": "well_formed"},
    ]
    usable, skipped = accuracy.measurable_rewards(specs, {"prompt": "p", "answer": "1"}, 2, is_trusted=False)
    assert [reward.name for reward in usable] == ["sum", "gate"]
    assert skipped == ["sum (code that the run names: give its recipe with --recipe)"]


@pytest.mark.parametrize("value", [[1.0], [1.0, math.inf], None, ["x", "y"]])
def test_a_reward_that_returns_no_scores_is_named(value: Any) -> None:
    reward = accuracy.MeasuredReward("mine", lambda **_: value, None)
    with pytest.raises(UserError, match="reward `mine` can't score the held-out rows"):
        accuracy.reward_values([reward], ["p", "q"], ["a", "b"], {})


def test_compared_rewards_are_paired() -> None:
    """The paired difference is known far better than either mean."""
    problems = list(range(10))
    first = pd.DataFrame({"problem": problems, "reward/r": [float(n) for n in problems]})
    second = first.assign(**{"reward/r": [n + 1 + 0.01 * (-1) ** n for n in problems]})
    mean = compare_tables(first, second)["rewards"]["r"]["mean"]
    assert mean["difference"]["value"] == pytest.approx(1.0)
    assert mean["difference"]["high"] - mean["difference"]["low"] < 0.02
    assert mean["first"]["high"] - mean["first"]["low"] > 4
    assert compare_tables(first, second.rename(columns={"reward/r": "reward/other"})) == {}


def test_rewards_whose_specs_differ_are_not_compared(evaluated: Callable, tmp_path: Path) -> None:
    evaluated([CORRECT])
    evaluated([{**CORRECT, "kwargs": {"extract": "hashes"}}], name="f")
    with pytest.raises(UserError, match="define strict accuracy differently"):
        comparison.compare(tmp_path / "e", tmp_path / "f")
    evaluated([{**CORRECT, "weight": 0.5}], name="g")
    mean = comparison.compare(tmp_path / "e", tmp_path / "g")["rewards"]["gsm8k_correctness"]["mean"]
    assert (
        mean["first"]
        == json.loads((tmp_path / "e/evaluation.json").read_text())["rewards"]["gsm8k_correctness"]["mean"]
    )
    evaluated([CORRECT, "repetition"], name="h")
    evaluated([CORRECT, {"name": "repetition", "kwargs": {"ngram": 2}}], name="i")
    for first, second in (("h", "i"), ("i", "h")):
        assert list(comparison.compare(tmp_path / first, tmp_path / second)["rewards"]) == ["gsm8k_correctness"]


@pytest.mark.parametrize(
    ("n", "quantile"), [(2, 12.7062), (3, 4.3027), (6, 2.5706), (11, 2.2281), (31, 2.0423), (400, 1.9659)]
)
def test_the_interval_of_a_mean_is_students_interval(n: int, quantile: float) -> None:
    """Quantiles from a table of Student's distribution."""
    values = [float(number) for number in range(n)]
    centre = (n - 1) / 2
    error = math.sqrt(sum((value - centre) ** 2 for value in values) / (n - 1) / n)
    found = mean_value(values)
    assert (found.high - found.value) / error == pytest.approx(quantile, rel=2e-4)
    assert found.value - found.low == pytest.approx(found.high - found.value)
    pair = paired_mean([0.0] * n, values)
    assert (pair.value, pair.low, pair.high) == (found.value, found.low, found.high)


def test_one_problem_has_no_interval() -> None:
    with pytest.raises(ValueError, match="requires at least two"):
        mean_value([1.0])
    with pytest.raises(ValueError, match="requires at least two"):
        mean_value([1.0, 2.0, 3.0], ["a", "a", "a"])


@pytest.mark.parametrize("values", [[2.0] * 10, [0.1 + 0.2, 0.3, 0.3], [0.0, 0.0]])
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


def test_the_p_value_of_a_mean_difference_is_students() -> None:
    """Computed with `scipy.stats.ttest_1samp([1, 2, -1, 3, 2], 0).pvalue`, scipy 1.17.1."""
    assert paired_mean([0.0] * 5, [1.0, 2.0, -1.0, 3.0, 2.0]).p == pytest.approx(0.10793882229227654)


def test_an_unscored_completion_is_in_no_mean_and_in_no_share() -> None:
    """One completion of problem 0 is unscored, and so are all three of problem 1."""
    pay = [2.0, None, 0.0, None, None, None, 2.0, 2.0, 2.0]
    passed = [score == 2.0 for score in pay]
    problems = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    table = pd.DataFrame({"problem": problems, "prompt": list("aaabbbccc"), "reward/r": pay, "passed/r": passed})
    found = summarise(table)["rewards"]["r"]
    assert found["unscored"] == 4
    assert found["mean"]["value"] == pytest.approx((1.0 + 2.0) / 2)
    assert found["passed"]["value"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["pass_at"]["1"]["value"] == pytest.approx(0.75)
    assert found["pass_at"]["2"]["value"] == pytest.approx(1.0)
    assert found["pass_at"]["3"]["value"] == pytest.approx(1.0), "of problem 2 alone"
    perfect = table.assign(**{"reward/r": 2.0, "passed/r": True})
    compared = compare_tables(table, perfect)["rewards"]["r"]
    assert compared["mean"]["difference"]["value"] == pytest.approx(0.5), "over problems 0 and 2"
    assert compared["passed"]["difference"]["value"] == pytest.approx(0.25)
    assert compared["passed"]["second"]["value"] == 1.0
    reverse = compare_tables(perfect, table)["rewards"]["r"]
    assert reverse["mean"]["first"]["value"] == 2.0
    assert reverse["passed"]["difference"]["value"] == pytest.approx(-0.25), "over the same problems"


def test_a_reward_that_scored_nothing_has_no_share() -> None:
    table = pd.DataFrame(
        {"problem": [0, 1], "prompt": ["a", "b"], "reward/r": [None, None], "passed/r": [False, False]}
    )
    assert summarise(table)["rewards"]["r"] == {"unscored": 2}


def test_calls_are_counted_per_completion() -> None:
    table = pd.DataFrame({"problem": [0, 1, 2], "prompt": list("abc"), "calls": [0, 2, 5], "reward/r": [0.0, 1.0, 2.0]})
    tools = summarise(table)["tools"]
    assert tools["calls"] == pytest.approx(7 / 3)
    assert tools["called"]["value"] == pytest.approx(2 / 3)
    assert tools["with_call"]["rewards"]["r"]["mean"]["value"] == 1.5


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
        assert difference["low"] < 0 < difference["high"]
        assert difference["p"] > 0.9
        assert "mcnemar" not in result
    assert compare_tables(several, several)["strict"]["difference"]["p"] == 1.0
    # A format that only the strict verdict requires must not count for the side with several samples.
    formless = several.assign(lenient=True)
    assert compare_tables(single, formless)["strict"]["difference"]["value"] == pytest.approx(0.0)


def test_rows_with_the_same_prompt_are_one_problem_everywhere() -> None:
    once = verdicts({f"p{n}": [[n % 3 == 0, n % 2 == 0]] for n in range(12)})
    twice = verdicts({f"p{n}": [[n % 3 == 0, n % 2 == 0]] * 4 for n in range(12)})
    found, copied = summarise(once), summarise(twice)
    separate = summarise(twice.assign(prompt=[f"prompt {problem}" for problem in twice["problem"]]))
    for one, two, other in zip(_estimates(found), _estimates(copied), _estimates(separate), strict=True):
        assert two["value"] == pytest.approx(one["value"])
        assert two["high"] - two["low"] > 1.2 * (other["high"] - other["low"])
    assert copied["majority"] == pytest.approx(found["majority"])
    better_once, better_twice = (table.assign(strict=True, **{"reward/r": 1.0}) for table in (once, twice))
    pair, copied_pair = compare_tables(once, better_once), compare_tables(twice, better_twice)
    for key in ("low", "high", "p"):
        assert copied_pair["strict"]["difference"][key] == pytest.approx(pair["strict"]["difference"][key])
        mean, copied_mean = (result["rewards"]["r"]["mean"]["difference"] for result in (pair, copied_pair))
        assert copied_mean[key] == pytest.approx(mean[key])
    single = twice[twice["sample"] == 0]
    assert "mcnemar" not in compare_tables(single, single), "the copies are not independent"


def _estimates(found: dict[str, Any]) -> list[dict[str, float]]:
    reward = found["rewards"]["r"]
    shares = [found[name] for name in ("strict", "lenient", "majority")] + list(found["pass_at"].values())
    return [*shares, reward["mean"], reward["passed"], *reward["pass_at"].values()]


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


@pytest.mark.parametrize("specs", [[], ["tag_presence"], ["trl.rewards.accuracy_reward"], ["gsm8k_correctness"]])
def test_a_strictly_right_answer_may_be_written_in_another_form(specs: list[str]) -> None:
    rewards = accuracy.strict_rewards(specs, ("think", "answer"))
    texts = [f"<think>\nx\n</think>\n<answer>\n{answer}\n</answer>" for answer in ("1000", "1,000.0", "1001")]
    assert accuracy.is_right(rewards, texts, {"answer": ["1000"] * 3}) == [True, True, False]


THINK_ANSWER = ("think", "answer")


def strict_names(specs: list[Any], **options: Any) -> list[str]:
    return sorted(reward.name for reward in accuracy.strict_rewards(specs, THINK_ANSWER, **options))


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        ([], ["gsm8k_correctness", "well_formed"]),
        (["gsm8k_correctness"], ["gsm8k_correctness"]),
        (["well_formed"], ["gsm8k_correctness", "well_formed"]),
        ([{"name": "gsm8k_correctness", "weight": 0.1}, "well_formed"], ["gsm8k_correctness", "well_formed"]),
        ([{"name": "well_formed", "weight": 0}, "gsm8k_correctness"], ["gsm8k_correctness"]),
        ([{"name": "well_formed", "weight": -1.0}, "gsm8k_correctness"], ["gsm8k_correctness"]),
        ([{"name": "sum", "rewards": ["gsm8k_correctness", {"name": "well_formed", "weight": 0.5}]}],
         ["gsm8k_correctness", "well_formed"]),
        ([{"name": "sum", "rewards": ["gsm8k_correctness", "well_formed"], "weight": 0}],
         ["gsm8k_correctness", "well_formed"]),  # as without any reward
        (["trl.rewards.think_format_reward"], ["gsm8k_correctness", "think_format_reward"]),
        (["trl.rewards.accuracy_reward", "well_formed"], ["gsm8k_correctness", "well_formed"]),
        (["my.rewards.accuracy_reward", "well_formed"], ["gsm8k_correctness", "well_formed"]),
        (["gsm8k_correctness", "gsm8k_correctness"], ["gsm8k_correctness"]),
    ],
)  # fmt: skip
def test_strict_accuracy_is_decided_by_correctness_and_format_with_a_positive_weight(
    specs: list[Any], names: list[str]
) -> None:
    assert strict_names(specs) == names
    assert accuracy.has_correctness(specs) == any("correctness" in str(spec) or "trl.rewards.accuracy" in str(spec)
                                                  for spec in specs if "'weight': 0}" not in str(spec))  # fmt: skip


def test_tags_of_the_command_replace_those_of_the_recipe() -> None:
    specs = [{"name": "well_formed", "kwargs": {"tags": ["a", "b"]}}]
    text = "<x>\n1\n</x>\n<y>\n2\n</y>"
    for override, right in ((True, [True]), (False, [False])):
        rewards = accuracy.strict_rewards(specs, ("x", "y"), override_tags=override)
        (form,) = [reward for reward in rewards if reward.kind == "format"]
        assert accuracy.is_right([form], [text], {}) == right
    default, form = accuracy.strict_rewards([], ("x", "y"))
    assert accuracy.is_right([form], [text], {}) == [True]
    assert accuracy.is_right([default], [text, text], {"answer": ["2", "1"]}) == [True, False]
    with pytest.raises(ValueError, match="tag"):
        accuracy.strict_rewards([], ("x", "x"))


def test_the_columns_and_the_mark_are_those_of_the_first_correctness_reward() -> None:
    specs = ["well_formed", {"name": "gsm8k_correctness", "kwargs": {"gold_column": "gold", "decimal": "comma"}}]
    rewards = accuracy.strict_rewards(specs, THINK_ANSWER)
    assert (accuracy.gold_column(rewards), accuracy.decimal(rewards)) == ("gold", "comma")
    plain = accuracy.strict_rewards(["gsm8k_correctness"], THINK_ANSWER)
    assert (accuracy.gold_column(plain), accuracy.decimal(plain)) == ("answer", "point")
    texts = ["<answer>5</answer>", "so the answer is #### 7", "no number"]
    columns = {"answer": ["5", "7", "9"]}
    assert accuracy.stated_answers(plain, texts, columns, THINK_ANSWER) == ["5", "7", None]
    assert accuracy.can_score(plain, 3, {"answer": ["5", None, "7"]}) == [True, False, True]


def test_what_strict_accuracy_requires_is_told_without_control_characters() -> None:
    described = accuracy.describe([{"pay_exact": 1, "extract": "a\x1bb"}, {"name": "well_formed"}])
    assert described == "right by `extract: a\\x1bb` and full pay of `well_formed`"


def test_a_reward_is_called_as_a_trainer_calls_it() -> None:
    """A completion of a conversation is messages, and one of a text is text. A coroutine is awaited."""
    seen: list[Any] = []

    async def scores(**given: Any) -> list[Any]:
        seen.append(given)
        return [1, None, 0.5]

    reward = accuracy.MeasuredReward("mine", scores, None)
    turns, called = [{"role": "user", "content": "q"}], [{"role": "tool", "content": "r"}]
    found = reward.scores(["p", turns, turns], ["a", "b", called], {"answer": ["1", "2", "3"]})
    assert found == [1.0, None, 0.5]
    assert isinstance(found[0], float)
    expected = ["a", [{"role": "assistant", "content": "b"}], called]
    assert seen == [{"prompts": ["p", turns, turns], "completions": expected, "answer": ["1", "2", "3"]}]
    with pytest.raises(ValueError, match="zip"):
        reward.scores(["p"], ["a", "b", "c"], {})


def test_a_reward_is_tried_on_a_row_with_as_many_empty_completions_as_are_sampled() -> None:
    seen: list[Any] = []

    def scores(prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
        seen.append((prompts, completions, answer))
        return [0.0] * len(prompts)

    reward = accuracy.MeasuredReward("mine", scores, None)
    assert reward.fails_on({"prompt": "p", "answer": "7"}, 3) is None
    assert seen == [(["p"] * 3, [""] * 3, ["7"] * 3)]
    assert reward.fails_on({"prompt": "p"}, 1).startswith("TypeError: ")
    unknown = reward.fails_on({"prompt": "p", "answer": "7", "zone": "a"}, 1)
    assert unknown is not None
    assert "'zone'" in unknown, "every column is given"


def test_only_a_correctness_reward_has_a_share_of_passes() -> None:
    specs: list[Any] = [{"name": "gsm8k_correctness", "weight": 3.0, "alias": "right"}, "well_formed"]
    measured, skipped = accuracy.measurable_rewards(specs, {"prompt": "p", "answer": "1"}, 2, is_trusted=True)
    assert skipped == []
    assert [(one.name, one.spec) for one in measured] == [
        ("right", {"name": "gsm8k_correctness", "alias": "right"}), ("well_formed", {"name": "well_formed"}),
    ]  # fmt: skip
    assert list(accuracy.reward_columns(measured)) == ["reward/right", "passed/right", "reward/well_formed"]
    text = "<think>\n1\n</think>\n<answer>\n1\n</answer>"
    values = accuracy.reward_values(measured, ["p", "p"], [text, "no"], {"answer": ["1", "1"]})
    assert values["passed/right"] == [True, False]
    assert list(values["reward/well_formed"]) == [1.0, 0.0]
    assert list(values) == ["reward/right", "passed/right", "reward/well_formed"]


def test_a_reward_of_whole_groups_needs_several_samples_and_a_judge_needs_trust() -> None:
    def built(kind: str, *, groups: bool) -> Any:
        declared = SimpleNamespace(kind=kind)
        return SimpleNamespace(declared=declared, kind=kind, needs_whole_groups=groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "leaves", lambda rewards: rewards)
        for groups, samples, trusted in itertools.product((False, True), (1, 2), (False, True)):
            judge = accuracy._obstacle(built("judge", groups=groups), samples, is_trusted=trusted)
            other = accuracy._obstacle(built("other", groups=groups), samples, is_trusted=trusted)
            assert (judge is None) == trusted
            assert (other is None) == (samples > 1 or not groups)


class Judging:
    """Reward whose verdicts are given."""

    def __init__(self, *verdicts: bool) -> None:
        self.verdicts = list(verdicts)

    def __call__(self, **given: Any) -> list[float]:
        return [float(verdict) for verdict in self.verdicts]

    def passed(self, scores: list[float]) -> list[bool]:
        return [score == 1 for score in scores]

    def validate(self, rows: int, columns: Any) -> list[bool]:
        return self.verdicts


def test_every_reward_decides_on_every_completion() -> None:
    pair: Any = (Judging(True, True, False), Judging(True, False, True))
    assert accuracy.is_right(pair, ["a", "b", "c"], {}) == [True, False, False]
    assert accuracy.can_score(pair, 3, {}) == [True, False, False]
    short: Any = (Judging(True, True), Judging(True))
    for rewards in (short, short[::-1]):
        with pytest.raises(ValueError, match="zip"):
            accuracy.is_right(rewards, ["a", "b"], {})
        with pytest.raises(ValueError, match="zip"):
            accuracy.can_score(rewards, 2, {})


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_finite_number_is_refused(score: float) -> None:
    reward = accuracy.MeasuredReward("mine", lambda **given: [0.0, score], None)
    with pytest.raises(ValueError, match=f"^{score} is no finite number$"):
        reward.scores(["p", "q"], ["", ""], {})
    with pytest.raises(UserError, match=r"^reward `mine` can't score the held-out rows \(ValueError: "):
        accuracy.reward_values([reward], ["p", "q"], ["", ""], {})
    assert accuracy.MeasuredReward("mine", lambda **given: [None, 1], None).scores(["p", "q"], ["", ""], {}) == [
        None,
        1,
    ]


JUDGE = {"name": "choice_correctness", "weight": 0.5}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("my.style", ["my.style"]),
        ({"name": "my.style", "alias": "mine"}, ["my.style"]),
        (JUDGE, ["choice_correctness"]),
        ({"name": "sum", "rewards": [JUDGE, "my.style"]}, ["choice_correctness", "my.style"]),
        ({"name": "gate", "reward": "my.a", "only_if": {"name": "sum", "rewards": ["my.b"]}}, ["my.a", "my.b"]),
    ],
)
def test_code_that_a_run_names_is_found_in_every_part_of_a_reward(spec: Any, names: list[str]) -> None:
    mapping = {"name": spec} if isinstance(spec, str) else spec
    assert list(accuracy._called_names(mapping)) == names
    skipped = accuracy.measurable_rewards([spec], {"prompt": "p"}, 1, is_trusted=False)[1]
    strange = any(name.startswith("my.") for name in names)
    reason = "(code that the run names: give its recipe with --recipe)"
    assert skipped == [f"{mapping.get('alias', mapping['name'])} {reason}"] if strange else reason not in skipped[0]


def test_an_answer_that_the_reward_did_not_read_is_read_in_any_layout() -> None:
    class Reading(Judging):
        kind = "correctness"

        def __call__(self, **given: Any) -> list[float]:
            given["log_extra"]("extracted", ["", None, None])
            return [0.0] * 3

    rewards: Any = [Reading()]
    texts = ["#### 7", "#### 7", "<b>a</b><c>eight</c>"]
    assert accuracy.stated_answers(rewards, texts, {}, ("b", "c")) == ["", "7", "eight"]
