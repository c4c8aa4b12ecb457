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


VALUES: dict[str, list[Any]] = {
    "double": [0, 6, -14],
    "is_even": [True, False, True],
    "larger": [2, 2, -3],
    "last_item": [3, "a", None],
    "count_vowels": [3, 5, 0],
    "reverse_words": ["three two one", "b a", ""],
    "digit_sum": [0, 7, 35],
    "factorial": [1, 1, 3_628_800],
    "fibonacci": [0, 1, 832_040],
    "is_prime": [False, True, False, True],
    "is_palindrome": [True, False, True],
    "unique": [[3, 1, 2], ["b", "a"], []],
    "second_largest": [2, 4, -2],
    "running_sums": [[1, 3, 6], [-1, 0], []],
    "mean": [1.5, 0.15, 0.0],
    "word_counts": [{"a": 2, "b": 1}, {"one": 1}, {}],
    "flatten": [[1, 2, 3], []],
    "common_items": [[2, 3], []],
    "to_celsius": [0.0, 100.0, -40.0, 37.0],
    "greatest_common_divisor": [6, 1, 5],
    "to_binary": ["0", "101", "11111111"],
    "caesar": ["bcd", "abc d", "gdkkn vnqkc"],
    "run_lengths": [[("a", 3), ("b", 1), ("c", 2)], [("x", 1)], []],
    "is_balanced": [True, False, False, True],
    "chunks": [[[1, 2], [3, 4], [5]], [[1]], []],
    "transpose": [[[1, 3, 5], [2, 4, 6]], [[1]]],
    "invert": [{1: "a", 2: "b"}, {}],
    "longest_word": ["words", "yy"],
    "are_anagrams": [True, False],
    "clamp": [3, 0, 2],
    "divisors": [[1], [1, 2, 3, 4, 6, 12], [1, 13]],
    "collatz_steps": [0, 8, 111],
    "merge_sorted": [[1, 2, 3, 4, 5], [1]],
    "is_leap_year": [False, True, True, False],
    "capitalized": ["Hello World", "A", ""],
    "missing_number": [2, 0, 0],
    "rotated": [[4, 1, 2, 3], [2, 3, 1], ["a"]],
    "hamming_distance": [3, 0],
    "pascal_row": [[1], [1, 1], [1, 5, 10, 10, 5, 1]],
    "power_mod": [24, 1, 9],
}
"""Values that the tests of each task demand, in the order of the tasks, found without the solutions."""


def test_the_tests_of_a_task_demand_the_right_values() -> None:
    assert [function.__name__ for function in TASKS] == list(VALUES)
    of_test = [task for number, task in enumerate(VALUES, 1) if number % 5 == 0]
    order = [name for name in VALUES if name not in of_test] + of_test
    for name, task in zip(order, ALL, strict=True):
        assert task["question"].startswith(f"Write a Python function `{name}(")
        assert len(task["tests"]) == len(VALUES[name])
        for test, value in zip(task["tests"], VALUES[name], strict=True):
            assert test.startswith(f"assert {f'abs({name}' if isinstance(value, float) else name}(")
            if isinstance(value, float):
                demanded, _, tolerance = test.rpartition(" - ")[2].partition(") < ")
                assert (float(demanded), float(tolerance)) == (pytest.approx(value), 1e-9)
            else:
                assert test.endswith(f") == {value!r}")


@pytest.mark.parametrize(
    ("name", "arguments", "value"),
    [
        # Beyond the tests that a policy is paid by.
        ("count_vowels", ("OI oue",), 5),
        ("is_prime", (9,), False),
        ("is_palindrome", ("1a2",), False),
        ("caesar", ("z", 27), "a"),
        ("is_balanced", ("]",), False),
        ("is_balanced", ("[)",), False),
        ("is_balanced", ("a[]()b",), True),
        ("rotated", ([1, 2, 3, 4], 3), [2, 3, 4, 1]),
        ("clamp", (3, 0, 3), 3),
        ("is_leap_year", (2100,), False),
        ("second_largest", ([1, 9, 4, 9],), 4),
        ("run_lengths", ("abba",), [("a", 1), ("b", 2), ("a", 1)]),
        ("common_items", ([10, 9, 10], [9, 10]), [9, 10]),
        ("merge_sorted", ([9, 11], [10]), [9, 10, 11]),
    ],
)
def test_a_solution_is_right_for_other_arguments(name: str, arguments: tuple[Any, ...], value: Any) -> None:
    (function,) = (function for function in TASKS if function.__name__ == name)
    assert function(*arguments) == value


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
