"""The preset `programs`: every solution passes its tests, and the splits share no task."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from grpo_recipes.data.load import load, load_prompts
from grpo_recipes.data.programs import TASKS, programming_tasks
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_rewards import unit_tests
from grpo_rewards.errors import UserError

ALL = [*programming_tasks("train"), *programming_tasks("test")]


def test_the_splits_share_no_task() -> None:
    assert (len(programming_tasks("train")), len(programming_tasks("test"))) == (32, 8)
    assert len({task["question"] for task in ALL}) == len(TASKS) == 40
    spec = DatasetSpec("programs", split="train[:4]", eval_split="test", system_prompt="none")
    assert [row["prompt"][0]["content"] for row in load(spec)] == [task["question"] for task in ALL[:4]]
    inner = load(DatasetSpec("programs", split="train[30:]+test[2:5]", system_prompt="none"))
    assert [row["prompt"][0]["content"] for row in inner] == [task["question"] for task in (*ALL[30:32], *ALL[34:37])]
    held_out = load_prompts(spec, evaluation=True).dataset
    assert list(held_out["tests"]) == [task["tests"] for task in ALL[32:]]
    assert list(held_out["solution"]) == [task["solution"] for task in ALL[32:]]


@pytest.mark.parametrize("keys", [{"path": "x.jsonl"}, {"size": 3}, {"columns": ["question"]}])
def test_keys_that_it_does_not_use_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="does not go with the dataset `programs`"):
        DatasetSpec("programs", **keys)


@pytest.mark.parametrize("task", ALL, ids=lambda task: task["question"].split("`")[1].split("(")[0])
def test_each_solution_passes_its_tests_under_pythons_own_assert(task: dict[str, Any]) -> None:
    namespace: dict[str, Any] = {}
    exec(task["solution"], namespace)
    for test in task["tests"]:
        exec(test, namespace)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_each_solution_earns_full_pay_and_the_question_earns_nothing() -> None:
    tests = [task["tests"] for task in ALL]
    assert unit_tests(completions=[f"```python\n{task['solution']}\n```" for task in ALL], tests=tests) == [1.0] * 40
    assert unit_tests(completions=[task["question"] for task in ALL], tests=tests) == [0.0] * 40


def test_a_solution_needs_nothing_of_this_project() -> None:
    program = "\n".join(task["solution"].partition("\n\n\n")[2] for task in ALL)
    header = ALL[0]["solution"].partition("\n\n\n")[0]
    subprocess.run([sys.executable, "-I", "-S", "-c", f"{header}\n{program}"], check=True)
