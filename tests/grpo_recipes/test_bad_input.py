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
RESULTS: list[Case] = []

# Options, verbs, help.
FRONT_DOOR: list[Case] = []

# grpo-rewards.
SCORED = {"rows.jsonl": '{"completion": "<answer>18</answer>", "answer": "18"}\n' * 8}
UNSCORABLE = {"rows.jsonl": '{"completion": "<answer>18</answer>", "answer": ""}\n' * 3}
CHECKED = "grpo-rewards check rows.jsonl --reward "
INTERNLM2 = json.dumps(
    {
        "architectures": ["InternLM2ForRewardModel"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
)


def own(module: str, body: str) -> dict[str, str]:
    """The files of a reward of the user's own; each row has a module of its own, since modules are imported once."""
    return {**SCORED, f"{module}.py": f"def reward({body}\n"}


REWARDS: list[Case] = [
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness", ("8 rows, 0 unscorable", "mean 2.0000"), 0, SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --gold-column answer", ("8 rows",), 0, SCORED),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness --gold-column nope",
         ("rows.jsonl has no column 'nope'", "--gold-column", "'completion', 'answer'"), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --gold-column nope", ("no column 'nope'",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness",
         ("'gsm8k_correctness' needs the dataset column 'answer'",), files={"rows.jsonl": '{"completion": "18"}\n'}),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness",
         ("gsm8k_correctness could score none of 3 rows", "no gold in 'answer'", "row 1"), 1, UNSCORABLE),
    Case("grpo-rewards score rows.jsonl --reward own_none.reward", ("reward could score none of 8 rows", "None"), 1,
         own("own_none", "completions, **columns): return [None] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_count.reward", ("'reward' returned 11 scores for 8 completions",),
         files=own("own_count", "completions, **columns): return [0.0] * 11")),
    Case("grpo-rewards score rows.jsonl --reward own_raises.reward",
         ("'reward' raised ZeroDivisionError: division by zero", "own_raises.py, line 1"),
         files=own("own_raises", "completions, **columns): return [1 / 0 for _ in completions]")),
    Case("grpo-rewards score rows.jsonl --reward own_value.reward", ("'reward' raised ValueError: math domain error",),
         files=own("own_value", "completions, **columns): raise ValueError('math domain error')")),
    Case("grpo-rewards score rows.jsonl --reward own_nan.reward", ("'reward' returned nan for row 1", "finite number"),
         files=own("own_nan", "completions, **columns): return [float('nan')] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_inf.reward", ("'reward' returned -inf for row 1",),
         files=own("own_inf", "completions, **columns): return [float('-inf')] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_text.reward", ("'reward' returned '1' for row 1",),
         files=own("own_text", "completions, **columns): return ['1'] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_scalar.reward", ("'reward' returned a float, not a list",),
         files=own("own_scalar", "completions, **columns): return 1.0")),
    Case("grpo-rewards score rows.jsonl --reward own_mapping.reward", ("'reward' returned a dict, not a list",),
         files=own("own_mapping", "completions, **columns): return {}")),
    Case("grpo-rewards score rows.jsonl --reward own_signature.reward",
         ("'reward' can't be called", "missing a required argument: 'response'", "prompts, completions"),
         files=own("own_signature", "response): return [0.0]")),
    Case("grpo-rewards score rows.jsonl --reward own_closed.reward",
         ("'reward' can't be called", "unexpected keyword argument", "**columns"),
         files=own("own_closed", "prompts, completions): return [0.0]")),
    Case("grpo-rewards score rows.jsonl --reward own_import.reward",
         ("'own_import' can't be imported", "ZeroDivisionError"), files={**SCORED, "own_import.py": "1 / 0"}),
    Case("grpo-rewards score rows.jsonl --reward own_syntax.reward", ("'own_syntax' can't be imported", "SyntaxError"),
         files={**SCORED, "own_syntax.py": "def reward(:"}),
    Case("grpo-rewards score rows.jsonl --reward '{name: own_factory.reward, kwargs: {}}'",
         ("reward 'own_factory.reward': KeyError",), files=own("own_factory", "): return {}['x']")),
    Case("grpo-rewards score rows.jsonl --reward no_such_module.reward", ("can't be imported", "no_such_module"),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward math.pi", ("'math.pi' is a float, which can't be called",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_cuont", ("unknown reward 'tag_cuont'; did you mean 'tag_count'?",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward zzz", ("unknown reward 'zzz'.",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward ''", ("a reward is a name or a mapping",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: tag_count'", ("is not a YAML mapping",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: tag_count, kwarg: {}}'", ("did you mean 'kwargs'?",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {extract: box}}'",
         ("extract must be one of", "'box'"), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {extarct: boxed}}'",
         ("unknown kwarg 'extarct'; did you mean 'extract'?",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {extract: boxed}}'",
         ("no completion states an answer where `extract: boxed` looks", "`extract: answer_tag` finds one in 8 of 8"), 0,
         SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --num-generations 0", ("--num-generations", "at least 1"),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward group_length --num-generations 3", ("whole number of groups of 3",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward group_length", ("needs the kwarg num_generations",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --out scores.csv", (".jsonl or .parquet",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --out rows.jsonl", ("is the file to score",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --out there.jsonl", ("there.jsonl can't be written",),
         files={**SCORED, "there.jsonl/file": ""}),
    Case("grpo-rewards score absent.jsonl --reward tag_count", ("absent.jsonl is not a file",)),
    Case("grpo-rewards score . --reward tag_count", (". is not a file",)),
    Case("grpo-rewards score rows.jsonl --reward tag_count", ("no row that can be used", "row 1: not JSON"),
         files={"rows.jsonl": b"\xff\xfe\x00junk\n"}),
    Case("grpo-rewards score rows.jsonl --reward tag_count", ("no row that can be used",), files={"rows.jsonl": ""}),
    Case("grpo-rewards score rows.jsonl --reward tag_count", ("row 1: a list, not an object",),
         files={"rows.jsonl": '[{"completion": "18"}]\n'}),
    Case("grpo-rewards score rows.jsonl --reward tag_count", ("row 1: no 'completion'", "'text'"),
         files={"rows.jsonl": '{"text": "18"}\n'}),
    Case("grpo-rewards score rows.parquet --reward tag_count", ("rows.parquet is not a Parquet file",),
         files={"rows.parquet": b"PAR1 junk"}),
    Case("grpo-rewards check rows.jsonl", ("8 golds, 8 earn full pay",), 0, SCORED),
    Case("grpo-rewards check rows.jsonl", ("none of 3 golds in 'answer' has a final answer",), 1, UNSCORABLE),
    Case("grpo-rewards check rows.jsonl --gold-column gold", ("no 'gold'",), files=SCORED),
    Case(CHECKED + "tag_count", ("check needs a correctness reward",), files=SCORED),
    Case(CHECKED + "'{name: gsm8k_correctness, kwargs: {gold_column: x}}'", ("needs the dataset column 'x'",),
         files=SCORED),
    Case("grpo-rewards convert-internlm2 absent out", ("'absent' is neither a folder nor a model",)),
    Case("grpo-rewards convert-internlm2 empty out", ("has no config.json",), files={"empty/file": ""}),
    Case("grpo-rewards convert-internlm2 odd out", ("is not valid JSON",), files={"odd/config.json": "{"}),
    Case("grpo-rewards convert-internlm2 odd out", ("is not a JSON object",), files={"odd/config.json": "[]"}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json lacks vocab_size",),
         files={"odd/config.json": '{"architectures": ["InternLM2ForRewardModel"]}'}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json has a value", "hidden_size"),
         files={"odd/config.json": INTERNLM2.replace("16", '"x"')}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json has a value", "float3"),
         files={"odd/config.json": INTERNLM2.replace("{", '{"dtype": "float3", ')}),
    Case("grpo-rewards convert-internlm2 odd out", ("no model.safetensors",), files={"odd/config.json": INTERNLM2}),
    Case("grpo-rewards convert-internlm2 odd out", ("odd has a tokenizer that can't be read",),
         files={"odd/config.json": INTERNLM2, "odd/model.safetensors": "", "odd/tokenizer.json": "{"}),
    Case("grpo-rewards convert-internlm2 {model} out", ("not InternLM2ForRewardModel",)),
    Case("grpo-rewards convert-internlm2 {model} there", ("there exists already",), files={"there/file": ""}),
]  # fmt: skip

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
