"""Bad input of `train`: resumes, folders that cannot be written, weight files that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_input import SAFETENSORS, ZIP, Case, check

ONE_TENSOR = b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'


CUT_OFF = len(ONE_TENSOR).to_bytes(8, "little") + ONE_TENSOR + bytes(15)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


ADAPTER_CONFIG = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base", "target_modules": ["q_proj"]})


# Resuming, folders that can't be written, weight files that can't be read.
RESUME = "train --config {recipe} --resume_from_checkpoint true"


def _changed(option: str, *words: str, run: Mapping[str, Any] | None = None) -> Case:
    """Return a resume of a run with one option that may not change."""
    return Case(f"{RESUME} {option}", ("recipe.yaml: `resume_from_checkpoint`", *words), run=run or {})


TRAINING: list[Case] = [
    Case(
        RESUME,
        ("recipe.yaml: `resume_from_checkpoint`", "_launch.json: ", "remove the file"),
        files={"run/_launch.json": "["},
        run={},
    ),
    _changed("--learning_rate 1e-4", "`learning_rate` was 1e-06 and is 0.0001"),
    _changed("--learning_rate 1e-4 --beta 0.1", "`learning_rate` was 1e-06", "`beta` was 0.0 and is 0.1"),
    _changed("--max_steps 9 --beta 0.1", "`beta` was 0.0 and is 0.1: launch as before"),
    _changed("", "`beta` was 0.04 and is 0.0", run={"beta": 0.04}),
    _changed("--loss_type grpo", "`loss_type` was dapo and is grpo"),
    _changed("--rewards tag_presence", "`rewards.0.name` was gsm8k_correctness and is tag_presence"),
    _changed("--rewards [gsm8k_correctness,tag_presence]", "`rewards.1.name` was not set and is tag_presence"),
    _changed("--rewards.0.weight 2", "`rewards.0.weight` was 1.0 and is 2"),
    _changed("--rewards.0.kwargs.extract boxed", "`rewards.0.kwargs.extract` was not set and is boxed"),
    _changed("--model_name_or_path gpt2", "`model_name_or_path` was ", " and is gpt2"),
    _changed("--dtype bfloat16", "`dtype` was float32 and is bfloat16"),
    _changed("--use_peft", "`use_peft` was false and is true"),
    _changed("--lora_r 8", "`lora_r` was 16 and is 8"),
    _changed("--num_generations 8", "`num_generations` was 4 and is 8"),
    _changed("--num_iterations 2", "`num_iterations` was 1 and is 2"),
    _changed("--gradient_accumulation_steps 2", "`gradient_accumulation_steps` was 1 and is 2"),
    _changed("--per_device_train_batch_size 4", "`per_device_train_batch_size` was 8 and is 4"),
    _changed("--max_completion_length 9", "`max_completion_length` was 8 and is 9"),
    _changed("--temperature 0.7", "`temperature` was 1.0 and is 0.7"),
    _changed("--top_p 0.9", "`top_p` was 1.0 and is 0.9"),
    _changed("--repetition_penalty 1.1", "`repetition_penalty` was 1.0 and is 1.1"),
    _changed("--seed 1", "`seed` was 42 and is 1"),
    _changed("--shuffle_dataset false", "`shuffle_dataset` was true and is false"),
    _changed("--dataset.split train[:20]", "`dataset.split` was train and is train[:20]"),
    _changed("--dataset.system_prompt none", "`dataset.system_prompt` was reasoning and is none"),
    _changed("--lr_scheduler_type cosine", "`lr_scheduler_type` was linear and is cosine"),
    _changed("--warmup_steps 1", "`warmup_steps` was 0 and is 1"),
    _changed("--num_train_epochs 5", "`num_train_epochs` was 3.0 and is 5.0"),
    _changed("--weight_decay 0.1", "`weight_decay` was 0.0 and is 0.1"),
    _changed("--epsilon 0.1", "`epsilon` was 0.2 and is 0.1"),
    _changed("--epsilon_high 0.3", "`epsilon_high` was 0.2 and is 0.3"),
    _changed("--scale_rewards none", "`scale_rewards` was group and is none"),
    _changed("--max_grad_norm 0.5", "`max_grad_norm` was 1.0 and is 0.5"),
    _changed("--vllm_importance_sampling_mode token_mask", "`vllm_importance_sampling_mode` was sequence_mask"),
    Case(RESUME, ("run.json", "can't be read as JSON", "restore"), run={}, files={"run/run.json": '{"recipe": {'}),
    Case(RESUME, ("run.json", "no `recipe`"), run={}, files={"run/run.json": "{}"}),
    Case(RESUME, ("run.json", "it is a list"), run={}, files={"run/run.json": "[]"}),
    Case(RESUME, ("run.json", "can't be read"), files={"run/run.json": ""}),
    Case(
        "train --config {recipe} --resume_from_checkpoint run/checkpoint-9",
        ("no complete checkpoint", "run/checkpoint-9"),
        run={},
    ),
    Case(
        RESUME,
        ("checkpoint-2/model.safetensors is cut off", "9 bytes", "10", "remove the folder run/checkpoint-2"),
        run={},
        files={"run/checkpoint-2/model.safetensors": SAFETENSORS[:9]},
    ),
    Case(
        RESUME, ("checkpoint-2/model.safetensors is empty",), run={}, files={"run/checkpoint-2/model.safetensors": ""}
    ),
    Case(
        RESUME, ("optimizer.pt is cut off: it has 9 bytes",), run={}, files={"run/checkpoint-2/optimizer.pt": ZIP[:9]}
    ),
    Case(RESUME, ("scheduler.pt is empty",), run={}, files={"run/checkpoint-2/scheduler.pt": ""}),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("`model_name_or_path`", "policy/model.safetensors is cut off", "save it again"),
        files={"policy/config.json": "{}", "policy/model.safetensors": CUT_OFF},
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("policy/model.safetensors is cut off or damaged (80 bytes)", "file not fully covered"),
        files={"policy/config.json": "{}", "policy/model.safetensors": CUT_OFF + bytes(2)},
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("policy/model.safetensors is cut off or damaged (20 bytes)",),
        files={"policy/config.json": "{}", "policy/model.safetensors": CUT_OFF[:20]},
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("policy/model.safetensors is cut off or damaged (17 bytes): invalid JSON in header",),
        files={"policy/config.json": "{}", "policy/model.safetensors": (9).to_bytes(8, "little") + bytes(9)},
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("policy/model.safetensors is a git-lfs pointer", "git lfs pull"),
        files={"policy/config.json": "{}", "policy/model.safetensors": POINTER},
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("policy has no weights of a model", "model.safetensors"),
        files={"policy/config.json": "{}"},
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("policy/model-00002-of-00002.safetensors is missing",),
        files={
            "policy/config.json": "{}",
            "policy/model-00001-of-00002.safetensors": SAFETENSORS,
            "policy/model.safetensors.index.json": json.dumps(
                {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
            ),
        },
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("model.safetensors.index.json is damaged",),
        files={"policy/config.json": "{}", "policy/model.safetensors.index.json": "[]"},
    ),
    Case(
        "train --config {recipe} --model_name_or_path sft",
        ("sft/adapter_model.safetensors is cut off",),
        files={"sft/adapter_config.json": ADAPTER_CONFIG, "sft/adapter_model.safetensors": CUT_OFF},
    ),
    Case(
        "train --config {recipe} --model_name_or_path sft",
        ("sft has no weights of an adapter", "adapter_model.safetensors"),
        files={"sft/adapter_config.json": ADAPTER_CONFIG},
    ),
    Case(
        "train --config {recipe} --model_name_or_path sft",
        ("`base_model_name_or_path`", "base/model.safetensors is empty"),
        files={
            "sft/adapter_config.json": ADAPTER_CONFIG,
            "sft/adapter_model.safetensors": SAFETENSORS,
            "base/model.safetensors": "",
        },
    ),
    Case(
        "train --config {recipe} --model_name_or_path sft",
        ("sft is an adapter, and its base /nowhere/base is missing", "adapter_config.json"),
        files={
            "sft/adapter_config.json": ADAPTER_CONFIG.replace('"base"', '"/nowhere/base"'),
            "sft/adapter_model.safetensors": SAFETENSORS,
        },
    ),
    Case(
        "train --config {recipe} --use_peft --beta 0.1 --reference '{adapter: sft}'",
        ("`reference.adapter`", "sft/adapter_model.safetensors is cut off"),
        files={"sft/adapter_config.json": ADAPTER_CONFIG, "sft/adapter_model.safetensors": CUT_OFF},
    ),
    Case(
        "train --config {recipe}",
        ("`rewards`", "judge/model.safetensors is cut off"),
        changes={"rewards": [{"name": "reward_model", "kwargs": {"model": "judge"}}]},
        files={"judge/config.json": "{}", "judge/model.safetensors": CUT_OFF},
    ),
    Case("train --config {recipe} --output_dir /proc/run", ("`output_dir` /proc/run can't be written", "/proc:")),
    Case("train --config {recipe} --output_dir /proc/a/b", ("`output_dir` /proc/a/b can't be written", "choose")),
    Case("train --config {recipe} --output_dir train.jsonl/run", ("`output_dir`", "train.jsonl: it is no folder")),
    Case("train --config {recipe} --output_dir train.jsonl", ("`output_dir` train.jsonl is a file: choose",)),
    Case("train --config {recipe}", ("`output_dir` run already holds files", "--output_dir"), run={}),
    Case("train --config run/run.json", ("run.json: `output_dir` run already holds files", "--output_dir"), run={}),
    Case("train --config run/run.json", ("run/run.json: can't be read as JSON",), files={"run/run.json": "{"}),
    Case("train --config run/run.json", ("run/run.json: it has no `recipe`",), files={"run/run.json": "{}"}),
    Case(
        "grpo-recipes plan run/run.json", ("run/run.json: it is a list, not an object",), files={"run/run.json": "[1]"}
    ),
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
