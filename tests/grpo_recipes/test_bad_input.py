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
REWARDS: list[Case] = [
    Case(
        "train --config {recipe}",
        ("recipe.yaml: `rewards`: reward 'judge': http://127.0.0.1:9/v1 gives no score",),
        changes={
            "rewards": [{"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "attempts": 1}}]
        },
    ),
]

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
