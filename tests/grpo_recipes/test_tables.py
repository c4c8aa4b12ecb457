"""Awkward tables of every task: `init` finds their columns, the rewards pay their golds, and every command runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
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
    """Recipe that `init` writes for a table with options, and a right and a wrong completion for the first row.

    Without the options, `init` asks for the first of them. A table without a reward is asked about with any.
    """

    reward: str
    keys: Mapping[str, Any]
    right: str = ""
    wrong: str = ""
    options: Sequence[str] = ()


def answer(text: str) -> str:
    return f"<reasoning>\nSo it is.\n</reasoning>\n<answer>\n{text}\n</answer>"


def program(text: str) -> str:
    return f"Here it is:\n```python\n{text}\n```"


MULTIPLY = "print(int(input()) * {})".format

GERMAN = ("--question", "Frage")
SPANISH = ("--question", "enunciado")
SINGLE = ",".join(f"opción {letter}" for letter in "abcd")

EXPECTED: dict[str, Expected] = {
    "apps.jsonl": Expected("unit_tests", {}, program("print(int(input()))"), program("print(1)")),
    "bigmath.jsonl": Expected("math_correctness", {}, r"So \boxed{0.5}", r"So \boxed{2}"),
    "boxed.csv": Expected(
        *("math_correctness", {}, r"\boxed{x^2+10x+21}", r"\boxed{x^2+10x-21}"),
        ("--answer", "Worked Solution"),
    ),
    "boxed.jsonl": Expected(
        *("math_correctness", {}, r"Son \boxed{\frac74}", r"\boxed{\frac47}"),
        (*SPANISH, "--answer", "solución"),
    ),
    "choices.jsonl.gz": Expected(
        *("choice_correctness", {}, answer("A"), answer("A or B")),
        (*GERMAN, "--choices", "optionen", "--answer", "richtig"),
    ),
    "choices_missing.jsonl": Expected("choice_correctness", {"drop_missing": True}, answer("B"), answer("A, B, C, D")),
    "choices_columns.csv": Expected(
        *("choice_correctness", {}, answer("iron"), answer("b")),
        ("--question", "Pregunta", "--choices", SINGLE, "--answer", "Clave"),
    ),
    "choices_text.csv": Expected("choice_correctness", {}, answer("1 km"), answer("B")),
    "code.jsonl": Expected(
        *("unit_tests", {}, program("def add(a, b):\n    return a + b"), program("def add(a, b):\n    return 3")),
        ("--question", "prompt_text"),
    ),
    "code_pairs.csv": Expected("unit_tests", {}, program(MULTIPLY(8)), program("print(8)")),
    "dapo17k.jsonl": Expected("math_correctness", {}, "Answer: 0", "Answer: 1"),
    "decimal_comma.csv": Expected(
        *("gsm8k_correctness", {"delimiter": ";"}, answer("2.881,62 €"), answer("2.88162")),
        ("--question", "Aufgabe", "--answer", "Ergebnis", "--decimal", "comma"),
    ),
    "extraction.csv": Expected(
        *("json_schema", {"name": "extraction"}),
        *(answer('{"quantity": 56, "name": "Eva Ruiz"}'), answer('{"quantity": 56, "name": "Bo Chen"}')),
        ("--task", "extraction"),
    ),
    "extraction_nested.jsonl": Expected(
        *("json_schema", {"name": "extraction"}),
        *(answer('{"city": "Oslo", "day": 13}'), answer('{"city": "Oslo", "day": 14}')),
        ("--task", "extraction"),
    ),
    "humaneval.jsonl": Expected(
        "unit_tests",
        {"columns": {"question": "prompt", "tests": "test"}, "system_prompt": "program"},
        program("def add_0(a):\n    return a"),
        program("def add_0(a):\n    return 1"),
    ),
    "ifeval.jsonl": Expected("instructions", {}, "word " * 60, "No, no."),
    "labels.jsonl": Expected(
        "string_match", {"labels": ["not spam", "spam"]}, answer("Spam"), answer("not spam, spam")
    ),
    "labels_cp1252.csv": Expected(
        *("string_match", {"encoding": "cp1252"}),
        *(answer("positiv"), answer("negativ, neutral, positiv")),
        ("--question", "Bewertung", "--answer", "Urteil"),
    ),
    "letters.csv": Expected("judge", {}, options=("--task", "judged")),
    "nested.jsonl": Expected("math_correctness", {}, "The answer is 20.", "It is 21."),
    "numbers.tsv": Expected(
        "gsm8k_correctness", {}, answer("5628"), answer("5.628"), ("--question", "text", "--answer", "value")
    ),
    "sciq.jsonl": Expected("", {}),
    "sharegpt.json": Expected("math_correctness", {}, "The answer is 7.", "5 + 2"),
    "skywork_or1.jsonl": Expected("math_correctness", {}, r"So \boxed{0.5}", r"So \boxed{2}"),
    "summaries.jsonl": Expected(
        *("string_match", {"system_prompt": "Write the summary of the text. Answer with it alone."}),
        "The council of Lyon will plant 72 trees along the river in spring, with schools taking part in the work.",
        "No.",
    ),
    "xlam.jsonl": Expected("", {}),
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
    assert cli.main(["init", name, "--model", model, *EXPECTED[name].options]) == 0
    recipe = f"{name.partition('.')[0]}.yaml"
    return recipe, parse_recipe(["--config", recipe])


def paid(reward: BuiltReward, row: Mapping[str, Any], text: str) -> float | None:
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    (score,) = reward.function(
        prompts=[row["prompt"]], completions=[[{"role": "assistant", "content": text}]], **columns
    )
    return score


def right_completion(name: str, row: Mapping[str, Any], reward: str) -> str:
    """Return a right completion for any row of a table, from its gold alone or from programs written here."""
    asked = str(row["prompt"])
    if name == "code.jsonl":
        return program(SOLUTIONS)
    if name == "code_pairs.csv":
        return program(MULTIPLY(asked.partition(" times ")[2].partition(".")[0]))
    if name == "apps.jsonl":
        return program(f"print(int(input()) + {asked.partition('print n + ')[2].partition('.')[0]})")
    if name == "humaneval.jsonl":
        number = re.search(r"add_(\d+)", asked)
        assert number is not None
        return program(f"def add_{number[1]}(a):\n    return a + {number[1]}")
    if reward == "instructions":
        return "word " * 100
    if name.startswith("boxed"):
        return str(row["answer"])
    if reward == "math_correctness":
        return rf"So \boxed{{{json.loads(row['answer'])[0] if name.startswith('skywork') else row['answer']}}}."
    return str(row["answer"]) if name == "summaries.jsonl" else answer(str(row["answer"]))


def check_table(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Check that `init` asks about a table, or that its rewards pay the golds and no wrong answer."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    expected = EXPECTED[name]
    if expected.options or not expected.reward:
        shutil.copy(TABLES / name, name)
        assert cli.main(["init", name]) == 2
        assert (*expected.options, "--question")[0] in capsys.readouterr().err
        assert not list(folder.glob("*.yaml"))
        if not expected.reward:
            return
    _, recipe = init(name)
    for key, value in expected.keys.items():
        assert getattr(recipe.dataset, key) == value
    checked = check(recipe, Machine(1, bf16=False))
    assert checked.golds is None
    assert not checked.gold_notes
    reward = checked.rewards[0]
    assert reward.name == expected.reward
    if reward.name == "judge":
        return
    for row in (*checked.train_dataset, *(checked.eval_dataset or ())):
        score = paid(reward, row, right_completion(name, row, reward.name))
        assert score is not None
        assert score >= 1, row
    first = load(replace(recipe.dataset, eval_share=None))[0]
    assert (paid(reward, first, expected.right) or 0) >= 1
    wrong = paid(reward, first, expected.wrong)
    assert wrong is not None
    assert wrong <= 0.5


QUICK = ("choices.jsonl.gz", "decimal_comma.csv", "ifeval.jsonl", "labels_cp1252.csv", "letters.csv",
         "sciq.jsonl", "skywork_or1.jsonl", "summaries.jsonl", "extraction.csv")  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_init_asks_or_its_rewards_pay_the_golds_and_no_wrong_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_table(name, tmp_path / "own", monkeypatch, capsys)


@pytest.mark.slow
def test_every_other_table_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    failed = []
    for name in EXPECTED.keys() - {*QUICK}:
        try:
            check_table(name, tmp_path / name, monkeypatch, capsys)
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert failed == []


def kind(request: dict[str, Any], handler: Any) -> tuple[int, Any]:
    """Answer as a judge that gives every completion seven points."""
    return 200, completion(json.dumps({"reason": "fine", "score": 7}))


COMMANDS = (
    *("boxed.csv", "choices_missing.jsonl", "code.jsonl", "decimal_comma.csv", "extraction.csv", "humaneval.jsonl"),
    *("ifeval.jsonl", "labels_cp1252.csv", "letters.csv", "nested.jsonl", "summaries.jsonl"),
)
"""A table of each form and notation."""

LAUNCHED = "boxed.csv"
"""Table whose training runs in processes of its own. A launch imports everything anew, which takes most of its time."""


@pytest.mark.parametrize("name", only([], COMMANDS, COMMANDS[::2]))
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
