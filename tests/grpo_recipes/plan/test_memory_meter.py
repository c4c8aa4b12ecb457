"""Estimated memory of training compared with a meter of the tensors that a micro-batch creates at real sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    CONFIG_MAPPING,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)
from trl import get_peft_config

from grpo_recipes.checks.checks import Machine, optimizer_name
from grpo_recipes.plan.layers import MeasuredLayers
from grpo_recipes.plan.memory import (
    CHECK_PADDING,
    GIB,
    MemoryPlan,
    ModelShape,
    Sharding,
    memory_plan,
    policy_model,
    quantised_bytes,
    sharing_prompts,
)
from grpo_recipes.recipe.recipe import Recipe, find_file, model_config, parse_recipe
from grpo_recipes.training.layout_check import COMPARED_ROWS
from grpo_recipes.training.packing import Layout
from tests.support import qwen
from tests.support.memory_meter import Batch, build, measure

WITHOUT = ("--gradient_checkpointing", "false")
LORA = ("--use_peft", "true", "--lora_target_modules", "all-linear")
FULL_24GB, FULL_A100 = "gsm8k-qwen2.5-1.5b-24gb", "gsm8k-qwen2.5-1.5b-8xa100"


class Case(NamedTuple):
    """A recipe on a layout, with changes and the size of its model."""

    recipe: str
    model: str
    layout: str = "single_gpu"
    changes: tuple[str, ...] = ()


SHIPPED = [
    Case("gsm8k-qwen2-0.5b-full-kl", "0.5B"),
    Case(FULL_24GB, "1.5B", "zero2_offload"),
    Case(FULL_A100, "1.5B", "ddp"),
    Case("gsm8k-qwen2.5-1.5b-iterative", "1.5B", "zero2_offload"),
    Case("gsm8k-qwen2.5-1.5b-lora", "1.5B"),
    Case("gsm8k-qwen2.5-1.5b-lora-continue", "1.5B", changes=LORA),  # the folder of the adapter says so otherwise
    Case("gsm8k-qwen2.5-1.5b-lora-vllm", "1.5B"),
    Case("gsm8k-qwen2.5-7b-full-zero3", "7B", "zero3"),
    Case("gsm8k-qwen2.5-7b-lora-zero3", "7B", "zero3"),
    Case("gsm8k-qwen2.5-7b-qlora-24gb", "7B"),
    Case("gsm8k-qwen2.5-72b-lora-zero3-2node", "72B", "zero3_multinode"),
    Case("offline-scored-gpt2", "gpt2"),
    Case("open-r1-trl-0.15", "1.5B", "zero3"),
    Case("programs-qwen2.5-coder-0.5b", "0.5B"),
    Case("rlaif-minimind-internlm2", "MiniMind2-Small"),
    Case("calculator-smollm2", "SmolLM2-135M", changes=("--use_cpu", "false")),
    Case("calculator", "1.5B"),
    Case("guess-number", "1.5B"),
    Case("python", "1.5B"),
]
WITHOUT_CHECKPOINTING = [
    Case(FULL_24GB, "1.5B", changes=WITHOUT),
    Case(FULL_24GB, "1.5B", "zero2", WITHOUT),
    Case(FULL_A100, "1.5B", changes=WITHOUT),
    Case(FULL_A100, "1.5B", changes=(*WITHOUT, "--gradient_accumulation_steps", "2")),
    Case("gsm8k-qwen2.5-1.5b-lora", "1.5B", changes=WITHOUT),
    Case("gsm8k-qwen2.5-1.5b-lora", "1.5B", changes=(*WITHOUT, "--dtype", "float32")),
    Case("gsm8k-qwen2-0.5b-full-kl", "0.5B", changes=(*WITHOUT, "--bf16", "false")),
    Case("gsm8k-qwen2.5-7b-lora-zero3", "7B", "zero3", WITHOUT),
    Case("gsm8k-qwen2.5-7b-qlora-24gb", "7B", changes=WITHOUT),
    Case("offline-scored-gpt2", "gpt2", changes=WITHOUT),
    Case("rlaif-minimind-internlm2", "MiniMind2-Small", changes=WITHOUT),
]
FULL_KL = [
    Case(recipe, model, layout, (*changes, "--kl_estimator", "full", "--beta", "0.04"))
    for recipe, model, layout in (
        (FULL_24GB, "1.5B", "zero2"),
        (FULL_A100, "1.5B", "single_gpu"),
        ("gsm8k-qwen2.5-1.5b-lora", "1.5B", "single_gpu"),
        ("gsm8k-qwen2.5-7b-full-zero3", "7B", "zero3"),
    )
    for changes in ((), WITHOUT)
]
OTHER_MODELS = [
    Case(recipe, model, changes=changes)
    for model in ("Llama-3.2-1B", "Qwen3-0.6B")
    for recipe in (FULL_24GB, FULL_A100, "gsm8k-qwen2.5-1.5b-lora")
    for changes in ((), WITHOUT)
]


def config_of(model: str) -> PretrainedConfig:
    """Return the configuration of a model of the recipes, from its config.json on the hub."""
    if model == "gpt2":
        return GPT2Config()
    if model == "MiniMind2-Small":
        sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 6400}
        return LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)
    if model == "SmolLM2-135M":
        sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
        return LlamaConfig(**sizes, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    if model == "Llama-3.2-1B":
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
        return LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)
    if model == "Qwen3-0.6B":
        sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        return Qwen3Config(**sizes, **heads, tie_word_embeddings=True)
    return qwen.config(model)


class Estimated(NamedTuple):
    """A case whose memory is estimated, and which can be measured."""

    recipe: Recipe
    config: PretrainedConfig
    plan: MemoryPlan
    """Estimate of a micro-batch in TRL's padded layout."""

    @classmethod
    def of(cls, case: Case, folder: Path) -> Estimated:
        """Return the estimate of a case, with the model's configuration in `folder`."""
        recipe, config = parse_recipe(["--config", case.recipe, *case.changes]), config_of(case.model)
        config.save_pretrained(folder)
        layout, arguments = find_file("accelerate_configs", case.layout), model_config(recipe)
        plan = memory_plan(
            recipe.config,
            arguments.dtype,
            policy_model(recipe, str(folder))[0],
            Sharding.described(layout),
            prompt_tokens=recipe.dataset.max_prompt_tokens,
            steps_per_generation=1,
            optim=optimizer_name(recipe, Machine.described(layout)),
            quantised_bytes=quantised_bytes(arguments),
            full_kl=recipe.kl_estimator == "full",
        )
        return cls(recipe, config, plan)

    def packed(self, factor: int) -> MemoryPlan:
        """Return the estimate of packed rows with `factor` times as many completions."""
        config = self.recipe.config
        return sharing_prompts(self.plan, factor, config.num_generations, config.gradient_accumulation_steps)

    def peak(self, factor: int = 1, *, rows: int | None = None, packed: bool = False, **how: bool) -> int:
        """Return the bytes that a micro-batch holds at its peak, gradients that stay included.

        Args:
            factor: Number of times that the micro-batch is as large as the recipe's.
            rows: Number of its rows, all by default.
            packed: True to measure packed rows of whole groups instead of TRL's layout.
            **how: Further arguments of the meter.
        """
        plan, config = self.plan, self.recipe.config
        arguments, is_deepspeed = model_config(self.recipe), plan.layout.is_deepspeed
        in_16_bits = plan.dtype_bytes == 2 or (is_deepspeed and plan.mixed_precision)
        quantised = plan.quantised_bytes is not None
        with FakeTensorMode():
            model = build(
                self.config,
                torch.bfloat16 if in_16_bits else torch.float32,
                get_peft_config(arguments),
                torch.bfloat16 if is_deepspeed or quantised else torch.float32,
                quantised=quantised,
            )
            meter = measure(
                model,
                Batch(rows or factor * plan.rows, plan.prompt_tokens, config.max_completion_length),
                checkpointing=plan.gradient_checkpointing,
                autocast=plan.mixed_precision and not is_deepspeed,  # DeepSpeed casts the model itself
                accumulates=config.gradient_accumulation_steps > factor and not is_deepspeed,
                splits_gradients=is_deepspeed,
                group=config.num_generations if packed else None,
                full_kl=plan.full_kl,
                **how,
            )
        return meter.peak


def training_bytes(plan: MemoryPlan) -> float:
    """Return the estimate of what the meter counts."""
    parts = plan.parts()
    if plan.layout.sharding != "none":
        return parts["activations"]  # a rank's share of the gradients is counted among the states
    buckets = parts["gradients"] / 2 if plan.layout.num_processes > 1 else 0
    return parts["activations"] + parts["gradients"] - buckets


def shown(case: Case, peak: int, planned: float) -> str:
    """Return a row of the table in docs/scaling.md."""
    name = " ".join([case.recipe, case.model, case.layout, *case.changes])
    return f"| {name} | {peak / GIB:.2f} | {planned / GIB:.2f} | {planned / peak:.3f} |"


def check_case(case: Case, folder: Path) -> None:
    """Check that the estimate is no less than the peak, and at most 25 % more."""
    estimated = Estimated.of(case, folder)
    peak, planned = estimated.peak(), training_bytes(estimated.plan)
    print(shown(case, peak, planned))
    assert peak <= planned <= 1.25 * peak


def check_packed(case: Case, folder: Path, factor: int) -> None:
    """Check that the estimate of a packed row holds with each kernel, and is at most 25 % above one of them.

    It also holds for the forward in TRL's layout, with which the first packed row is compared.
    """
    estimated = Estimated.of(case, folder)
    loop, varlen = (estimated.peak(factor, packed=True, varlen=varlen) for varlen in (False, True))
    check = estimated.peak(factor, rows=min(factor * estimated.plan.rows, COMPARED_ROWS), trains=False)
    planned, padded = training_bytes(estimated.packed(factor)), training_bytes(estimated.plan)
    name = f"{factor} micro-batches as one"
    print(shown(case._replace(changes=(*case.changes, name) if factor > 1 else case.changes), loop, planned))
    print(f"varlen {varlen / GIB:.2f} check {check / GIB:.2f} padded {padded / GIB:.2f}")
    assert max(loop, varlen, check) <= planned <= 1.25 * max(loop, check)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*SHIPPED, *WITHOUT_CHECKPOINTING, *FULL_KL, *OTHER_MODELS], ids=lambda case: f"{case.recipe}-{case.model}"
)
def test_the_plan_holds_the_peak_of_a_micro_batch(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [(), WITHOUT, ("--kl_estimator", "full", "--beta", "0.04")],
    ids=["checkpointing", "without", "full KL"],
)
def test_the_plan_holds_the_peak_of_a_small_models_micro_batch(changes: tuple[str, ...], tmp_path: Path) -> None:
    check_case(Case("rlaif-minimind-internlm2", "MiniMind2-Small", changes=changes), tmp_path)


PACKED = [
    case._replace(changes=(*case.changes, "--kl_estimator", "sampled"))
    for case in (*SHIPPED, *WITHOUT_CHECKPOINTING, *OTHER_MODELS)
    if case.model not in ("gpt2", "72B")
]
"""Cases whose rows can be packed: GPT-2's dropout and the full KL prevent it. The meter takes a minute for 72B."""


@pytest.mark.slow
@pytest.mark.parametrize("case", PACKED, ids=lambda case: f"{case.recipe}-{case.model}")
def test_the_plan_holds_the_peak_of_a_packed_row(case: Case, tmp_path: Path) -> None:
    check_packed(case, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(FULL_24GB, "1.5B", "zero2_offload"),
        Case(FULL_A100, "1.5B", changes=WITHOUT),
        Case("gsm8k-qwen2.5-1.5b-lora", "1.5B"),
        Case("gsm8k-qwen2.5-7b-lora-zero3", "7B", "zero3"),
        Case("gsm8k-qwen2.5-7b-qlora-24gb", "7B"),
        Case("gsm8k-qwen2.5-1.5b-lora", "Qwen3-0.6B", changes=WITHOUT),
    ],
    ids=lambda case: f"{case.recipe}-{case.model}",
)
def test_the_plan_holds_the_peak_of_a_larger_packed_row(case: Case, factor: int, tmp_path: Path) -> None:
    check_packed(case, tmp_path, factor)


@pytest.mark.slow
def test_the_plan_holds_the_peak_of_a_small_models_packed_row(tmp_path: Path) -> None:
    check_packed(Case("rlaif-minimind-internlm2", "MiniMind2-Small", changes=WITHOUT), tmp_path, 2)


# ---- Decoder layers that are measured

_SIZES = {"vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 4}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
SHARED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **{**_SIZES, **_HEADS, "intermediate_size": 1536, "head_dim": 64},
        **{"linear_num_key_heads": 8, "linear_num_value_heads": 16},
        **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    },
    "gpt_oss": {
        **{**_SIZES, **_HEADS, "intermediate_size": 512, "head_dim": 64, "sliding_window": 128},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
    },
    "granitemoehybrid": {
        **{**_SIZES, **_HEADS, "intermediate_size": 1024, "shared_intermediate_size": 1024, "num_local_experts": 0},
        **{"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1},
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "lfm2": {
        **{**_SIZES, **_HEADS, "intermediate_size": 1536},
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "mamba2": {**_SIZES, "num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 1},
}
"""Sizes of small models whose prompts are shared, by model type."""

COMPLETION = 256


def shared_plan(config: PretrainedConfig, dtype: str, checkpointing: bool, group: int | None, rows: int) -> MemoryPlan:
    """Return the estimate of a micro-batch with prompts of 512 tokens, in groups that share them or in TRL's rows."""
    shape, model = ModelShape.built(config)
    base = MemoryPlan(
        shape=shape,
        layout=Sharding(),
        rows=rows,
        generated_rows=rows,
        tokens=512 + COMPLETION,
        prompt_tokens=512,
        dtype_bytes=4 if dtype == "float32" else 2,
        mixed_precision=dtype == "float32",
        gradient_checkpointing=checkpointing,
        full_reference=False,
        gather_for_generation=False,
        vllm=None,
        vllm_share=0.3,
        vllm_split=1,
        vllm_sleeps=False,
        reward_parameters=0,
        gpu_memory=None,
        accumulates=False,
        layers=MeasuredLayers(model),
    )
    return base if group is None else sharing_prompts(base, 1, group, 1, Layout.SHARED)


def shared_peak(config: PretrainedConfig, plan: MemoryPlan, batch: Batch, group: int | None, trains: bool) -> int:
    """Return the bytes that a meter of the whole model finds for a micro-batch, or for a forward without gradients."""
    in_float32 = plan.dtype_bytes == 4
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(config, torch.float32 if in_float32 else torch.bfloat16)
        meter = measure(
            model,
            batch,
            checkpointing=plan.gradient_checkpointing and trains,
            autocast=in_float32,
            group=group,
            segmented=group is not None,
            trains=trains,
        )
    return meter.peak


def check_shared(kind: str, dtype: str, checkpointing: bool, group: int | None, rows: int = 8) -> None:
    """Check the estimate against the largest moment: shared prompts, the longest trimmed rows, and the check."""
    config = CONFIG_MAPPING[kind](**SHARED[kind])
    plan = shared_plan(config, dtype, checkpointing, group, rows)
    moments = {"micro-batch": shared_peak(config, plan, Batch(rows, 512, COMPLETION), group, trains=True)}
    if group is not None:
        trimmed = plan._simpler_rows().tokens
        padded = Batch(min(rows, COMPARED_ROWS), 512 + CHECK_PADDING, COMPLETION)
        moments["trimmed"] = shared_peak(config, plan, Batch(rows, trimmed - COMPLETION, COMPLETION), None, trains=True)
        moments["check"] = shared_peak(config, plan, padded, None, trains=False)
    planned, peak = training_bytes(plan), max(moments.values())
    sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in moments.items())
    how = f"{dtype}{', checkpointing' if checkpointing else ''}"
    print(f"| {kind} | {how} | {group} | {sizes} | {planned / GIB:.2f} | {planned / peak:.3f} |")
    assert peak <= planned <= 1.25 * peak


@pytest.mark.slow
@pytest.mark.parametrize("group", [8, 4, None], ids=["one prompt", "two prompts", "own prompts"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["without", "checkpointing"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SHARED)
def test_the_plan_holds_the_peak_of_shared_prompts(
    kind: str, dtype: str, checkpointing: bool, group: int | None
) -> None:
    check_shared(kind, dtype, checkpointing, group)
