"""What each command says to bad input: one table, each row with its exit code and the words of its one sentence.

Every row runs in this process, in a folder of its own. Where the exit code is 2, no model may have been loaded, standard
error ends with one sentence (`error: ...`), and no traceback is printed. Rows with exit code 0 hold what must stay allowed.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes import cli, train
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.runs.checkpoints import Manifest, write_manifest
from grpo_rewards import cli as rewards_cli
from tests.support import stored

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


PROSE_JSONL = "".join(
    json.dumps({"question": f"Why {n}?", "answer": f"This one has no short answer at all, number {n} either."}) + "\n"
    for n in range(1, 41)
)
MIXED_JSONL = "".join(
    PROSE_JSONL.splitlines(keepends=True)[n] if n in (2, 6) else row
    for n, row in enumerate(ROWS_JSONL.splitlines(keepends=True))
)

REWARDS_PY = """
def by_level(completions, level, **columns):
    return [float(value) for value in level]


def with_a_choice(completions, level=None, **columns):
    return [0.0] * len(completions)


def takes_little(prompts, completions):
    return [0.0] * len(completions)
"""


def with_column(name: str, value: Any) -> str:
    """The fine rows with one more column."""
    return "".join(json.dumps({**json.loads(row), name: value}) + "\n" for row in ROWS_JSONL.splitlines())


def refused(key: str, *values: float, words: str) -> list[Case]:
    """A value of a key that is out of its range, in the file for `plan` and on the command line for `train`."""
    return [
        case
        for value in values
        for case in (
            Case("grpo-recipes plan {recipe}", (f"`{key}` is {value}: set a", words), changes={key: value}),
            Case(f"train --config {{recipe}} --{key}={value}", (f"`{key}` is {value}: set a", words)),
        )
    ]


def allowed(key: str, *values: Any, **also: Any) -> list[Case]:
    """Values at the border of a key's range that must stay allowed."""
    return [
        Case("grpo-recipes plan {recipe}", ("optimiser step",), 0, changes={key: value, **also}) for value in values
    ]


LORA = {"use_peft": True, "lora_r": 4}
NAN, INFINITE = float("nan"), float("inf")

# Keys and values of a recipe.
RECIPE: list[Case] = [
    Case("grpo-recipes plan {recipe} --lerning_rate 1", ("learning_rate",)),
    Case("train --config {recipe} --lerning_rate 1", ("learning_rate",)),
    # Numbers out of range, and those at the border.
    *refused("temperature", 0.0, -1.0, words="number above 0"),
    *refused("max_completion_length", 0, -5, words="number of at least 1"),
    *refused("learning_rate", -1e-6, words="number of at least 0"),
    *refused("learning_rate", NAN, INFINITE, words="number of at least 0"),
    *refused("beta", -0.1, INFINITE, words="number of at least 0"),
    *refused("epsilon", -0.2, NAN, words="number of at least 0"),
    *refused("epsilon_high", -0.2, words="number of at least 0"),
    *refused("delta", -2.0, words="number of at least 0"),
    *refused("max_grad_norm", -1.0, words="number of at least 0"),
    *refused("weight_decay", -0.01, words="number of at least 0"),
    *refused("top_p", 0.0, 1.5, words="number above 0 and at most 1"),
    *refused("top_entropy_quantile", 0.0, 1.01, words="number above 0 and at most 1"),
    *refused("vllm_gpu_memory_utilization", 0.0, 1.2, words="number above 0 and at most 1"),
    *refused("min_p", -0.1, 1.1, words="number of at least 0 and at most 1"),
    *refused("lora_r", 0, words="number of at least 1"),
    *refused("seed", -1, words="number of at least 0 and below 4,294,967,296"),
    *refused("max_steps", 0, -2, words="number of at least 1, or -1"),
    *refused("top_k", -2, words="number of at least 0, or -1"),
    *refused("repetition_penalty", 0.0, words="number above 0"),
    *refused("adam_beta2", 1.0, words="number of at least 0 and below 1"),
    *allowed("temperature", 0.01),
    *allowed("max_completion_length", 1),
    *allowed("learning_rate", 0.0, 1e-2),
    *allowed("beta", 0.0),
    *allowed("epsilon_high", 0.0, 5.0),
    *allowed("delta", 4.0),
    *allowed("top_p", 1.0),
    *allowed("min_p", 0.0, 1.0),
    *allowed("generation_kwargs", {"stop": "</answer>"}, {"stop": ["a", "b"]}),
    Case("train --config {recipe} --generation_kwargs.stop 3", ("`generation_kwargs.stop` must be a string", "not 3")),
    Case(
        "train --config {recipe} --generation_kwargs.stop [b] --use_transformers_continuous_batching true",
        ("`use_transformers_continuous_batching` drops stop: set it to false",),
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("`generation_kwargs.stop_strings`: write `stop` instead",),
        changes={"generation_kwargs": {"stop_strings": ["b"]}},
    ),
    *allowed("top_k", 0, -1),
    *allowed("top_entropy_quantile", 1.0),
    *allowed("vllm_gpu_memory_utilization", 1.0),
    *allowed("max_grad_norm", 0.0),
    *allowed("weight_decay", 0.0),
    *allowed("seed", 0),
    *allowed("max_steps", -1, 1),
    *allowed("lora_r", 1, use_peft=True),
    Case("grpo-recipes plan {recipe}", ("`num_train_epochs` is 0",), changes={"max_steps": -1, "num_train_epochs": 0}),
    Case(
        "grpo-recipes plan {recipe}",
        ("note", "`learning_rate` is 0.05", "above 0.01"),
        0,
        changes={"learning_rate": 0.05},
    ),
    # Weights.
    Case(
        "grpo-recipes plan {recipe}",
        ("`rewards`: all weights are 0", "give one reward a weight"),
        changes={"rewards": [{"name": "gsm8k_correctness", "weight": 0}, {"name": "tag_count", "weight": 0.0}]},
    ),
    Case("train --config {recipe} --rewards.0.weight 0", ("`rewards`: all weights are 0",)),
    Case(
        "train --config {recipe}",
        ("`rewards`: all weights are 0",),
        changes={"rewards": [{"name": "sum", "rewards": [{"name": "tag_count", "weight": 0}]}]},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("gsm8k_correctness × 1, tag_count × 0 (logged only)",),
        0,
        changes={"rewards": ["gsm8k_correctness", {"name": "tag_count", "weight": 0}]},
    ),
    # Places on the command line.
    Case("train --config {recipe} --rewards.5.weight 2", ("`--rewards.5.weight`: `rewards`", "no entry `5`", "0 to 0")),
    Case("train --config {recipe} --rewards.x.weight 2", ("`--rewards.x.weight`: `rewards`", "no entry `x`", "0 to 0")),
    Case("train --config {recipe} --rewards.-1.weight 2", ("no entry `-1`",)),
    Case("grpo-recipes plan {recipe} --rewards.1 tag_count", ("`--rewards.1`", "no entry `1`", "0 to 0")),
    Case("grpo-recipes plan {recipe} --max_steps.x 2", ("`max_steps` is 2, which has no keys", "`.x`")),
    Case("grpo-recipes plan {recipe} --max_steps.x.y 2", ("`max_steps` is 2, which has no keys", "`.x`")),
    Case("grpo-recipes plan {recipe} --dataset.size", ("`--dataset.size` needs a value",)),
    Case("grpo-recipes plan {recipe} --rewards.0.weight 2", ("gsm8k_correctness × 2",), 0),
    # Keys given twice.
    Case(
        "grpo-recipes plan twice.yaml",
        ("twice.yaml: `beta` is given twice, in line 2 and in line 4: keep one",),
        files={"twice.yaml": "# comment\nbeta: 0.1\nmax_steps: 2\nbeta: 0.2\n"},
    ),
    Case(
        "train --config twice.yaml",
        ("twice.yaml: `path` is given twice, in line 3 and in line 5: keep one",),
        files={"twice.yaml": "dataset:\n  name: gsm8k\n  path: a.jsonl\n  split: train\n  'path': b.jsonl\n"},
    ),
    Case(
        "train --config twice.yaml",
        ("twice.yaml: `tags` is given twice, in line 3 and in line 4: keep one",),
        files={"twice.yaml": "rewards:\n  - name: tag_count\n    kwargs: {tags: [a, b],\n      tags: [c, d]}\n"},
    ),
    Case(
        "train --config {recipe} --dataset '{name: gsm8k, name: arithmetic}'", ("`--dataset`: `name` is given twice",)
    ),
    Case(
        "grpo-recipes plan {recipe} --accelerate_config two.yaml",
        ("two.yaml: `num_processes` is given twice, in line 1 and in line 2",),
        files={"two.yaml": "num_processes: 1\nnum_processes: 2\n"},
    ),
    Case(
        "grpo-recipes plan merged.yaml",
        ("tag_count × 2",),
        0,
        files={
            "merged.yaml": "model_name_or_path: nowhere/model\nuse_cpu: true\nbf16: false\ndataset: arithmetic\nrewards:\n"
            "  - &tags {name: tag_count, weight: 1, alias: one}\n  - {<<: *tags, weight: 2, alias: tag_count}\n"
        },
    ),
    # What is not installed.
    Case(
        "train --config {recipe} --report_to trackio",
        ("`report_to: trackio` needs the package trackio", "not installed", "`report_to: none`"),
    ),
    Case(
        "train --config {recipe}",
        ("`report_to` can't be `wandbb`: did you mean `wandb`?",),
        changes={"report_to": ["wandbb"]},
    ),
    Case("grpo-recipes plan {recipe} --report_to trackio", ("note", "needs the package trackio"), 0),
    Case("grpo-recipes plan {recipe}", ("optimiser step",), 0, changes={"report_to": "none"}),
    Case(
        "train --config {recipe} --use_vllm true",
        ("`use_vllm` needs vLLM, which is not installed", "grpo-recipes[vllm]"),
    ),
    Case("grpo-recipes plan {recipe} --use_vllm true", ("note", "`use_vllm` needs vLLM, which is not installed"), 0),
    # What vLLM can't do with a recipe.
    Case(
        "grpo-recipes plan {recipe} --vllm_importance_sampling_mode sequence_maks",
        ("`vllm_importance_sampling_mode` can't be `sequence_maks`: did you mean `sequence_mask`?",),
    ),
    Case(
        "grpo-recipes plan {recipe} --num_processes 4 --vllm_tensor_parallel_size 3",
        ("`vllm_tensor_parallel_size` 3 does not divide the 4 process(es)",),
        changes={"use_vllm": True},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("`vllm_max_model_length` is 20, and the longest prompt of", "`max_completion_length`", "raise the first"),
        changes={"use_vllm": True, "vllm_max_model_length": 20},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("`load_in_8bit` loads a base that vLLM can't hold",),
        changes={"use_vllm": True, "load_in_8bit": True, **LORA},
    ),
    *allowed("vllm_tensor_parallel_size", 3, use_vllm=True, vllm_mode="server"),
    *allowed("vllm_max_model_length", 20, use_vllm=True, vllm_mode="server"),
    *allowed("vllm_max_model_length", 2000, use_vllm=True),
    Case(
        "grpo-recipes plan {recipe} --model_name_or_path prompts",
        ("prompts is an adapter of the kind PROMPT_TUNING", "can't be merged", "`use_vllm: false`"),
        files={"prompts/adapter_config.json": '{"peft_type": "PROMPT_TUNING", "base_model_name_or_path": "base"}'},
        changes={"use_vllm": True},
    ),
    # Adapters.
    Case(
        "train --config {recipe}",
        ("`lora_target_modules`: kproj, qproj matches no module of the model", "q_proj", "all-linear"),
        changes={**LORA, "lora_target_modules": ["qproj", "kproj"]},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("`lora_target_modules`: c_attn matches no module of the model", "q_proj"),
        changes={**LORA, "lora_target_modules": ["c_attn"]},
    ),
    Case(
        "train --config {recipe}",
        ("`lora_target_modules`: a single name is a pattern", "`.*q_proj`"),
        changes={**LORA, "lora_target_modules": "q_proj"},
    ),
    Case("grpo-recipes plan {recipe}", ("peak",), 0, changes={**LORA, "lora_target_modules": ["q_proj", "v_proj"]}),
    Case("grpo-recipes plan {recipe}", ("peak",), 0, changes={**LORA, "lora_target_modules": ".*v_proj"}),
    Case("grpo-recipes plan {recipe}", ("peak",), 0, changes={**LORA, "lora_target_modules": "all-linear"}),
    # Columns that rewards need.
    Case(
        "train --config {recipe}",
        ("`rewards`: by_level needs the column `level`", "it gets are answer, source"),
        files={"levels.py": REWARDS_PY, "rows.jsonl": with_column("source", "book")},
        changes={"rewards": ["levels.by_level"], "dataset": {"name": "gsm8k", "path": "rows.jsonl"}},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("levels", "optimiser step"),
        0,
        files={"levels.py": REWARDS_PY, "rows.jsonl": with_column("level", 3)},
        changes={
            "rewards": [{"name": "levels.by_level", "alias": "levels"}],
            "dataset": {"name": "gsm8k", "path": "rows.jsonl"},
        },
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("optimiser step",),
        0,
        files={"levels.py": REWARDS_PY},
        changes={"rewards": ["levels.with_a_choice"]},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("`rewards`: takes_little must take every column by name", "`**columns`"),
        files={"levels.py": REWARDS_PY},
        changes={"rewards": ["levels.takes_little"]},
    ),
    Case(
        "train --config {recipe}",
        ("`rewards`: by_level needs the column `level`",),
        files={"levels.py": REWARDS_PY},
        changes={"rewards": [{"name": "sum", "rewards": ["gsm8k_correctness", "levels.by_level"]}]},
    ),
    Case(
        "train --config {recipe}",
        ("`rewards`: strict needs the column `solution`", "it gets are answer"),
        changes={"rewards": [{"name": "gsm8k_correctness", "alias": "strict", "kwargs": {"gold_column": "solution"}}]},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("accuracy_reward needs the column `solution`",),
        changes={"rewards": ["trl.rewards.accuracy_reward"]},
    ),
    Case(
        "train --config {recipe}",
        ("recorded_reward needs the column `recorded_reward`",),
        changes={"rewards": ["grpo_recipes.training.offline.recorded_reward"]},
    ),
    *(
        Case(
            "grpo-recipes plan {recipe}",
            ("rows.jsonl, line 1", f"'{name}'", "the trainer takes for itself", "rename it"),
            files={"rows.jsonl": with_column(name, "x")},
            changes={"dataset": {"name": "gsm8k", "path": "rows.jsonl"}},
        )
        for name in ("prompt", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
    ),
    Case(
        "train --config {recipe}",
        ("the column 'level' has values of several types",),
        files={"rows.jsonl": with_column("level", 3) + with_column("level", "hard")},
        changes={"dataset": {"name": "gsm8k", "path": "rows.jsonl"}},
    ),
    # Golds that can't be scored.
    Case(
        "train --config {recipe}",
        (
            "gsm8k_correctness can score none of the 40 golds in the column `answer`",
            "This one has no short answer",
            "####",
        ),
        files={"rows.jsonl": PROSE_JSONL},
        changes={"dataset": {"name": "gsm8k", "path": "rows.jsonl"}},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("can score none of the 40 golds",),
        files={"rows.jsonl": PROSE_JSONL},
        changes={
            "dataset": {"name": "gsm8k", "path": "rows.jsonl"},
            "rewards": ["tag_count", {"name": "sum", "rewards": ["math_correctness"]}],
        },
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("note", "2 of 40 golds can't be scored by gsm8k_correctness", "rows 3, 7"),
        0,
        files={"rows.jsonl": MIXED_JSONL},
        changes={"dataset": {"name": "gsm8k", "path": "rows.jsonl"}},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("tag_count × 1", "optimiser step"),
        0,
        files={"rows.jsonl": PROSE_JSONL},
        changes={"dataset": {"name": "gsm8k", "path": "rows.jsonl"}, "rewards": ["tag_count"]},
    ),
]

# Tables of one's own. Every sentence about them is in test_own_data.py; these are each kind's way to the screen.
OWN_CSV = "problem,solution,level\nWhat is 1 + 1?,2,1\nWhat is 1 + 2?,3,1\n"
HELD_OUT = {"name": "gsm8k", "path": "train.jsonl", "eval_path": "other.jsonl"}
DATA: list[Case] = [
    Case(
        f"{command} --dataset '{{{spec}}}'",
        ("recipe.yaml: ", *words),
        files={"rows.csv": OWN_CSV, "wide.csv": OWN_CSV + "a,b,c,d\n", "null.csv": OWN_CSV + ",4,1\n"},
    )
    for command in ("grpo-recipes plan {recipe}", "train --config {recipe}")
    for spec, words in {
        "path: rows.csv": ("rows.csv, line 2 has the columns problem, solution, level", "`columns: {question: ...}`"),
        "path: rows.csv, columns: {question: problm}": ("no column 'problm' (it has problem, solution, level)",),
        "path: rows.csv, columns: {question: problem, images: level}": (
            "a column 'images'",
            "`columns: {other_images:",
        ),
        "path: wide.csv, columns: {question: problem}": ("wide.csv, line 4 has 4 cells",),
        "path: null.csv, columns: {question: problem}": ("null.csv, line 4 has the question None",),
        'path: rows.csv, prompt_template: "{{ problem[9:1:0] }}"': (
            "`dataset.prompt_template` fails on rows.csv, line 2",
        ),
        "path: no-*.csv": ("`dataset.path`: no file matches no-*.csv",),
        "path: [{path: rows.csv, fraction: 2}]": (
            "the `fraction` of rows.csv is 2.0: set a number above 0 and at most 1",
        ),
        "path: [rows.csv, train.jsonl]": ("rows.csv, line 2 has the question None",),
    }.items()
] + [
    Case(
        "train --config {recipe} --eval_strategy steps --eval_steps 1 --per_device_eval_batch_size 8",
        ("`dataset.eval_path`: 40 of 40 held-out rows are training rows too",),
        files={"other.jsonl": ROWS_JSONL},
        changes={"dataset": HELD_OUT},
    )
]

# Resuming, folders that can't be written, weight files that can't be read.
RESUME = "train --config {recipe} --resume_from_checkpoint true"
BRANCH_FROM_1 = '{"branch": [{"id": "b", "number": 2, "after": 1}], "resumed_from": "checkpoint-1"}'


def _changed(option: str, *words: str, run: Mapping[str, Any] | None = None) -> Case:
    """A resume of a run with one option that may not change."""
    return Case(f"{RESUME} {option}", ("recipe.yaml: `resume_from_checkpoint`", *words), run=run or {})


TRAINING: list[Case] = [
    Case(
        RESUME,
        ("recipe.yaml: `resume_from_checkpoint`", "_launch.json: ", "remove the file"),
        files={"run/_launch.json": "["},
        run={},
    ),
    Case(
        RESUME,
        (
            "run resumed from checkpoint-1 and saved nothing",
            "an earlier launch saved checkpoint-2: name the checkpoint",
        ),
        files={"run/_launch.json": BRANCH_FROM_1},
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
    Case("train --config {recipe} --output_dir train.jsonl", ("`output_dir` train.jsonl already holds files",)),
    Case("train --config {recipe}", ("`output_dir` run already holds files", "--output_dir"), run={}),
    Case("train --config run/run.json", ("run.json: `output_dir` run already holds files", "--output_dir"), run={}),
    Case("train --config run/run.json", ("run/run.json: can't be read as JSON",), files={"run/run.json": "{"}),
    Case("train --config run/run.json", ("run/run.json: it has no `recipe`",), files={"run/run.json": "{}"}),
    Case(
        "grpo-recipes plan run/run.json", ("run/run.json: it is a list, not an object",), files={"run/run.json": "[1]"}
    ),
    Case(
        "train --config {recipe} --max_steps -1 --num_train_epochs 0",
        ("`num_train_epochs` is 0", "set it above 0"),
    ),
]

# Runs and evaluations that can't be read, or hold nothing to check.
CUT_STATE = json.dumps({"log_history": stored.HISTORY})[:500]
EVALUATE_M = "grpo-recipes evaluate m --dataset arithmetic --limit 2 --output e"
TWO_EVALUATIONS = {**stored.evaluation_files("a"), **stored.evaluation_files("b")}
BOXED = {"settings": {"samples": 1, "strict": [{"name": "gsm8k_correctness", "extract": "boxed"}]}}
RESULTS: list[Case] = [
    # What stays fine.
    Case("grpo-recipes diagnose run", ("nothing looks wrong", "10 of 11 checks had data"), 0, stored.run_files()),
    Case("grpo-recipes report run", ("report.html",), 0, stored.run_files()),
    Case("grpo-recipes report run other", ("report.html",), 0, {**stored.run_files(), **stored.run_files("other")}),
    Case(
        "grpo-recipes diagnose run",
        ("nothing looks wrong", "8 of 11 checks had data", "length_into_cap (no `run.json` holds"),
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
    Case("grpo-recipes compare a b", ("2 problems", "exact p = 1"), 0, TWO_EVALUATIONS),
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
            (b"\xff\xfe\x00", ("it is not UTF-8 text",)),
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
            (
                {"recipe": {}, "config": {"max_completion_length": "long"}},
                ("`config.max_completion_length`", "integer"),
            ),
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
    Case("grpo-recipes compare a nowhere", ("nowhere has no finished evaluation",), 2, TWO_EVALUATIONS),
    *(
        Case(
            "grpo-recipes compare a b",
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
                ("m/adapter_config.json: can't be read as JSON",),
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
            ("request.json", "", ("can't be read as JSON", "remove the folder")),
            ("request.json", "[]", ("it is a list", "remove the folder")),
        )
    ),
    Case(
        "grpo-recipes evaluate {model} --dataset arithmetic --limit 2 --output e",
        ("e holds another evaluation", "it does not record"),
        2,
        {"e/request.json": "{}"},
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
FRONT_DOOR: list[Case] = [
    Case("grpo-recipes --help", ("95 % intervals", "plan", "report"), code=0),
    Case("grpo-recipes --version", ("grpo-recipes 0.",), code=0),
    Case("grpo-recipes plan --help", ("--gpu_memory SIZE",), code=0),
    Case("grpo-recipes evaluate --help", ("--samples N",), code=0),
    Case("train --help", ("--rewards.0.weight", "GRPOConfig"), code=0),
    Case("train --version", ("grpo-recipes 0.",), code=0),
    Case("grpo-rewards --help", ("convert-internlm2",), code=0),
    Case("grpo-rewards --version", ("grpo-rewards 0.",), code=0),
    Case("grpo-recipes", ("name a command, init, plan, train, evaluate, compare, diagnose, report or merge",)),
    Case("grpo-recipes pln {recipe}", ("no command `pln`", "did you mean `plan`?")),
    Case("grpo-recipes plan", ("gsm8k-qwen2.5-1.5b-lora",), 0),
    Case("grpo-recipes plan quickstrt", ("no such file", "did you mean `quickstart`?")),
    Case("grpo-recipes plan nope/quickstart.yaml", ("nope/quickstart.yaml", "no such file")),
    Case("grpo-recipes plan .", ("is a folder",)),
    Case("grpo-recipes plan {recipe} {recipe}", ("unknown argument `recipe.yaml`",)),
    Case("grpo-recipes plan {recipe} --gpu-memry 24GB", ("did you mean `--gpu_memory`?",)),
    Case("grpo-recipes plan {recipe} --lora_rank 4", ("did you mean `lora_r`?",)),
    Case("grpo-recipes plan {recipe} --model x", ("did you mean `model_name_or_path`?",)),
    Case("grpo-recipes plan {recipe} --save_step 4", ("did you mean `save_steps`?",)),
    Case("grpo-recipes plan {recipe}", ("did you mean `lora_r`?",), changes={"lora_rank": 4}),
    Case("grpo-recipes plan {recipe}", ("unknown key `optimizer_lr`",), changes={"optimizer_lr": 4}),
    Case("grpo-recipes plan {recipe} --num_processes 0", ("--num_processes is 0: set it to at least 1",)),
    Case("grpo-recipes plan {recipe} --num_processes -2", ("--num_processes is -2",)),
    Case("grpo-recipes plan {recipe} --num_processes two", ("--num_processes", "'two'")),
    Case("grpo-recipes plan {recipe} --num_processes=1", ("on 1 process",), code=0),
    Case("grpo-recipes plan {recipe} --gpu_memory 0", ("--gpu_memory 0: write a size",)),
    Case("grpo-recipes plan {recipe} --gpu_memory 24GB", ("fits in",), code=0),
    Case("grpo-recipes plan {recipe} --accelerate_config dpp", ("did you mean `ddp`?",)),
    Case(
        "grpo-recipes plan {recipe} --accelerate_config a.yaml",
        ("a.yaml: `num_processes`",),
        files={"a.yaml": "num_processes: 0\n"},
    ),
    Case("grpo-recipes plan {recipe} --model_config nope.json", ("nope.json: there is no such file",)),
    Case("grpo-recipes plan {recipe} --model_name_or_path ./nope", ("./nope: there is no such folder",), code=0),
    Case("grpo-recipes plan {recipe} --dataset.path nope/rows.jsonl", ("nope/rows.jsonl",)),
    Case("grpo-recipes plan {recipe} --dataset.path ./rows", ("there is no file or folder ./rows",)),
    Case("grpo-recipes plan {recipe} --rewards gsm8k_corectness", ("did you mean `gsm8k_correctness`?",)),
    Case("grpo-recipes plan {recipe} --rewards xqzt", ("unknown reward `xqzt`",)),
    Case(
        "grpo-recipes plan {recipe} --reference.adapter ./nope --beta 0.1",
        ("`reference.adapter` ./nope: there is no such folder",),
    ),
    Case("grpo-recipes plan {recipe} --json", ('"num_processes": 1',), code=0),
    Case("train", ("name a recipe", "`--config quickstart`")),
    Case("train quickstart", ("did you mean `--config quickstart`?",)),
    Case("train --config", ("`--config` needs a value",)),
    Case("train --confg {recipe}", ("did you mean `--config`?",)),
    Case("train --config quickstrt", ("did you mean `quickstart`?",)),
    Case(
        "train --config {recipe} --model_name_or_path ./nope", ("`model_name_or_path` ./nope: there is no such folder",)
    ),
    Case("train --config {recipe} --model_name_or_path runs/no/where", ("runs/no/where: there is no such folder",)),
    Case("grpo-recipes evaluate", ("required: model",)),
    Case("grpo-recipes evaluate ./nope", ("./nope: the model can't be loaded: there is no such folder",)),
    Case("grpo-recipes evaluate {model} --sampels 8", ("did you mean `--samples`?",)),
    Case("grpo-recipes evaluate {model} --samples x", ("--samples", "'x'")),
    Case("grpo-recipes evaluate {model} --max_new_tokens 0 --dataset arithmetic", ("--max_new_tokens is 0",)),
    Case("grpo-recipes compare a", ("required: B",)),
    Case("grpo-recipes init", ("required: path",)),
    Case("grpo-recipes init nowhere.csv --output x.yaml", ("nowhere.csv",)),
    Case("grpo-recipes init t.csv --output x.yaml", ("none of the columns 'a', 'b'",), files={"t.csv": "a,b\n1,2\n"}),
    Case("grpo-recipes train", ("required: recipe",)),
    Case("grpo-recipes train quickstrt", ("did you mean `quickstart`?",)),
    Case("grpo-recipes merge a", ("required: --output",)),
    Case("grpo-recipes merge nowhere --output b", ("nowhere holds no adapter",)),
    Case("grpo-recipes merge {model} --output b", ("holds no adapter", "a full model needs no merging")),
    Case("grpo-recipes diagnose", ("required: run",)),
    Case("grpo-recipes diagnose a b", ("unknown argument `b`",)),
    Case("grpo-recipes report nope", ("nope",)),
    Case("grpo-recipes report a --outptu b", ("did you mean `--output`?",)),
    Case("grpo-rewards", ("name a command, list, score, check or convert-internlm2",)),
    Case("grpo-rewards scor", ("no command `scor`", "did you mean `score`?")),
]

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
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: reward `judge`: http://127.0.0.1:9/v1 gives no score",),
         changes={"rewards": [{"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:9/v1", "model": "m",
                                                           "attempts": 1}}]}),
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: reward `judge`: http://127.0.0.1:9/v1 gives no score",),
         changes={"rewards": [{"name": "gate", "only_if": "well_formed", "reward":
                               {"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:9/v1", "model": "m",
                                                            "attempts": 1}}}]}),
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: judge needs the column `rubric`",),
         changes={"rewards": [{"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:9/v1", "model": "m",
                                                           "template": "By {rubric}: {completion}"}}]}),
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: instructions needs the column `instruction_id_list`",),
         changes={"rewards": ["instructions"]}),
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: json_schema needs the column `schema`",),
         changes={"rewards": ["json_schema"]}),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness", ("8 rows, 0 unscorable", "mean 2.0000"), 0, SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --gold-column answer", ("8 rows",), 0, SCORED),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness --gold-column nope",
         ("rows.jsonl has no column `nope`", "--gold_column", "`completion`, `answer`"), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --gold-column nope", ("no column `nope`",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness",
         ("`gsm8k_correctness` needs the dataset column `answer`",), files={"rows.jsonl": '{"completion": "18"}\n'}),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness",
         ("gsm8k_correctness could score none of 3 rows", "no gold in `answer`", "row 1"), 1, UNSCORABLE),
    Case("grpo-rewards score rows.jsonl --reward own_none.reward", ("reward could score none of 8 rows", "None"), 1,
         own("own_none", "completions, **columns): return [None] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_count.reward", ("`reward` returned 11 scores for 8 completions",),
         files=own("own_count", "completions, **columns): return [0.0] * 11")),
    Case("grpo-rewards score rows.jsonl --reward own_raises.reward",
         ("`reward` raised ZeroDivisionError: division by zero", "own_raises.py, line 1"),
         files=own("own_raises", "completions, **columns): return [1 / 0 for _ in completions]")),
    Case("grpo-rewards score rows.jsonl --reward own_value.reward", ("`reward` raised ValueError: math domain error",),
         files=own("own_value", "completions, **columns): raise ValueError('math domain error')")),
    Case("grpo-rewards score rows.jsonl --reward own_nan.reward", ("`reward` returned nan for row 1", "finite number"),
         files=own("own_nan", "completions, **columns): return [float('nan')] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_inf.reward", ("`reward` returned -inf for row 1",),
         files=own("own_inf", "completions, **columns): return [float('-inf')] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_text.reward", ("`reward` returned '1' for row 1",),
         files=own("own_text", "completions, **columns): return ['1'] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_scalar.reward", ("`reward` returned a float, not a list",),
         files=own("own_scalar", "completions, **columns): return 1.0")),
    Case("grpo-rewards score rows.jsonl --reward own_mapping.reward", ("`reward` returned a dict, not a list",),
         files=own("own_mapping", "completions, **columns): return {}")),
    Case("grpo-rewards score rows.jsonl --reward own_signature.reward",
         ("`own_signature.reward` can't take `prompts` and `completions` by name", "f(prompts=..., completions=..."),
         files=own("own_signature", "response): return [0.0]")),
    Case("grpo-rewards score rows.jsonl --reward own_closed.reward",
         ("`reward` can't be called", "unexpected keyword argument", "**columns"),
         files=own("own_closed", "prompts, completions): return [0.0]")),
    Case("grpo-rewards score rows.jsonl --reward own_import.reward",
         ("`own_import` can't be imported", "ZeroDivisionError"), files={**SCORED, "own_import.py": "1 / 0"}),
    Case("grpo-rewards score rows.jsonl --reward own_syntax.reward", ("`own_syntax` can't be imported", "SyntaxError"),
         files={**SCORED, "own_syntax.py": "def reward(:"}),
    Case("grpo-rewards score rows.jsonl --reward '{name: own_factory.reward, kwargs: {}}'",
         ("reward `own_factory.reward`: KeyError",), files=own("own_factory", "): return {}['x']")),
    Case("grpo-rewards score rows.jsonl --reward no_such_module.reward", ("can't be imported", "no_such_module"),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward math.pi", ("`math.pi` is a float, which can't be called",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_cuont", ("unknown reward `tag_cuont`: did you mean `tag_count`?",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward zzz", ("unknown reward `zzz`",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward ''", ("a reward is a name or a mapping",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: tag_count'", ("is not a YAML mapping",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: tag_count, kwarg: {}}'", ("did you mean `kwargs`?",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {extract: box}}'",
         ("extract must be one of", "'box'"), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {extarct: boxed}}'",
         ("unknown kwarg `extarct`: did you mean `extract`?",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {extract: boxed}}'",
         ("no completion states an answer where `extract: boxed` looks", "`extract: answer_tag` finds one in 8 of 8"), 0,
         SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --num-generations 0", ("--num_generations", "at least 1"),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward group_length --num-generations 3", ("whole number of groups of 3",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward group_length", ("needs num_generations",), files=SCORED),
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
    Case("grpo-rewards score rows.jsonl --reward tag_count", ("row 1: no `completion`", "`text`"),
         files={"rows.jsonl": '{"text": "18"}\n'}),
    Case("grpo-rewards score rows.parquet --reward tag_count", ("rows.parquet is not a Parquet file",),
         files={"rows.parquet": b"PAR1 junk"}),
    Case("grpo-rewards check rows.jsonl", ("8 golds, 8 earn full pay",), 0, SCORED),
    Case("grpo-rewards check rows.jsonl", ("none of 3 golds in `answer` can be read",), 1, UNSCORABLE),
    Case("grpo-rewards check rows.jsonl --gold-column gold", ("no `gold`",), files=SCORED),
    Case(CHECKED + "tag_count", ("check needs a correctness reward",), files=SCORED),
    Case(CHECKED + "'{name: gsm8k_correctness, kwargs: {gold_column: x}}'", ("row 1: no `x`",),
         files=SCORED),
    Case("grpo-rewards convert-internlm2 absent out", ("'absent' is neither a folder nor a model",)),
    Case("grpo-rewards convert-internlm2 empty out", ("has no config.json",), files={"empty/file": ""}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json: can't be read as JSON",), files={"odd/config.json": "{"}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json: it is a list, not an object",),
         files={"odd/config.json": "[]"}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json lacks vocab_size",),
         files={"odd/config.json": '{"architectures": ["InternLM2ForRewardModel"]}'}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json has a value", "hidden_size"),
         files={"odd/config.json": INTERNLM2.replace("16", '"x"')}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json has a value", "float3"),
         files={"odd/config.json": INTERNLM2.replace("{", '{"dtype": "float3", ')}),
    Case("grpo-rewards convert-internlm2 odd out", ("no model.safetensors",), files={"odd/config.json": INTERNLM2}),
    Case("grpo-rewards convert-internlm2 odd out", ("odd has a tokenizer that can't be read",),
         files={"odd/config.json": INTERNLM2, "odd/model.safetensors": "", "odd/tokenizer.json": "{}"}),
    Case("grpo-rewards convert-internlm2 {model} out", ("not InternLM2ForRewardModel",)),
    Case("grpo-rewards convert-internlm2 {model} there", ("there exists already",), files={"there/file": ""}),
]  # fmt: skip

CASES = [*RECIPE, *DATA, *TRAINING, *RESULTS, *FRONT_DOOR, *REWARDS]


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
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "levels", raising=False)
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
    write_manifest(checkpoint, Manifest(2, 1, False, {}), each_node=False, writes=True)


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
    return line.startswith("error: ") and not line.endswith(("..", ".:", "?.", ",."))


def _no_model_yet(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a model was loaded before the input was refused")
