"""Rewards of a recipe in an evaluation: mean scores with intervals, pass rates, and rewards that must not be called."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.evaluation import accuracy, summary
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.reports.report import write_report
from grpo_recipes.reports.run import Run
from tests.support.errors import refused

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "level": n % 4} for n in range(8)]
GOLDLESS = [{key: value for key, value in row.items() if key != "answer"} for row in ROWS]


def pays_the_level(completions: list, level: list, **columns: Any) -> list[float | None]:
    """Score a message by the level of its row. Level 3 has no score."""
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [None if one == 3 else float(one) for one in level]


async def answers_later(completions: list, **columns: Any) -> list[float]:
    return [0.5] * len(completions)


def needs_a_trainer(completions: list, trainer_state: Any, **columns: Any) -> list[float]:
    return [float(trainer_state.global_step)] * len(completions)


def longer_than_others(completions: list, **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


longer_than_others.needs_whole_groups = True


def pays_a_floor(completions: list, answer: list, **columns: Any) -> list[float]:
    return [
        0.9 if completion[0]["content"].endswith(f" {gold}") else 0.1
        for completion, gold in zip(completions, answer, strict=True)
    ]


HERE = "tests.grpo_recipes.evaluation.test_accuracy."
CORRECT = {"name": "gsm8k_correctness", "kwargs": {"extract": "auto"}, "weight": 3.0}


@pytest.fixture
def evaluated(tmp_path: Path, tiny_model: Path, generating: Callable) -> Callable:
    """Return a function that evaluates rows by a recipe's rewards. The policy is right on even problems only."""

    def complete(prompts: list, settings: Settings) -> list[str]:
        output = []
        for place, prompt in enumerate(prompts):
            n = int(prompt[-1]["content"].split()[2])
            output.append(f"#### {2 * n}" if n % 2 == 0 or (settings.samples > 1 and place % 2) else "#### 1000")
        return output

    generating(complete)

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


def test_every_reward_is_measured_that_can_be(
    evaluated: Callable, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [f"{HERE}needs_a_trainer", f"{HERE}longer_than_others"]
    with caplog.at_level(logging.WARNING):
        found = evaluated([CORRECT, f"{HERE}pays_the_level", f"{HERE}answers_later", *others])["rewards"]
    assert list(found) == ["gsm8k_correctness", "pays_the_level", "answers_later"]
    correct = found["gsm8k_correctness"]
    assert correct["mean"]["value"] == pytest.approx(2.0 * 4 / 8)
    assert correct["passed"]["value"] == 0.5
    for end in ("low", "high"):
        assert correct["mean"][end] == pytest.approx(2 * correct["passed"][end])
    level = found["pays_the_level"]
    assert level["unscored"] == 2
    # 0, 1, 2, 0, 1, 2: by hand, with Student's quantile for five degrees of freedom
    error = math.sqrt(sum((one - 1) ** 2 for one in [0, 1, 2] * 2) / 5 / 6)
    assert level["mean"]["value"] == 1.0
    assert level["mean"]["high"] == pytest.approx(1 + 2.5706 * error, abs=1e-3)
    assert "passed" not in level
    assert found["answers_later"]["mean"] == {"value": 0.5, "low": None, "high": None}, "equal scores"
    (output,) = [text for text in caplog.messages if "needs_a_trainer (TypeError" in text]
    assert "longer_than_others (" in output
    assert "gsm8k_correctness" in capsys.readouterr().out


def test_a_reward_that_declares_what_passes_has_accuracy_and_pass_at_k(
    evaluated: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = {"name": f"{HERE}pays_a_floor", "kind": "correctness", "highest_pay": 1.0, "passes_at": 0.9}
    options = ("--samples", "2", "--temperature", "1")
    found = evaluated([CORRECT, mine], *options)["rewards"]
    correct = found["gsm8k_correctness"]
    assert correct["passed"]["value"] == correct["pass_at"]["1"]["value"] == 0.75  # both samples of even problems
    assert correct["pass_at"]["2"]["value"] == 1.0
    assert correct["majority"]["value"] == 0.5  # odd problems have a wrong answer first, which wins the tie
    for key in ("passed", "pass_at", "majority"):
        assert found["pays_a_floor"][key] == correct[key]
    unknown = evaluated([{"name": f"{HERE}pays_a_floor", "kind": "correctness"}], *options, name="unknown")["rewards"]
    assert "passed" not in unknown["pays_a_floor"]
    evaluated([{**mine, "highest_pay": 0.5, "passes_at": 0.5}], *options, name="false", code=2)
    assert "0.9 is more than its `highest_pay` 0.5" in capsys.readouterr().err


def test_a_task_without_golds_is_evaluated_compared_and_reported(
    evaluated: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluated([f"{HERE}pays_the_level"], rows=GOLDLESS)
    assert "strict" not in found
    assert found["rewards"]["pays_the_level"]["mean"]["value"] == 1.0
    compared = summary.compare(tmp_path / "e", tmp_path / "e")
    assert compared.keys() == {"problems", "warnings", "rewards"}
    assert compared["rewards"]["pays_the_level"]["mean"]["difference"]["value"] == 0.0
    for name, rewards in (("g", []), ("h", [f"{HERE}needs_a_trainer"])):
        evaluated(rewards, rows=GOLDLESS, name=name, code=2)
    assert "`answer`" in capsys.readouterr().err
    run = tmp_path / "run"
    (run / "evaluations").mkdir(parents=True)
    (tmp_path / "e").rename(run / "evaluations" / "after")
    (run / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": n, "reward": 0.1} for n in range(4)]}))
    page = Path(write_report([Run.read(run)], tmp_path / "page")).read_text()
    assert "pays_the_level" in page
    assert "1.000 [" in page


def test_rewards_whose_specs_differ_are_not_compared(evaluated: Callable, tmp_path: Path) -> None:
    first = evaluated([CORRECT, "repetition"])["rewards"]
    evaluated([{**CORRECT, "kwargs": {"extract": "hashes"}}], name="f")
    with refused(tmp_path / "f", "`settings.strict`"):
        summary.compare(tmp_path / "e", tmp_path / "f")
    evaluated([{**CORRECT, "weight": 0.5}, {"name": "repetition", "kwargs": {"ngram": 2}}], name="g")
    for one, other in (("e", "g"), ("g", "e")):
        rewards = summary.compare(tmp_path / one, tmp_path / other)["rewards"]
        assert list(rewards) == ["gsm8k_correctness"], "the weight makes no difference"
        assert rewards["gsm8k_correctness"]["mean"]["first"] == first["gsm8k_correctness"]["mean"]


# ---- which rewards may be called


def measurable(*specs: Any, samples: int = 2, trusted: bool = False) -> tuple[list[str], list[str]]:
    """Return the names of the rewards that can be measured, and the others with the reasons."""
    row = {"prompt": "p", "answer": "1"}
    usable, skipped = accuracy.measurable_rewards(specs, row, samples, is_trusted=trusted)
    return [reward.name for reward in usable], skipped


CHOICE = {"name": "choice_correctness", "weight": 0.5}
JUDGE = {"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}}
STRANGE: list[Any] = [
    "os.system",
    {"name": "os.system", "alias": "mine"},
    {"name": "gate", "kwargs": {"condition": "os.system", "reward": "well_formed"}},
    {"name": "sum", "rewards": [CHOICE, "my.style"]},
    {"name": "gate", "reward": "my.a", "only_if": {"name": "sum", "rewards": ["my.b"]}},
    {"name": "sum", "rewards": ["well_formed", {"name": "gate", "alias": "g", "reward": "os.system",
                                               "only_if": "well_formed"}]},
    JUDGE,
]  # fmt: skip


def test_nothing_that_a_strangers_run_names_is_called() -> None:
    names, skipped = measurable(*STRANGE, "well_formed")
    assert names == ["well_formed"]
    assert len(skipped) == len(STRANGE)
    assert all("--recipe" in reason for reason in skipped)
    right = {"name": "gsm8k_correctness"}
    ours = [
        {"name": "sum", "rewards": [right, "well_formed"]},
        {"name": "gate", "reward": right, "only_if": "well_formed"},
    ]
    assert measurable(*ours) == (["sum", "gate"], [])


def test_a_reward_of_whole_groups_needs_several_samples_and_a_judge_does_not() -> None:
    grouped = f"{HERE}longer_than_others"
    assert measurable(grouped, samples=2, trusted=True) == (["longer_than_others"], [])
    names, (reason,) = measurable(grouped, samples=1, trusted=True)
    assert names == []
    assert "--samples" in reason
    assert "--samples" not in str(measurable(JUDGE, samples=1, trusted=True))


# ---- scores


@pytest.mark.parametrize("value", [[1.0], [1.0, math.inf], [0.0, math.nan], None, ["x", "y"]])
def test_a_reward_that_returns_no_scores_is_named(value: Any) -> None:
    reward = accuracy.MeasuredReward("mine", lambda **_: value, None)
    with refused("reward `mine`"):
        accuracy.reward_values([reward], ["p", "q"], ["a", "b"], {})


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


def test_a_reward_is_tried_on_a_row_with_as_many_empty_completions_as_are_sampled() -> None:
    seen: list[Any] = []

    def scores(prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
        seen.append((prompts, completions, answer))
        return [0.0] * len(prompts)

    reward = accuracy.MeasuredReward("mine", scores, None)
    assert reward.fails_on({"prompt": "p", "answer": "7"}, 3) is None
    assert seen == [(["p"] * 3, [""] * 3, ["7"] * 3)]
    assert reward.fails_on({"prompt": "p"}, 1).startswith("TypeError: ")
    assert "'zone'" in str(reward.fails_on({"prompt": "p", "answer": "7", "zone": "a"}, 1)), "every column is given"


# ---- strict accuracy

THINK_ANSWER = ("think", "answer")


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        ([], ["gsm8k_correctness", "well_formed"]),
        (["gsm8k_correctness"], ["gsm8k_correctness"]),
        (["well_formed"], ["gsm8k_correctness", "well_formed"]),
        ([{"name": "gsm8k_correctness", "weight": 0.1}, "well_formed"], ["gsm8k_correctness", "well_formed"]),
        ([{"name": "well_formed", "weight": 0}, "gsm8k_correctness"], ["gsm8k_correctness"]),
        ([{"name": "sum", "rewards": ["gsm8k_correctness", {"name": "well_formed", "weight": 0.5}]}],
         ["gsm8k_correctness", "well_formed"]),
        (["trl.rewards.think_format_reward"], ["gsm8k_correctness", "think_format_reward"]),
        (["trl.rewards.accuracy_reward", "well_formed"], ["gsm8k_correctness", "well_formed"]),
        (["gsm8k_correctness", "gsm8k_correctness"], ["gsm8k_correctness"]),
    ],
)  # fmt: skip
def test_strict_accuracy_is_decided_by_correctness_and_format_with_a_positive_weight(
    specs: list[Any], names: list[str]
) -> None:
    assert sorted(reward.name for reward in accuracy.strict_rewards(specs, THINK_ANSWER)) == names


def test_a_recipe_has_a_correctness_reward_if_one_of_ours_or_of_trls_counts() -> None:
    for specs in (["gsm8k_correctness"], ["trl.rewards.accuracy_reward"], [{"name": "sum", "rewards": [CHOICE]}]):
        assert accuracy.has_correctness(specs)
    for specs in ([], ["well_formed"], ["my.rewards.accuracy_reward"], [{"name": "gsm8k_correctness", "weight": 0}]):
        assert not accuracy.has_correctness(specs)


def test_the_columns_and_the_mark_are_those_of_the_first_correctness_reward() -> None:
    specs = ["well_formed", {"name": "gsm8k_correctness", "kwargs": {"gold_column": "gold", "decimal": "comma"}}]
    rewards = accuracy.strict_rewards(specs, THINK_ANSWER)
    assert (accuracy.gold_column(rewards), accuracy.decimal(rewards)) == ("gold", "comma")
    plain = accuracy.strict_rewards(["gsm8k_correctness"], THINK_ANSWER)
    assert (accuracy.gold_column(plain), accuracy.decimal(plain)) == ("answer", "point")
    texts = ["<answer>5</answer>", "so the answer is #### 7", "no number", "<b>a</b><c>eight</c>"]
    columns = {"answer": ["5", "7", "9", "8"]}
    assert accuracy.stated_answers(plain, texts, columns, ("b", "c")) == ["5", "7", None, "eight"]


def test_every_reward_decides_on_every_completion() -> None:
    rewards = accuracy.strict_rewards(["choice_correctness", "well_formed"], THINK_ANSWER)
    texts = ["<think>a</think><answer>B</answer>", "B", "<think>a</think><answer>A</answer>"]
    columns = {"answer": ["B"] * 3, "choices": [["Rome", "Paris"]] * 3}
    assert accuracy.is_right(rewards, texts, columns) == [True, False, False]
    golds = {"answer": ["B", "C", None], "choices": [["Rome", "Paris"]] * 3}
    assert accuracy.can_score(rewards, 3, golds) == [True, False, False]


def test_what_strict_accuracy_requires_is_told_without_control_characters() -> None:
    described = accuracy.describe([{"pay_exact": 1, "extract": "a\x1bb"}, {"name": "well_formed"}])
    assert r"a\x1bb" in described
    assert "`well_formed`" in described
