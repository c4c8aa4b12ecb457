"""Requests of an evaluation: the folder, the rows, the settings, and the options of the command."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest

from grpo_recipes import cli
from grpo_recipes.data.load import load
from grpo_recipes.evaluation.evaluate import Request, evaluate_model
from grpo_recipes.evaluation.problems import held_out_spec
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.vllm_engine import VLLM
from grpo_recipes.recipe.dataset import DatasetSpec
from tests.support.errors import refused


def test_an_evaluation_has_a_folder_of_its_own(tmp_path: Path) -> None:
    here = Request(model=str(tmp_path))
    assert here.folder() == tmp_path / "evaluations" / "after"
    assert here.folder("hard") == tmp_path / "evaluations" / "after-hard"
    sampled = Request(model=str(tmp_path), samples=2)
    assert sampled.folder("hard") == tmp_path / "evaluations" / "after-hard-2-samples"
    assert Request(model="org/model", samples=4).folder() == Path("runs/evaluations/org--model-4-samples")
    asked = Request(model="org/model", samples=4, output=Path("mine"))
    assert (asked.folder(), asked.folder("a")) == (Path("mine"), Path("mine/a"))


def test_several_tables_get_a_folder_each() -> None:
    request = Request(model="org/model", output=Path("mine"))
    assert request.on_each([]) == [request]
    (one,) = request.on_each(["a.jsonl"])
    assert (one.path, one.output) == ("a.jsonl", Path("mine"))
    several = request.on_each(["x/a.jsonl.gz", "b.csv", "y/a.csv", ".jsonl"])
    assert [str(one.output) for one in several] == ["mine/a-0", "mine/b", "mine/a-2", "mine/rows"]
    assert [one.path for one in several] == ["x/a.jsonl.gz", "b.csv", "y/a.csv", ".jsonl"]
    beside = [one.output for one in Request(model="org/model", samples=2).on_each(["data/easy.csv", "hard.csv"])]
    assert beside == [Path("runs/evaluations") / f"org--model-{name}-2-samples" for name in ("easy", "hard")]


def test_options_of_vllm_need_vllm() -> None:
    assert Request(model="m").engine() is None
    given: dict[str, Any] = {"vllm_tensor_parallel_size": 2, "vllm_max_model_length": 0}
    given["vllm_gpu_memory_utilization"] = 0.5
    assert Request(model="m", vllm=True, **given).engine() == VLLM(**given)
    for name, value in {**given, "vllm_server_base_url": "http://x"}.items():
        with refused(f"--{name}", "--vllm"):
            Request(model="m", **{name: value}).engine()  # type: ignore[arg-type]


# ---- rows


def spec(trained: dict[str, Any], **options: Any) -> dict[str, Any]:
    found = held_out_spec(trained, **options).as_dict()
    return {key: found[key] for key in ("name", "path", "split", "eval_share", "system_prompt") if key in found}


GSM8K = {"name": "gsm8k", "split": "test", "system_prompt": "reasoning"}
SEVERAL = [{"path": "b.jsonl", "split": "train"}, {"path": "c.jsonl", "split": "train"}]


@pytest.mark.parametrize(
    ("trained", "options", "expected"),
    [
        ({}, {}, GSM8K),
        ({"name": "gsm8k", "eval_split": "train[90%:]"}, {}, {**GSM8K, "split": "train[90%:]"}),
        ({"name": "gsm8k"}, {"split": "train[:9]"}, {**GSM8K, "split": "train[:9]"}),
        ({"name": "gsm8k", "system_prompt": "boxed"}, {"system_prompt": "think"}, {**GSM8K, "system_prompt": "think"}),
        ({"name": "math"}, {"dataset": "gsm8k"}, GSM8K),
        ({"name": "gsm8k", "system_prompt": "boxed"}, {"dataset": "gsm8k"}, {**GSM8K, "system_prompt": "boxed"}),
        ({"path": "a.jsonl", "eval_path": "b.jsonl"}, {}, {"path": "b.jsonl", "split": "test"}),
        ({"path": "a.jsonl", "eval_path": "b.jsonl"}, {"path": "c.jsonl"}, {"path": "c.jsonl", "split": "test"}),
        ({"path": "a.jsonl", "eval_split": "x"}, {"path": "c.jsonl", "split": "y"}, {"path": "c.jsonl", "split": "y"}),
        ({"path": "a.jsonl", "eval_share": 0.5}, {}, {"path": "a.jsonl", "split": "train", "eval_share": 0.5}),
        ({"path": "a.jsonl", "eval_share": 0.5}, {"split": "x"}, {"path": "a.jsonl", "split": "x"}),
        ({"path": "a.jsonl", "eval_share": 0.5}, {"path": "b.jsonl"}, {"path": "b.jsonl", "split": "test"}),
        ({"name": "gsm8k", "pass_rate": {"min": 0.5}, "of_an_older_version": 1}, {}, GSM8K),
        ({"path": "a.jsonl", "eval_path": ["b.jsonl", "c.jsonl"]}, {}, {"path": SEVERAL, "split": "train"}),
    ],
)
def test_the_rows_are_those_that_the_run_was_not_trained_on(trained: Any, options: Any, expected: Any) -> None:
    assert spec(trained, **options) == expected


def test_rows_of_the_training_are_not_evaluated_unasked(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"question": ["1?"], "answer": ["#### 1"]})
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    rows.save_to_disk(one)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(two)
    for trained, options in (
        ({"path": "a.jsonl"}, {}),
        ({"path": "a.jsonl"}, {"path": "a.jsonl"}),
        ({"path": ["a.jsonl", "b.jsonl"]}, {}),
        ({"name": "gsm8k", "path": one}, {}),
        ({"name": "gsm8k", "path": one}, {"path": one}),
    ):
        with refused("rows", trained["path"], "--path"):
            spec(trained, **options)
    assert spec({"name": "gsm8k", "path": one, "eval_split": "train[90%:]"})["split"] == "train[90%:]"
    assert spec({"name": "gsm8k", "path": one}, split="train[90%:]")["split"] == "train[90%:]"
    assert spec({"name": "gsm8k", "path": two, "split": "train"})["split"] == "test"


@pytest.mark.parametrize(
    ("path", "kept"),
    [("b.tsv.gz", {"delimiter", "encoding", "decimal"}), ("b.jsonl", {"encoding"}), ("b.parquet", set())],
)
def test_another_path_keeps_the_keys_that_describe_such_a_file(path: str, kept: set[str]) -> None:
    notation = {"delimiter": ";", "encoding": "cp1252", "decimal": "comma"}
    found = held_out_spec({"name": "gsm8k", "path": "a.csv", **notation}, path=path)
    assert {key for key in notation if getattr(found, key) is not None} == kept


# ---- evaluations by the record of a run


@pytest.fixture
def run_folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "run"))


@pytest.fixture
def evaluated(run_folder: Path, tmp_path: Path, generating: Callable) -> Callable:
    """Return a function that evaluates a run with a record of some keys, each time into another folder."""
    generating(lambda prompts, settings: ["<think>x</think><answer>1</answer>"] * len(prompts))
    count = iter(range(100))

    def run(recipe: dict[str, Any], /, **options: Any) -> dict[str, Any]:
        (run_folder / "run.json").write_text(json.dumps({"recipe": {"dataset": ARITHMETIC, **recipe}}))
        return evaluate_model(run_folder, **{"output": tmp_path / f"e{next(count)}", "limit": 2, **options})

    return run


ARITHMETIC = {"name": "arithmetic", "size": 5}
FORM = {"name": "well_formed", "kwargs": {"tags": ["a", "b"]}}


def test_the_settings_are_those_of_the_options_and_else_of_the_recipe(evaluated: Callable) -> None:
    def settings(recipe: dict[str, Any], **options: Any) -> dict[str, Any]:
        return evaluated(recipe, **options)["settings"]

    plain = settings({})
    numbers = {"samples": 1, "temperature": 0.0, "max_new_tokens": 512, "batch_size": 64, "seed": 0, "stop": []}
    assert plain.items() >= numbers.items()
    recipe = {"generation_kwargs": {"stop": ["END"]}, "chat_template_kwargs": {"enable_thinking": False}}
    found = settings({**recipe, "max_completion_length": 7}, samples=2)
    assert found.items() >= {"max_new_tokens": 7, "temperature": 1.0, "stop": ["END"]}.items()
    assert found["chat_template_kwargs"] == {"enable_thinking": False}
    options = {"max_new_tokens": 9, "temperature": 0.5, "seed": 3, "batch_size": 5, "samples": 2}
    assert settings({"max_completion_length": 7}, **options).items() >= options.items()


@pytest.mark.parametrize(
    ("prompt", "rewards", "options", "tags"),
    [
        ("reasoning", [], {}, ["reasoning", "answer"]),
        ("Say it.", [], {}, ["think", "answer"]),
        ("none", [FORM], {"tags": ("x", "y")}, ["x", "y"]),
        ("reasoning", ["gsm8k_correctness", {"name": "sum", "rewards": ["tag_count", FORM]}], {}, ["a", "b"]),
    ],
)
def test_the_tags_are_those_of_the_options_the_rewards_or_the_system_prompt(
    prompt: str, rewards: list[Any], options: dict[str, Any], tags: list[str], evaluated: Callable
) -> None:
    recipe = {"dataset": {**ARITHMETIC, "system_prompt": prompt}, "rewards": rewards}
    settings = evaluated(recipe, **options)["settings"]
    assert settings["tags"] == tags
    for reward in settings["strict"]:
        if reward["name"] == "well_formed":
            assert reward["tags"] == tags, "the form is judged by the same tags"


def test_accuracy_is_measured_if_golds_decide(evaluated: Callable, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1?", "key": "1"}) + "\n")
    goldless = {"dataset": {"path": "trained.jsonl", "eval_path": str(file), "prompt_format": "text"}}
    for rewards in ([], ["well_formed"], ["my.style"]):
        assert "strict" in evaluated({"rewards": rewards})
    assert "strict" not in evaluated({**goldless, "rewards": ["well_formed"]})
    by_key = {"name": "gsm8k_correctness", "kwargs": {"gold_column": "key"}}
    assert evaluated({**goldless, "rewards": [by_key]})["strict"]["value"] == 1.0
    for rewards in ([], ["gsm8k_correctness"]):
        with refused("rows", "answer"):
            evaluated({**goldless, "rewards": rewards})
    with refused("rows", "--recipe"):
        evaluated({**goldless, "rewards": ["my.style"]})


def test_what_identifies_an_evaluation_is_recorded(evaluated: Callable, run_folder: Path, tmp_path: Path) -> None:
    found = evaluated({"rewards": [{"name": "gsm8k_correctness", "weight": 2.0}]})
    assert (found["model"], found["engine"], found["problems"]) == (str(run_folder), "transformers", 2)
    assert found["dataset"].items() >= {"name": "arithmetic", "split": "test"}.items()
    assert found["paid_by"] == [{"name": "gsm8k_correctness"}]
    assert found["weights"] == SavedModel(str(run_folder)).fingerprint()
    assert found["made_with"]["dtype"] == "float32"
    assert "chat_template" not in found
    template, recipe = tmp_path / "t" / "chat_template.jinja", tmp_path / "r.yaml"
    template.parent.mkdir()
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    recipe.write_text(
        f"model_name_or_path: m\ndataset: arithmetic\nrewards: well_formed\nchat_template_path: {template.parent}"
    )
    assert evaluated({}, recipe=str(recipe))["chat_template"]


def test_a_limit_keeps_the_first_rows_and_a_share_is_that_which_training_holds_out(
    evaluated: Callable, tmp_path: Path
) -> None:
    def prompts(limit: int | None, dataset: dict[str, Any] = ARITHMETIC) -> list[str]:
        output = tmp_path / f"of {limit} {len(dataset)}"
        evaluated({"dataset": dataset}, limit=limit, output=output)
        return pd.read_parquet(output / "completions.parquet")["prompt"].tolist()

    every = prompts(None)
    assert len(every) > 2
    assert prompts(2) == every[:2]
    assert prompts(1_000) == every
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n}?", "answer": "1"}) + "\n" for n in range(10)))
    shared = {"path": str(file), "eval_share": 0.3, "prompt_format": "text"}
    assert prompts(None, shared) == [row["prompt"] for row in load(DatasetSpec.parse(shared), evaluation=True)]
    assert len(prompts(None, shared)) == 3


def test_the_command_and_python_have_the_same_defaults(
    evaluated: Callable, run_folder: Path, generating: Callable
) -> None:
    """`evaluate_model(model)` and `grpo-recipes evaluate MODEL` are one evaluation, which is made once."""
    evaluated({"dataset": {**ARITHMETIC, "size": 3}})
    assert cli.main(["evaluate", str(run_folder)]) == 0
    generating(lambda *_: pytest.fail("it was made again"))
    found = evaluate_model(run_folder)
    assert found == json.loads((run_folder / "evaluations" / "after" / "evaluation.json").read_text())


def test_a_mistake_in_a_recipe_and_a_folder_that_can_not_be_written_are_named(
    evaluated: Callable, tmp_path: Path
) -> None:
    with refused("`rewards`", "no_such"):
        evaluated({"rewards": [{"name": "well_formed", "kwargs": {"no_such": 1}}]})
    with refused("rows", "`key`"):
        evaluated({"rewards": [{"name": "gsm8k_correctness", "kwargs": {"gold_column": "key"}}]})
    with refused("--tags"):
        evaluated({}, tags=("x", "x"))
    (tmp_path / "file").touch()
    with refused(tmp_path / "file" / "e", "--output"):
        evaluated({}, output=tmp_path / "file" / "e")


def test_a_runs_own_rewards_define_strict_accuracy(evaluated: Callable, generating: Callable, tmp_path: Path) -> None:
    rows = load(DatasetSpec("arithmetic", split="test", size=5, system_prompt="none"))
    golds = {row["prompt"][0]["content"]: row["answer"].rpartition("#### ")[2] for row in rows}
    generating(lambda prompts, settings: [rf"\boxed{{{golds[prompt[0]['content']]}}}" for prompt in prompts])
    recipe = {"dataset": {**ARITHMETIC, "system_prompt": "none"}}
    boxed = [{"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}]
    options = {"samples": 2, "output": tmp_path / "e"}
    summary = evaluated({**recipe, "rewards": boxed}, **options)
    assert summary["strict"]["value"] == summary["pass_at"]["2"]["value"] == 1.0
    with refused(tmp_path / "e", "rewards"):
        evaluated({**recipe, "rewards": ["gsm8k_correctness"]}, **options)
    assert evaluated({**recipe, "rewards": ["gsm8k_correctness"]})["strict"]["value"] == 0.0


# ---- the command


def test_the_command_evaluates_a_model_by_its_recipe(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "e"
    command = ["evaluate", str(tiny_model), "--recipe", "quickstart", "--split", "test[:9]", "--limit", "6"]
    command += ["--batch_size", "4", "--max_new_tokens", "4", "--output", str(folder)]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.startswith("6 ")
    summary = json.loads((folder / "evaluation.json").read_text())
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert (summary["dataset"]["name"], summary["dataset"]["split"]) == ("arithmetic", "test[:9]")
    prompts = pd.read_parquet(folder / "completions.parquet")["prompt"]
    assert json.loads(prompts[0])[0]["role"] == "system"
    assert prompts.is_unique


HERE = ["--dataset", "arithmetic", "--split", "test[:2]"]
WRONG: list[tuple[list[str], list[str]]] = [
    (["MODEL", "--dataset", "arithmatic"], ["`arithmetic`"]),
    (["MODEL", *HERE, "--vllm"], ["--vllm"]),
    (["MODEL", *HERE, "--vllm", "--vllm_server_base_url", "http://127.0.0.1:9"], ["http://127.0.0.1:9"]),
    (["MODEL", *HERE, "--limit", "0"], ["--limit", "0"]),
    (["MODEL", "--recipe", "no-such-recipe"], ["no-such-recipe"]),
]


def test_a_wrong_option_is_named_in_the_last_line(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "vllm", None)
    for number, (arguments, figures) in enumerate(WRONG):
        given = [str(tiny_model) if word == "MODEL" else word for word in arguments]
        assert cli.main(["evaluate", *given, "--output", str(tmp_path / f"e{number}")]) == 2, arguments
        last = capsys.readouterr().err.splitlines()[-1]
        assert all(figure in last for figure in figures), last


def test_settings_of_an_evaluation_are_checked() -> None:
    Settings(samples=1, batch_size=1, max_new_tokens=1)
    for name in ("samples", "batch_size", "max_new_tokens"):
        with refused(f"--{name}", 0):
            Settings(**{name: 0})
    for temperature in (-0.1, float("nan"), float("inf")):
        with refused("--temperature"):
            Settings(temperature=temperature)
    with refused("--samples", "2", "--temperature"):
        Settings(samples=2)


def test_a_run_on_recorded_responses_is_refused_with_options_that_work(
    run_folder: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = {"name": "scored", "path": "scored.jsonl", "prompt_format": "text"}
    (run_folder / "run.json").write_text(json.dumps({"recipe": {"dataset": scored, "rewards": []}}))
    command = ["evaluate", str(run_folder), "--limit", "2", "--max_new_tokens", "4", "--output", str(tmp_path / "e")]
    assert cli.main(command) == 2
    fix = capsys.readouterr().err.splitlines()[-1].partition("`")[2].partition("`")[0]
    assert cli.main([*command, *fix.replace("PROBLEMS.jsonl", str(gsm8k_file)).split()]) == 0
