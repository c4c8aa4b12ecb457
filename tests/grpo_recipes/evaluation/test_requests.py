"""Requests of an evaluation: the folder, the rows, and the difference from the evaluation in the folder."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from safetensors.numpy import save_file

from grpo_recipes import cli
from grpo_recipes.checks.tokenizer import ChatTemplate
from grpo_recipes.data.places import row_numbers
from grpo_recipes.evaluation import comparison, evaluate
from grpo_recipes.evaluation.accuracy import MeasuredReward, strict_rewards
from grpo_recipes.evaluation.comparison import compare
from grpo_recipes.evaluation.evaluate import Request, evaluate_into, held_out_spec
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.vllm_engine import VLLM
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.runs.lock import LOCK
from grpo_rewards.errors import UserError
from grpo_rewards.registry import RewardSpecError


def test_an_evaluation_has_a_folder_of_its_own(tmp_path: Path) -> None:
    here = Request(model=str(tmp_path))
    assert here.folder() == tmp_path / "evaluations" / "after"
    assert here.folder("hard") == tmp_path / "evaluations" / "after-hard"
    sampled = Request(model=str(tmp_path), samples=2)
    assert sampled.folder() == tmp_path / "evaluations" / "after-2-samples"
    assert sampled.folder("hard") == tmp_path / "evaluations" / "after-hard-2-samples"
    assert Request(model="org/model").folder() == Path("runs/evaluations/org--model")
    assert Request(model="org/model", samples=4).folder("a") == Path("runs/evaluations/org--model-a-4-samples")
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


def test_options_of_vllm_need_vllm() -> None:
    assert Request(model="m").engine() is None
    with pytest.raises(UserError, match="^--vllm_max_model_length is an option of vLLM: add --vllm$"):
        Request(model="m", vllm_max_model_length=0).engine()
    given = {"vllm_tensor_parallel_size": 2, "vllm_max_model_length": 64, "vllm_gpu_memory_utilization": 0.5}
    assert Request(model="m", vllm=True, **given).engine() == VLLM(**given)  # type: ignore[arg-type]
    for name, value in {**given, "vllm_server_base_url": "http://x"}.items():
        with pytest.raises(UserError, match=f"^--{name} is an option of vLLM: add --vllm$"):
            Request(model="m", **{name: value}).engine()  # type: ignore[arg-type]


def spec(trained: dict[str, Any], **options: Any) -> dict[str, Any]:
    found = held_out_spec(trained, Request(model="m", **options)).as_dict()
    return {key: found[key] for key in ("name", "path", "split", "eval_share", "system_prompt") if key in found}


GSM8K = {"name": "gsm8k", "split": "test", "system_prompt": "reasoning"}


SEVERAL = [{"path": "b.jsonl", "split": "train"}, {"path": "c.jsonl", "split": "train"}]


@pytest.mark.parametrize(
    ("trained", "options", "expected"),
    [
        ({}, {}, GSM8K),
        ({"name": "gsm8k", "split": "train[:5%]"}, {}, GSM8K),
        ({"name": "gsm8k", "eval_split": "train[90%:]"}, {}, {**GSM8K, "split": "train[90%:]"}),
        ({"name": "gsm8k"}, {"split": "train[:9]"}, {**GSM8K, "split": "train[:9]"}),
        ({"name": "gsm8k", "system_prompt": "boxed"}, {}, {**GSM8K, "system_prompt": "boxed"}),
        ({"name": "gsm8k", "system_prompt": "boxed"}, {"system_prompt": "think"}, {**GSM8K, "system_prompt": "think"}),
        ({"name": "math"}, {"dataset": "gsm8k"}, GSM8K),
        ({"name": "gsm8k", "system_prompt": "boxed"}, {"dataset": "gsm8k"}, {**GSM8K, "system_prompt": "boxed"}),
        ({"path": "a.jsonl", "eval_path": "b.jsonl"}, {}, {"path": "b.jsonl", "split": "test"}),
        ({"path": "a.jsonl", "eval_path": "b.jsonl"}, {"path": "c.jsonl"}, {"path": "c.jsonl", "split": "test"}),
        ({"path": "a.jsonl", "eval_split": "x"}, {"path": "c.jsonl"}, {"path": "c.jsonl", "split": "test"}),
        ({"path": "a.jsonl", "eval_share": 0.5}, {}, {"path": "a.jsonl", "split": "train", "eval_share": 0.5}),
        ({"path": "a.jsonl", "eval_share": 0.5}, {"split": "x"}, {"path": "a.jsonl", "split": "x"}),
        ({"path": "a.jsonl", "eval_share": 0.5}, {"path": "b.jsonl"}, {"path": "b.jsonl", "split": "test"}),
        # Several files have no split of their own.
        ({"path": ["a.jsonl", "b.jsonl"], "eval_path": "c.jsonl"}, {}, {"path": "c.jsonl", "split": "test"}),
        ({"name": "gsm8k", "pass_rate": {"min": 0.5}, "of_an_older_version": 1}, {}, GSM8K),
        ({"path": "a.jsonl", "eval_path": ["b.jsonl", "c.jsonl"]}, {}, {"path": SEVERAL, "split": "train"}),
    ],
)
def test_the_rows_are_those_that_the_run_was_not_trained_on(trained: Any, options: Any, expected: Any) -> None:
    assert spec(trained, **options) == expected


@pytest.mark.parametrize(
    ("trained", "options", "message"),
    [
        ({"path": "a.jsonl"}, {}, "the run trained on a.jsonl: name the held-out problems with --path, or a --split"),
        ({"path": "a.jsonl"}, {"path": "a.jsonl"}, "the run trained on a.jsonl: name the held-out problems with"),
        ({"path": ["a.jsonl", "b.jsonl"]}, {}, r"the run trained on \['a.jsonl', 'b.jsonl'\]: name the held-out"),
        ({"name": "scored", "path": "a.jsonl"}, {}, "the dataset scored holds recorded responses and no final"),
    ],
)
def test_rows_of_the_training_are_not_evaluated_unasked(trained: Any, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        spec(trained, **options)


@pytest.mark.parametrize(
    ("system_prompt", "tags"),
    [
        ("none", ("think", "answer")),
        ("reasoning", ("reasoning", "answer")),
        ("Say it.", ("think", "answer")),
        (None, ("reasoning", "answer")),
    ],
)
def test_the_tags_are_those_that_the_system_prompt_asks_for(system_prompt: str | None, tags: tuple[str, str]) -> None:
    dataset = DatasetSpec.parse({"path": "a.jsonl", "system_prompt": system_prompt})
    assert evaluate._tags({}, dataset) == tags
    assert evaluate._tags({"rewards": [{"name": "a"}, {"name": "b", "kwargs": {"tags": ["x", "y"]}}]}, dataset) == (
        "x",
        "y",
    )


@pytest.mark.parametrize(
    ("problems", "batch_size", "samples", "sizes"),
    [(10, 4, 1, [4, 4, 2]), (8, 4, 1, [4, 4]), (5, 4, 2, [2, 2, 1]), (2, 4, 8, [1, 1]), (5, 7, 2, [3, 2])],
)
def test_a_batch_holds_all_samples_of_a_problem(problems: int, batch_size: int, samples: int, sizes: list[int]) -> None:
    settings = Settings(batch_size=batch_size, samples=samples, temperature=1.0)
    batches = evaluate._batches(problems, settings)
    assert [len(batch) for batch in batches] == sizes
    assert [place for batch in batches for place in batch] == list(range(problems))


FOUND = {
    "model": "m",
    "weights": {"sha": "1"},
    "dataset": {"path": "a.jsonl", "split": "test"},
    "rows": {"prompt": "1"},
    "settings": {"samples": 1, "strict": ["s"], "stop": ["x"]},
}


@pytest.mark.parametrize(
    ("identity", "difference"),
    [
        (FOUND, None),
        ({**FOUND, "model": "copy"}, None),  # with equal weights
        ({**FOUND, "model": "copy", "rows": {"prompt": "2"}}, "the problems have changed since"),
        ({**FOUND, "model": "copy", "weights": {"sha": "2"}}, "model was 'm' and is now 'copy'"),
        ({**FOUND, "weights": {"sha": "2"}}, "the model's weights or its tokenizer have changed since"),
        ({**FOUND, "rows": {"prompt": "2"}}, "the problems have changed since"),
        ({**FOUND, "dataset": {"path": "a.jsonl", "split": "x"}}, "dataset.split was 'test' and is now 'x'"),
        ({**FOUND, "dataset": {"path": "b.jsonl", "split": "test"}}, "dataset.path was 'a.jsonl' and is now 'b.jsonl'"),
        (
            {**FOUND, "settings": {"samples": 1, "strict": ["t"], "stop": ["x"]}},
            "the rewards of strict accuracy (`settings.strict`) have changed since",
        ),
        ({**FOUND, "settings": {"samples": 1, "strict": ["s"]}}, "settings.stop was ['x'] and is now None"),
        ({**FOUND, "engine": "vllm"}, "it does not record `engine`"),
    ],
)
def test_another_evaluation_differs_in_one_named_key(identity: Any, difference: str | None) -> None:
    assert evaluate._difference(FOUND, identity) == difference


def test_one_file_may_have_two_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).touch()
        assert evaluate._difference({"model": "a"}, {"model": f"./{name}"}) == (
            None if name == "a" else "model was 'a' and is now './b'"
        )
    for other in ("./a", str(tmp_path / "a")):
        assert evaluate._difference({"dataset": {"path": "a"}}, {"dataset": {"path": other}}) is None
    for other in ("b", "absent", 3):
        assert evaluate._difference({"dataset": {"path": "a"}}, {"dataset": {"path": other}}) == (
            f"dataset.path was 'a' and is now {other!r}"
        )


def finished(folder: Path, answer: str = "1", **settings: Any) -> Path:
    """Evaluate two problems into a folder."""
    dataset = Dataset.from_dict({"prompt": ["1?", "2?"], "answer": ["1", "2"]})
    made_with = settings.pop("made_with", {})
    evaluate_into(
        folder,
        lambda prompts, settings: [f"<answer>{answer}</answer>"] * len(prompts),
        dataset,
        Settings(**settings),
        {"model": "m", "engine": "transformers"},
        record=lambda settings: {"made_with": made_with},
    )
    return folder


def test_evaluations_that_were_generated_differently_are_compared_with_a_warning(tmp_path: Path) -> None:
    first = finished(tmp_path / "a", made_with={"version": "5.23", "dtype": "float32"})
    alike = finished(tmp_path / "b", "2", made_with={"version": "5.23", "dtype": "float32"})
    other = finished(tmp_path / "c", temperature=0.5, made_with={"version": "5.24"})
    result = compare(first, alike)
    assert (result["problems"], result["warnings"]) == (2, [])
    assert [result["lenient"][side]["value"] for side in ("first", "second")] == [0.5, 0.5]
    assert compare(first, other)["warnings"] == [
        "A and B were not generated alike (temperature 0.0 and 0.5; version 5.23 and 5.24; dtype float32 and not "
        "recorded), which may explain a part of the difference"
    ]


def test_folders_that_can_not_be_compared_are_named(tmp_path: Path) -> None:
    first = finished(tmp_path / "run" / "evaluations" / "after")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "run.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for later in ("hard", "before", "then", "easy"):
        (tmp_path / "run" / "evaluations" / f"later-{later}").mkdir()
        (tmp_path / "run" / "evaluations" / f"later-{later}" / "evaluation.json").touch()
    for second, message in (
        (tmp_path / "absent", "there is no such folder"),
        (tmp_path / "run", f"is a run: name one of its evaluations, such as {first}"),
        (tmp_path / "trained", "is a run that has not been evaluated: run `grpo-recipes evaluate"),
        (tmp_path / "empty", "has no finished evaluation: run `grpo-recipes evaluate` with it as --output"),
    ):
        with pytest.raises(UserError) as caught:
            compare(first, second)
        assert message in str(caught.value)
    pd.read_parquet(first / "completions.parquet").head(0).to_parquet(first / "completions.parquet")
    with pytest.raises(UserError, match=r"completions\.parquet: it holds no completions; evaluate anew$"):
        compare(first, first)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_of_at_least_one_problem(limit: int) -> None:
    with pytest.raises(UserError) as caught:
        evaluate._problems(DatasetSpec.parse("arithmetic"), limit)
    assert str(caught.value) == f"--limit is {limit}: set it to at least 1, or leave it out for all problems"


def test_a_limit_keeps_the_first_problems() -> None:
    rows = DatasetSpec.parse({"name": "arithmetic", "size": 5})
    every = evaluate._problems(rows, None).dataset["prompt"][:]
    assert len(every) == 5
    for limit in (1, 5, 9):
        assert evaluate._problems(rows, limit).dataset["prompt"][:] == every[:limit]


def test_the_command_and_python_have_the_same_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """`evaluate_model(model)` and `grpo-recipes evaluate MODEL` are one evaluation."""

    class Asked(Exception):
        pass

    def ask(request: object) -> None:
        raise Asked(request)

    monkeypatch.setattr(evaluate, "evaluate_request", ask)
    with pytest.raises(Asked) as caught:
        cli.main(["evaluate", "m"])
    (request,) = caught.value.args
    assert request == Request(model="m")


@pytest.mark.parametrize(
    ("found", "asked", "difference"),
    [
        ({"model": "a", "weights": {"x": 1}}, {"model": "b", "weights": {"x": 1}}, None),
        ({"model": "a", "weights": {"x": 1}}, {"model": "b", "weights": {"x": 2}}, "model was 'a' and is now 'b'"),
        ({"model": "a"}, {"model": "b"}, "model was 'a' and is now 'b'"),
        ({"dataset": {"model": "a"}, "weights": 1}, {"dataset": {"model": "b"}, "weights": 1},
         "dataset.model was 'a' and is now 'b'"),
        ({"settings": {"stop": ["x"]}}, {"settings": {}}, "settings.stop was ['x'] and is now None"),
        ({}, {"rows": {"prompt": "1"}}, "it does not record `rows`"),
        ({"paid_by": []}, {"paid_by": ["r"]}, "the rewards of the recipe have changed since"),
        ({"dataset": {"a": 1}}, {"dataset": "x"}, "dataset was {'a': 1} and is now 'x'"),
        ({"dataset": "x"}, {"dataset": {"a": 1}}, "dataset was 'x' and is now {'a': 1}"),
        ({"engine": "."}, {"engine": "./"}, "engine was '.' and is now './'"),
        ({"rows": {"prompt": "2"}}, {"rows": {"prompt": "1"}}, "the problems have changed since"),
    ],
)  # fmt: skip
def test_the_first_difference_of_two_evaluations_is_named(
    found: dict[str, Any], asked: dict[str, Any], difference: str | None
) -> None:
    assert evaluate._difference(found, asked) == difference


def test_a_result_that_another_process_has_finished_meanwhile_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter([None, {"strict": 1}])
    monkeypatch.setattr(evaluate, "_golds", lambda *given: None)
    monkeypatch.setattr(evaluate, "_identity", lambda *given: {})
    monkeypatch.setattr(evaluate, "_finished", lambda *given: next(results))
    settings = Settings(strict=None)
    found = evaluate.evaluate_into(tmp_path / "e", lambda *given: pytest.fail("nothing is left"), [], settings, {})
    assert found == {"strict": 1}


def recorded(is_scored: bool = False) -> Any:
    """Return the tools of a recipe, with an environment that scores its rows or does not."""
    environments = [SimpleNamespace(scores=False), SimpleNamespace(scores=is_scored)]
    return SimpleNamespace(toolset=SimpleNamespace(environments=environments), identity={"tools": ["t"]})


@pytest.mark.parametrize(
    ("rewards", "columns", "tools", "has_accuracy"),
    [
        ([], ["prompt", "answer"], None, True),
        ([], ["prompt"], None, True),  # refused later, because the golds are missing
        (["my.style"], ["prompt", "answer"], None, True),
        (["my.style"], ["prompt"], None, False),
        (["gsm8k_correctness"], ["prompt"], None, True),
        (["my.style"], ["prompt", "answer"], recorded(), True),
        (["my.style"], ["prompt", "answer"], recorded(is_scored=True), False),
        ([], ["prompt", "answer"], recorded(is_scored=True), False),
        (["gsm8k_correctness"], ["prompt", "answer"], recorded(is_scored=True), True),
    ],
)
def test_accuracy_is_measured_if_golds_decide(
    rewards: list[str], columns: list[str], tools: Any, has_accuracy: bool
) -> None:
    dataset = Dataset.from_dict({column: ["1"] for column in columns})
    rows = DatasetSpec.parse({"path": "a.jsonl"})
    found = evaluate._settings({"rewards": rewards}, rows, Request(model="m"), dataset, tools)
    assert (found.strict is not None) == has_accuracy
    assert found.tools == (None if tools is None else {"tools": ["t"]})


def test_the_settings_are_those_of_the_options_and_else_of_the_recipe() -> None:
    dataset = Dataset.from_dict({"prompt": ["1"], "answer": ["1"]})
    rows = DatasetSpec.parse({"path": "a.jsonl", "system_prompt": "none"})

    def settings(recipe: dict[str, Any], **options: Any) -> Settings:
        return evaluate._settings(recipe, rows, Request(model="m", **options), dataset, None)

    plain = settings({})
    assert (plain.samples, plain.temperature, plain.max_new_tokens, plain.batch_size) == (1, 0.0, 512, 64)
    assert (plain.seed, plain.stop, plain.chat_template_kwargs, plain.tags) == (0, (), None, ("think", "answer"))
    assert settings({"max_completion_length": 7}).max_new_tokens == 7
    assert settings({"max_completion_length": 7}, max_new_tokens=9).max_new_tokens == 9
    assert [settings({}, samples=samples).temperature for samples in (1, 2, 3)] == [0.0, 1.0, 1.0]
    assert settings({}, temperature=0.5).temperature == settings({}, samples=2, temperature=0.5).temperature == 0.5
    given = settings({}, seed=3, batch_size=5, samples=2)
    assert (given.seed, given.batch_size, given.samples) == (3, 5, 2)
    recipe = {"generation_kwargs": {"stop": ["END"]}, "chat_template_kwargs": {"enable_thinking": False}}
    assert settings(recipe).stop == ("END",)
    assert settings(recipe).chat_template_kwargs == {"enable_thinking": False}
    tagged = {"rewards": [{"name": "well_formed", "kwargs": {"tags": ["a", "b"]}}]}
    assert settings(tagged).tags == ("a", "b")
    assert settings(tagged, tags=("x", "y")).tags == ("x", "y")
    for found, tags in ((settings(tagged), ("a", "b")), (settings(tagged, tags=("x", "y")), ("x", "y"))):
        assert found.strict is not None
        (form,) = [reward for reward in found.strict if reward.kind == "format"]
        assert form.with_tags(tags) == form
    with pytest.raises(UserError, match="^--tags: "):
        settings({}, tags=("x", "x"))
    with pytest.raises(RewardSpecError):
        settings({"rewards": [{"name": "well_formed", "kwargs": {"no_such": 1}}]})


COLUMNS = {name: ["1"] for name in ("prompt", "answer", "board", "choices", "level", "size", "colour", "move")}


@pytest.mark.parametrize(
    ("tools", "rewards", "columns"),
    [
        (None, ["gsm8k_correctness"], {"prompt", "answer"}),
        ({"tools": ["my.tool"]}, [], {"prompt", "answer"}),
        (None, ["choice_correctness"], {"prompt", "answer", "choices"}),
        ({"environment_factory": "my.Game"}, [], COLUMNS.keys()),
    ],
)
def test_the_rows_of_an_evaluation_are_known_by_the_columns_that_it_reads(
    tools: Any, rewards: Any, columns: Any
) -> None:
    strict = strict_rewards(rewards, ("think", "answer")) if rewards else None
    found = evaluate._rows_fingerprint(Dataset.from_dict(COLUMNS), Settings(strict=strict, tools=tools))
    assert found.keys() == set(columns)
    assert list(found) == sorted(found), "the file is the same in every process"


def test_what_identifies_an_evaluation_can_be_written_as_json() -> None:
    described = {"model": "m", "released": date(2026, 1, 2), "dataset": {"hub_token": "hf_" + "a" * 34}}
    found = evaluate._identity(Dataset.from_dict(COLUMNS), Settings(), described)
    assert found["released"] == "2026-01-02"
    assert "aaaa" not in json.dumps(found)
    assert (found["problems"], found["rows"].keys()) == (1, {"prompt", "answer"})
    assert "tools" not in found["settings"], "settings without a value are left out"
    assert found["settings"]["tags"] == ["think", "answer"]
    assert json.loads(json.dumps(found)) == found


def test_a_folder_of_other_files_is_left_alone(tmp_path: Path) -> None:
    assert evaluate._finished(tmp_path / "absent", {}) is None
    assert evaluate._finished(tmp_path, {}) is None
    (tmp_path / LOCK).touch()
    (tmp_path / f"{LOCK}.of-a-killed-process").touch()
    assert evaluate._finished(tmp_path, {}) is None, "locks of an evaluation that has not begun"
    (tmp_path / f"notes{LOCK}").touch()
    with pytest.raises(UserError, match="holds files that are no evaluation: give another --output$"):
        evaluate._finished(tmp_path, {})


def test_a_gold_that_is_missing_among_others_is_left_out() -> None:
    rows = Dataset.from_dict({"prompt": ["p", "q"], "answer": [["18", None], ["x", "y"]]})
    assert evaluate._golds(rows, Settings(), row_numbers) == ["18", "x or y"]
    assert evaluate._golds(rows, Settings(strict=None), row_numbers) is None
    numbers = Dataset.from_dict({"prompt": ["p", "q"], "answer": [0, 5]})
    assert evaluate._golds(numbers, Settings(), row_numbers) == ["0", "5"]
    strict = strict_rewards([{"name": "gsm8k_correctness", "kwargs": {"gold_column": "prompt"}}], ("think", "answer"))
    with pytest.raises(ValueError, match="needs the dataset column `prompt`"):
        evaluate._golds(numbers, Settings(strict=strict), row_numbers)
    with pytest.raises(UserError, match="^row 2 can't be scored by the rewards of strict accuracy, "):
        evaluate._golds(Dataset.from_dict({"prompt": ["p"] * 3, "answer": ["1", None, None]}), Settings(), row_numbers)


def test_prompts_are_stored_in_their_own_letters_and_golds_are_read_with_their_mark(tmp_path: Path) -> None:
    strict = strict_rewards([{"name": "gsm8k_correctness", "kwargs": {"decimal": "comma"}}], ("think", "answer"))
    prompts = [[{"role": "user", "content": "Größe?"}]] * 4
    texts = ["<answer>1,5</answer>", "#### 1,5", "#### 1.500", "#### 1.500"]
    rows = Dataset.from_dict({"prompt": prompts, "answer": [1.5] * 3 + [1500.0]})
    evaluate_into(tmp_path / "e", lambda prompts, settings: texts, rows, Settings(strict=strict), {})
    table = pd.read_parquet(tmp_path / "e" / "completions.parquet")
    assert "Größe" in table["prompt"][0]
    assert table["strict"].tolist() == [True, False, False, False]
    assert table["lenient"].tolist() == [True, True, False, True]


def test_the_seed_of_a_batch_reproduces_published_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds: list[int] = []

    def complete(prompts: list[Any], settings: Settings) -> list[str]:
        seeds.append(settings.seed)
        return [""] * len(prompts)

    rows = Dataset.from_dict({"prompt": ["1?", "2?"], "answer": ["1", "2"]})
    evaluate_into(tmp_path / "e", complete, rows, Settings(seed=2, batch_size=1), {})
    assert seeds == [2_000_006, 2_000_007]
    shown = capsys.readouterr().err
    assert "evaluating: 100%" in shown
    assert "batch" in shown
    assert (tmp_path / "e" / "evaluation.json").read_text().startswith('{\n  "'), "a line for each key"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "e" / "parts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="a link leads out of"):
        evaluate_into(tmp_path / "e", complete, rows, Settings(seed=2, batch_size=1), {})


def test_a_result_that_can_not_be_written_is_one_sentence(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    def lacking(*given: Any) -> None:
        raise ValueError("a reward needs the column `key`")

    monkeypatch.setattr(evaluate, "evaluate_into", lacking)
    with pytest.raises(UserError, match="^a reward needs the column `key`$"):
        evaluate.evaluate_model(tiny_model, dataset="arithmetic", limit=1, output=Path("e"))
    monkeypatch.setattr(evaluate, "evaluate_into", full)
    with pytest.raises(
        UserError, match=r"^e: the result can't be written there \(.*No space.*\): give another --output$"
    ):
        evaluate.evaluate_model(tiny_model, dataset="arithmetic", limit=1, output=Path("e"))
    recipe = {"dataset": {"name": "arithmetic"}, "rewards": [{"name": "well_formed", "kwargs": {"no_such": 1}}]}
    monkeypatch.setattr(evaluate, "recipe_of", lambda *given: recipe)
    with pytest.raises(UserError, match=r"^the recipe's `rewards`: .*no_such.*[^.]$"):
        evaluate.evaluate_model(tiny_model, dataset="arithmetic", limit=1, output=Path("e"))


@pytest.mark.parametrize(
    ("spec", "column"),
    [
        ({"name": "well_formed", "alias": "form"}, "reward/form"),
        ({"name": "my.rewards.style"}, "reward/style"),
        ({"name": "gsm8k_correctness", "alias": "right"}, "passed/right"),
    ],
)
def test_a_damaged_column_of_a_compared_reward_is_named(spec: dict[str, Any], column: str, tmp_path: Path) -> None:
    path = finished(tmp_path / "e") / "completions.parquet"
    table = pd.read_parquet(path)
    assert comparison._read_completions(path.parent, [spec]).equals(table), (
        "a reward that was not measured has no column"
    )
    table.assign(**{column: "text"}).to_parquet(path)
    with pytest.raises(UserError, match=f"completions.parquet: .*{column}.*evaluate anew, into another --output"):
        comparison._read_completions(path.parent, [spec])
    assert len(comparison._read_completions(path.parent, [])) == 2


@pytest.mark.parametrize("base", [None, ""])
def test_an_adapter_without_a_named_base_is_known_by_its_own_files(base: str | None, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    save_file({"a": np.zeros(2)}, tmp_path / "adapter_model.safetensors")
    found = evaluate.weights_fingerprint(str(tmp_path))
    assert "adapter_model.safetensors" in found
    assert "base" not in found
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    assert evaluate.weights_fingerprint(str(tmp_path)) == {}


def test_what_the_command_evaluates_is_recorded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(evaluate, "evaluate_into", lambda *given: seen.append(given) or {})
    monkeypatch.setattr(evaluate, "hub_commit", lambda name: None)
    tried: list[Any] = []
    monkeypatch.setattr(MeasuredReward, "fails_on", lambda self, row, samples: tried.append(row))
    template = ChatTemplate(tmp_path, "{{ messages }}", None)
    for rewards, chosen in (([], None), ([{"name": "well_formed", "weight": 2.0}], template)):
        recipe = {"dataset": {"name": "arithmetic"}, "rewards": rewards}
        monkeypatch.setattr(evaluate, "recipe_of", lambda *given, recipe=recipe: recipe)
        monkeypatch.setattr(evaluate, "chat_template_of", lambda *given, chosen=chosen, **more: chosen)
        evaluate.evaluate_model(tiny_model, limit=3, output=tmp_path / "e")
    plain, full = (given[4] for given in seen)
    assert plain.keys() == {"model", "dataset", "engine", "weights"}
    assert (plain["model"], plain["engine"], plain["dataset"]["name"]) == (
        str(tiny_model),
        "transformers",
        "arithmetic",
    )
    assert plain["weights"] == evaluate.weights_fingerprint(str(tiny_model))
    assert full == {**plain, "chat_template": template.digest, "paid_by": [{"name": "well_formed"}]}
    folder, engine, dataset, _, _, rewards, record, places = seen[1]
    assert (folder, engine.chat_template, len(dataset)) == (tmp_path / "e", template, 3)
    assert [reward.name for reward in rewards] == ["well_formed"]
    assert len(places([2])) == 1
    assert [row["prompt"] for row in tried] == [dataset["prompt"][0]], "each reward is tried on the first row"
    assert record == engine.record
    assert evaluate.weights_fingerprint("org/unknown") == {}


def test_the_rows_of_a_share_are_those_that_training_holds_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n}?", "answer": "1"}) + "\n" for n in range(10)))
    held_out = evaluate._problems(DatasetSpec.parse({"path": str(file), "eval_share": 0.3}), None)
    assert len(held_out.dataset) == 3
    assert len(evaluate._problems(DatasetSpec.parse({"path": str(file)}), None).dataset) == 10


def test_a_reward_gets_every_column_but_the_prompt(tmp_path: Path) -> None:
    seen: list[Any] = []

    def score(**given: Any) -> list[float]:
        seen.append(given)
        return [1.0] * len(given["prompts"])

    rows = Dataset.from_dict({"prompt": ["1?", "2?"], "answer": ["1", "2"], "zone": ["a", "b"]})
    settings = Settings(samples=2, temperature=1.0, strict=None)
    reward = MeasuredReward("mine", score, None)
    evaluate_into(tmp_path / "e", lambda prompts, settings: ["a", "b", "c", "d"], rows, settings, {}, [reward])
    assert seen == [
        {
            "prompts": ["1?", "1?", "2?", "2?"],
            "completions": ["a", "b", "c", "d"],
            "answer": ["1", "1", "2", "2"],
            "zone": ["a", "a", "b", "b"],
        }
    ]
    names = pq.read_schema(tmp_path / "e" / "completions.parquet").names
    assert names == ["problem", "sample", "prompt", "completion", "reward/mine"]


def test_a_folder_that_is_lost_before_the_result_is_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Dataset.from_dict({"prompt": ["1?"], "answer": ["1"]})

    def loses(settings: Settings) -> dict[str, Any]:
        lease = "filelock/2\npid=17\nhost=other-host\nmode=lease\ntoken=x\nduration=60.0\n"
        (tmp_path / LOCK).write_text(lease)
        return {}

    with pytest.raises(UserError, match="process 17 on other-host.* has taken it over"):
        evaluate_into(tmp_path, lambda prompts, settings: ["1"], rows, Settings(), {}, record=loses)
    assert not (tmp_path / "completions.parquet").exists()
