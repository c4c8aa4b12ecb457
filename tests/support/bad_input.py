"""Rows of bad input: a command line, the files it reads, and the message it must end with.

Every row runs in this process, in its own folder. For exit code 2, no model may have been loaded, standard error must
end with one message (`error: ...`), no traceback is printed, and no file is written. Rows with exit code 0 hold what
must stay allowed.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes import cli, train
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.runs.checkpoints import Manifest, write_manifest
from grpo_rewards import cli as rewards_cli

COMMANDS = {"grpo-recipes": cli.main, "train": train.main, "grpo-rewards": rewards_cli.main}


ROWS_JSONL = "".join(
    json.dumps({"question": f"Ann has {n} figs and eats 1. How many are left?", "answer": f"{n}-1\n#### {n - 1}"})
    + "\n"
    for n in range(1, 41)
)


SAFETENSORS = (2).to_bytes(8, "little") + b"{}"


ZIP = b"PK\x05\x06" + bytes(18)  # an empty one, as torch.save writes them


Content = str | bytes | Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """One command line with bad input.

    Attributes:
        line: Command line. `{model}` stands for a tiny model's folder, `{recipe}` for a valid recipe.
        words: Words that the message must contain. For exit code 0, the whole output must contain them.
        code: Exit code.
        files: Files to write into the folder first, by name: their contents, or a function that makes the file.
        changes: Keys of the valid recipe to replace. None removes a key.
        run: Keys of the valid recipe that a run in `run`, with a checkpoint of step 2, was launched with. None for no
            run.
    """

    line: str
    words: tuple[str, ...]
    code: int = 2
    files: Mapping[str, Content] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] | None = None


def fine_recipe(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    """Return a valid recipe on forty rows, and write the rows."""
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


def check(case: Case, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a row's command and compare its exit code and its last message."""
    recipe = fine_recipe(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("levels", "my_tools", "my_envs"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", _no_model_yet)
    if case.run is not None:
        lay_a_run(tmp_path / "run", {**recipe, **case.run})
    for name, content in case.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            path.unlink(missing_ok=True)
            content(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    values = {key: value for key, value in {**recipe, **case.changes}.items() if value is not None}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    line = case.line.replace("{recipe}", "recipe.yaml").replace("{model}", str(tiny_model))
    program, *arguments = shlex.split(line)
    before = _names(tmp_path)
    with _captured() as (out, err):
        code = exit_code(COMMANDS[program], arguments)
    said = out.getvalue() + err.getvalue()
    assert code == case.code, said
    assert "Traceback" not in said
    sentence = said if code == 0 else err.getvalue().rstrip().splitlines()[-1]
    for word in case.words:
        assert word in sentence, said
    if code == 2:
        assert _is_one_sentence(sentence), sentence
        assert _names(tmp_path) == before


def lay_a_run(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Write the files of a run on one process that are read before a model is loaded."""
    checkpoint = folder / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (folder.parent / "earlier.yaml").write_text(yaml.safe_dump(dict(recipe)))
    launched = parse_recipe(["--config", str(folder.parent / "earlier.yaml")])
    (folder / "run.json").write_text(json.dumps({"recipe": launched.as_dict()}))
    (checkpoint / "trainer_state.json").write_text('{"global_step": 2}')
    (checkpoint / "model.safetensors").write_bytes(SAFETENSORS)
    for name in ("rng_state.pth", "optimizer.pt", "scheduler.pt"):
        (checkpoint / name).write_bytes(ZIP)
    write_manifest(checkpoint, Manifest(2, 1, False, {}), each_node=False, writes=True)


def _names(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def exit_code(main: Any, arguments: list[str]) -> int:
    """Return the exit code of a command."""
    try:
        return main(arguments)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1 if leaving.code else 0


def _is_one_sentence(line: str) -> bool:
    """Return True if a line begins with `error: ` and has no doubled punctuation at its end."""
    return line.startswith("error: ") and not line.endswith(("..", ".:", "?.", ",."))


def _no_model_yet(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a model was loaded before the input was refused")
