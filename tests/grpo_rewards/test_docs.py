"""docs/rewards.md, answers.md and rewards/README.md: rows of tables, and adapters with their frameworks' calls."""

import inspect
import json
import re
import shlex
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from grpo_rewards import (
    choice_correctness,
    group_length,
    instructions,
    json_schema,
    repetition,
    string_match,
    unit_tests,
)
from grpo_rewards.cli import main
from grpo_rewards.math.correctness import GSM8KCorrectness
from grpo_rewards.registry import REGISTERED, build_rewards
from tests.grpo_rewards import answers_page

ANSWERS = (Path(__file__).parents[2] / "docs" / "answers.md").read_text(encoding="utf-8")
DOCS = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
README = (Path(__file__).parents[2] / "rewards" / "README.md").read_text(encoding="utf-8")


def rows_under(head):
    """Return the cells of each row of the table of five columns whose last column has this head."""
    table = ANSWERS.split(f"| {head} |\n|---|---|---|---|---|\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


RIGHT, WRONG = "<think>\na\n</think>\n<answer>\n18\n</answer>", "<answer>17</answer>"


def code(cell):
    return cell.removeprefix("`").removesuffix("`")


def source_of(name):
    return re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", DOCS + README, re.DOTALL).group(1)


def example(name):
    namespace = {}
    exec(compile(source_of(name), name, "exec"), namespace)
    return namespace


def test_the_page_of_answers_is_current():
    assert answers_page.page() == ANSWERS, "python -m tests.grpo_rewards.answers_page > docs/answers.md"


def test_every_row_of_the_policy_table_is_true():
    table = rows_under("verdict")
    assert len(table) >= 60
    assert set(REGISTERED) <= set(re.findall(r"\| `(\w+)` \|", DOCS))
    for question, arguments, gold, completion, verdict in table:
        columns = {}
        reward = GSM8KCorrectness(**({} if arguments == "–" else yaml.safe_load(code(arguments))))
        (score,) = reward(completions=[code(completion)], answer=[code(gold)], log_extra=columns.__setitem__)
        assert columns["verdict"] == [verdict], question
        assert score == {"exact": 2.0, "equal": 1.5, "no gold": None}.get(verdict, 0.0), question


def test_every_row_of_the_table_of_choices_is_true():
    for question, choices, gold, completion, names in rows_under("names"):
        columns = {}
        (score,) = choice_correctness(
            completions=[code(completion)], answer=[gold], choices=[choices.split(", ")], log_extra=columns.__setitem__
        )
        assert columns["extracted"] == [None if names == "none" else names], question
        assert score == float(names == gold), question


def test_the_audit_of_the_page_finds_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(source_of("sloppy"), encoding="utf-8")
    rows = [("What is 6 * 3?", "18"), ("What is 40 + 2?", "42"), ("What is 9 - 12?", "-3"), ("What is 7 * 8?", "56")]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    command = next(line for line in DOCS.splitlines() if line.startswith("$ grpo-rewards audit"))
    assert main(shlex.split(command)[2:]) == 1
    said = capsys.readouterr().out
    printed = DOCS.split(command)[1].split("```\n")[2].splitlines()
    assert len(printed) == 3
    assert set(printed) <= set(said.splitlines())


def test_verls_adapter_scores_its_call():
    compute_score = example("verl")["compute_score"]
    # verl's own prompt: 'Let's think step by step and output the final answer after "####".'
    calls = [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18", 2.0), ("So.\n#### $1,800.00", "1800", 1.5),
        ("Let's see.\n#### 17", "18", 0.0), (RIGHT, "18", 0.0), ("#### 18", "", 0.0),
    ]  # fmt: skip
    # verl's reward loop calls a synchronous function in an executor's thread, by keyword.
    with ThreadPoolExecutor() as executor:
        for solution, gold, expected in calls:
            call = {"data_source": "openai/gsm8k", "solution_str": solution, "ground_truth": gold, "extra_info": {}}
            assert executor.submit(compute_score, **call).result() == expected


def test_openrlhfs_adapter_scores_its_call():
    torch = pytest.importorskip("torch")
    # The call of `SingleTurnAgentExecutor`: in a thread, by position, one row, with special tokens in the text.
    for completion, pay in ((RIGHT, 2.0), (WRONG, 0.0)):
        query = "Q: 3*6?" + completion + "<|im_end|>"
        with ThreadPoolExecutor() as executor:
            outcome = executor.submit(example("openrlhf")["reward_func"], [query], ["Q: 3*6?"], ["18"]).result()
        assert torch.equal(outcome["rewards"], torch.tensor([pay]))
        assert torch.equal(outcome["scores"], torch.tensor([float(pay > 0)]))


def test_openrlhfs_adapter_removes_the_prompt_and_the_end_of_turn():
    pytest.importorskip("torch")
    source = source_of("openrlhf").replace("import gsm8k_correctness", "import string_match as gsm8k_correctness")
    source = source.replace("gsm8k_correctness(", "type(gsm8k_correctness)(extract='whole')(")
    namespace = {}
    exec(source, namespace)
    prompt = "Is it Rome? " * 9
    for query in (f"{prompt}Paris<|im_end|>", f"{prompt[12:]}Paris<|im_end|>", f"{prompt}Paris"):
        assert namespace["reward_func"]([query], [prompt], ["paris"])["rewards"].tolist() == [1.0]


def test_verifiers_adapter_scores_its_call(monkeypatch):
    # `Rubric` calls a function with named objects, more than the function needs, and expects a float.
    class Rubric:
        def __init__(self, funcs):
            self.funcs = funcs

        def score(self, completion, answer):
            objects = {
                "prompt": [], "completion": completion, "answer": answer, "state": {}, "info": {}, "parser": None,
            }  # fmt: skip
            return [float(func(**objects, task=None)) for func in self.funcs]

    monkeypatch.setitem(sys.modules, "verifiers", types.SimpleNamespace(Rubric=Rubric))
    rubric = example("verifiers")["rubric"]
    assert rubric.score([{"role": "assistant", "content": RIGHT}], "18") == [2.0]
    assert rubric.score(WRONG, "18") == rubric.score(RIGHT, "") == [0.0]


def test_trl_takes_the_rewards_unchanged():
    pytest.importorskip("trl")
    for reward in example("trl")["reward_funcs"]:
        # The call of `GRPOTrainer._calculate_rewards`, with both completion shapes.
        for completions in ([RIGHT, WRONG], [[{"role": "assistant", "content": text}] for text in (RIGHT, WRONG)]):
            scores = reward(prompts=["p", "p"], completions=completions, completion_ids=[[1], [1]], answer=["18", "18"],
                            question=["q", "q"], trainer_state=None, log_extra=lambda column, values: None,
                            log_metric=lambda name, value: None)  # fmt: skip
            assert scores[0] > scores[1]


def test_explain_prints_the_documented_lines(tmp_path, capsys, monkeypatch):
    command, shown = re.search(
        r"^\$ grpo-rewards (score [^\n]* --explain)\n.*?\n```\n\n```\n(.*?)```", DOCS, re.M | re.S
    ).groups()
    row = {"completion": "<think>\n9 * 2\n</think>\n<answer>\n$18.00\n</answer>", "answer": "18"}
    (tmp_path / "completions.jsonl").write_text(json.dumps(row))
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.startswith(f"{shown}\n")


def test_the_readmes_example_is_true():
    source = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    namespace, calls = {}, re.findall(r"^(\w+\(.*\))  # (\[[\d.]+\])", source, re.MULTILINE)
    exec(source, namespace)
    assert len(calls) == 2
    for call, shown in calls:
        assert eval(call, namespace) == eval(shown)


def test_own_rewards_work_in_a_spec(monkeypatch):
    module = types.ModuleType("documented_rewards")
    vars(module).update(example("own"))
    monkeypatch.setitem(sys.modules, "documented_rewards", module)
    built = build_rewards(
        ["documented_rewards.brevity",
         {"name": "documented_rewards.Brevity", "alias": "brevity_3", "kwargs": {"budget": 3}}]
    )  # fmt: skip
    assert [reward.function.__name__ for reward in built] == ["brevity", "brevity_3"]
    assert [reward.function(prompts=["p"], completions=["long"]) for reward in built] == [[1.0], [0.0]]
    assert all(inspect.getdoc(reward.function) for reward in built)


def test_a_modules_docstring_has_the_pay_table_of_its_reward():
    for reward in [choice_correctness, group_length, instructions, json_schema, repetition, string_match, unit_tests]:
        tables = re.findall(r"(?:^ *\|.*\n)+", type(reward).__doc__, re.MULTILINE)
        table = "\n".join(line.strip() for line in tables[0].splitlines())
        assert "| pay |" in table
        assert table in sys.modules[type(reward).__module__].__doc__
