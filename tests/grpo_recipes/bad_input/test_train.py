"""Bad input of `train`: resumes with another recipe, and folders that can't be written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_input import Case, check

# Resuming, and folders that can't be written.
RESUME = "train --config {recipe} --resume_from_checkpoint true"


def _changed(option: str, *words: str, run: Mapping[str, Any] | None = None) -> Case:
    """Return a resume of a run with one option that may not change."""
    return Case(f"{RESUME} {option}", ("recipe.yaml: `resume_from_checkpoint`", *words), run=run or {})


TRAINING: list[Case] = [
    _changed("--learning_rate 1e-4", "`learning_rate` was 1e-06 and is 0.0001"),
    _changed("--learning_rate 1e-4 --beta 0.1", "`learning_rate` was 1e-06", "`beta` was 0.0 and is 0.1"),
    _changed("", "`beta` was 0.04 and is 0.0", run={"beta": 0.04}),
    _changed("--rewards [gsm8k_correctness,tag_presence]", "`rewards.1.name` was not set and is tag_presence"),
    _changed("--rewards.0.kwargs.extract boxed", "`rewards.0.kwargs.extract` was not set and is boxed"),
    _changed("--model_name_or_path gpt2", "`model_name_or_path` was ", " and is gpt2"),
    _changed("--dataset.system_prompt none", "`dataset.system_prompt` was reasoning and is none"),
    _changed("--lr_scheduler_type cosine", "`lr_scheduler_type` was linear and is cosine"),
    Case(
        "train --config {recipe} --resume_from_checkpoint run/checkpoint-9",
        ("no complete checkpoint", "run/checkpoint-9"),
        run={},
    ),
    Case("train --config {recipe} --output_dir /proc/run", ("`output_dir` /proc/run can't be written", "/proc:")),
    Case("train --config {recipe} --output_dir /proc/a/b", ("`output_dir` /proc/a/b can't be written", "choose")),
    Case("train --config {recipe} --output_dir train.jsonl/run", ("`output_dir`", "train.jsonl: it is no folder")),
    Case("train --config {recipe} --output_dir train.jsonl", ("`output_dir` train.jsonl is a file: choose",)),
    Case("train --config {recipe}", ("`output_dir` run already holds files", "--output_dir"), run={}),
    Case("train --config run/run.json", ("run.json: `output_dir` run already holds files", "--output_dir"), run={}),
    Case(
        "train --config {recipe} --max_steps -1 --num_train_epochs 0",
        ("`num_train_epochs` is 0", "set a number above 0"),
    ),
]


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.line[:90])
def test_bad_input_ends_with_one_message(
    case: Case, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tmp_path, tiny_model, monkeypatch)
