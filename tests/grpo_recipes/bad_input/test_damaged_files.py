"""Damaged files: each ends a command that reads it with one sentence, exit code 2, and nothing written.

A damaged checkpoint is in `runs/test_damaged_checkpoints.py`, because a resume goes back to the one before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import stored
from tests.support.bad_input import SAFETENSORS, ZIP, Case, Content, check

HEADER = b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
CUT_OFF = len(HEADER).to_bytes(8, "little") + HEADER + bytes(15)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base", "target_modules": ["q_proj"]})
NO_BASE = ADAPTER.replace('"base"', '"/nowhere/base"')
CUT_STATE = json.dumps({"log_history": stored.HISTORY})[:500]

NOT_JSON = "JSON"
NOT_REGULAR = "regular"
LIST = "list"

DIAGNOSE, REPORT, COMPARE = "grpo-recipes diagnose run", "grpo-recipes report run", "grpo-recipes compare one two"
EVALUATE = "grpo-recipes evaluate m --dataset arithmetic --limit 2 --output e"
PLAN, TRAIN = "grpo-recipes plan {recipe}", "train --config {recipe}"
OF_M, OF_SFT = f"{TRAIN} --model_name_or_path m", f"{TRAIN} --model_name_or_path sft"
RESUME = f"{TRAIN} --resume_from_checkpoint true"


def sft(**files: Content) -> dict[str, Content]:
    """Return the files of an adapter, with other contents for some."""
    fine = {"adapter_config": ADAPTER, "adapter_model": SAFETENSORS, **files}
    suffixes = {"adapter_config": "json", "adapter_model": "safetensors"}
    return {f"sft/{name}.{suffixes[name]}": content for name, content in fine.items()}


def judged(model: str) -> dict[str, Any]:
    return {"rewards": [{"name": "reward_model", "kwargs": {"model": model}}]}


# Command, damaged file, its content, and words of the message.
FAULTS: list[tuple[str, str, Content, str]] = [
    (DIAGNOSE, "run/trainer_state.json", CUT_STATE, NOT_JSON),
    (DIAGNOSE, "run/trainer_state.json", os.mkfifo, NOT_REGULAR),
    (DIAGNOSE, "run/trainer_state.json", "[" * 100_000, "nested"),
    (DIAGNOSE, "run/trainer_state.json", '{"log_history": [{"step": "1"}]}', '`log_history[0].step` is "1"'),
    (DIAGNOSE, "run/_log.jsonl", '{"step": 1}\n{"reward"\n', "line 2"),
    (DIAGNOSE, "run/completions/completions_00040.parquet", stored.COMPLETIONS[:-50], "parquet"),
    (DIAGNOSE, "run/completions/completions_00040.parquet", stored.parquet({"a": [1]}), "`step`"),
    (REPORT, "run/run.json", b"\xff\xfe\x00", "UTF-8"),
    (REPORT, "run/run.json", '{"recipe": {}, "rewards": [{"name": "x"}]}', "`rewards[0]`"),
    (REPORT, "run/evaluations/before/evaluation.json", '{"strict": 0.5}', "`problems`"),
    (COMPARE, "two/evaluation.json", "", NOT_JSON),
    (COMPARE, "two/completions.parquet", Path.mkdir, NOT_REGULAR),
    (COMPARE, "two/completions.parquet", stored.parquet({**stored.EVALUATED, "strict": ["y", "n"]}), "column `strict`"),
    (EVALUATE, "m/config.json", "[]", "JSON object"),
    (EVALUATE, "m/tokenizer.json", '{"version"', NOT_JSON),
    (EVALUATE, "m/model.safetensors", CUT_OFF, "cut off"),
    (EVALUATE, "m/model.safetensors", POINTER, "git-lfs"),
    (EVALUATE, "m/model.safetensors", Path.mkdir, "is missing"),
    (EVALUATE, "e/request.json", "[]", "remove"),
    ("grpo-recipes evaluate run --output e", "run/run.json", '{"recipe": []}', "`recipe`"),
    ("grpo-recipes export m --to out", "m/model.safetensors", "", "is empty"),
    ("grpo-recipes chat m --prompt 1", "m/config.json", os.mkfifo, NOT_REGULAR),
    ("grpo-recipes merge sft --output out", "sft/adapter_config.json", "{", NOT_JSON),
    ("grpo-recipes init odd.jsonl --output first.yaml", "odd.jsonl", "{" * 20, "JSON"),
    (f"{PLAN} --model_name_or_path m", "m/config.json", '{"model', NOT_JSON),
    (f"{PLAN} --dataset.path rows.jsonl", "rows.jsonl", os.mkfifo, "name a"),
    (f"{PLAN} --dataset.system_prompt '{{file: prompt.txt}}'", "prompt.txt", b"\xff", "UTF-8"),
    ("grpo-recipes plan run/run.json", "run/run.json", "[1]", LIST),
    (OF_M, "m/model.safetensors", CUT_OFF, "save"),
    (OF_SFT, "sft/adapter_model.safetensors", CUT_OFF, "cut off"),
    (f"{TRAIN} --use_peft --beta 0.1 --reference '{{adapter: sft}}'", "sft/adapter_model.safetensors", CUT_OFF, "cut"),
    (RESUME, "run/run.json", '{"recipe": {', "restore"),
    (RESUME, "run/run.json", lambda path: None, "restore"),
    (RESUME, "run/_launch.json", "[", "remove"),
    (RESUME, "run/checkpoint-2/model.safetensors", SAFETENSORS[:9], "run/checkpoint-2"),
    (RESUME, "run/checkpoint-2/optimizer.pt", ZIP[:9], "cut off"),
    (RESUME, "run/checkpoint-2/scheduler.pt", "", "is empty"),
]


def case_of(line: str, file: str, content: Content, words: str) -> Case:
    """Return a command on intact files, with one of them damaged."""
    run = {} if line == RESUME else None
    fine: dict[str, Content] = {}
    if line in (DIAGNOSE, REPORT):
        fine = stored.run_files("run")
    elif line == COMPARE:
        fine = {**stored.evaluation_files("one"), **stored.evaluation_files("two")}
    elif file.startswith("m/"):
        fine = stored.model_files({"model.safetensors": stored.ONE_TENSOR})
    elif file.startswith("sft/"):
        fine = sft()
    elif file == "e/request.json":
        fine = stored.model_files({"model.safetensors": stored.ONE_TENSOR})
    elif line.startswith("grpo-recipes evaluate run"):
        fine = {"run/config.json": "{}", "run/model.safetensors": stored.ONE_TENSOR}
    return Case(line, (Path(file).name, words), files={**fine, file: content}, run=run)


# Files that are missing, or that name others.
OTHERS = [
    Case(DIAGNOSE, ("`trainer_state.json`",), files=stored.run_files(state=None)),
    Case(DIAGNOSE, ("run",), files=stored.run_files(state={"log_history": []}, completions=None)),
    Case("grpo-recipes compare one nowhere", ("nowhere",), files=stored.evaluation_files("one")),
    Case(EVALUATE, ("m",), files=stored.model_files({"config.json": None, "notes.txt": ""})),
    Case(EVALUATE, ("model.safetensors.index.json",), files=stored.model_files({})),
    Case(
        EVALUATE,
        ("model.safetensors.index.json",),
        files=stored.model_files({"model.safetensors.index.json": {"weight_map": {"w": "../model.safetensors"}}}),
    ),
    Case(OF_SFT, ("/nowhere/base",), files=sft(adapter_config=NO_BASE)),
    Case(OF_SFT, ("base/model.safetensors",), files={**sft(), "base/model.safetensors": ""}),
    Case(
        TRAIN,
        ("`rewards`", "judge/model.safetensors"),
        changes=judged("judge"),
        files={"judge/config.json": "{}", "judge/model.safetensors": CUT_OFF},
    ),
    Case(EVALUATE.replace(" m ", " {model} "), ("e",), files={"e/notes.txt": ""}),
    # Files that must stay allowed.
    Case(DIAGNOSE, ("nothing",), 0, stored.run_files(record=None, evaluation=None)),
    Case("grpo-recipes compare one two", ("2 problems",), 0, case_of(COMPARE, "notes.txt", "", "").files),
]


@pytest.mark.parametrize("case", [*(case_of(*fault) for fault in FAULTS), *OTHERS], ids=lambda case: case.line[:90])
def test_a_damaged_file_ends_with_one_message(
    case: Case, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tmp_path, tiny_model, monkeypatch)
