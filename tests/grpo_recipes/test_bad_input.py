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
from grpo_recipes.recipe import parse_recipe
from grpo_rewards import cli as rewards_cli

COMMANDS = {"grpo-recipes": cli.main, "train": train.main, "grpo-rewards": rewards_cli.main}

ROWS_JSONL = "".join(
    json.dumps({"question": f"Ann has {n} figs and eats 1. How many are left?", "answer": f"{n}-1\n#### {n - 1}"})
    + "\n"
    for n in range(1, 41)
)

SAFETENSORS = (2).to_bytes(8, "little") + b"{}"
ONE_TENSOR = b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
CUT_OFF = len(ONE_TENSOR).to_bytes(8, "little") + ONE_TENSOR + bytes(15)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
ADAPTER_CONFIG = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base", "target_modules": ["q_proj"]})
ZIP = b"PK\x05\x06" + bytes(18)  # an empty one, as torch.save writes them


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        line: the command line; `{model}` stands for a tiny model's folder, `{recipe}` for a recipe that is fine.
        words: what the sentence (exit code 0: the whole output) must hold, each of them.
        code: the exit code.
        files: files to lay into the folder first, by name.
        changes: keys of the fine recipe to replace (None removes one).
        run: keys of the fine recipe that a run in `run`, with a checkpoint of step 2, was launched with; None for no run.
    """

    line: str
    words: tuple[str, ...]
    code: int = 2
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] | None = None


# Keys and values of a recipe.
RECIPE: list[Case] = [
    Case("grpo-recipes plan {recipe} --lerning_rate 1", ("learning_rate",)),
    Case("train --config {recipe} --lerning_rate 1", ("learning_rate",)),
]

# Resuming, folders that can't be written, weight files that can't be read.
RESUME = "train --config {recipe} --resume_from_checkpoint true"


def _changed(option: str, *words: str, run: Mapping[str, Any] | None = None) -> Case:
    """A resume of a run with one option that may not change."""
    return Case(f"{RESUME} {option}", ("recipe.yaml: `resume_from_checkpoint`", *words), run=run or {})


TRAINING: list[Case] = [
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
    _changed("--dataset.prompt_style none", "`dataset.prompt_style` was reasoning and is none"),
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
    Case(RESUME, ("run.json", "no `recipe`"), run={}, files={"run/run.json": "[]"}),
    Case(RESUME, ("run.json", "can't be read"), files={"run/run.json": ""}),
    Case(
        "train --config {recipe} --resume_from_checkpoint run/checkpoint-9",
        ("no complete checkpoint", "run/checkpoint-9"),
        run={},
    ),
    Case(
        RESUME,
        ("checkpoint-2/model.safetensors is cut off", "70 bytes", "79", "remove the folder run/checkpoint-2"),
        run={},
        files={"run/checkpoint-2/model.safetensors": (len(ONE_TENSOR)).to_bytes(8, "little") + ONE_TENSOR + bytes(7)},
    ),
    Case(
        RESUME, ("checkpoint-2/model.safetensors is empty",), run={}, files={"run/checkpoint-2/model.safetensors": ""}
    ),
    Case(RESUME, ("optimizer.pt is cut off or damaged",), run={}, files={"run/checkpoint-2/optimizer.pt": ZIP[:9]}),
    Case(RESUME, ("scheduler.pt is empty",), run={}, files={"run/checkpoint-2/scheduler.pt": ""}),
    Case(RESUME, ("reference.safetensors is cut",), run={}, files={"run/checkpoint-2/reference.safetensors": CUT_OFF}),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("`model_name_or_path`", "policy/model.safetensors is cut off", "save it again"),
        files={"policy/config.json": "{}", "policy/model.safetensors": CUT_OFF},
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("policy/model.safetensors is damaged", "80 bytes"),
        files={"policy/config.json": "{}", "policy/model.safetensors": CUT_OFF + bytes(2)},
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("policy/model.safetensors is cut off in its header",),
        files={"policy/config.json": "{}", "policy/model.safetensors": CUT_OFF[:20]},
    ),
    Case(
        "train --config {recipe} --model_name_or_path policy",
        ("policy/model.safetensors is damaged: its header",),
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
        ("sft is an adapter, and its base /nowhere/base is not there", "adapter_config.json"),
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
    Case("train --config {recipe} --output_dir train.jsonl", ("`output_dir` train.jsonl already holds files",)),
    Case("train --config {recipe}", ("`output_dir` run already holds files", "--output_dir"), run={}),
    Case("train --config run/run.json", ("run.json: `output_dir` run already holds files", "--output_dir"), run={}),
    Case("train --config run/run.json", ("run/run.json: can't be read as JSON",), files={"run/run.json": "{"}),
    Case("train --config run/run.json", ("run/run.json: holds no `recipe`",), files={"run/run.json": "{}"}),
    Case("grpo-recipes plan run/run.json", ("run/run.json: holds no `recipe`",), files={"run/run.json": "[1]"}),
    Case(
        "train --config {recipe} --max_steps -1 --num_train_epochs 0",
        ("`num_train_epochs` 0 comes to 0 optimiser steps",),
    ),
]

# Runs and evaluations that can't be read, or hold nothing to check.
RESULTS: list[Case] = []

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
    if case.run is not None:
        _lay_a_run(tmp_path / "run", {**recipe, **case.run})
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


def _lay_a_run(folder: Path, recipe: Mapping[str, Any]) -> None:
    """The record and the checkpoint of a run on one process, as far as they are read before a model is loaded."""
    checkpoint = folder / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (folder.parent / "earlier.yaml").write_text(yaml.safe_dump(dict(recipe)))
    launched = parse_recipe(["--config", str(folder.parent / "earlier.yaml")])
    (folder / "run.json").write_text(json.dumps({"recipe": launched.as_dict()}))
    (checkpoint / "trainer_state.json").write_text('{"global_step": 2}')
    (checkpoint / "model.safetensors").write_bytes(SAFETENSORS)
    for name in ("rng_state.pth", "optimizer.pt", "scheduler.pt"):
        (checkpoint / name).write_bytes(ZIP)


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
