"""Whole output of each command: the transcripts of tests/golden.

A line "$ COMMAND" is typed in a folder with the files of `inputs`, and what it prints stands below it, with its exit
code if that is not 0. `make golden` types all of them again and rewrites the files: read their diff as a reader of the
command. Wording is asserted nowhere else.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import bad_input, stored, tiny

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden"
SLOW = {"evaluate", "export", "merge", "plan-memory", "train"}
"""Transcripts that load or measure a model and so take seconds."""

VARIES = (
    (r"\b\d+(?:\.\d+)? (?:s|seconds|ms|tokens/s)\b", "N s"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?Z?", "DATE"),
    (r".*\d+(?:batch|it)/s\].*|.*\?batch/s\].*", ""),
    (rf"{re.escape(str(ROOT))}/", ""),
)
"""Patterns of text that differs between two machines or runs, with what stands for it."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Write a recipe, its rows, completions to score, a finished run and two evaluations; link a tiny model."""
    folder = tmp_path_factory.mktemp("inputs")
    values = bad_input.fine_recipe(folder, tiny_model) | {"model_name_or_path": "model"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (folder / "model").symlink_to(tiny_model)
    (folder / "problems.csv").write_text("question,answer,level\n" + "".join(f"{n} + 1?,{n + 1},1\n" for n in range(8)))
    rows = [("#### 2", "2"), ("<answer>3</answer>", "4"), ("No idea.", "5")]
    (folder / "completions.jsonl").write_text(
        "".join(f'{{"completion": "{text}", "answer": "#### {gold}"}}\n' for text, gold in rows)
    )
    files = {**stored.run_files("finished"), **stored.evaluation_files("one"), **stored.evaluation_files("two")}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    tiny.save_policy(folder / "other", num_hidden_layers=1)
    return folder


def transcript(commands: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Type the commands, and return each with what it printed."""
    parts = []
    for command in commands:
        program, *arguments = shlex.split(command)
        code = bad_input.exit_code(bad_input.COMMANDS[program], arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        said = "".join(capfd.readouterr())
        for pattern, shown in ((re.escape(f"{folder}/"), ""), (re.escape(str(folder)), "."), *VARIES):
            said = re.sub(pattern, shown, said)
        said = re.sub(r" +$", "", said, flags=re.MULTILINE).strip("\n")
        parts.append(f"$ {command}\n{said}\n" + (f"[exit code {code}]\n" if code else ""))
    return "\n".join(parts)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in sorted(FOLDER.glob("*.txt"))
    ],
)
def test_a_command_prints_its_transcript(
    file: Path, tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(inputs, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name, value in {"COLUMNS": "120", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    kept = file.read_text(encoding="utf-8")
    commands = [line.removeprefix("$ ") for line in kept.splitlines() if line.startswith("$ ")]
    capfd.readouterr()
    now = transcript(commands, tmp_path, capfd)
    if os.environ.get("GOLDEN") == "write":
        file.write_text(now, encoding="utf-8")
    else:
        changed = difflib.unified_diff(kept.splitlines(), now.splitlines(), "kept", "now", lineterm="", n=1)
        assert now == kept, "if this is meant: make golden\n" + "\n".join(changed)
