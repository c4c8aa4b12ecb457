"""Awkward tables of every task: `init` finds their columns, the rewards pay their golds, and every command runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from grpo_recipes import cli, run_recipe
from grpo_recipes.checks.checks import Machine, check
from grpo_recipes.data.load import load
from grpo_recipes.recipe.recipe import Recipe, parse_recipe
from grpo_rewards.registry import BuiltReward
from tests.support.chat_server import completion, serving
from tests.support.grids import only

TABLES = Path(__file__).resolve().parents[1] / "data" / "tables"


class Expected(NamedTuple):
    """Recipe that `init` writes for a table, and a right and a wrong completion for the first row."""

    task: str
    reward: str
    keys: Mapping[str, Any]
    right: str
    wrong: str


def answer(text: str) -> str:
    return f"<reasoning>\nSo it is.\n</reasoning>\n<answer>\n{text}\n</answer>"


def program(text: str) -> str:
    return f"Here it is:\n```python\n{text}\n```"


MULTIPLY = "print(int(input()) * {})".format

EXPECTED: dict[str, Expected] = {
    "boxed.csv": Expected("boxed", "math_correctness", {}, r"\boxed{x^2+10x+21}", r"\boxed{x^2+10x-21}"),
    "boxed.jsonl": Expected("boxed", "math_correctness", {}, r"Son \boxed{\frac74}", r"\boxed{\frac47}"),
    "choices.jsonl.gz": Expected("choice", "choice_correctness", {}, answer("A"), answer("A or B")),
    "choices_missing.jsonl": Expected(
        "choice", "choice_correctness", {"drop_missing": True}, answer("B"), answer("A, B, C, D")
    ),
    "choices_columns.csv": Expected("choice", "choice_correctness", {}, answer("iron"), answer("b")),
    "choices_text.csv": Expected("choice", "choice_correctness", {}, answer("1 km"), answer("B")),
    "code.jsonl": Expected(
        *("tests", "unit_tests", {}),
        *(program("def add(a, b):\n    return a + b"), program("def add(a, b):\n    return 3")),
    ),
    "code_pairs.csv": Expected("tests", "unit_tests", {}, program(MULTIPLY(8)), program("print(8)")),
    "decimal_comma.csv": Expected(
        *("numbers", "gsm8k_correctness", {"delimiter": ";", "decimal": "comma"}),
        *(answer("2.881,62 €"), answer("2.88162")),
    ),
    "extraction.csv": Expected(
        *("JSON objects", "json_schema", {"name": "extraction"}),
        *(answer('{"quantity": 56, "name": "Eva Ruiz"}'), answer('{"quantity": 56, "name": "Bo Chen"}')),
    ),
    "extraction_nested.jsonl": Expected(
        *("JSON objects", "json_schema", {"name": "extraction"}),
        *(answer('{"city": "Oslo", "day": 13}'), answer('{"city": "Oslo", "day": 14}')),
    ),
    "labels.jsonl": Expected(
        *("labels", "string_match", {"labels": ["not spam", "spam"]}),
        *(answer("Spam"), answer("not spam, spam")),
    ),
    "labels_cp1252.csv": Expected(
        *("labels", "string_match", {"encoding": "cp1252", "labels": ["negativ", "neutral", "positiv"]}),
        *(answer("positiv"), answer("negativ, neutral, positiv")),
    ),
    "letters.csv": Expected("judge", "judge", {}, "", ""),
    "nested.jsonl": Expected("numbers", "gsm8k_correctness", {}, answer("20"), answer("21")),
    "numbers.tsv": Expected("numbers", "gsm8k_correctness", {}, answer("5628"), answer("5.628")),
    "sharegpt.json": Expected("numbers", "gsm8k_correctness", {}, answer("7"), answer("5 + 2")),
    "summaries.jsonl": Expected(
        *("texts", "string_match", {}),
        "The council of Lyon will plant 72 trees along the river in spring, with schools taking part in the work.",
        "No.",
    ),
}

SOLUTIONS = "\n".join(
    [
        *("def add(a, b): return a + b", "def last(items): return items[-1]"),
        *("def is_even(n): return n % 2 == 0", "def shout(text): return text.upper()"),
    ]
)


def test_every_table_is_tried() -> None:
    assert {path.name for path in TABLES.iterdir()} == set(EXPECTED)


def init(name: str, model: str = "some/model") -> tuple[str, Recipe]:
    """Run `init` on a copy of a table in the working directory, and return the recipe's name and the recipe."""
    shutil.copy(TABLES / name, name)
    assert cli.main(["init", name, "--model", model]) == 0
    recipe = f"{name.partition('.')[0]}.yaml"
    return recipe, parse_recipe(["--config", recipe])


def paid(reward: BuiltReward, row: Mapping[str, Any], text: str) -> float | None:
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    (score,) = reward.function(
        prompts=[row["prompt"]], completions=[[{"role": "assistant", "content": text}]], **columns
    )
    return score


def right_completion(name: str, row: Mapping[str, Any]) -> str:
    """Return a right completion for any row of a table, from its gold alone or from programs written here."""
    if name == "code.jsonl":
        return program(SOLUTIONS)
    if name == "code_pairs.csv":
        return program(MULTIPLY(str(row["prompt"]).partition(" times ")[2].partition(".")[0]))
    if name.startswith("boxed"):
        return rf"So \boxed{{{row['answer']}}}."
    if name == "summaries.jsonl":
        return str(row["answer"])
    return answer(str(row["answer"]))


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", only([name for name in EXPECTED if not name.startswith("code")], EXPECTED))
def test_init_finds_the_task_and_the_rewards_pay_its_golds_and_no_wrong_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = EXPECTED[name]
    _, recipe = init(name)
    assert expected.task in capsys.readouterr().out
    for key, value in expected.keys.items():
        assert getattr(recipe.dataset, key) == value
    checked = check(recipe, Machine(1, bf16=False))
    assert checked.golds is None
    assert not checked.gold_notes
    reward = checked.rewards[0]
    assert reward.name == expected.reward
    assert checked.eval_dataset is not None
    if reward.name == "judge":
        return
    for row in (*checked.train_dataset, *checked.eval_dataset):
        score = paid(reward, row, right_completion(name, row))
        assert score is not None
        assert score >= 1, row
    first = load(replace(recipe.dataset, eval_share=None))[0]
    assert (paid(reward, first, expected.right) or 0) >= 1
    wrong = paid(reward, first, expected.wrong)
    assert wrong is not None
    assert wrong <= 0.5


def kind(request: dict[str, Any], handler: Any) -> tuple[int, Any]:
    """Answer as a judge that gives every completion seven points."""
    return 200, completion(json.dumps({"reason": "fine", "score": 7}))


LAUNCHED = "choices_missing.jsonl"
"""Table whose training runs in processes of its own. A launch imports everything anew, which takes most of its time."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_every_command_runs_on_the_table_without_an_edit(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, made = init(name, str(tiny_model))
    run = made.output_dir
    steps = ["--max_steps", "2", "--max_completion_length", "8", "--eval_steps", "2", "--save_steps", "2"]
    with serving(kind) as server:
        if name == "letters.csv":  # the judge of the recipe is to be served by its user
            steps += ["--rewards.0.kwargs.base_url", server.url]
        assert cli.main(["plan", recipe, *steps]) == 0
        if name == LAUNCHED:
            assert cli.main(["train", recipe, *steps]) == 0
        else:
            assert run_recipe(parse_recipe(["--config", recipe, *steps])) == 0
        evaluated = ["--recipe", str(run / "run.json"), "--max_new_tokens", "8"]
        assert cli.main(["evaluate", str(run), *evaluated]) == 0
    capsys.readouterr()
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report" / "report.html").read_text(encoding="utf-8")
    assert EXPECTED[name].reward in page
    assert [path.name for path in Path.cwd().glob("*.yaml")] == [recipe]
