"""What each command says to bad input: one table, each row with its exit code and the words of its one sentence.

Every row runs in this process, in a folder of its own. Where the exit code is 2, no model may have been loaded, standard
error ends with one sentence (`error: ...`), and no traceback is printed. Rows with exit code 0 hold what must stay allowed.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes import cli, train
from grpo_rewards import cli as rewards_cli
from tests.grpo_recipes import stored

COMMANDS = {"grpo-recipes": cli.main, "train": train.main, "grpo-rewards": rewards_cli.main}

ROWS_JSONL = "".join(
    json.dumps({"question": f"Ann has {n} figs and eats 1. How many are left?", "answer": f"{n}-1\n#### {n - 1}"})
    + "\n"
    for n in range(1, 41)
)


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        line: the command line; `{model}` stands for a tiny model's folder, `{recipe}` for a recipe that is fine.
        words: what the sentence (exit code 0: the whole output) must hold, each of them.
        code: the exit code.
        files: files to lay into the folder first, by name.
        changes: keys of the fine recipe to replace (None removes one).
    """

    line: str
    words: tuple[str, ...]
    code: int = 2
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


# Keys and values of a recipe.
RECIPE: list[Case] = [
    Case("grpo-recipes plan {recipe} --lerning_rate 1", ("learning_rate",)),
    Case("train --config {recipe} --lerning_rate 1", ("learning_rate",)),
]

# Resuming, folders that can't be written, weight files that can't be read.
TRAINING: list[Case] = []

# Runs and evaluations that can't be read, or hold nothing to check.
CUT_STATE = json.dumps({"log_history": stored.HISTORY})[:500]
EVALUATE_M = "grpo-recipes evaluate m --dataset arithmetic --limit 2 --output e"
TWO_EVALUATIONS = {**stored.evaluation_files("a"), **stored.evaluation_files("b")}
BOXED = {"settings": {"samples": 1, "strict": [{"name": "gsm8k_correctness", "extract": "boxed"}]}}
RESULTS: list[Case] = [
    # What stays fine.
    Case("grpo-recipes diagnose run", ("nothing looks wrong", "9 of 10 checks had data"), 0, stored.run_files()),
    Case("grpo-recipes report run", ("report.html",), 0, stored.run_files()),
    Case("grpo-recipes report run other", ("report.html",), 0, {**stored.run_files(), **stored.run_files("other")}),
    Case(
        "grpo-recipes diagnose run",
        ("nothing looks wrong", "7 of 10 checks had data", "length_into_cap (no `run.json` says"),
        0,
        stored.run_files(record=None),
    ),
    Case(
        "grpo-recipes diagnose run",
        ("nothing looks wrong", "identical_completions (fewer than four groups"),
        0,
        stored.run_files(completions=None),
    ),
    Case(
        "grpo-recipes diagnose run",
        ("nothing looks wrong",),
        0,
        stored.run_files(record={**stored.RECORD, "launches": [stored.RECORD], "later": 1}),
    ),
    Case("grpo-recipes diagnose run", ("nothing looks wrong",), 0, stored.run_files(evaluation=None)),
    Case(
        "grpo-recipes diagnose run",
        ("kl_blow_up (`kl` was not logged",),
        0,
        stored.run_files(state={"log_history": [{**entry, "kl": None} for entry in stored.HISTORY]}),
    ),
    Case(
        "grpo-recipes diagnose run",
        ("nothing looks wrong",),
        0,
        {
            **stored.run_files(state=CUT_STATE),
            "run/checkpoint-40/trainer_state.json": json.dumps({"log_history": stored.HISTORY}),
        },
    ),
    Case("grpo-recipes evaluate --compare a b", ("2 problems", "exact p = 1"), 0, TWO_EVALUATIONS),
    # Nothing to check.
    Case(
        "grpo-recipes diagnose run",
        ("run", "nothing could be checked"),
        2,
        stored.run_files(state={"log_history": []}, completions=None),
    ),
    Case(
        "grpo-recipes report run",
        ("run", "nothing could be checked"),
        2,
        stored.run_files(state={"log_history": []}, completions=None),
    ),
    Case(
        "grpo-recipes report run other",
        ("other", "nothing could be checked"),
        2,
        {**stored.run_files(), **stored.run_files("other", state={"log_history": []}, completions=None)},
    ),
    Case(
        "grpo-recipes diagnose run",
        ("nothing could be checked",),
        2,
        stored.run_files(
            state={"log_history": [{"step": 0, "train_runtime": 0.1, "train_loss": 0.0}]}, completions=None
        ),
    ),
    Case(
        "grpo-recipes diagnose run",
        ("nothing could be checked",),
        2,
        stored.run_files(
            state={"log_history": [{"step": 1, "loss": 0.0, "reward": None}]}, completions=None, record=None
        ),
    ),
    # A run's files.
    Case("grpo-recipes diagnose nowhere", ("nowhere", "no such folder")),
    Case("grpo-recipes report nowhere", ("nowhere", "no such folder")),
    Case("grpo-recipes diagnose recipe.yaml", ("recipe.yaml", "no such folder")),
    Case("grpo-recipes diagnose run", ("no `trainer_state.json`",), 2, stored.run_files(state=None)),
    *(
        Case(f"grpo-recipes {verb} run", ("run/trainer_state.json", *words), 2, stored.run_files(state=state))
        for state, words in (
            ("", ("can't be read as JSON",)),
            (CUT_STATE, ("can't be read as JSON",)),
            (b"\xff\xfe\x00", ("can't be read as JSON",)),
            ("[" * 100_000, ("can't be read as JSON",)),
            ("{}", ("it has no `log_history`",)),
            ("[]", ("it is a list, not an object",)),
            ("null", ("it is null, not an object",)),
            ('"state"', ('it is "state", not an object',)),
            ({"log_history": {}}, ("`log_history` is an object, not a list",)),
            ({"log_history": [1]}, ("`log_history[0]` is 1, not an object",)),
            ({"log_history": [{"reward": 1.0}]}, ("`log_history[0]` has no `step`",)),
            ({"log_history": [{"step": "1"}]}, ('`log_history[0].step` is "1", not an integer',)),
            ({"log_history": [{"step": True}]}, ("`log_history[0].step` is true, not an integer",)),
            ({"log_history": [], "global_step": "x"}, ('`global_step` is "x", not an integer',)),
        )
        for verb in ("diagnose", "report")
    ),
    *(
        Case(f"grpo-recipes {verb} run", ("run/run.json", *words), 2, stored.run_files(record=record))
        for record, words in (
            ("", ("can't be read as JSON",)),
            ('{"recipe": {"model', ("can't be read as JSON",)),
            ("{}", ("it has no `recipe`",)),
            ("[]", ("it is a list",)),
            ({"recipe": "quickstart"}, ('`recipe` is "quickstart", not an object',)),
            ({"recipe": {"max_completion_length": "long"}}, ("`recipe.max_completion_length`", "integer")),
            ({"recipe": {}, "rewards": {}}, ("`rewards` is an object, not a list",)),
            ({"recipe": {}, "rewards": ["tag_count"]}, ('`rewards[0]` is "tag_count", not an object',)),
            ({"recipe": {}, "rewards": [{"name": "x"}]}, ("`rewards[0]` has no `source`",)),
            (
                {"recipe": {}, "rewards": [{"name": "x", "source": "x", "weight": "2"}]},
                ('`rewards[0].weight` is "2", not a number',),
            ),
            ({"recipe": {}, "versions": []}, ("`versions` is a list, not an object",)),
        )
        for verb in ("diagnose", "report")
    ),
    *(
        Case("grpo-recipes diagnose run", ("completions_00040.parquet", *words), 2, stored.run_files(completions=table))
        for table, words in (
            (b"", ("can't be read as parquet",)),
            (b"junk" * 100, ("can't be read as parquet",)),
            (stored.COMPLETIONS[:-50], ("can't be read as parquet",)),
            (stored.parquet({"text": ["a"]}), ("no column `step`", "its columns: text")),
            (
                stored.parquet({"step": ["one"], "prompt": ["p"], "completion": ["c"]}),
                ("column `step` does not hold integers",),
            ),
            (
                stored.parquet({"step": [1], "prompt": [3], "completion": ["c"]}),
                ("column `prompt` does not hold texts or lists of messages",),
            ),
            (
                stored.parquet({"step": [1], "prompt": ["p"], "completion": [["c"]]}),
                ("column `completion` does not hold texts or lists of messages",),
            ),
            (
                stored.parquet({"step": [1], "prompt": ["p"], "completion": ["c"], "tag_presence": ["much"]}),
                ("column `tag_presence` does not hold numbers",),
            ),
        )
    ),
    *(
        Case(
            "grpo-recipes report run",
            ("run/evaluations/before/evaluation.json", *words),
            2,
            stored.run_files(evaluation=summary),
        )
        for summary, words in (
            ("", ("can't be read as JSON",)),
            ("{}", ("it has no `problems`",)),
            ("[]", ("it is a list",)),
            ({**stored.EVALUATION, "strict": 0.5}, ("`strict` is 0.5, not a share",)),
            ({**stored.EVALUATION, "strict": {"value": 0.5}}, ("`strict` is an object, not a share",)),
            ({**stored.EVALUATION, "lenient": {"value": 0.5, "low": 0.6, "high": 0.4}}, ("not a share",)),
            ({**stored.EVALUATION, "pass_at": [0.5]}, ("`pass_at` is a list, not an object",)),
            ({**stored.EVALUATION, "pass_at": {"2": "all"}}, ('`pass_at.2` is "all", not a share',)),
        )
    ),
    Case(
        "grpo-recipes report run",
        ("after/completions.parquet", "no column `problem`"),
        2,
        {
            **stored.run_files(),
            **stored.evaluation_files("run/evaluations/before"),
            **stored.evaluation_files("run/evaluations/after", table={"a": [1]}),
        },
    ),
    Case("grpo-recipes report run --output recipe.yaml", ("can't be written", "--output"), 2, stored.run_files()),
    # Evaluations that are compared.
    Case("grpo-recipes evaluate --compare a nowhere", ("nowhere has no finished evaluation",), 2, TWO_EVALUATIONS),
    *(
        Case(
            "grpo-recipes evaluate --compare a b",
            words,
            2,
            {**stored.evaluation_files("a"), **stored.evaluation_files("b", **damaged)},
        )
        for damaged, words in (
            ({"summary": ""}, ("b/evaluation.json", "can't be read as JSON")),
            ({"summary": "{}"}, ("b/evaluation.json", "it has no `problems`")),
            ({"summary": "[]"}, ("b/evaluation.json", "it is a list")),
            ({"summary": {**stored.EVALUATION, "settings": []}}, ("b/evaluation.json", "`settings` is a list")),
            ({"summary": {**stored.EVALUATION, **BOXED}}, ("strict", "evaluate both with the same --recipe")),
            ({"table": None}, ("b/completions.parquet", "can't be read")),
            ({"table": b"junk"}, ("b/completions.parquet", "can't be read as parquet")),
            ({"table": {"a": [1]}}, ("b/completions.parquet", "no column `problem`", "its columns: a")),
            (
                {"table": {**stored.EVALUATED, "strict": ["yes", "no"]}},
                ("b/completions.parquet", "column `strict` does not hold true or false"),
            ),
            (
                {"table": {**stored.EVALUATED, "problem": ["p", "q"]}},
                ("b/completions.parquet", "column `problem` does not hold integers"),
            ),
            (
                {"table": stored.parquet({name: [] for name in stored.EVALUATED})},
                ("b/completions.parquet",),
            ),
            ({"table": {**stored.EVALUATED, "prompt": ["3+3=", "2+2="]}}, ("not on the same problems",)),
        )
    ),
    # Models that can't be evaluated.
    *(
        Case(EVALUATE_M, words, 2, stored.model_files(replaced))
        for replaced, words in (
            ({"config.json": None, "notes.txt": ""}, ("m holds no model",)),
            (
                {"config.json": None, "checkpoint-8/x": "", "checkpoint-16/x": ""},
                ("holds no model", "m/checkpoint-16"),
            ),
            ({}, ("model.safetensors.index.json is missing", "copy or download the folder again")),
            ({"pytorch_model.bin": b"x"}, ("m/pytorch_model.bin is cut off or damaged",)),
            ({"model.safetensors": b""}, ("m/model.safetensors is empty",)),
            ({"model.safetensors": b"\x10\0\0\0\0\0\0\0{"}, ("m/model.safetensors", "cut off")),
            (
                {"model.safetensors": "version https://git-lfs.github.com/spec/v1"},
                ("m/model.safetensors", "git lfs pull"),
            ),
            ({"model.safetensors": stored.ONE_TENSOR[:-1]}, ("m/model.safetensors", "cut off")),
            ({"config.json": '{"model'}, ("m/config.json", "can't be read as JSON")),
            ({"config.json": "[]"}, ("m/config.json", "it is a list")),
            ({"tokenizer.json": '{"version"', "model.safetensors": b""}, ("m/tokenizer.json", "can't be read")),
            ({"model.safetensors.index.json": "{}"}, ("model.safetensors.index.json is damaged",)),
            (
                {"model.safetensors.index.json": {"weight_map": {"w": "model-00002-of-00002.safetensors"}}},
                ("m/model-00002-of-00002.safetensors is missing",),
            ),
            (
                {"config.json": None, "adapter_config.json": {"base_model_name_or_path": "org/base"}},
                ("adapter_model.safetensors or adapter_model.bin is missing",),
            ),
            (
                {"config.json": None, "adapter_config.json": "{", "adapter_model.safetensors": b""},
                ("m/adapter_model.safetensors is empty",),
            ),
            (
                {"config.json": None, "adapter_config.json": "{", "adapter_model.bin": b"\x80"},
                ("m/adapter_config.json", "can't be read as JSON"),
            ),
            (
                {
                    "config.json": None,
                    "adapter_config.json": {"base_model_name_or_path": "/no/such/base"},
                    "adapter_model.bin": b"\x80",
                },
                ("its base /no/such/base is missing",),
            ),
        )
    ),
    # The options of an evaluation, and the folder it writes to.
    Case("grpo-recipes evaluate", ("name a model",)),
    Case("grpo-recipes evaluate {model} --dataset arithmetic --tags a a", ("--tags", "two different tag names")),
    Case("grpo-recipes evaluate {model} --dataset arithmetic --tags '<a>' b", ("--tags", "two different tag names")),
    Case("grpo-recipes evaluate {model} --dataset arithmetic --samples 0", ("--samples is 0",)),
    Case("grpo-recipes evaluate {model} --dataset arithmetic --output recipe.yaml", ("recipe.yaml", "--output")),
    Case(
        "grpo-recipes evaluate {model} --dataset arithmetic --output e",
        ("e holds files that are no evaluation",),
        2,
        {"e/notes.txt": ""},
    ),
    *(
        Case(
            "grpo-recipes evaluate {model} --dataset arithmetic --limit 2 --output e",
            (f"e/{name}", *words),
            2,
            {f"e/{name}": content},
        )
        for name, content, words in (
            ("evaluation.json", "", ("can't be read as JSON",)),
            ("evaluation.json", "{}", ("it has no `problems`",)),
            ("evaluation.json", "[]", ("it is a list",)),
            ("asked.json", "", ("can't be read as JSON", "remove the folder")),
            ("asked.json", "[]", ("it is a list", "remove the folder")),
        )
    ),
    Case(
        "grpo-recipes evaluate {model} --dataset arithmetic --limit 2 --output e",
        ("e holds another evaluation", "it does not record"),
        2,
        {"e/asked.json": "{}"},
    ),
    *(
        Case(
            "grpo-recipes evaluate run --output e",
            ("run/run.json", *words),
            2,
            {"run/config.json": "{}", "run/model.safetensors": stored.ONE_TENSOR, "run/run.json": record},
        )
        for record, words in (
            ("", ("can't be read as JSON",)),
            ("{}", ("it has no `recipe`",)),
            ('{"recipe": []}', ("`recipe` is a list",)),
            ('{"recipe": {"dataset": "gsm8k"}}', ("`recipe.dataset`", "not an object")),
            ('{"recipe": {"rewards": "gsm8k_correctness"}}', ("`recipe.rewards`", "not a list")),
        )
    ),
    Case(
        "grpo-recipes evaluate run --output e",
        ("`rewards`", "extract"),
        2,
        {
            "run/config.json": "{}",
            "run/model.safetensors": stored.ONE_TENSOR,
            "run/run.json": json.dumps(
                {
                    "recipe": {
                        "dataset": {"name": "arithmetic"},
                        "rewards": [{"name": "gsm8k_correctness", "kwargs": {"extract": "box"}}],
                    }
                }
            ),
        },
    ),
]

# Options, verbs, help.
FRONT_DOOR: list[Case] = []

# grpo-rewards.
REWARDS: list[Case] = []

CASES = [*RECIPE, *TRAINING, *RESULTS, *FRONT_DOOR, *REWARDS]


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    """A recipe that is fine, on forty rows."""
    (tmp_path / "train.jsonl").write_text(ROWS_JSONL)
    return {
        "model_name_or_path": str(tiny_model),
        "dtype": "float32",
        "bf16": False,
        "use_cpu": True,
        "dataset": {"name": "gsm8k", "path": "train.jsonl"},
        "rewards": ["gsm8k_correctness"],
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "output_dir": "run",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.line[:90])
def test_bad_input_gets_one_sentence(
    case: Case, tmp_path: Path, recipe: dict[str, Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", _no_model_yet)
    for name, content in case.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    values = {key: value for key, value in {**recipe, **case.changes}.items() if value is not None}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    line = case.line.replace("{recipe}", "recipe.yaml").replace("{model}", str(tiny_model))
    program, *arguments = shlex.split(line)
    with _captured() as (out, err):
        code = _exit_code(COMMANDS[program], arguments)
    said = out.getvalue() + err.getvalue()
    assert code == case.code, said
    assert "Traceback" not in said
    sentence = said if code == 0 else err.getvalue().rstrip().splitlines()[-1]
    for word in case.words:
        assert word in sentence, said
    if code == 2:
        assert _is_one_sentence(sentence), sentence


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def _exit_code(main: Any, arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1 if leaving.code else 0


def _is_one_sentence(line: str) -> bool:
    """Whether a line begins with who speaks, and has no doubled punctuation at its end."""
    return line.startswith(("error: ", "grpo-rewards: ", "grpo-recipes: ")) and not line.endswith(
        ("..", ".:", "?.", ",.")
    )


def _no_model_yet(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a model was loaded before the input was refused")
