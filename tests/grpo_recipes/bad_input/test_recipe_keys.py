"""Bad recipes: keys and values that `plan` and `train` refuse, and values that must stay allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_input import ROWS_JSONL, Case, check

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
    """Return the valid rows with one more column."""
    return "".join(json.dumps({**json.loads(row), name: value}) + "\n" for row in ROWS_JSONL.splitlines())


def refused(key: str, *values: float, words: str) -> list[Case]:
    """Return rows for values out of a key's range, in the file for `plan` and on the command line for `train`."""
    return [
        case
        for value in values
        for case in (
            Case("grpo-recipes plan {recipe}", (f"`{key}` is {value}: set a", words), changes={key: value}),
            Case(f"train --config {{recipe}} --{key}={value}", (f"`{key}` is {value}: set a", words)),
        )
    ]


def allowed(**changes: Any) -> Case:
    """Return a row for values at the border of their keys' ranges, which must stay allowed."""
    return Case("grpo-recipes plan {recipe}", ("optimizer step",), 0, changes=changes)


LORA = {"use_peft": True, "lora_r": 4}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MOE = {"model_type": "qwen3_moe", **SIZES, **HEADS, **EXPERTS}


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
    *refused("num_generations", 1, words="number of at least 2"),
    *refused("num_train_epochs", 0.0, words="number above 0"),
    *refused("per_device_train_batch_size", 0, words="number of at least 1"),
    *refused("gradient_accumulation_steps", 0, words="number of at least 1"),
    *refused("steps_per_generation", 0, words="number of at least 1"),
    *refused("lora_r", 0, words="number of at least 1"),
    *refused("seed", -1, words="number of at least 0 and below 4,294,967,296"),
    *refused("max_steps", 0, -2, words="number of at least 1, or -1"),
    *refused("top_k", -2, words="number of at least 0, or -1"),
    *refused("repetition_penalty", 0.0, words="number above 0"),
    *refused("adam_beta2", 1.0, words="number of at least 0 and below 1"),
    allowed(
        temperature=0.01,
        max_completion_length=1,
        learning_rate=0.0,
        beta=0.0,
        epsilon_high=0.0,
        delta=4.0,
        top_p=1.0,
        min_p=0.0,
        top_k=0,
        generation_kwargs={"stop": "</answer>"},
        top_entropy_quantile=1.0,
        vllm_gpu_memory_utilization=1.0,
        max_grad_norm=0.0,
        weight_decay=0.0,
        seed=0,
        max_steps=1,
    ),
    allowed(
        learning_rate=1e-2,
        epsilon_high=5.0,
        min_p=1.0,
        top_k=-1,
        generation_kwargs={"stop": ["a", "b"]},
        max_steps=-1,
        use_peft=True,
        lora_r=1,
    ),
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
    Case("train --config {recipe} --rewards.5.weight 2", ("`--rewards.5.weight`: `rewards`", "entry `5`", "below 1")),
    Case("train --config {recipe} --rewards.x.weight 2", ("`--rewards.x.weight`: `rewards`", "entry `x`", "below 1")),
    Case("train --config {recipe} --rewards.-1.weight 2", ("no entry `-1`",)),
    Case("grpo-recipes plan {recipe} --rewards.1 tag_count", ("`--rewards.1`", "no entry `1`", "below 1")),
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
            "merged.yaml": "model_name_or_path: nowhere/model\nuse_cpu: true\nbf16: false\n"
            "dataset: arithmetic\nrewards:\n"
            "  - &tags {name: tag_count, weight: 1, alias: one}\n  - {<<: *tags, weight: 2, alias: tag_count}\n"
        },
    ),
    # Packages that are not installed.
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
    Case("grpo-recipes plan {recipe}", ("optimizer step",), 0, changes={"report_to": "none"}),
    Case(
        "train --config {recipe} --use_vllm true",
        ("`use_vllm` needs vLLM, which is not installed", "grpo-recipes[vllm]"),
    ),
    Case("grpo-recipes plan {recipe} --use_vllm true", ("note", "`use_vllm` needs vLLM, which is not installed"), 0),
    # Recipes that vLLM cannot serve.
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
    allowed(use_vllm=True, vllm_mode="server", vllm_tensor_parallel_size=3, vllm_max_model_length=20),
    allowed(use_vllm=True, vllm_max_model_length=2000),
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
        "grpo-recipes plan {recipe} --model_config moe.json",
        ("PEFT can't add the adapter", "lora_dropout", "correct the `lora_*` keys"),
        files={"moe.json": json.dumps(MOE)},
        changes={**LORA, "lora_target_modules": "all-linear"},
    ),
    Case(
        "grpo-recipes plan {recipe} --model_config moe.json",
        ("PEFT can't add the adapter", "without also targeting up_proj", "correct the `lora_*` keys"),
        files={"moe.json": json.dumps(MOE)},
        changes={**LORA, "lora_target_modules": ["gate_proj", "q_proj"]},
    ),
    Case(
        "train --config {recipe}",
        ("`lora_target_modules`: q_proj matches no module", "a single name is a pattern", "`.*q_proj`"),
        changes={**LORA, "lora_target_modules": "q_proj"},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("optimizer step",),
        0,
        changes={**LORA, "lora_target_modules": ["q_proj", "v_proj"]},
    ),
    Case("grpo-recipes plan {recipe}", ("optimizer step",), 0, changes={**LORA, "lora_target_modules": ".*v_proj"}),
    Case("grpo-recipes plan {recipe}", ("optimizer step",), 0, changes={**LORA, "lora_target_modules": "all-linear"}),
    # Columns that rewards need.
    Case(
        "train --config {recipe}",
        ("`rewards`: by_level needs the column `level`", "it gets are answer, source"),
        files={"levels.py": REWARDS_PY, "rows.jsonl": with_column("source", "book")},
        changes={"rewards": ["levels.by_level"], "dataset": {"name": "gsm8k", "path": "rows.jsonl"}},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("levels", "optimizer step"),
        0,
        files={"levels.py": REWARDS_PY, "rows.jsonl": with_column("level", 3)},
        changes={
            "rewards": [{"name": "levels.by_level", "alias": "levels"}],
            "dataset": {"name": "gsm8k", "path": "rows.jsonl"},
        },
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("optimizer step",),
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
        ("the column 'level' has ",),
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
        ("note", "2 of 40 golds can't be scored by gsm8k_correctness", "on rows.jsonl, lines 3, 7: a gold is"),
        0,
        files={"rows.jsonl": MIXED_JSONL},
        changes={"dataset": {"name": "gsm8k", "path": "rows.jsonl"}},
    ),
    Case(
        "grpo-recipes plan {recipe}",
        ("tag_count × 1", "optimizer step"),
        0,
        files={"rows.jsonl": PROSE_JSONL},
        changes={"dataset": {"name": "gsm8k", "path": "rows.jsonl"}, "rewards": ["tag_count"]},
    ),
]


@pytest.mark.parametrize("case", RECIPE, ids=lambda case: case.line[:90])
def test_bad_input_ends_with_one_message(
    case: Case, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tmp_path, tiny_model, monkeypatch)
