"""The preset `programs`: every solution passes its tests, and the splits share no task."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from grpo_recipes.data.load import load, load_prompts
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_rewards import unit_tests

SPEC = DatasetSpec("programs", split="train", eval_split="test", system_prompt="none")
ALL = [*load(SPEC), *load_prompts(SPEC, evaluation=True).dataset]


def test_the_splits_share_no_task() -> None:
    questions = [task["prompt"][0]["content"] for task in ALL]
    assert (len(load(SPEC)), len(set(questions))) == (32, 40)
    inner = load(DatasetSpec("programs", split="train[30:]+test[2:5]", system_prompt="none"))
    assert [row["prompt"][0]["content"] for row in inner] == [*questions[30:32], *questions[34:37]]


def test_each_solution_passes_its_tests_under_pythons_own_assert() -> None:
    for task in ALL:
        namespace: dict[str, Any] = {}
        exec(task["solution"], namespace)
        for test in task["tests"]:
            exec(test, namespace)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_each_solution_earns_full_pay_and_the_question_earns_nothing() -> None:
    tests = [task["tests"] for task in ALL]
    assert unit_tests(completions=[f"```python\n{task['solution']}\n```" for task in ALL], tests=tests) == [1.0] * 40
    assert unit_tests(completions=[task["prompt"][0]["content"] for task in ALL], tests=tests) == [0.0] * 40
