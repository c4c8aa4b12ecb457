"""`grpo-recipes init`: the guesses about columns and answers, and checks of the recipes that it writes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.checks.checks import Checked, Machine, check
from grpo_recipes.plan import init
from grpo_recipes.plan.columns import Column
from grpo_recipes.plan.init import (
    BOXED,
    CALL_TEMPLATE,
    CHOICE,
    CODE,
    LABEL,
    NONE,
    NUMBER,
    OBJECT,
    TASKS,
    TEXT,
    WORDS,
    WORKED,
    Form,
    Guess,
    Wishes,
    dataset_keys,
    default_output,
    guessed,
    recipe_text,
    schema_of,
    write_first_recipe,
)
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.recipe.specs import DatasetSpec, SourceSpec
from grpo_rewards.errors import UserError
from tests.support import launching
from tests.support.grids import covering

QUESTION = "How many?"
CPU = Machine(1, bf16=False)
LONG = "A long text of many words which is no answer to hold against."

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
        {"instruction": "Write a poem.", "output": LONG},
        TEXT,
        {"question": "instruction", "answer": "output"},
        [],
    ),
    "instructions alone": ({"instruction": "Write a poem."}, NONE, {"question": "instruction"}, []),
    "MATH-500": (
        {"problem": QUESTION, "answer": "\\frac12", "solution": "So $\\boxed{\\frac12}$.", "level": 2},
        BOXED,
        {"question": "problem", "answer": "solution", "other_answer": "answer"},
        ["other_answer", "level"],
    ),
    "objects": (
        {"text": QUESTION, "target": {"city": "Rome", "day": 3}},
        OBJECT,
        {"object": "target"},
        [],
    ),
    "tests": (
        {"task": "Write f.", "test_list": ["assert f(1) == 2"]},
        CODE,
        {"question": "task", "tests": "test_list"},
        [],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_form_and_the_columns_of_a_table_are_guessed(name: str) -> None:
    row, form, columns, others = TABLES[name]
    guess = guessed(datasets.Dataset.from_list([row] * 10))
    assert guess.form is form
    assert dict(guess.columns) == columns
    assert guess.others == others


IN_TAGS = {"tags": ["reasoning", "answer"]}
PRESENCE = {"name": "tag_presence", "kwargs": IN_TAGS}
OBJECTS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "day": {"type": "integer"}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
JUDGE = {"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:8000/v1", "model": "Qwen/Qwen3-8B"}}
RECIPES: dict[str, tuple[str | None, str | None, list[Any], str, list[str]]] = {
    # preset, system prompt, rewards, comment on the rewards, sentences about columns
    "GSM8K": (
        *("gsm8k", "reasoning", [{"name": "gsm8k_correctness", "kwargs": IN_TAGS}, PRESENCE], "# The rewards; "),
        ["question: question (by its name)", "answer: answer (solutions that end in `#### N`)"],
    ),
    "MATH": (
        *("math", "boxed", [{"name": "math_correctness", "kwargs": {"extract": "boxed"}}], "# The rewards; "),
        [
            *("problem: question (by its name)", "solution: answer (solutions with the answer in \\boxed{})"),
            "passed to the rewards: level, type",
        ],
    ),
    "numbers": (
        *(None, "reasoning", [{"name": "gsm8k_correctness", "kwargs": IN_TAGS}, PRESENCE], "# The rewards; "),
        ["Problem: question (by its name)", "target: answer (numbers)"],
    ),
    "words": (
        *(None, "reasoning", [{"name": "string_match", "kwargs": IN_TAGS}, PRESENCE], "# The rewards; "),
        ["question: question (by its name)", "answer: answer (by its name)", "passed to the rewards: other_image"],
    ),
    "ARC": (
        *("multiple_choice", "reasoning", [{"name": "choice_correctness", "kwargs": IN_TAGS}, PRESENCE]),
        "# The rewards; ",
        [
            *("question: question (by its name)", "answerKey: answer (names one of the choices)"),
            *("choices: choices (lists of texts)", "passed to the rewards: id"),
        ],
    ),
    "prompts with golds": (
        *(None, None, ["math_correctness"], "# The rewards; "),
        [
            *("prompt: prompt (complete prompts)", "answer: answer (solutions that end in `#### N`)"),
            "passed to the rewards: n",
        ],
    ),
    "messages": (
        *(None, None, [JUDGE], "# The table has no answers, so a model judges the completions."),
        ["prompt: prompt (complete prompts)"],
    ),
    "instructions": (
        *(None, "Write the output of the text. Answer with it alone."),
        [{"name": "string_match", "kwargs": {"match": "f1", "extract": "whole"}}],
        "# The reward pays for words in common with the text in the table. ",
        ["instruction: question (by its name)", "output: answer (texts)"],
    ),
    "objects": (
        "extraction",
        "Read the text, and answer with one JSON object between <answer> and </answer>. It must fit this JSON Schema:\n"
        + json.dumps(OBJECTS),
        [{"name": "json_schema", "kwargs": {**IN_TAGS, "schema": OBJECTS, "gold_column": "answer"}}],
        *("# The rewards; ", ["text: question (by its name)", "target: answer (by its name)"]),
    ),
    "tests": (
        *(None, "program", ["unit_tests"], "# Programs run in a sandbox, on Linux only (docs/security.md).\n"),
        ["task: question (by its name)", "test_list: answer (tests of a program)"],
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_form_has_its_keys_of_a_recipe(name: str) -> None:
    preset, system_prompt, rewards, comment, sentences = RECIPES[name]
    row, form, columns, _ = TABLES[name]
    guess = guessed(datasets.Dataset.from_list([row] * 10))
    dataset = dataset_keys(SourceSpec(path="a/b.jsonl"), guess)
    expected = {"name": preset, "path": "a/b.jsonl", "columns": columns, "system_prompt": system_prompt}
    if form is CODE:  # the question does not name the function
        expected["prompt_template"] = CALL_TEMPLATE
    assert dataset == {key: value for key, value in expected.items() if value}
    text = recipe_text(dataset, guess, "some/model", has_gpu=True, rows=10, share=None)
    assert yaml.safe_load(text)["rewards"] == rewards
    assert comment in text
    assert [line.removeprefix("  ") for line in guess.describe_columns()] == sentences
    no_answers = "found no column of answers, so a judge scores the completions"
    assert guess.describe() == (no_answers if form is NONE else f"the answers are {form.what} in 10 of 10 rows")


def test_a_prompt_in_words_names_the_function_of_its_tests() -> None:
    """MBPP's sanitized table has its questions in `prompt`. A conversation and HumanEval's prompts stay as they are."""
    for prompt, tests, template in (
        ("Write f.", ["assert f(1) == 2"], "{{ prompt }}\nYour program"),
        (CHAT, ["assert f(1) == 2"], ""),
        ("def f(n):\n", "def check(candidate):\n    assert candidate(1) == 2\n", ""),
    ):
        guess = guessed(datasets.Dataset.from_dict({"prompt": [prompt] * 9, "tests": [tests] * 9}))
        keys = dataset_keys(SourceSpec(path="a.jsonl"), guess)
        assert keys.get("prompt_template", "").startswith(template)
        assert ("prompt_template" in keys) is bool(template)


CHAT = [{"role": "user", "content": QUESTION}]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("values", "prompt", "rewards"),
    [
        # A bare answer in a conversation is right only in a layout, which a prompt of text can't request any more.
        ([str(7 * n % 23) for n in range(20)], CHAT, ["gsm8k_correctness", "tag_presence"]),
        ([f"Rome {n}" for n in range(20)], CHAT, ["string_match", "tag_presence"]),
        (["good", "bad"] * 10, CHAT, ["string_match", "tag_presence"]),
        ([str(7 * n % 23) for n in range(20)], [SYSTEM, *CHAT], ["math_correctness"]),
        ([str(7 * n % 23) for n in range(20)], QUESTION, ["math_correctness"]),
        ([f"Rome {n}" for n in range(20)], QUESTION, [("string_match", "casefold", "whole")]),
        (["good", "bad"] * 10, QUESTION, [("string_match", "casefold", "whole")]),
        ([f"So \\boxed{{{n}}}" for n in range(20)], QUESTION, ["math_correctness"]),
        (["assert f(1) == 2"] * 20, QUESTION, ["unit_tests"]),
        ([LONG + str(n) for n in range(20)], QUESTION, [("string_match", "f1", "whole")]),
        ([{"a": n} for n in range(20)], QUESTION, ["json_schema"]),
    ],
)  # fmt: skip
def test_rewards_for_complete_prompts(values: list[Any], prompt: Any, rewards: list[Any]) -> None:
    guess = guessed(datasets.Dataset.from_dict({"prompt": [prompt] * 20, "answer": values}))
    dataset = dataset_keys(SourceSpec(path="a.jsonl"), guess)
    assert ("system_prompt" in dataset) is ("tag_presence" in rewards)
    assert "name" not in dataset
    assert "labels" not in dataset
    found = yaml.safe_load(recipe_text(dataset, guess, "m", has_gpu=True, rows=20, share=None))["rewards"]
    named = []
    for reward in found:
        kwargs = {} if isinstance(reward, str) else reward["kwargs"]
        name = reward if isinstance(reward, str) else reward["name"]
        named.append((name, kwargs["match"], kwargs["extract"]) if "extract" in kwargs else name)
    assert named == rewards


BATCHES = """
# 2 prompts × 8 completions per optimizer step; more prompts make steadier steps.
per_device_train_batch_size: 16
num_generations: 8
max_completion_length: 256
max_steps: 500
"""


def test_a_recipe_for_a_gpu_and_for_a_cpu_is_written_out() -> None:
    missing = [None if n < 25 else f"{n},5" for n in range(60)]
    guess = guessed(golds("Ergebnis", missing, **{"Nr\nx": list(range(60))}))
    dataset = dataset_keys(SourceSpec(path="in/Preise 2024.tar.gz", decimal="comma", delimiter=";"), guess)
    assert recipe_text(dataset, guess, "my/model", has_gpu=True, rows=1_260, share=0.3) == (
        "# Written by `grpo-recipes init`; check it with `grpo-recipes plan`, run it with `grpo-recipes train`.\n\n"
        "# LoRA on one GPU.\nmodel_name_or_path: my/model\ndtype: bfloat16\nbf16: true\nuse_peft: true\nlora_r: 16\n"
        "lora_alpha: 32\nlora_target_modules: all-linear\n\n"
        "# 1,260 rows; the answers are numbers in 35 of 35 rows. 25 rows have no question or no answer (1, 2, 3, 4, 5, "
        "6, 7, 8, 9,\n# 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20 and 5 more, counted from 1); `drop_missing` leaves "
        "them out. Every other\n# column reaches the rewards: 'Nr\\nx'. About 30% of the rows are held out, by a hash "
        "of each.\n"
        "dataset:\n  path: in/Preise 2024.tar.gz\n  delimiter: ;\n  decimal: comma\n  columns:\n    question: Frage\n"
        "    answer: Ergebnis\n  drop_missing: true\n  system_prompt: reasoning\n  eval_share: 0.3\n\n"
        "# The rewards; `grpo-rewards list` describes each of them, and `grpo-rewards audit` attacks one of your own.\n"
        "rewards:\n- name: gsm8k_correctness\n  kwargs:\n    tags:\n    - reasoning\n    - answer\n    decimal: comma\n"
        "- name: tag_presence\n  kwargs:\n    tags:\n    - reasoning\n    - answer\n" + BATCHES + "\n"
        "# A learning rate for LoRA; full fine-tuning needs about 1e-6.\nlearning_rate: 5.0e-05\nmax_grad_norm: 0.2\n"
        "beta: 0.0\n\n"
        "# Evaluation on the held-out rows every 50 steps.\neval_strategy: steps\neval_steps: 50\n"
        "per_device_eval_batch_size: 16\nlogging_steps: 1\nsave_steps: 50\nsave_total_limit: 2\n"
        "output_dir: runs/Preise-2024\n"
    )
    for_cpu = recipe_text(dataset, guess, "my/model", has_gpu=False, rows=60, share=None)
    assert (
        "# For a CPU, as there is no GPU with bfloat16 here: all parameters, in float32.\nmodel_name_or_path: "
        "my/model\ndtype: float32\nbf16: false\nuse_cpu: true\n\n# 60 rows; "
    ) in for_cpu
    assert "# A learning rate for full fine-tuning of a small model.\nlearning_rate: 1.0e-05\n" in for_cpu
    assert for_cpu.endswith(
        "\n# There are too few rows to hold some out, so nothing is evaluated.\n"
        "logging_steps: 1\nsave_steps: 50\nsave_total_limit: 2\noutput_dir: runs/Preise-2024\n"
    )
    assert "held out, by a hash" not in for_cpu


def written(table: datasets.Dataset, folder: Path, machine: Machine = CPU, **wishes: Any) -> tuple[Guess, Checked]:
    """Write the recipe of a table, and return the guess and what the checks of the recipe build."""
    table.save_to_disk(folder / "table")
    file = folder / "recipe.yaml"
    guess = write_first_recipe(str(folder / "table"), file, "some/model", machine=machine, wishes=Wishes(**wishes))
    return guess, check(parse_recipe(["--config", str(file)]), machine)


@pytest.mark.parametrize(("name", "has_gpu"), covering(TABLES, [False, True]))
def test_the_recipe_passes_every_check(name: str, has_gpu: bool, tmp_path: Path) -> None:
    row, *_ = TABLES[name]
    asked = next((key for key in row if isinstance(row[key], str) and key not in ("id", "answer")), None)
    rows = []
    for number in range(200):  # every row holds another problem, so that a tenth of them can be held out
        if asked:
            rows.append({**row, asked: f"{number}: {row[asked]}"})
        else:
            rows.append({"prompt": [{"role": "user", "content": f"{QUESTION} {number}"}]})
    _, checked = written(datasets.Dataset.from_list(rows), tmp_path, Machine(1, bf16=has_gpu))
    assert checked.eval_dataset is not None
    assert len(checked.train_dataset) + len(checked.eval_dataset) == 200
    assert checked.golds is None
    prompt = str(checked.train_dataset[0]["prompt"])
    assert any(text in prompt for text in (QUESTION, "poem", "Write f."))


def golds(column: str, values: list[Any], **others: list[Any]) -> datasets.Dataset:
    """Return a table with a question in each row, a column of golds, and other columns."""
    questions = [f"What is the answer to question number {n}?" for n in range(len(values))]
    return datasets.Dataset.from_dict({"Frage": questions, column: values, **others})


def test_few_answers_of_another_form_are_ignored_and_many_are_refused() -> None:
    def table(wrong: int) -> datasets.Dataset:
        answers = ["because of what was said above, as the others do"] * wrong + ["#### 7"] * (100 - wrong)
        return golds("answer", answers)

    assert guessed(table(5)).form is WORKED
    with pytest.raises(UserError, match=r"80 of 100 answers in 'answer' are solutions that end in `#### N`.* `--task"):
        guessed(table(20))
    assert guessed(table(20), Wishes(task="numbers")).form is WORKED
    assert guessed(table(20), Wishes(task="text")).form is TEXT


# Content before names


@pytest.mark.parametrize(
    ("column", "values", "form"),
    [
        ("x1", [str(7 * n % 23) + " kg" for n in range(30)], NUMBER),
        ("x1", ["Ja", "nein"] * 15, LABEL),
        ("x1", [f"Stadt {chr(65 + n)}" for n in range(26)], WORDS),
        ("x1", [json.dumps({"a": n}) for n in range(9)], OBJECT),
        ("x1", ["assert f(1) == 2\nassert f(2) == 3"] * 9, CODE),
        ("x1", [rf"Also \boxed{{{n}}}" for n in range(9)], BOXED),
        ("答案", [LONG + str(n) for n in range(9)], TEXT),
    ],
)
def test_the_answer_is_found_by_its_content(column: str, values: list[Any], form: Form) -> None:
    counters = {"Nr": list(range(len(values))), "Kennung": [f"r-{n:03d}" for n in range(len(values))]}
    dates = {"am": [f"2024-03-{1 + n % 28:02d}" for n in range(len(values))], "aus": ["Buch"] * len(values)}
    guess = guessed(golds(column, values, **counters, **dates))
    assert guess.form is form
    assert column in guess.columns.values()
    assert set(guess.others) == {"Nr", "Kennung", "am", "aus"}


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        (
            {
                "a": ["1 apple and one pear more", "2 pears for you and me"],
                "b": ["Why is that so, dear?", "Who is it?"],
            },
            "a",
        ),
        ({"frage": ["Was ist das da?", "Wer ist das da?"], "a": [3, 5], "b": [8, 1]}, "b"),
        ({"frage": ["Was ist das da?"] * 4, "a": ["x", "y", "x", "y"], "b": [9, 7, 5, 6]}, "a"),
    ],
)
def test_equally_good_columns_are_asked_for(columns: dict[str, list[Any]], named: str) -> None:
    with pytest.raises(
        UserError, match=rf"the columns .*'{named}'.* could each be the (question|answer).*`--\w+ COLUMN`"
    ):
        guessed(datasets.Dataset.from_dict(columns))


def test_options_decide_between_columns() -> None:
    table = golds("a", [3, 5, 9], b=[8, 1, 7], c=[["x", "y"]] * 3)
    assert guessed(table, Wishes(answer="b")).columns["answer"] == "b"
    assert guessed(table, Wishes(answer="a", task="words")).form is WORDS
    assert guessed(table, Wishes(question="Frage", task="judged")).form is NONE
    with pytest.raises(UserError, match="--answer names the column 'd', and the table has 'Frage', 'a', 'b', 'c'"):
        guessed(table, Wishes(answer="d"))
    with pytest.raises(UserError, match="'a' has no answers for the task code"):
        guessed(table, Wishes(answer="a", task="code"))
    with pytest.raises(UserError, match="no column names one of the choices"):
        guessed(table, Wishes(choices="c", answer="a"))


def test_golds_that_count_the_choices_from_one_are_refused() -> None:
    table = golds("answer", [1 + n % 4 for n in range(20)], choices=[["a1", "b2", "c3", "d4"]] * 20)
    with pytest.raises(UserError, match=r"15 of 20 answers in 'answer' name one of the choices .*count from 0"):
        guessed(table)


def single(names: list[str]) -> dict[str, list[Any]]:
    return {name: [f"{name} text {n}" for n in range(20)] for name in names}


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("names", "answers", "labels"),
    [
        (["A", "B", "C", "D"], ["A", "B", "C", "D"] * 5, "ABCD"),
        (["option_a", "option_b", "option_c"], ["a", "b", "c", "b"] * 5, "ABC"),
        (["Opción A", "Opción B"], [0, 1, 1, 0] * 5, "AB"),
        (["option1", "option2"], [1, 2, 2, 1] * 5, "12"),
        (["ending0", "ending1", "ending2", "ending3"], [0, 1, 2, 3] * 5, "0123"),
        (["choice_A", "choice_B"], [f"choice_{'AB'[n % 2]} text {n}" for n in range(20)], "AB"),
    ],
)
def test_choices_in_columns_of_their_own_are_found(
    names: list[str], answers: list[Any], labels: str, tmp_path: Path
) -> None:
    table = golds("answer", answers, **single(names))
    guess, checked = written(table, tmp_path)
    assert guess.form is CHOICE
    renamed = {label: name for label, name in zip(labels, names, strict=True) if label != name}
    assert guess.columns == {"question": "Frage", **renamed, "label": "answer"}
    assert checked.golds is None
    rows = [*checked.train_dataset, *(checked.eval_dataset or [])]
    for row in rows:
        assert row["choices"]["label"] == list(labels)
    assert sorted({row["answer"] for row in rows}) == sorted({row["answer"] for row in rows} & set(labels))


@pytest.mark.parametrize("names", [["sentence1", "sentence2"], ["x1", "x2"]])
def test_numbered_columns_and_labels_from_0_are_no_multiple_choice(names: list[str]) -> None:
    table = golds("label", [0, 1, 1, 0] * 5, **single(names))
    assert guessed(table, Wishes(question="Frage")).form is not CHOICE


def test_a_row_may_have_fewer_choices() -> None:
    columns = single(["A", "B", "C", "D"])
    columns["D"][3] = None
    guess = guessed(golds("answer", ["A", "B"] * 10, **columns))
    assert guess.form is CHOICE
    assert guess.missing == []


@pytest.mark.parametrize("form", ['["x {n}", "y {n}"]', "['x {n}', 'y {n}']", "x {n} | y {n}"])
def test_choices_may_be_text(form: str, tmp_path: Path) -> None:
    table = golds("answer", ["A", "B"] * 10, options=[form.replace("{n}", str(n)) for n in range(20)])
    guess, checked = written(table, tmp_path)
    assert guess.form is CHOICE
    assert checked.golds is None


def test_text_with_bars_and_numbers_is_no_multiple_choice() -> None:
    tables = [f"| a | {n} |" for n in range(20)]
    assert guessed(golds("answer", [0, 1, 3, 1] * 5, table=[text.strip("| ") for text in tables])).form is NUMBER


def test_numbers_that_are_positions_and_choices_are_asked_for() -> None:
    columns = {"choices": [["0", "1", "2", "3"]] * 20}
    with pytest.raises(UserError, match="the numbers in 'answer' may be positions of the choices in choices, or the"):
        guessed(golds("answer", [0, 1, 2, 3] * 5, **columns))


def test_answers_that_are_names_of_columns_are_refused() -> None:
    with pytest.raises(UserError, match=r"answers in 'answer' are names of columns \(left, right\), which hold"):
        guessed(golds("answer", ["left", "right"] * 10, **single(["left", "right"])))


def test_a_question_that_is_the_same_in_all_rows_is_refused() -> None:
    columns = {"instruction": ["Add the two numbers."] * 20, "input": [f"{n} and {n + 1}" for n in range(20)]}
    table = datasets.Dataset.from_dict({**columns, "output": [2 * n + 1 for n in range(20)]})
    with pytest.raises(UserError, match="'instruction' has the same text in all rows, and 'input' differ"):
        guessed(table)
    assert guessed(table, Wishes(question="input")).columns["question"] == "input"


def test_marks_between_digits_decide_about_words(tmp_path: Path) -> None:
    pairs = [f"({n},{n % 3}2)" for n in range(20)]
    _, checked = written(golds("answer", pairs), tmp_path)
    reward = checked.rewards[0].function
    answers = [f"<answer>{text}</answer>" for text in ("(1,12)", "(11,2)")]
    assert reward(
        completions=[[{"role": "assistant", "content": text}] for text in answers], answer=["(1,12)"] * 2
    ) == [
        1.0,
        0.0,
    ]


def test_answers_are_read_with_the_decimal_mark_of_the_table(tmp_path: Path) -> None:
    file = tmp_path / "preise.csv"
    lines = [f"Wie viel kosten {n} Stück?;{n}.234,50\n" for n in range(1, 21)]
    file.write_text("Frage;Ergebnis\n" + "".join(lines), encoding="utf-8")
    guess = write_first_recipe(str(file), tmp_path / "r.yaml", "some/model", machine=CPU)
    assert guess.decimal == "comma"
    assert "decimal: comma" in (tmp_path / "r.yaml").read_text().partition("rewards:")[2]


def test_turns_in_the_notation_of_sharegpt_are_a_prompt(tmp_path: Path) -> None:
    rows = []
    for n in range(20):
        turns = [{"from": "human", "value": f"What is {n} + {n}?"}, {"from": "gpt", "value": str(2 * n)}]
        rows.append({"id": f"row-{n}", "conversations": turns})
    guess, checked = written(datasets.Dataset.from_list(rows), tmp_path)
    assert guess.form is NUMBER
    assert guess.brings_prompts
    for row in checked.train_dataset:
        assert [turn["role"] for turn in row["prompt"]] == ["system", "user"]
        assert row["prompt"][1]["content"] == f"What is {int(row['answer']) // 2} + {int(row['answer']) // 2}?"


def test_the_answers_of_squad_are_words_and_its_context_is_named() -> None:
    answers = [{"text": [f"Rome {n}"], "answer_start": [n]} for n in range(20)]
    guess = guessed(golds("answers", answers, context=[f"{n} people went to the city of Rome." for n in range(20)]))
    assert guess.form is WORDS
    assert "  context: text that the prompt does not hold (`dataset.prompt_template` can add it)" in (
        guess.describe_columns()
    )


def test_the_tasks_of_the_command_line_are_those_of_the_forms() -> None:
    assert cli.TASKS == TASKS


# Ambiguous numbers


@pytest.mark.parametrize(
    ("values", "decimal"),
    [
        (["1.200 €", "6.403,64 €", "7 €"], "comma"),
        (["1,200", "5,628"], None),
        (["1.5", "2.25"], None),
        ([1.5, 2.25], None),
    ],
)
def test_a_certain_decimal_mark_is_written(values: list[Any], decimal: str | None, tmp_path: Path) -> None:
    written(golds("Ergebnis", values * 10), tmp_path)
    (reward, _) = yaml.safe_load((tmp_path / "recipe.yaml").read_text())["rewards"]
    assert reward["name"] == "gsm8k_correctness"
    assert reward["kwargs"].get("decimal") == decimal


@pytest.mark.parametrize("values", [["1.200 €", "3.500 €"], ["1.200,50", "1,200.50"]])
def test_an_ambiguous_decimal_mark_is_asked_for(values: list[str], tmp_path: Path) -> None:
    table = golds("Ergebnis", values * 10)
    with pytest.raises(UserError, match=r"may have a decimal point or a decimal comma .*`--decimal point` or"):
        guessed(table)
    assert guessed(table, Wishes(decimal="comma")).decimal == "comma"
    assert guessed(table, Wishes(decimal="point")).decimal == "point"


def test_number_cells_with_two_readings_are_asked_for(tmp_path: Path) -> None:
    file, recipe = tmp_path / "t.csv", tmp_path / "t.yaml"
    rows = [f"Wie viele sind es am Tag {n}?;{1 + n % 9}.{200 + n}" for n in range(40)]
    file.write_text("\n".join(["Frage;Anzahl", *rows]))
    with pytest.raises(UserError, match=r"`--decimal point` or `--decimal comma`"):
        write_first_recipe(str(file), recipe, machine=CPU)
    assert not recipe.exists()
    write_first_recipe(str(file), recipe, machine=CPU, wishes=Wishes(decimal="comma"))
    rows_read = check(parse_recipe(["--config", str(recipe)]), CPU).train_dataset
    assert min(rows_read["answer"]) >= 1200


# Rows without an answer, few rows, schemas


def test_rows_without_an_answer_are_named_and_left_out(tmp_path: Path) -> None:
    guess, checked = written(golds("answer", [None if n % 4 == 1 else n * 3 for n in range(40)]), tmp_path)
    assert guess.missing == list(range(2, 41, 4))
    assert "10 rows have no question or no answer (2, 6, 10" in "\n".join(guess.describe_columns())
    assert checked.eval_dataset is not None
    assert len(checked.train_dataset) + len(checked.eval_dataset) == 30


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("rows", [2, 3, 5, 12, 20])
def test_a_small_table_holds_out_a_larger_share_or_nothing(rows: int, tmp_path: Path) -> None:
    _, checked = written(golds("answer", [n * 3 for n in range(rows)]), tmp_path)
    held_out = 0 if checked.eval_dataset is None else len(checked.eval_dataset)
    assert len(checked.train_dataset) + held_out == rows
    assert len(checked.train_dataset) >= 2
    assert held_out >= rows // 5 or checked.eval_dataset is None


def test_a_table_of_one_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has only one row"):
        written(golds("answer", [3]), tmp_path)


def test_no_recipe_is_written_if_a_check_fails(tmp_path: Path) -> None:
    table = golds("answer", [f"#### {n}" for n in range(20)])
    table.save_to_disk(tmp_path / "table")
    with pytest.raises(UserError, match="model_name_or_path"):
        write_first_recipe(str(tmp_path / "table"), tmp_path / "r.yaml", "./no/such/folder", machine=CPU)
    assert not (tmp_path / "r.yaml").exists()


def test_the_schema_of_objects_fits_each_of_them() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    objects = [
        {"name": "Ann", "age": 3, "tags": ["a"], "home": {"city": "Rome"}},
        {"name": "Bo", "age": 3.5, "tags": [], "home": {"city": "Oslo", "zip": "1"}, "ok": True},
        {"name": 7, "age": 1, "tags": ["b", 2], "home": {"city": "Lima"}, "ok": None},
    ]
    schema = schema_of(objects)
    for one in objects[:2]:
        jsonschema.validate(one, schema)
    assert schema["required"] == ["name", "age", "tags", "home"]
    assert schema["properties"]["home"]["required"] == ["city"]
    for wrong in ({**objects[0], "age": "3"}, {**objects[0], "more": 1}, {"name": "Ann"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_labels_that_differ_in_case_are_one_and_the_prompt_names_them(tmp_path: Path) -> None:
    guess, checked = written(golds("Urteil", ["Gut", "gut", "gut ", "schlecht"] * 10), tmp_path)
    assert guess.labels == ["gut", "schlecht"]
    assert set(checked.train_dataset["answer"]) == {"gut", "schlecht"}
    content = checked.train_dataset[0]["prompt"][-1]["content"]
    assert content.endswith("Answer with one of these labels: gut, schlecht.")


def test_the_command_writes_a_recipe_and_never_overwrites_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {n} + {n}?", "answer": n + n} for n in range(100)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["init", "sums.jsonl", "--model", "my/model"]) == 0
    assert "numbers in 100 of 100 rows" in capsys.readouterr().out
    recipe = yaml.safe_load(Path("sums.yaml").read_text())
    assert recipe["model_name_or_path"] == "my/model"
    assert recipe["dataset"]["path"] == "sums.jsonl"
    before = Path("sums.yaml").read_text()
    assert cli.main(["init", "sums.jsonl"]) == 2
    assert capsys.readouterr().err == "error: --output sums.yaml exists: name another file\n"
    assert Path("sums.yaml").read_text() == before


def test_a_table_without_questions_is_refused() -> None:
    with pytest.raises(UserError, match=r"none of the columns 'a', 'b' looks like a question: .*--question COLUMN"):
        guessed(datasets.Dataset.from_dict({"a": ["x"], "b": [1]}))


@pytest.mark.parametrize(
    ("path", "file"),
    [("a/b c.csv", "b-c.yaml"), ("openai/gsm8k", "gsm8k.yaml"), ("data/*.parquet", "run.yaml"), ("x.tar.gz", "x.yaml")],
)
def test_the_recipe_has_the_name_of_the_table(path: str, file: str) -> None:
    assert default_output(path) == Path(file)


def test_a_column_name_cannot_add_a_line_to_the_recipe(tmp_path: Path) -> None:
    table = golds("answer", ["7", "8", "9"], **{"x\nbf16: true\n": [1, 2, 4]})
    written(table, tmp_path)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["bf16"] is False


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("rows.jsonl/mine.yaml", "a file has the name of its folder"),
        ("rows.jsonl/inner/mine.yaml", "Not a directory"),
        ("/proc/mine.yaml", "No such file or directory"),
    ],
)
def test_a_recipe_that_cannot_be_written_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    launching.write_rows(tmp_path / "rows.jsonl", 20)
    assert cli.main(["init", "rows.jsonl", "--output", output]) == 2
    place = output if output.startswith("/") else f"{output} (relative to {tmp_path})"
    assert capsys.readouterr().err == f"error: --output {place} can't be written ({reason}): name another file\n"


# Boundaries of the guesses


@pytest.mark.parametrize(
    ("places", "share"),
    [
        # Shares of the rows by hash. A tenth of 50 rows holds 10 out only if a fifth lies below it.
        ([n / 100 for n in range(100)], 0.1),
        ([n / 50 for n in range(50)], 0.2),
        ([n / 49 for n in range(49)], 0.2),  # 9 of 49
        ([0.05] + [0.95] * 8, 0.1),  # one of nine
        ([0.05] * 5 + [0.15] + [0.95] * 24, 0.2),  # a fifth of 30 rows
        ([0.25] + [0.95] * 8, 0.3),
        ([0.15] * 8, None),  # nothing would be left to train on
        ([0.15] * 6 + [0.95] * 2, 0.2),
        ([0.15] * 7 + [0.95], None),
        ([0.1] + [0.95] * 8, 0.2),  # below a tenth, not at it
        ([0.49] + [0.95] * 8, 0.5),
        ([0.51] + [0.95] * 8, None),
    ],
)
def test_the_smallest_share_that_holds_enough_rows_out(
    places: list[float], share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = np.array([int(place * 2.0**64) for place in places], dtype=np.uint64)
    monkeypatch.setattr(init, "load_prompts", lambda spec: SimpleNamespace(identities=identities))
    assert init._share_to_hold_out(DatasetSpec.parse({"path": "x"})) == share


def test_three_of_many_columns_are_named() -> None:
    values = [[7, 1, 5], [2, 9, 4], [8, 3, 1], [6, 2, 7]]
    columns = dict(zip("abcd", values, strict=True))
    with pytest.raises(UserError, match="^the columns 'a' and 'b' and 'c' could each be the answer: name one with"):
        guessed(
            datasets.Dataset.from_dict({"Frage": ["Wie viel ist das?", "Was ist das?", "Wer ist das da?"], **columns})
        )


def test_a_column_about_rows_is_an_answer_only_if_it_is_named() -> None:
    table = golds("level", [3, 1, 2], year=[7, 9, 8])
    assert guessed(table).form is NONE
    assert guessed(table, Wishes(answer="year")).roles["year"] == "answer (as asked)"
    assert guessed(table, Wishes(task="judged")).describe() == (
        "found no column of answers, so a judge scores the completions"
    )
    assert (guessed(table).count, guessed(table).looked_at) == (0, 0)


def choosing(right: int, rows: int = 20, name: str = "answer", **others: Any) -> datasets.Dataset:
    """Return a table of multiple choice in which `right` golds name a choice."""
    letters = ["B"] * right + ["none of them"] * (rows - right)
    return golds(name, letters, choices=[["one", "two"]] * rows, **others)


def test_golds_that_name_a_choice_in_nine_of_ten_rows_are_enough() -> None:
    guess = guessed(choosing(18))
    assert (guess.form, guess.count, guess.looked_at) == (CHOICE, 18, 20)
    for right in (17, 10):
        with pytest.raises(
            UserError, match=rf"^{right} of 20 answers in 'answer' name one of the choices in 'choices'"
        ):
            guessed(choosing(right))
        assert guessed(choosing(right), Wishes(task="words")).form is WORDS
    assert guessed(choosing(9)).form is not CHOICE
    assert guessed(choosing(17, name="x1")).form is not CHOICE, "only a column named as an answer is meant"
    with pytest.raises(UserError, match="^no column names one of the choices by its letter, its text or its position"):
        guessed(choosing(17, name="x1"), Wishes(task="multiple_choice"))
    with pytest.raises(UserError, match="^no column names one of the choices by its letter, its text or its position"):
        guessed(choosing(17), Wishes(task="multiple_choice"))


def test_the_answer_may_be_named_among_columns_that_look_like_choices() -> None:
    columns = {"option_a": ["1", "2"] * 10, "option_b": ["3", "4"] * 10}
    guess = guessed(golds("x", ["7"] * 20, **columns), Wishes(answer="option_a"))
    assert guess.form is not CHOICE
    assert "option_a" in guess.columns.values()
    given = guessed(golds("key", ["A", "B"] * 10, **columns), Wishes(answer="key"))
    assert given.form is CHOICE
    assert given.roles == {
        "Frage": "question (by its name)",
        "key": "answer (names one of the choices)",
        "option_a, option_b": "choices (one choice each)",
    }


def test_a_question_beside_texts_of_choices_is_the_only_text() -> None:
    def table(labels: str) -> datasets.Dataset:
        return golds("key", ["A", "B"] * 10, **single(list(labels))).rename_column("Frage", "what")

    assert guessed(table("ABC")).columns["question"] == "what"
    with pytest.raises(UserError, match="could each be the question"):
        guessed(table("AB"))  # two texts may be anything
    assert guessed(table("AB"), Wishes(question="what")).form is CHOICE


def test_a_text_with_a_certain_answer_is_not_the_question() -> None:
    worked = [f"{n} and {n} is as much as\n#### {2 * n}" for n in range(20)]
    guess = guessed(golds("x", worked))
    assert guessed(golds("x", worked).rename_column("Frage", "what")).columns == {"question": "what", "answer": "x"}
    assert (guess.form, dict(guess.columns)) == (WORKED, {"question": "Frage", "answer": "x"})
    with pytest.raises(UserError, match="could each be the"):
        guessed(golds("x", worked, y=worked))


def test_one_text_in_all_rows_is_refused_only_beside_a_text_that_differs() -> None:
    def table(other: list[str]) -> datasets.Dataset:
        return datasets.Dataset.from_dict(
            {"instruction": ["Add the two numbers."] * 20, "more": other, "output": [2 * n % 7 for n in range(20)]}
        )

    with pytest.raises(UserError, match="^'instruction' has the same text in all rows, and 'more' differ: name"):
        guessed(table([f"{n} and {n + 1} of them" for n in range(20)]))
    assert guessed(table(["one text in all of the rows"] * 20)).form is NUMBER


@pytest.mark.parametrize(
    ("decimal", "kwargs"), [("comma", {"decimal": "comma"}), ("point", {"decimal": "point"}), (None, None)]
)
def test_a_decimal_mark_reaches_the_reward_of_complete_prompts(decimal: Any, kwargs: Any) -> None:
    values = ["1.200,50"] * 9 + ["7"] if decimal is None else ["1.200", "3.400"] * 5
    guess = guessed(datasets.Dataset.from_dict({"prompt": [QUESTION] * 10, "answer": values}), Wishes(decimal=decimal))
    kwargs = kwargs or {"decimal": "comma"}
    assert init._rewards(guess) == [{"name": "math_correctness", "kwargs": kwargs}]


@pytest.mark.parametrize(
    ("cells", "wishes", "outcome"),
    [
        (["", "1.200", "3.400"], None, "'1.200'"),
        (["1.200", "3.45"], None, None),  # 3.45 is no thousand
        (["1200", "3400"], None, None),
        (["1.200", "3.400"], "comma", None),
        (["1.200", "3.400"], "point", None),
    ],
)
def test_number_cells_are_ambiguous_if_both_marks_make_numbers(
    cells: list[str], wishes: Any, outcome: str | None, tmp_path: Path
) -> None:
    file, recipe = tmp_path / "t.csv", tmp_path / "new" / "folder" / "t.yaml"
    rows = [f"Wie viele sind es am Tag {n}?;{cell}" for n, cell in enumerate(cells * 10)]
    file.write_text("\n".join(["Frage;Anzahl", *rows]))
    if outcome is not None:
        with pytest.raises(UserError, match=rf"^the answers in 'Anzahl' may have .*\({outcome}\): choose with"):
            write_first_recipe(str(file), recipe, machine=CPU, wishes=Wishes(decimal=wishes))
        return
    guess = write_first_recipe(str(file), recipe, "some/model", machine=CPU, wishes=Wishes(decimal=wishes))
    assert guess.form is NUMBER
    written_recipe = yaml.safe_load(recipe.read_text())
    assert written_recipe["dataset"].get("decimal") == ("comma" if wishes == "comma" else None)
    assert written_recipe["rewards"][0]["kwargs"].get("decimal") == wishes


@pytest.mark.parametrize(("path", "stem"), [("a-b_c.csv", "a-b_c"), ("-x-.csv", "x"), ("é 1.csv", "é-1")])
def test_the_name_of_a_run_keeps_letters_digits_and_dashes(path: str, stem: str) -> None:
    assert default_output(path) == Path(f"{stem}.yaml")


def test_nouns_that_say_nothing_are_not_part_of_the_system_prompt() -> None:
    for noun, says in (("summary", True), ("answer", False), ("Completion", False), ("text", False), ("poem", True)):
        table = golds(noun, [LONG + str(n) for n in range(9)])
        keys = dataset_keys(SourceSpec(path="a.jsonl"), guessed(table, Wishes(question="Frage", answer=noun)))
        expected = f"Write the {noun} of the text. Answer with it alone." if says else None
        assert keys.get("system_prompt") == expected


@pytest.mark.parametrize(
    "noun",
    [
        *("answer", "solution", "final_answer", "expected_answer", "ground_truth", "gold", "target"),
        *("reference_answer", "answers", "label", "answer_key", "answerkey", "correct", "correct_answer"),
    ],
)
def test_names_of_answers_are_no_kinds_of_text(noun: str) -> None:
    guess = guessed(golds(noun, [LONG + str(n) for n in range(9)]), Wishes(question="Frage", answer=noun))
    assert "system_prompt" not in dataset_keys(SourceSpec(path="a.jsonl"), guess)


def test_the_first_thousand_rows_are_looked_at() -> None:
    guess = guessed(golds("x", [7 * n % 1_009 for n in range(1_001)]))
    assert (guess.form, guess.count, guess.looked_at) == (NUMBER, 1_000, 1_000)


def test_rows_without_answers_are_counted_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BATCH", 3)
    rows = [{"question": f"What is number {n}?", "info": {"gold": None if n % 4 == 0 else 3 * n}} for n in range(13)]
    guess = guessed(datasets.Dataset.from_list(rows))
    assert guess.columns == {"answer": "info.gold"}
    assert guess.missing == [1, 5, 9, 13]
    assert guess.others == ["info"]


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ([3], "1 row has no question or no answer (3, counted from 1); `drop_missing` leaves them out"),
        ([1, 2], "2 rows have no question or no answer (1, 2, counted from 1); `drop_missing` leaves them out"),
        (range(1, 21), f"20 rows have no question or no answer ({', '.join(map(str, range(1, 21)))}, counted"),
        (range(1, 22), f"21 rows have no question or no answer ({', '.join(map(str, range(1, 21)))} and 1 more, "),
    ],
    ids=len,
)
def test_twenty_rows_without_answers_are_named(missing: Sequence[int], sentence: str) -> None:
    assert replace(guessed(golds("answer", [7, 1, 5])), missing=missing).about_missing().startswith(sentence)


def test_other_columns_keep_their_names_unless_a_preset_or_the_trainer_uses_them() -> None:
    boxed = [rf"So \boxed{{{n}}}" for n in range(9)]
    others = {"answer": ["a b c d e f g"] * 9, "problem": [n % 2 for n in range(9)], "image": [n % 2 for n in range(9)]}
    guess = guessed(golds("x", boxed, **others, environments=[1] * 9), Wishes(question="Frage", answer="x"))
    assert guess.form is BOXED
    assert guess.columns == {
        **{"question": "Frage", "answer": "x", "other_answer": "answer", "other_problem": "problem"},
        **{"other_image": "image", "other_environments": "environments"},
    }
    prompts = datasets.Dataset.from_dict({"prompt": [QUESTION] * 9, "answer": boxed, "problem": others["problem"]})
    assert guessed(prompts).others == ["problem"]
    assert guessed(golds("target", [7, 1, 5], problem=[4, 2, 9])).others == ["problem"], "no preset reads numbers"


def test_a_column_with_an_answers_name_comes_before_the_last_turns() -> None:
    turns = [[{"from": "human", "value": QUESTION}, {"from": "gpt", "value": LONG + str(n)}] for n in range(20)]
    table = datasets.Dataset.from_dict({"conversations": turns, "n": list(range(20))})
    guess = guessed(table)
    assert (guess.form, guess.columns) == (TEXT, {"prompt": "conversations"})
    assert guess.roles == {
        "conversations": "prompt (conversations)",
        "conversations, last turn": "answer (texts)",
    }
    assert not guess.requests_layout
    named = guessed(table.add_column("answer", [7 * n % 23 for n in range(20)]))
    assert (named.form, named.columns) == (NUMBER, {"prompt": "conversations"})
    assert guessed(table, Wishes(answer="n", task="numbers")).columns == {"prompt": "conversations", "answer": "n"}


def test_keys_of_objects_are_part_of_the_answer() -> None:
    objects = [{"city": f"Rome {n}", "day": 7 * n % 23} for n in range(9)]
    guess = guessed(golds("x1", objects))
    assert (guess.form, guess.columns, guess.others) == (OBJECT, {"text": "Frage", "object": "x1"}, [])
    assert guess.schema["required"] == ["city", "day"]
    assert guessed(golds("x1", objects), Wishes(answer="x1.day")).columns["answer"] == "x1.day"
    worked = [{"more": f"It is\n#### {n}", "text": f"It is\n#### {n}"} for n in range(9)]
    with pytest.raises(UserError, match="the columns 'x1.more' and 'x1.text' could each be the answer"):
        guessed(golds("x1", worked), Wishes(question="Frage", task="numbers"))


def test_messages_are_no_answers_whatever_keys_they_have() -> None:
    turn = {"role": "user", "content": "2 + 2", "input": "2 + 2", "output": "4"}
    table = golds("notes", [[turn]] * 9).rename_column("Frage", "prompt")
    assert guessed(table).form is NONE


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (
            {"answer": "x"},
            "^'x' has no answers of a known form: name another `--answer`, or a `--task` of code, numbers",
        ),
        ({"task": "code"}, "^no column has no answers for the task code: name another"),
        ({"answer": "x", "task": "words"}, "^'x' has no answers for the task words: name another"),
        ({"answer": ""}, "--answer names the column ''"),
        ({"question": ""}, "--question names the column ''"),
        ({"choices": ""}, "--choices names the column ''"),
    ],
    ids=str,
)
def test_wishes_that_no_column_meets_are_refused(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        guessed(golds("x", [[{"a": 1}, {"a": 2}]] * 9), Wishes(**wishes))


def test_an_empty_task_is_no_wish_that_a_column_meets() -> None:
    with pytest.raises(UserError, match="^no column has no answers of a known form: name another"):
        guessed(golds("answer", [7, 1, 5]), Wishes(task=""))


def test_a_task_is_met_by_half_of_the_values() -> None:
    values = ["one and two and three and four"] * 10 + [f"#### {n}" for n in range(10)]
    assert guessed(golds("x", values), Wishes(answer="x", task="numbers")).form is WORKED
    fewer = ["one and two and three and four"] * 11 + [f"#### {n}" for n in range(9)]
    with pytest.raises(UserError, match="'x' has no answers for the task numbers"):
        guessed(golds("x", fewer), Wishes(answer="x", task="numbers"))
    with pytest.raises(UserError, match="'x' has no answers for the task classification"):
        guessed(golds("x", [f"word {n}" for n in range(9)]), Wishes(answer="x", task="classification"))
    assert guessed(golds("x", [17, 42] * 5), Wishes(answer="x", task="classification")).labels == ["17", "42"]


@pytest.mark.parametrize(("numbers", "is_refused"), [(10, True), (9, False)])
def test_words_of_which_half_are_numbers_are_refused(numbers: int, is_refused: bool) -> None:
    values = [str(7 * n % 23) for n in range(numbers)] + [f"Rome number {chr(65 + n)}" for n in range(20 - numbers)]
    if not is_refused:
        assert guessed(golds("x", values)).form is WORDS
        return
    with pytest.raises(
        UserError, match="10 of 20 answers in 'x' are numbers, and .* `--task numbers` or `--task words`"
    ):
        guessed(golds("x", values))


def test_numbers_of_which_half_are_boxed_are_numbers() -> None:
    values = [rf"\boxed{{{n}}}" for n in range(10)] + [str(n) for n in range(10)]
    assert guessed(golds("x", values)).form is NUMBER


def test_a_certain_answer_with_a_questions_name_may_be_the_question() -> None:
    texts = [rf"Fill the \boxed{{{n}}} with what was lost in it" for n in range(9)]
    table = datasets.Dataset.from_dict({"problem": texts, "n": [7, 1, 5, 2, 8, 4, 3, 9, 6]})
    assert guessed(table).columns == {"question": "problem", "answer": "n"}


def test_a_named_answer_or_list_of_choices_is_not_the_question() -> None:
    texts = [f"{n} and what was said above" for n in range(9)]
    table = golds("x", [LONG + str(n) for n in range(9)]).rename_column("Frage", "what")
    with pytest.raises(UserError, match="could each be the question"):
        guessed(table)
    assert guessed(table, Wishes(answer="x")).columns == {"question": "what", "answer": "x"}
    lists = datasets.Dataset.from_dict(
        {"what": texts, "x": ["up to here | down to there"] * 9, "y": ["A", "B", "A"] * 3}
    )
    assert guessed(lists, Wishes(choices="x")).columns == {"question": "what", "choices": "x", "label": "y"}
    nested = [{"text": text, "gold": 7 * n % 23} for n, text in enumerate(texts)]
    inside = datasets.Dataset.from_dict({"x": nested, "y": [LONG + str(n) for n in range(9)]})
    assert guessed(inside, Wishes(answer="x.gold", question="x.text")).columns == {
        **{"question": "x.text", "answer": "x.gold"}
    }


def test_columns_that_share_values_with_a_taken_one_are_left_out() -> None:
    paths = (("x",), ("x", "text"), ("x", "gold"), ("y",))
    outer, text, gold, other = columns = [Column(path, []) for path in paths]
    assert init._unrelated(columns, text) == [gold, other]
    assert init._unrelated(columns, outer) == [other]
    assert init._unrelated(columns, gold, other) == [text]
    assert init._unrelated(columns) == columns
    assert init._without_keys_of_objects(columns) == [outer, other]
    assert init._without_keys_of_objects([text, gold]) == [text, gold]


def test_texts_of_choices_alone_are_asked_about() -> None:
    table = datasets.Dataset.from_dict({**single(["A", "B", "C"]), "key": ["A", "B"] * 10})
    with pytest.raises(UserError, match="the columns 'A' and 'B' and 'C' could each be the question"):
        guessed(table)


def test_one_text_in_all_rows_is_the_question_if_it_is_asked_for() -> None:
    others = {"a": ["one and two and", "two and one and", "two and one and"], "b": ["the same in all rows"] * 3}
    others |= {
        "c": ["x and y and", "y and z and", "z and x and"],
        "d": ["up and down and", "to and fro and", "so it is"],
    }
    table = datasets.Dataset.from_dict({"instruction": ["Add the two numbers."] * 3, **others, "output": [7, 1, 5]})
    with pytest.raises(
        UserError, match="^'instruction' has the same text in all rows, and 'a' and 'c' and 'd' differ: "
    ):
        guessed(table)
    guess = guessed(table, Wishes(question="instruction"))
    assert guess.columns == {"question": "instruction", "answer": "output"}
    assert guess.texts == ["a", "c", "d"]
    with pytest.raises(UserError, match="same text in all rows, and 'a' and 'c' differ: name"):
        guessed(table.remove_columns("d"))
    more = table.add_column("e", ["come and go and", "go and stay and", "stay and come and"])
    with pytest.raises(UserError, match="same text in all rows, and 'a' and 'c' and 'd' differ: name"):
        guessed(more)
    two = datasets.Dataset.from_dict({"instruction": ["Add the two."] * 3, "a": others["a"], "output": [7, 1, 5]})
    with pytest.raises(UserError, match="same text in all rows, and 'a' differ: name"):
        guessed(two)


# Golds that name choices


def test_a_column_without_values_and_another_answer_are_no_golds() -> None:
    table = golds("x1", ["A", "B", "B"] * 3, x2=[None] * 9, choices=[["up", "down"]] * 9)
    guess = guessed(table)
    assert (guess.form, guess.columns["label"], guess.count) == (CHOICE, "x1", 9)
    both = golds("label", ["A", "B", "B"] * 3, answer=["up", "down", "down"] * 3, choices=[["up", "down"]] * 9)
    assert guessed(both).roles["answer"] == "answer (names one of the choices)"
    with pytest.raises(UserError, match="the columns 'x1' and 'x2' could each be the answer"):
        guessed(golds("x1", ["A", "B", "B"] * 3, x2=["B", "A", "B"] * 3, choices=[["up", "down"]] * 9))


def test_a_second_group_of_choices_is_tried_if_the_first_holds_the_answer() -> None:
    names = {"x_a": ["A", "B"] * 10, "x_b": ["no", "yes"] * 10, **single(["option_a", "option_b"])}
    guess = guessed(golds("n", list(range(20)), **names), Wishes(answer="x_a"))
    assert guess.form is CHOICE
    assert guess.roles["option_a, option_b"] == "choices (one choice each)"


def test_a_list_of_choices_that_no_gold_names_is_no_list_of_choices() -> None:
    lists = {"tags": [["red", "green"]] * 20, "options": [["up", "down"]] * 20}
    guess = guessed(golds("x1", ["down", "up"] * 10, **lists))
    assert (guess.columns["choices"], guess.columns["label"]) == ("options", "x1")
    numbers = golds("n", [0, 1] * 10, m=["B", "A"] * 10, figures=["1 | 2", "3 | 4"] * 10)
    assert guessed(numbers).columns == {"question": "Frage", "choices": "figures", "label": "m"}


def texts_in_a_line(letters: int) -> str:
    """Return a text whose first word has so many letters."""
    return f"{'x' * letters} end of it"


def test_text_with_bars_is_multiple_choice_if_it_is_asked_for() -> None:
    table = golds("answer", [0, 1] * 10, table=["up | down", "down | up"] * 10)
    assert guessed(table).form is not CHOICE
    assert guessed(table, Wishes(choices="table")).form is CHOICE


def test_too_few_golds_among_columns_of_single_choices_are_another_task() -> None:
    table = golds("answer", ["A", "none of them"] * 10, **single(["A", "B"]))
    assert guessed(table).form is not CHOICE
    assert guessed(golds("answer", [None, "none"], choices=[["up", "down"]] * 2)).form is not CHOICE
    with pytest.raises(UserError, match="1 of 1 answers|1 of 2 answers"):
        guessed(golds("answer", ["A", "none"], choices=[["up", "down"]] * 2))


def test_answers_are_names_of_columns_only_if_these_are_other_columns() -> None:
    guess = guessed(golds("answer", ["left", "answer"] * 10, left=[n % 3 for n in range(20)]))
    assert guess.form is LABEL


# Golds of all rows


def test_labels_are_read_from_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "LOOKED_AT", 20)
    values = ["good", "bad"] * 10
    assert guessed(golds("x", [*values, *["so so"] * 4])).labels == ["bad", "good", "so so"]
    with pytest.raises(
        UserError, match=r"^'x' has more than 50 labels, or rare ones: choose `--task words`, or another"
    ):
        guessed(golds("x", [*values, *[f"of its own {n}" for n in range(40)]]))


def test_one_answer_with_marks_decides_about_all() -> None:
    assert guessed(golds("x", [f"Rome {chr(65 + n)}" for n in range(19)] + ["(1,12)"])).has_marks
    assert not guessed(golds("x", [f"Rome {chr(65 + n)}" for n in range(20)])).has_marks


def test_the_noun_is_the_last_key_of_the_answer() -> None:
    rows = [{"Frage": f"What is the answer to question {n}?", "info": {"summary": LONG + str(n)}} for n in range(9)]
    guess = guessed(datasets.Dataset.from_list(rows), Wishes(answer="info.summary"))
    keys = dataset_keys(SourceSpec(path="a.jsonl"), guess)
    assert keys["system_prompt"] == "Write the summary of the text. Answer with it alone."


def test_a_decimal_mark_is_that_of_golds_that_are_text() -> None:
    texts = ["1,5", "2,5", "3,25", "n/a", "7", "8", "9", "10,5", "11", "12"]
    assert guessed(golds("x", texts)).decimal == "comma"
    assert guessed(golds("x", [1.5, 2.25, 7.0]), Wishes(decimal="comma")).decimal is None
    for worked in ("It is\n#### {}", r"It is \boxed{{{}}}"):
        assert guessed(golds("x", [worked.format(text) for text in ("1,5", "2,25", "7")])).decimal == "comma"
    with pytest.raises(UserError, match=r"decimal comma \('1.200'\): choose"):
        guessed(golds("x", ["7", "1.200", "3.500", "2.500"]))
    with pytest.raises(UserError, match=r"decimal comma \('2,5'\): choose"):
        guessed(golds("x", ["7", "1.5", "2,5", "3.5"]))


@pytest.mark.parametrize(
    ("values", "schema"),
    [
        ([0, 0], {"type": "integer"}),
        ([1, 2.5, None], {"type": "number"}),
        ([2.5, 1], {"type": "number"}),
        ([False], {"type": "boolean"}),
        (["", 1], {"type": ["string", "integer"]}),
        ([None], {}),
        ([[], []], {"type": "array"}),
        ([[1], [], 5, [2.5]], {"type": ["array", "integer"], "items": {"type": "number"}}),
        (
            [{"a": 1}, {"a": 2, "b": "x"}, "text"],
            {
                "type": ["object", "string"],
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        ),
        ([{str(n): 1 for n in range(51)}], {"type": "object"}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_schema_of_values(values: list[Any], schema: dict[str, Any]) -> None:
    assert schema_of(values) == schema


def test_a_schema_names_fifty_keys() -> None:
    assert len(schema_of([{str(n): 1 for n in range(50)}])["properties"]) == 50


# The text of a recipe


def test_comments_are_wrapped_at_spaces_only() -> None:
    line = "x" * 59 + " " + "y" * 60
    assert init._comment(line) == f"# {line}\n"
    assert init._comment(line + "z") == f"# {'x' * 59}\n# {'y' * 60}z\n"
    path = "a-very-long-" * 11
    assert init._comment(f"file {path}") == f"# file\n# {path}\n"


def test_values_keep_their_letters_and_are_wrapped_as_comments_are() -> None:
    guess = guessed(golds("Lösung", [7, 1, 5]))
    source = SourceSpec(path="Tabelle.csv", encoding="cp1252", delimiter=";")
    dataset = dataset_keys(source, guess)
    assert dataset == {
        **{"path": "Tabelle.csv", "delimiter": ";", "encoding": "cp1252"},
        **{"columns": {"question": "Frage", "answer": "Lösung"}, "system_prompt": "reasoning"},
    }
    for letters, line in ((96, "end of it"), (97, "end of\n    it")):
        changed = {**dataset, "system_prompt": texts_in_a_line(letters)}
        text = recipe_text(changed, guess, "m", has_gpu=True, rows=3, share=None)
        assert "    answer: Lösung\n" in text
        assert f"  system_prompt: {'x' * letters} {line}\n" in text  # a line ends behind the 120th character


def test_a_schema_keeps_its_letters() -> None:
    guess = guessed(golds("object", [{"Straße": f"Weg {n}"} for n in range(9)]))
    assert '"Straße"' in dataset_keys(SourceSpec(path="a.jsonl"), guess)["system_prompt"]


def test_no_recipe_is_left_if_its_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golds("answer", [7, 1, 5]).save_to_disk(tmp_path / "table")

    def refuse(*_: Any) -> None:
        assert (tmp_path / "r.yaml").exists()
        raise UserError("refused")

    for name in ("check", "check_model_exists"):
        with monkeypatch.context() as changes:
            changes.setattr(init, name, refuse)
            with pytest.raises(UserError, match="^refused$"):
                write_first_recipe(str(tmp_path / "table"), tmp_path / "r.yaml", machine=CPU)
        assert not (tmp_path / "r.yaml").exists()


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("question,answer\n")
    with pytest.raises(UserError, match="t.csv has no rows: name another table$"):
        write_first_recipe(str(tmp_path / "t.csv"), tmp_path / "r.yaml", machine=CPU)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("decimal", ["comma", "point"])
def test_a_decimal_mark_is_a_key_of_tables_with_cells_only(decimal: Any, tmp_path: Path) -> None:
    rows = [{"Frage": f"Wie viele sind es am Tag {n}?", "x": f"{1 + n % 9}.{200 + n}"} for n in range(40)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.csv").write_text("Frage;x\n" + "".join(f"{row['Frage']};{row['x']}\n" for row in rows))
    labels = (f"{row['Frage']};{'JN'[n % 2]}\n" for n, row in enumerate(rows))
    (tmp_path / "w.csv").write_text("Frage;Urteil\n" + "".join(labels))
    found = {}
    for name in ("t.jsonl", "t.csv", "w.csv"):
        wishes = Wishes(decimal=decimal)
        guess = write_first_recipe(str(tmp_path / name), tmp_path / f"{name}.yaml", "m/m", machine=CPU, wishes=wishes)
        recipe = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
        kwargs = recipe["rewards"][0].get("kwargs", {})
        found[name] = (guess.decimal, recipe["dataset"].get("decimal"), kwargs.get("decimal"))
    cells = ("comma",) * 3 if decimal == "comma" else (None,) * 3
    assert found["t.jsonl"] == (decimal, None, decimal)
    assert found["t.csv"] == cells
    assert found["w.csv"] == (None, cells[1], None)
    assert write_first_recipe(str(tmp_path / "w.csv"), tmp_path / "other.yaml", "m/m", machine=CPU).form is LABEL


@pytest.mark.parametrize("pattern", ["*.csv", "~/t.csv"])
def test_number_cells_of_a_pattern_are_read_as_those_of_a_file(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = [f"Wie viele sind es am Tag {n}?;{1 + n % 9}.{200 + n}" for n in range(40)]
    Path("t.csv").write_text("\n".join(["Frage;Anzahl", *rows]))
    with pytest.raises(UserError, match=r"`--decimal point` or `--decimal comma`"):
        write_first_recipe(pattern, Path("r.yaml"), "m/m", machine=CPU)
    write_first_recipe(pattern, Path("r.yaml"), "m/m", machine=CPU, wishes=Wishes(decimal="comma"))
    assert yaml.safe_load(Path("r.yaml").read_text())["dataset"]["decimal"] == "comma"
    assert min(check(parse_recipe(["--config", "r.yaml"]), CPU).train_dataset["answer"]) >= 1200
