"""`grpo-recipes init`: the recipe that it writes for a table, or the option that it asks for."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import datasets
import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.checks.checks import Machine, check
from grpo_recipes.data.load import recipe_prompts
from grpo_recipes.plan import forms, init
from grpo_recipes.plan.init import Proposal, Wishes, proposed, write_first_recipe
from grpo_recipes.recipe.recipe import Recipe, parse_recipe
from grpo_rewards.math.golds import gold_answer
from tests.support.errors import refused

CPU = Machine(1, bf16=False)
ROWS = 20


def question(n: int) -> str:
    return f"What happens in story number {n}?"


def text(n: int) -> str:
    return f"Story {n} tells how the {NOUNS[n % 7]} of town {n} met the {NOUNS[n % 5]} at the river."


NOUNS = ("mayor", "baker", "doctor", "sailor", "miller", "singer", "farmer")
COLORS = ("red", "green", "blue")


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def chat(content: str, answer: str) -> list[dict[str, str]]:
    return [*user(content), {"role": "assistant", "content": answer}]


class Shape(NamedTuple):
    """Table in the shape of a common set, the recipe that is written for it, and a part of its first prompt."""

    row: Callable[[int], dict[str, Any]]
    reward: str
    keys: Mapping[str, Any] = MappingProxyType({})
    prompt: str = ""
    right: str | None = None
    """Completion that the first row pays in full. Default: the gold in the layout of the reward."""


FENCED = "```python\ndef f0(x):\n    return x\n```"

PROPOSED: dict[str, Shape] = {
    "GSM8K": Shape(
        lambda n: {"question": question(n), "answer": f"So it is.\n#### {3 * n + 7}"},
        "gsm8k_correctness",
    ),
    "NuminaMath: answer before messages and solution": Shape(
        lambda n: {
            **{"source": "a", "problem": question(n), "solution": "So \\boxed{1}", "answer": f"\\frac{{{n}}}{{101}}"},
            "messages": chat(question(n), "So \\boxed{1}"),
        },
        *("math_correctness", {"columns": {"question": "problem"}, "system_prompt": "boxed"}),
    ),
    "Alpaca, of which many rows have no input": Shape(
        lambda n: {
            **{"instruction": f"Name the color of case {n}.", "input": text(n) if n % 2 else ""},
            "output": f"{COLORS[n % 3]} {n}",
        },
        "string_match",
        {"prompt_template": "{{ question }}{% if input %}\n\n{{ input }}{% endif %}"},
    ),
    "SQuAD": Shape(
        lambda n: {
            **{"id": f"x{n}", "title": "T", "context": text(n), "question": question(n)},
            "answers": {"text": [f"mayor of town {n}"], "answer_start": [3]},
        },
        "string_match",
        {"columns": {"answer": "answers"}, "prompt_template": "{{ context }}\n\n{{ question }}"},
        f"{text(0)}\n\n{question(0)}",
    ),
    "NQ": Shape(lambda n: {"question": question(n), "answer": [f"town {n}", f"city {n}"]}, "string_match"),
    "BoolQ": Shape(
        lambda n: {"question": f"is story {n} true", "passage": text(n), "answer": n % 3 == 0},
        "string_match",
        {"name": "classification", "labels": ["false", "true"]},
        f"{text(0)}\n\nis story 0 true\n\nAnswer with one of these labels: false, true.",
    ),
    "label and label_text": Shape(
        lambda n: {"text": text(n), "label": n % 3, "label_text": COLORS[n % 3]},
        "string_match",
        {"columns": {"label": "label_text", "other_label": "label"}, "labels": ["blue", "green", "red"]},
        "labels: blue, green, red.",
    ),
    "ARC": Shape(
        lambda n: {
            **{"id": f"{n}", "question": question(n), "answerKey": "AB"[n % 2]},
            "choices": {"text": [f"red {n}", f"blue {n}"], "label": ["A", "B"]},
        },
        *("choice_correctness", {"name": "multiple_choice", "columns": {"label": "answerKey"}}, "A. red 0\nB. blue 0"),
    ),
    "MMLU": Shape(
        lambda n: {"question": question(n), "subject": "x", "choices": [f"red {n}", f"blue {n}"], "answer": n % 2},
        *("choice_correctness", {"name": "multiple_choice"}, "A. red 0\nB. blue 0"),
    ),
    "MMLU-Pro: a letter and its position": Shape(
        lambda n: {
            **{"question": question(n), "options": [f"red {n}", f"blue {n}"], "answer": "AB"[n % 2]},
            **{"answer_index": n % 2, "cot_content": text(n), "category": "law"},
        },
        *("choice_correctness", {"columns": {"label": "answer", "choices": "options"}}, "A. red 0\nB. blue 0"),
    ),
    "MedQA: choices by letter, the text of the right one": Shape(
        lambda n: {
            **{"question": question(n), "answer": f"{COLORS[n % 2]} {n}", "answer_idx": "AB"[n % 2]},
            "options": {"A": f"red {n}", "B": f"green {n}"},
        },
        *("choice_correctness", {"columns": {"label": "answer", "choices": "options"}}, "A. red 0\nB. green 0"),
    ),
    "MBPP": Shape(
        lambda n: {
            **{"text": f"Write a function of case {n}.", "code": "...", "test_setup_code": ""},
            **{"test_list": [f"assert f{n}({n}) == {n}"], "challenge_test_list": []},
        },
        *("unit_tests", {"columns": {"question": "text", "tests": "test_list"}, "system_prompt": "program"}),
        *("Your program is called like this: f0(0)", FENCED),
    ),
    "APPS with functions": Shape(
        lambda n: {
            **{"question": question(n), "starter_code": f"def f{n}(x):"},
            "input_output": json.dumps({"fn_name": f"f{n}", "inputs": [[n]], "outputs": [n]}),
        },
        *("unit_tests", {"columns": {"tests": "input_output"}}, f"{question(0)}\n\ndef f0(x):", FENCED),
    ),
    "assertions as JSON": Shape(
        lambda n: {"question": question(n), "tests": json.dumps([f"assert f{n}({n}) == {n}"])},
        *("unit_tests", {"system_prompt": "program"}, "called like this: f0(0)", FENCED),
    ),
    "verl: golds inside of objects": Shape(
        lambda n: {
            **{"data_source": "x", "prompt": user(question(n)), "ability": "math"},
            **{"reward_model": {"ground_truth": str(3 * n), "style": "rule"}, "extra_info": {"index": n}},
        },
        *("math_correctness", {"columns": {"answer": "reward_model.ground_truth"}}),
    ),
    "names that TRL takes": Shape(
        lambda n: {"question": question(n), "answer": 3 * n, "completions": "x", "problem_id": n, "environment": "y"},
        *("gsm8k_correctness", {"columns": {"other_completions": "completions", "other_environment": "environment"}}),
    ),
}


def completion(reward: dict[str, Any], row: dict[str, Any]) -> str:
    """Return the gold of a row in the layout that a reward reads."""
    gold = row["answer"]["text"] if isinstance(row["answer"], dict) else row["answer"]
    gold = gold[0] if isinstance(gold, list) else gold
    gold = gold_answer(gold) if reward["name"] == "gsm8k_correctness" else gold
    if reward["name"] == "math_correctness":
        return f"So it is \\boxed{{{gold_answer(gold)}}}."
    return str(gold) if "tags" not in reward["kwargs"] else f"<reasoning>\n\n</reasoning>\n<answer>\n{gold}\n</answer>"


def written(
    table: datasets.Dataset, folder: Path, machine: Machine = CPU, **wishes: Any
) -> tuple[Proposal, dict[str, Any], Recipe]:
    """Write the recipe of a table, and return the proposal, and the recipe as it is written and as it is read."""
    table.save_to_disk(folder / "table")
    file = folder / "recipe.yaml"
    proposal = write_first_recipe(str(folder / "table"), file, "some/model", machine=machine, wishes=Wishes(**wishes))
    return proposal, yaml.safe_load(file.read_text()), parse_recipe(["--config", str(file)])


def golds_of(recipe: Recipe) -> list[list[Any]]:
    """Return the golds of the training rows and, if there are any, of the held-out rows."""
    sides = [False, True] if recipe.dataset.eval_share else [False]
    return [recipe_prompts(recipe, evaluation=side).dataset["answer"][:] for side in sides]


SLOW = (
    *("APPS with functions", "assertions as JSON", "NQ", "MMLU", "verl: golds inside of objects"),
    *("MMLU-Pro: a letter and its position", "SQuAD"),
)
"""Tables that others stand for in the quick suite."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PROPOSED]
)
def test_a_recipe_shows_the_question_and_pays_every_gold(name: str, tmp_path: Path) -> None:
    shape = PROPOSED[name]
    _, recipe, parsed = written(datasets.Dataset.from_list([shape.row(n) for n in range(ROWS)]), tmp_path)
    checked = check(parsed, CPU)
    assert {key: recipe["dataset"].get(key) for key in shape.keys} == shape.keys
    assert recipe["dataset"]["max_prompt_tokens"] % 256 == 0
    assert checked.golds is None
    assert checked.eval_dataset is not None
    rows = [*checked.train_dataset, *checked.eval_dataset]
    assert len(rows) == ROWS
    if shape.prompt:
        assert any(shape.prompt in row["prompt"][-1]["content"] for row in rows)
    reward = recipe["rewards"][0]
    reward = {"name": reward, "kwargs": {}} if isinstance(reward, str) else reward
    assert reward["name"] == shape.reward
    for row in rows:
        if shape.right is None or "f0" in str(row["tests"]):
            said = shape.right or completion(reward, row)
            columns = {key: [value] for key, value in row.items() if key != "prompt"}
            answers = {"prompts": [row["prompt"]], "completions": [[{"role": "assistant", "content": said}]]}
            assert checked.rewards[0].function(**answers, **columns)[0] >= 1, said


ASKED: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "two questions": (lambda n: {"question": question(n), "problem": text(n), "answer": n}, "--question"),
    "two answers": (lambda n: {"question": question(n), "answer": n, "target": n + 1}, "--answer"),
    "WikiQA: an answer and whether it is right": (
        lambda n: {"question": question(n), "answer": text(n), "label": n % 2},
        "--answer",
    ),
    "Alpaca": (
        lambda n: {"instruction": f"Rewrite the text {n}.", "input": text(n), "output": text(n + 1)},
        "'output' & texts",
    ),
    "UltraFeedback": (
        lambda n: {"prompt": question(n), "chosen": chat("a", "b"), "rejected": chat("a", "c"), "score_chosen": 1.5},
        "pairs & --question & --task",
    ),
    "RLVR-IFeval": (
        lambda n: {
            **{"messages": user(question(n)), "ground_truth": json.dumps({"func_name": "validate", "N": n})},
            "constraint_type": "All Lowercase",
        },
        "objects & --task & extraction",
    ),
    "HelpSteer: a rated response": (
        lambda n: {"prompt": question(n), "response": f"town {n}", "helpfulness": n % 5},
        "'response'",
    ),
    "labels without names": (lambda n: {"text": text(n), "label": n % 3}, "numbers"),
    "several labels": (lambda n: {"text": text(n), "labels": [COLORS[n % 3], "x"]}, "a few words"),
    "letters without choices": (lambda n: {"question": question(n), "answer": "ABC"[n % 3]}, "--choices"),
    "positions from 1": (
        lambda n: {"question": question(n), "choices": [f"red {n}", f"blue {n}", "x"], "answer": 1 + n % 2},
        "--answer",
    ),
    "positions or choices": (
        lambda n: {"question": question(n), "choices": ["0", "1", "2"], "answer": n % 3},
        "choices",
    ),
    "choices in half of the rows": (
        lambda n: {"question": question(n), "options": ["a", "b"] if n % 2 else [], "answer": 3 * n},
        "options",
    ),
    "RACE: an article beside choices": (
        lambda n: {"article": text(n), "question": question(n), "options": ["aa", "bb"], "answer": "AB"[n % 2]},
        "'article' & --question question",
    ),
    "HotpotQA: a context that is no text": (
        lambda n: {"question": question(n), "answer": f"town {n}", "context": {"sentences": [text(n)]}},
        "'context'",
    ),
    "golds that name different choices": (
        lambda n: {"question": question(n), "choices": ["aa", "bb"], "answer": "AB"[n % 2], "label": (n + 1) % 2},
        "--answer",
    ),
    "a context beside a complete prompt": (
        lambda n: {"prompt": user(question(n)), "answer": f"town {n}", "context": text(n)},
        "'context'",
    ),
    "TextVQA": (lambda n: {"image_id": f"{n}", "question": question(n), "answers": ["a"]}, "'image_id' & picture"),
    "KodCode": (
        lambda n: {"question": question(n), "test": f"from solution import f\n\ndef test_f():\n    assert f({n})"},
        "unit_tests & --answer",
    ),
    "calls in pairs": (
        lambda n: {"problem": question(n), "tests": json.dumps([{"fn_name": "f", "input": [n], "output": n}])},
        "unit_tests & --answer",
    ),
    "the same answer in all rows": (lambda n: {"question": question(n), "answer": "7"}, "--answer"),
    "prompts alone": (lambda n: {"instruction": f"Write a poem about topic {n}.", "source": "x"}, "judged"),
    "UltraChat": (
        lambda n: {"prompt": question(n), "prompt_id": f"{n}", "messages": chat(question(n), text(n))},
        "judged",
    ),
    "choices in columns": (
        lambda n: {"question": question(n), "option_a": f"red {n}", "option_b": f"blue {n}", "answer": "ab"[n % 2]},
        "--choices option_a,option_b",
    ),
    "a decimal comma": (lambda n: {"question": question(n), "answer": f"{n},64 €"}, "--decimal comma"),
    "translations": (lambda n: {"translation": {"en": text(n), "de": text(n + 1)}}, "--question"),
    "NLI": (lambda n: {"premise": text(n), "hypothesis": text(n + 1), "label": COLORS[n % 3]}, "--question"),
    "an ambiguous decimal mark": (
        lambda n: {"question": question(n), "answer": f"{n + 1}.200 €"},
        "--decimal point & --decimal comma",
    ),
    "rows without an answer and others without input": (
        lambda n: {"instruction": question(n), "input": text(n) if n % 2 else "", "output": f"{n}" if n > 3 else None},
        "4 rows",
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_table_with_several_readings_is_asked_about(name: str, tmp_path: Path) -> None:
    row, message = ASKED[name]
    datasets.Dataset.from_list([row(n) for n in range(ROWS)]).save_to_disk(tmp_path / "table")
    with refused("", *message.split(" & ")):
        write_first_recipe(str(tmp_path / "table"), tmp_path / "r.yaml", "some/model", machine=CPU)
    assert not (tmp_path / "r.yaml").exists()


def golds(values: list[Any], name: str = "answer", **others: list[Any]) -> datasets.Dataset:
    """Return a table with a question in each row, a column of golds, and other columns."""
    return datasets.Dataset.from_dict({"question": list(map(question, range(len(values)))), name: values, **others})


def test_options_decide_between_columns_and_forms(tmp_path: Path) -> None:
    others: dict[str, list[Any]] = {"x2": [2 * n for n in range(20)], "x3": [["x", "y"]] * 20}
    table = golds([3 * n for n in range(20)], "x1", **others)
    by_answer = proposed(table, "t", Wishes(answer="x2"))
    assert (by_answer.task, by_answer.dataset["columns"]) == ("numbers", {"answer": "x2"})
    assert proposed(table, "t", Wishes(answer="x1", task="words")).rewards[0]["name"] == "string_match"
    assert proposed(table, "t", Wishes(task="judged")).rewards[0]["name"] == "judge"
    for wishes, place, *figures in (
        (Wishes(answer="d"), "--answer", "'d'", "'x1'", "'x2'", "'x3'"),
        (Wishes(question=""), "--question", "''"),
        (Wishes(choices="x3", answer="x1"), "x3", "--answer"),
        (Wishes(answer="x1", task="code"), "'x1'", "task code"),
    ):
        with refused(place, *figures):
            proposed(table, "t", wishes)
    _, recipe, _ = written(
        golds(["a cat", "a dog"] * 15, left=["a cat"] * 30, right=["a dog"] * 30), tmp_path, choices="left, right"
    )
    assert recipe["dataset"]["columns"] == {"label": "answer", "A": "left", "B": "right"}


def test_a_class_label_is_read_by_its_name(tmp_path: Path) -> None:
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["neg", "pos"]))
    rows = {"text": list(map(text, range(ROWS))), "label": [n % 2 for n in range(ROWS - 1)] + [-1]}
    _, recipe, parsed = written(datasets.Dataset.from_dict(rows, features=features), tmp_path)
    assert recipe["dataset"]["labels"] == ["neg", "pos"]
    found = golds_of(parsed)
    assert sum(map(len, found)) == ROWS - 1
    assert set(found[0]) == {"neg", "pos"}


def test_a_table_without_a_question_is_shown_a_template_and_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The six lines work: they are written as they are shown, and the checks accept them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("t.csv").write_text("id,size,total\n" + "".join(f"{n},{n},{n * n}\n" for n in range(ROWS)))
    assert cli.main(["init", "t.csv"]) == 2
    *shown, error = capsys.readouterr().err.splitlines()
    assert "--question COLUMN" in error
    assert len(shown) == 6
    Path("mine.py").write_text("\n".join(shown[2:]))
    Path("r.yaml").write_text("\n".join([*shown[:2], "model_name_or_path: m/m", "bf16: false", "use_cpu: true"]))
    checked = check(parse_recipe(["--config", "r.yaml", "--output_dir", "out"]), CPU)
    said = [{"role": "assistant", "content": "It is 49."}]
    assert checked.rewards[0].function(completions=[said], total=[49]) == [1.0]


@pytest.mark.parametrize(
    ("values", "decimal"), [(["1.200 €", "7 €"], "comma"), (["1,200", "5,628"], None), ([1.5, 2.25], None)]
)
def test_a_decimal_mark_is_written(values: list[Any], decimal: Any) -> None:
    (reward, _) = proposed(golds(values * 10), "t", Wishes(decimal=decimal)).rewards
    assert reward["name"] == "gsm8k_correctness"
    assert reward["kwargs"].get("decimal") == decimal


def test_number_cells_with_two_readings_are_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"How many are there on day {n}?;{1 + n % 9}.{200 + n}" for n in range(40)]
    Path("t.csv").write_text("\n".join(["question;answer", *rows]))
    with refused("'answer'", "--decimal point", "--decimal comma"):
        write_first_recipe("*.csv", Path("r.yaml"), "m/m", machine=CPU)
    write_first_recipe("*.csv", Path("r.yaml"), "m/m", machine=CPU, wishes=Wishes(decimal="comma"))
    assert yaml.safe_load(Path("r.yaml").read_text())["dataset"]["decimal"] == "comma"
    assert min(check(parse_recipe(["--config", "r.yaml"]), CPU).train_dataset["answer"]) >= 1200


def test_rows_without_an_answer_are_counted_and_left_out(tmp_path: Path) -> None:
    proposal, _, parsed = written(golds([None if n % 4 == 1 else n * 3 for n in range(40)]), tmp_path)
    assert any("10 rows" in note for note in proposal.notes)
    assert sum(map(len, golds_of(parsed))) == 30


def test_golds_that_no_reward_reads_are_named(tmp_path: Path) -> None:
    tests = [f"assert f({n}) == {n}" for n in range(38)] + ["assert True"] * 2
    proposal, _, _ = written(golds(tests, "tests"), tmp_path)
    assert any("2 of " in note for note in proposal.notes)


@pytest.mark.parametrize("rows", [19, 20])
def test_a_small_table_holds_out_a_larger_share_or_nothing(rows: int, tmp_path: Path) -> None:
    _, recipe, parsed = written(golds([n * 3 for n in range(rows)]), tmp_path)
    found = golds_of(parsed)
    assert sum(map(len, found)) == rows
    assert (len(found) == 2) == (recipe.get("eval_strategy") == "steps") == (rows >= 20)


def test_labels_that_differ_in_case_are_one_and_the_prompt_names_them(tmp_path: Path) -> None:
    table = golds(["Good", "good", "good ", "bad"] * 10, "label")
    _, recipe, parsed = written(table, tmp_path)
    assert recipe["dataset"]["labels"] == ["bad", "good"]
    assert set(golds_of(parsed)[0]) == {"good", "bad"}


# The file


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_recipe_fits_its_machine(has_gpu: bool, tmp_path: Path) -> None:
    _, recipe, _ = written(golds([3 * n for n in range(ROWS)]), tmp_path, Machine(1, bf16=has_gpu))
    assert [recipe.get(key, False) for key in ("bf16", "use_peft", "use_cpu")] == [has_gpu, has_gpu, not has_gpu]
    assert (recipe["eval_strategy"], recipe["output_dir"]) == ("steps", "runs/table")
    assert recipe["dataset"]["system_prompt"] == "reasoning"


def test_the_command_writes_a_recipe_and_never_overwrites_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": question(n), "answer": n + n} for n in range(100)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["init", "sums.jsonl", "--model", "my/model"]) == 0
    assert "numbers in 100 of 100 rows" in capsys.readouterr().out
    before = Path("sums.yaml").read_text()
    assert yaml.safe_load(before)["model_name_or_path"] == "my/model"
    assert cli.main(["init", "sums.jsonl"]) == 2
    assert "--output sums.yaml" in capsys.readouterr().err
    assert Path("sums.yaml").read_text() == before


def test_no_recipe_is_left_if_a_check_fails(tmp_path: Path) -> None:
    golds([f"#### {n}" for n in range(9)]).save_to_disk(tmp_path / "table")
    with refused("`model_name_or_path`"):
        write_first_recipe(str(tmp_path / "table"), tmp_path / "r.yaml", "./no/such/folder", machine=CPU)
    assert not (tmp_path / "r.yaml").exists()


@pytest.mark.parametrize("rows", ["", "a,1\n"])
def test_a_table_of_less_than_two_rows_is_refused(rows: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("question,answer\n" + rows)
    with refused("t.csv"):
        write_first_recipe(str(tmp_path / "t.csv"), tmp_path / "r.yaml", machine=CPU)


def test_a_column_name_cannot_add_a_line_to_the_recipe(tmp_path: Path) -> None:
    _, recipe, _ = written(golds(["7", "8", "9"]).add_column("x\nbf16: true\n", [1, 2, 4]), tmp_path)
    assert recipe["bf16"] is False


@pytest.mark.parametrize(
    ("path", "file"),
    [("a/b c.csv", "b-c.yaml"), ("openai/gsm8k", "gsm8k.yaml"), ("data/*.parquet", "run.yaml"), ("x.tar.gz", "x.yaml")],
)
def test_the_recipe_has_the_name_of_the_table(path: str, file: str) -> None:
    assert init.default_output(path) == Path(file)


def test_the_tasks_of_the_command_line_are_those_of_the_forms() -> None:
    assert set(cli.TASKS) == set(forms.TASKS)
