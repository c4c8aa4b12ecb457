"""docs/rewards.md: every row of its policy table, and every adapter with the call that its framework makes."""

import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from grpo_rewards import choice_correctness
from grpo_rewards.correctness import GSM8KCorrectness
from grpo_rewards.registry import build_rewards, registered_names
from tests.word_problems import gsm8k_rows

DOCS = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
POLICY = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in DOCS.split("| verdict |\n|---|---|---|---|---|\n")[1].split("\n\n")[0].splitlines()
]
CHOICES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in DOCS.split("| names |\n|---|---|---|---|---|\n")[1].split("\n\n")[0].splitlines()
]
RIGHT, WRONG = "<think>\na\n</think>\n<answer>\n18\n</answer>", "<answer>17</answer>"


def code(cell):
    return cell.removeprefix("`").removesuffix("`")


def example(name):
    namespace = {}
    source = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", DOCS, re.DOTALL).group(1)
    exec(compile(source, f"docs/rewards.md ({name})", "exec"), namespace)
    return namespace


def test_the_policy_table_is_all_there():
    assert len(POLICY) >= 60
    assert {len(row) for row in POLICY} == {5}


@pytest.mark.parametrize(("question", "arguments", "gold", "completion", "verdict"), POLICY)
def test_a_row_of_the_policy_table(question, arguments, gold, completion, verdict):
    columns = {}
    reward = GSM8KCorrectness(**({} if arguments == "–" else yaml.safe_load(code(arguments))))
    (score,) = reward(completions=[code(completion)], answer=[code(gold)], log_extra=columns.__setitem__)
    assert columns["verdict"] == [verdict]
    assert score == {"exact": 2.0, "equal": 1.5, "no gold": None}.get(verdict, 0.0)


@pytest.mark.parametrize(("question", "choices", "gold", "completion", "names"), CHOICES)
def test_a_row_of_the_table_of_choices(question, choices, gold, completion, names):
    columns = {}
    (score,) = choice_correctness(
        completions=[code(completion)], answer=[gold], choices=[choices.split(", ")], log_extra=columns.__setitem__
    )
    assert columns["extracted"] == [None if names == "none" else names]
    assert score == float(names == gold)


def test_every_registered_reward_is_documented():
    for name in registered_names():
        assert f"| `{name}` |" in DOCS


def test_verl():
    compute_score = example("verl")["compute_score"]
    # verl's own prompt: 'Let's think step by step and output the final answer after "####".'
    calls = [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18", 2.0),
        ("Let's see.\n#### $1,800.00", "1800", 1.5),
        ("Let's see.\n#### 17", "18", 0.0),
        (RIGHT, "18", 0.0),
        ("#### 18", "", 0.0),
    ]
    # verl's reward loop calls a synchronous function in an executor's thread, by keyword.
    with ThreadPoolExecutor() as executor:
        for solution, ground_truth, expected in calls:
            score = executor.submit(
                compute_score,
                data_source="openai/gsm8k",
                solution_str=solution,
                ground_truth=ground_truth,
                extra_info={"index": 0},
            ).result()
            assert score == expected


def test_verl_pays_every_gold_solution():
    compute_score = example("verl")["compute_score"]
    golds = [row["answer"] for row in gsm8k_rows(7473)]
    assert len(golds) == 7473
    # verl's preprocessing keeps the number after "####", without its commas, as the ground truth.
    truths = [gold.split("#### ")[1].replace(",", "") for gold in golds]
    assert min(compute_score("openai/gsm8k", gold, truth) for gold, truth in zip(golds, truths, strict=True)) >= 1.5


def test_openrlhf():
    torch = pytest.importorskip("torch")
    outcome = example("openrlhf")["reward_func"](queries=["Q: 3*6?" + RIGHT, "Q" + WRONG], prompts=["Q: 3*6?", "Q"],
                                                 labels=["18", "18"])  # fmt: skip
    assert torch.equal(outcome["rewards"], torch.tensor([2.0, 0.0]))
    assert torch.equal(outcome["scores"], torch.tensor([1.0, 0.0]))


def test_trl_takes_the_rewards_as_they_are():
    pytest.importorskip("trl")
    for reward in example("trl")["reward_funcs"]:
        # The call of `GRPOTrainer._calculate_rewards`, with both completion shapes.
        for completions in ([RIGHT, WRONG], [[{"role": "assistant", "content": text}] for text in (RIGHT, WRONG)]):
            scores = reward(prompts=["p", "p"], completions=completions, completion_ids=[[1], [1]], answer=["18", "18"],
                            question=["q", "q"], trainer_state=None, log_extra=lambda column, values: None,
                            log_metric=lambda name, value: None)  # fmt: skip
            assert scores[0] > scores[1]


def test_the_readmes_example():
    readme = (Path(__file__).parents[2] / "rewards" / "README.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    namespace, calls = {}, re.findall(r"^(\w+\(.*\))  # (\[[\d.]+\])", source, re.MULTILINE)
    exec(source, namespace)
    assert len(calls) == 2
    for call, shown in calls:
        assert eval(call, namespace) == eval(shown)


def test_own_rewards_work_in_a_spec(monkeypatch):
    import types

    module = types.ModuleType("documented_rewards")
    vars(module).update(example("own"))
    monkeypatch.setitem(__import__("sys").modules, "documented_rewards", module)
    built = build_rewards(
        ["documented_rewards.brevity",
         {"name": "documented_rewards.Brevity", "alias": "brevity_3", "kwargs": {"budget": 3}}]
    )  # fmt: skip
    assert [reward.function.__name__ for reward in built] == ["brevity", "brevity_3"]
    assert [reward.function(prompts=["p"], completions=["long"]) for reward in built] == [[1.0], [0.0]]
    assert all(inspect.getdoc(reward.function) for reward in built)
