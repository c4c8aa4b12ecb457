"""`grpo-recipes init`: the guesses about columns and answers, and checks of the recipes that it writes."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.checks.checks import Machine, check
from grpo_recipes.plan.init import (
    BOXED,
    CHOICE,
    NONE,
    NUMBER,
    WORDS,
    WORKED,
    Form,
    default_output,
    guessed,
    recipe_text,
)
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_rewards.errors import UserError

QUESTION = "How many?"
CPU = Machine(1, bf16=False)

TABLES: dict[str, tuple[dict[str, Any], Form, dict[str, str], list[str]]] = {
    "GSM8K": ({"question": QUESTION, "answer": "3 and 4.\n#### 7"}, WORKED, {}, []),
    "MATH": (
        {"problem": QUESTION, "level": 3, "type": "Algebra", "solution": "So $\\boxed{\\frac12}$."},
        BOXED,
        {"question": "problem", "answer": "solution"},
        ["level", "type"],
    ),
    "the answer beside the solution": (
        {"problem": QUESTION, "answer": "\\frac{x}{2}, by the rule given above", "solution": "So $\\boxed{7}$."},
        BOXED,
        {"question": "problem", "answer": "solution", "other_answer": "answer"},
        ["other_answer"],
    ),
    "numbers": ({"Problem": QUESTION, "target": 7.5}, NUMBER, {"question": "Problem", "answer": "target"}, []),
    "words": (
        {"question": QUESTION, "answer": "the old man", "image": "x"},
        WORDS,
        {"other_image": "image"},
        ["other_image"],
    ),
    "ARC": (
        {"id": "a", "question": QUESTION, "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "B"},
        CHOICE,
        {"label": "answerKey"},
        ["id"],
    ),
    "MMLU": (
        {"question": QUESTION, "subject": "x", "choices": ["one", "two"], "answer": 1},
        CHOICE,
        {"label": "answer"},
        ["subject"],
    ),
    "prompts with golds": ({"prompt": QUESTION, "answer": "#### 7", "n": 1}, WORKED, {}, ["n"]),
    "messages": ({"prompt": [{"role": "user", "content": QUESTION}]}, NONE, {}, []),
    "instructions": (
        {"instruction": "Write a poem.", "output": "A long text of many words which is no answer to hold against."},
        NONE,
        {"question": "instruction"},
        ["output"],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_form_and_the_columns_of_a_table_are_guessed(name: str) -> None:
    row, form, columns, others = TABLES[name]
    guess = guessed(datasets.Dataset.from_list([row] * 10))
    assert guess.form is form
    assert dict(guess.columns) == columns
    assert guess.others == others


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_the_recipe_passes_every_check(name: str, has_gpu: bool, tmp_path: Path) -> None:
    row, *_ = TABLES[name]
    table = datasets.Dataset.from_list([row] * 10)
    asked = "question" if "question" in row else next((key for key in row if isinstance(row[key], str)), None)
    if asked:  # every row holds another problem, so that a tenth of them can be held out
        table = table.remove_columns([asked]).add_column(asked, [f"{number}: {row[asked]}" for number in range(10)])
        table = datasets.Dataset.from_list(
            [{**one, asked: f"{one[asked]} {part}"} for one in table for part in range(20)]
        )
    else:
        content = [[{"role": "user", "content": f"{QUESTION} {number}"}] for number in range(200)]
        table = datasets.Dataset.from_dict({"prompt": content})
    table.save_to_disk(tmp_path / "table")
    file = tmp_path / "recipe.yaml"
    file.write_text(
        recipe_text(str(tmp_path / "table"), guessed(table), "some/model", has_gpu=has_gpu, rows=len(table))
    )
    checked = check(parse_recipe(["--config", str(file)]), Machine(1, bf16=has_gpu))
    assert checked.eval_dataset is not None
    assert len(checked.train_dataset) + len(checked.eval_dataset) == 200
    assert QUESTION in str(checked.train_dataset[0]["prompt"]) or "poem" in str(checked.train_dataset[0]["prompt"])


def test_few_rows_of_another_form_are_ignored_and_many_are_not() -> None:
    def form(wrong: int) -> Form:
        answers = ["because of what was said above, as the others do"] * wrong + ["#### 7"] * (100 - wrong)
        return guessed(datasets.Dataset.from_dict({"question": [QUESTION] * 100, "answer": answers})).form

    assert [form(5), form(20)] == [WORKED, NONE]


def test_the_command_writes_a_recipe_and_never_overwrites_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {n} + {n}?", "answer": n + n} for n in range(100)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["init", "sums.jsonl", "--model", "my/model"]) == 0
    assert "numbers in 100 of the first 100 rows" in capsys.readouterr().out
    recipe = yaml.safe_load(Path("sums.yaml").read_text())
    assert recipe["model_name_or_path"] == "my/model"
    assert recipe["dataset"]["path"] == "sums.jsonl"
    before = Path("sums.yaml").read_text()
    assert cli.main(["init", "sums.jsonl"]) == 2
    assert capsys.readouterr().err == "error: --output sums.yaml exists: name another file\n"
    assert Path("sums.yaml").read_text() == before


def test_a_table_without_questions_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"none of the columns 'a', 'b' looks like a question .*columns: \{question: ...\}"
    ):
        guessed(datasets.Dataset.from_dict({"a": ["x"], "b": [1]}))


@pytest.mark.parametrize(
    ("path", "file"),
    [("a/b c.csv", "b-c.yaml"), ("openai/gsm8k", "gsm8k.yaml"), ("data/*.parquet", "run.yaml"), ("x.tar.gz", "x.yaml")],
)
def test_the_recipe_has_the_name_of_the_table(path: str, file: str) -> None:
    assert default_output(path) == Path(file)


def test_a_column_name_cannot_add_a_line_to_the_recipe() -> None:
    table = datasets.Dataset.from_list([{"question": QUESTION, "answer": "7", "x\nbf16: true\n": 1}] * 3)
    text = recipe_text("t", guessed(table), "m", has_gpu=False, rows=3)
    assert yaml.safe_load(text)["bf16"] is False
