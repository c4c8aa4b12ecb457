"""Bad input of each kind: the command ends with one sentence that names the place and the figures.

A row is a command line, the words of the message, separated by spaces, and what differs from the valid input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_input import ROWS_JSONL, Case, check

PLAN, TRAIN = "grpo-recipes plan {recipe}", "train --config {recipe}"
RESUME = f"{TRAIN} --resume_from_checkpoint true"
MIXED = "train --config {recipe} --eval_strategy steps --eval_steps 1 --per_device_eval_batch_size 8"

OWN_CSV = "problem,solution,level\nWhat is 1 + 1?,2,1\nWhat is 1 + 2?,3,1\n"
TABLES = {"rows.csv": OWN_CSV, "wide.csv": OWN_CSV + "a,b,c,d\n", "null.csv": OWN_CSV + ",4,1\n"}

PROSE = [json.dumps({"question": f"Why {n}?", "answer": f"There is no number {n} or so."}) for n in range(1, 41)]
SOME_PROSE = [
    prose if n in (2, 6) else row for n, (prose, row) in enumerate(zip(PROSE, ROWS_JSONL.splitlines(), strict=True))
]
OWN_ROWS = {"name": "gsm8k", "path": "rows.jsonl"}
OWN = {"dataset": OWN_ROWS}
HELD_OUT = {"dataset": {**OWN_ROWS, "eval_path": "train.jsonl"}}

REWARDS_PY = """
def by_level(completions, level, **columns):
    return [float(value) for value in level]


def with_a_choice(completions, level=None, **columns):
    return [0.0] * len(completions)


def takes_little(prompts, completions):
    return [0.0] * len(completions)
"""
LEVELS = {"levels.py": REWARDS_PY}

LORA = {"use_peft": True, "lora_r": 4}
SOFT_PROMPT = '{"peft_type": "PROMPT_TUNING", "base_model_name_or_path": "base"}'
FILE, EMPTY = {"file": ""}, {"empty/a": ""}
VLLM = {"use_vllm": True}
SERVER = {**VLLM, "vllm_mode": "server", "vllm_max_model_length": 20}
FAST = {"learning_rate": 0.05}
UNUSUAL = {"top_k": 0, "max_steps": -1, "learning_rate": 0.0, "generation_kwargs": {"stop": "a"}}
WEIGHTLESS = {"rewards": ["gsm8k_correctness", {"name": "tag_count", "weight": 0}]}


def lines(rows: list[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def with_column(name: str, value: Any) -> str:
    """Return the valid rows with one more column."""
    return lines([json.dumps({**json.loads(row), name: value}) for row in ROWS_JSONL.splitlines()])


MIXED_LEVELS = with_column("level", 3) + with_column("level", "hard")

REFUSED: list[tuple[Any, ...]] = [
    # Verbs, options and names.
    ("grpo-recipes", "init plan preview train evaluate compare diagnose report merge chat export"),
    ("grpo-recipes pln {recipe}", "`pln` `plan`"),
    ("grpo-recipes plan quickstrt", "quickstrt `quickstart`"),
    ("grpo-recipes plan .", ". folder"),
    (f"{PLAN} recipe.yaml", "`recipe.yaml`"),
    (f"{PLAN} --gpu-memry 24GB", "`--gpu_memory`"),
    (f"{PLAN} --num_processes 0", "`num_processes` 0 1"),
    (f"{PLAN} --num_processes two", "--num_processes 'two'"),
    (f"{PLAN} --gpu_memory 0", "--gpu_memory 0"),
    (f"{PLAN} --accelerate_config dpp", "dpp `ddp`"),
    (f"{PLAN} --accelerate_config a.yaml", "a.yaml `num_processes` 0", {"a.yaml": "num_processes: 0\n"}),
    (f"{PLAN} --accelerate_config a.yaml", "a.yaml `num_processes` 2", {"a.yaml": "num_processes: 1\n" * 2}),
    (f"{PLAN} --model_config nope.json", "nope.json"),
    (f"{PLAN} --model_name_or_path ./nope", "recipe.yaml `model_name_or_path` ./nope"),
    ("train", "`--config --config quickstart`"),
    ("train quickstart", "`--config quickstart`?"),
    ("train --config", "`--config`"),
    (f"{TRAIN} --model_name_or_path runs/no/where", "recipe.yaml `model_name_or_path` runs/no/where"),
    ("grpo-recipes evaluate", "model"),
    ("grpo-recipes evaluate ./nope", "nope"),
    ("grpo-recipes evaluate {model} --sampels 8", "`--samples`"),
    ("grpo-recipes evaluate {model} --max_new_tokens 0 --dataset arithmetic", "--max_new_tokens 0"),
    ("grpo-recipes compare a", "B"),
    ("grpo-recipes init nowhere.csv --output x.yaml", "nowhere.csv"),
    ("grpo-recipes init t.csv --output x.yaml", "t.csv one", {"t.csv": "a,b\n1,2\n"}),
    ("grpo-recipes init t.csv --output x.yaml --model m", "`--question COLUMN`", {"t.csv": "a,b\n" + "1,2\n" * 20}),
    ("grpo-recipes train quickstrt", "quickstrt `quickstart`"),
    ("grpo-recipes merge a", "--output"),
    ("grpo-recipes merge nowhere --output b", "nowhere"),
    ("grpo-recipes merge {model} --output b", "adapter"),
    ("grpo-recipes merge run --output b", "run/checkpoint-2", {}, {}, {}),
    ("grpo-recipes merge run --output file", "--output file", FILE),
    ("grpo-recipes merge {model} --output file/b", "--output file/b", FILE),
    ("grpo-recipes chat ./nope", "nope"),
    ("grpo-recipes chat {model} --prompt 1 --temperature -1", "--temperature -1 0"),
    ("grpo-recipes chat {model} --prompt 1 --max_new_tokens 0", "--max_new_tokens 0 1"),
    ("grpo-recipes chat {model} --prompt 1 --recipe quickstrt", "`quickstart`"),
    ("grpo-recipes export nope --to b", "nope"),
    ("grpo-recipes export {model} --to {model}", "--to"),
    ("grpo-recipes export {model} --to file", "--to file", FILE),
    ("grpo-recipes export {model} --to /proc/b", "--to /proc/b"),
    (f"grpo-recipes export {{model}} --to {'x' * 300}", "--to xxxx"),
    ("grpo-recipes export empty --to b", "empty", EMPTY),
    ("grpo-recipes export run --to b", "run/checkpoint-2", {}, {}, {}),
    ("grpo-recipes diagnose a b", "`b`"),
    ("grpo-recipes report nope", "nope"),
    ("grpo-rewards scor", "`scor` `score`"),
    # Keys and numbers of a recipe.
    (f"{TRAIN} --lerning_rate 1", "`--lerning_rate` `learning_rate`"),
    (PLAN, "recipe.yaml `optimizer_lr`", {}, {"optimizer_lr": 4}),
    (PLAN, "recipe.yaml `learning_rate` nan 0", {}, {"learning_rate": float("nan")}),
    (f"{TRAIN} --temperature=0.0", "recipe.yaml `temperature` 0.0"),
    (f"{TRAIN} --max_steps -1 --num_train_epochs 0", "`num_train_epochs` 0"),
    (f"{TRAIN} --generation_kwargs.stop 3", "`generation_kwargs.stop` 3"),
    (f"{TRAIN} --rewards.0.weight 0", "`rewards` 0"),
    (f"{PLAN} --rewards gsm8k_corectness", "`gsm8k_corectness` `gsm8k_correctness`?"),
    (f"{TRAIN} --rewards.5.weight 2", "`--rewards.5.weight` `rewards` `5` 1"),
    (f"{PLAN} --max_steps.x 2", "`--max_steps.x` `max_steps` 2 `.x`"),
    ("grpo-recipes plan two.yaml", "two.yaml `beta` 2 4", {"two.yaml": "# c\nbeta: 0.1\nmax_steps: 2\nbeta: 0.2\n"}),
    (f"{TRAIN} --dataset '{{name: gsm8k, name: arithmetic}}'", "`--dataset` `name`"),
    # Packages, vLLM and adapters.
    (f"{TRAIN} --report_to trackio", "`report_to: trackio` `report_to: none`"),
    (TRAIN, "`report_to` `wandbb` `wandb`?", {}, {"report_to": ["wandbb"]}),
    (f"{TRAIN} --use_vllm true", "`use_vllm` grpo-recipes[vllm]"),
    (f"{PLAN} --num_processes 4 --vllm_tensor_parallel_size 3", "`vllm_tensor_parallel_size` 3 4", {}, VLLM),
    (PLAN, "`vllm_max_model_length` 20 `max_completion_length` 8", {}, {**VLLM, "vllm_max_model_length": 20}),
    (PLAN, "`load_in_8bit`", {}, {**VLLM, "load_in_8bit": True, **LORA}),
    (f"{PLAN} --model_name_or_path p", "p PROMPT_TUNING `use_vllm:", {"p/adapter_config.json": SOFT_PROMPT}, VLLM),
    (TRAIN, "`lora_target_modules` kproj, q_proj", {}, {**LORA, "lora_target_modules": ["qproj", "kproj"]}),
    (TRAIN, "`lora_target_modules` `.*q_proj`", {}, {**LORA, "lora_target_modules": "q_proj"}),
    # Tables, columns and golds.
    (f"{PLAN} --dataset '{{path: rows.csv}}'", "recipe.yaml rows.csv, row 2 problem, solution, level", TABLES),
    (f"{TRAIN} --dataset '{{path: rows.csv, columns: {{question: problm}}}}'", "'problm' problem, level", TABLES),
    (f"{PLAN} --dataset '{{path: wide.csv, columns: {{question: problem}}}}'", "wide.csv, row 4 3", TABLES),
    (f"{TRAIN} --dataset '{{path: null.csv, columns: {{question: problem}}}}'", "null.csv, row 4 None", TABLES),
    (f"{PLAN} --dataset '{{path: no-*.csv}}'", "`dataset.path` no-*.csv"),
    (f"{TRAIN} --dataset.path ./rows", "`dataset.path` ./rows"),
    (f"{TRAIN} --dataset '{{path: [{{path: rows.csv, fraction: 2}}]}}'", "`dataset.path.fraction` 2.0 1", TABLES),
    (MIXED, "`dataset.eval_path` 40", {"rows.jsonl": ROWS_JSONL}, HELD_OUT),
    (TRAIN, "by_level `level` answer", LEVELS, {"rewards": ["levels.by_level"]}),
    (PLAN, "takes_little `**columns`", LEVELS, {"rewards": ["levels.takes_little"]}),
    (PLAN, "rows.jsonl, line 1 'log_extra'", {"rows.jsonl": with_column("log_extra", "x")}, OWN),
    (TRAIN, "rows.jsonl, line 41 'level' 'hard'", {"rows.jsonl": MIXED_LEVELS}, OWN),
    (TRAIN, "gsm8k_correctness 40 `answer` ####", {"rows.jsonl": lines(PROSE)}, OWN),
    # Resumes with another recipe, and folders that can't be written.
    (f"{RESUME} --learning_rate 1e-4 --beta 0.1", "`learning_rate` 1e-06 0.0001 `beta` 0.0 0.1", {}, {}, {}),
    (RESUME, "`resume_from_checkpoint` `beta` 0.04 0.0", {}, {}, {"beta": 0.04}),
    (f"{RESUME} --rewards [gsm8k_correctness,tag_presence]", "`rewards.1.name` tag_presence", {}, {}, {}),
    (f"{RESUME} --dataset.system_prompt none", "`dataset.system_prompt` reasoning none", {}, {}, {}),
    (f"{TRAIN} --resume_from_checkpoint run/checkpoint-9", "run/checkpoint-9", {}, {}, {}),
    (f"{TRAIN} --output_dir /proc/a/b", "`output_dir` /proc/a/b /proc:"),
    (f"{TRAIN} --output_dir train.jsonl/run", "`output_dir` train.jsonl:"),
    (f"{TRAIN} --output_dir train.jsonl", "`output_dir` train.jsonl `--output_dir`"),
    ("train --config run/run.json", "run.json `output_dir` run --output_dir", {}, {}, {}),
]

ALLOWED: list[tuple[Any, ...]] = [
    ("grpo-recipes plan", "gsm8k-qwen2.5-1.5b-lora"),
    (f"{PLAN} --num_processes=1 --json", '"num_processes": 1', {}, UNUSUAL),
    (f"{PLAN} --rewards.0.weight 2 --report_to trackio", "note × 2 `learning_rate` 0.05 0.01 trackio", {}, FAST),
    (PLAN, "tag_count × 0", {}, {**WEIGHTLESS, **LORA, "lora_target_modules": ["q_proj", "v_proj"]}),
    (f"{PLAN} --use_vllm true", "note `use_vllm`", {}, {"vllm_max_model_length": 2000}),
    (PLAN, "tag_count", {"rows.jsonl": lines(PROSE)}, {**OWN, **SERVER, "rewards": ["tag_count"]}),
    (PLAN, "optimizer", LEVELS, {"rewards": ["levels.with_a_choice"], **LORA, "lora_target_modules": ".*v_proj"}),
    (PLAN, "note 2 of 40 gsm8k_correctness rows.jsonl, lines 3, 7:", {"rows.jsonl": lines(SOME_PROSE)}, OWN),
    (
        "grpo-recipes plan merged.yaml",
        "tag_count × 2",
        {
            "merged.yaml": "model_name_or_path: nowhere/model\nuse_cpu: true\nbf16: false\n"
            "dataset: arithmetic\nrewards:\n"
            "  - &tags {name: tag_count, weight: 1, alias: one}\n  - {<<: *tags, weight: 2, alias: tag_count}\n"
        },
    ),
]


def case_of(code: int, line: str, words: str, files: Any = None, changes: Any = None, run: Any = None) -> Case:
    return Case(line, tuple(words.split()), code, files or {}, changes or {}, run)


@pytest.mark.parametrize(
    "case",
    [*(case_of(2, *row) for row in REFUSED), *(case_of(0, *row) for row in ALLOWED)],
    ids=lambda case: case.line[:90],
)
def test_a_command_ends_with_one_message(
    case: Case, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tmp_path, tiny_model, monkeypatch)
