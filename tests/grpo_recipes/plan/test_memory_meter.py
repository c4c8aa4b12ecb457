"""Planned memory of training compared with a meter of the tensors that a whole micro-batch creates at real sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config
from trl import get_peft_config

from grpo_recipes.plan.memory import GIB, MemoryPlan
from grpo_recipes.plan.plan import Plan, plan
from grpo_recipes.recipe.recipe import model_config
from grpo_recipes.training.layout_trial import COMPARED_ROWS, EXTRA_PADDING
from grpo_recipes.training.packing import Layout
from tests.support import launching, qwen
from tests.support.memory_meter import Batch, build, measure

WITHOUT = ("--gradient_checkpointing", "false")
FULL_KL = ("--kl_estimator", "full", "--beta", "0.04")
NO_DROPOUT = ("--lora_dropout", "0")  # PEFT has none for experts
PADDED = ("--micro_batching", "off")
FULL_24GB, FULL_A100 = "gsm8k-qwen2.5-1.5b-24gb", "gsm8k-qwen2.5-1.5b-8xa100"
LORA_24GB, QLORA = "gsm8k-qwen2.5-1.5b-lora", "gsm8k-qwen2.5-7b-qlora-24gb"
LORA_ZERO3, FULL_ZERO3 = "gsm8k-qwen2.5-7b-lora-zero3", "gsm8k-qwen2.5-7b-full-zero3"
SMALL = {"vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
LAYERS = 4
"""Layers of a large model here. The plan measures three of them and adds the others."""


def shortened(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration with the sizes of a published model and fewer layers."""
    return type(config)(**{**config.to_dict(), "num_hidden_layers": LAYERS, "layer_types": None})


CONFIGS: dict[str, Any] = {
    **{size: shortened(qwen.config(size)) for size in qwen.SIZES},
    "gpt2": GPT2Config(n_layer=LAYERS),
    "Qwen3-0.6B": Qwen3Config(
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": LAYERS, "vocab_size": 151936},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "llama-2": LlamaConfig(**{**SMALL, **HEADS, "intermediate_size": 1536, "num_hidden_layers": 2}),
    "llama-3": LlamaConfig(**{**SMALL, **HEADS, "intermediate_size": 1536, "num_hidden_layers": 3}),
    # Small models with layers unlike Llama's: linear attention, experts, scans and convolutions.
    "qwen3_5_text": CONFIG_MAPPING["qwen3_5_text"](
        **{**SMALL, **HEADS, "intermediate_size": 1536, "head_dim": 64, "linear_num_key_heads": 8},
        **{"linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    ),
    "gpt_oss": CONFIG_MAPPING["gpt_oss"](
        **{**SMALL, **HEADS, "intermediate_size": 512, "head_dim": 64, "sliding_window": 128},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
    ),
    "qwen3_moe": CONFIG_MAPPING["qwen3_moe"](
        **{**SMALL, **HEADS, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    ),
    "granitemoehybrid": CONFIG_MAPPING["granitemoehybrid"](
        **{**SMALL, **HEADS, "intermediate_size": 1024, "shared_intermediate_size": 1024, "num_local_experts": 0},
        **{"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1},
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    ),
    "lfm2": CONFIG_MAPPING["lfm2"](
        **{**SMALL, **HEADS, "intermediate_size": 1536},
        layer_types=["conv", "conv", "full_attention", "conv"],
    ),
    "mamba2": CONFIG_MAPPING["mamba2"](**SMALL, num_heads=16, head_dim=64, state_size=64, n_groups=1),
}  # fmt: skip
"""Configurations of the models of the recipes, from their config.json on the hub, and of small models."""


class Case(NamedTuple):
    """A recipe on a layout, with changes and its model."""

    recipe: str
    model: str
    layout: str = "single_gpu"
    changes: tuple[str, ...] = ()


SMALL_GROUPS = ("--num_generations", "4", "--per_device_train_batch_size", "4")
BESIDE_VLLM = ("--use_vllm", "true")  # without generation by transformers, which is not measured here
QUICK = [
    Case(LORA_24GB, "llama-2", changes=(*NO_DROPOUT, *SMALL_GROUPS, *BESIDE_VLLM)),
    Case(FULL_A100, "llama-3", changes=(*WITHOUT, *PADDED, *SMALL_GROUPS, *BESIDE_VLLM)),
]
PUBLISHED = [
    Case("gsm8k-qwen2-0.5b-full-kl", "0.5B", changes=(*WITHOUT, "--bf16", "false")),
    Case(FULL_24GB, "1.5B", "zero2_offload"),
    Case(FULL_24GB, "1.5B", "zero2", FULL_KL),
    Case(FULL_A100, "1.5B", changes=("--gradient_accumulation_steps", "2")),
    Case(FULL_A100, "1.5B", "fsdp2"),
    Case(LORA_24GB, "1.5B"),
    Case(LORA_24GB, "1.5B", changes=(*WITHOUT, "--dtype", "float32")),
    Case(FULL_ZERO3, "7B", "zero3"),
    Case(LORA_ZERO3, "7B", "zero3", WITHOUT),
    Case(QLORA, "7B"),
    Case(QLORA, "7B", changes=(*WITHOUT, *PADDED)),
    Case("gsm8k-qwen2.5-72b-lora-zero3-2node", "72B", "zero3_multinode"),
    Case(FULL_A100, "gpt2", changes=("--disable_dropout", "false")),
    Case(LORA_24GB, "Qwen3-0.6B", changes=WITHOUT),
]
OTHER_LAYERS = [
    Case(LORA_24GB, "qwen3_5_text", changes=NO_DROPOUT),
    Case(LORA_24GB, "gpt_oss", changes=(*WITHOUT, "--dtype", "float32", "--use_peft", "false")),
    Case(LORA_24GB, "qwen3_moe", changes=NO_DROPOUT),
    Case(LORA_24GB, "granitemoehybrid", changes=(*PADDED, *NO_DROPOUT)),
    Case(LORA_24GB, "lfm2", changes=(*NO_DROPOUT, *WITHOUT, "--dtype", "float32")),
    Case(LORA_24GB, "mamba2", changes=("--use_peft", "false")),  # PEFT adds no LoRA to its projections
]


def planned(case: Case, folder: Path) -> tuple[Plan, MemoryPlan]:
    CONFIGS[case.model].save_pretrained(folder)
    rows = launching.write_rows(folder / "rows.jsonl", 640)
    arguments = ["--config", case.recipe, "--dataset.path", str(rows), *case.changes]
    found = plan(arguments, accelerate_config=case.layout, model_config_file=str(folder / "config.json"))
    assert isinstance(found.run.memory, MemoryPlan), found.run.memory
    return found, found.run.memory


def peak(config: PretrainedConfig, found: Plan, run: MemoryPlan, *, checks: bool = False) -> int:
    """Return the bytes at the peak of a micro-batch, or of the forward in TRL's layout with which it is compared."""
    arguments, is_split = model_config(found.recipe), run.sharding.split != "none"
    in_16_bits = run.dtype_bytes == 2 or (is_split and run.mixed_precision)
    layout = run.micro_batch().layout
    is_packed = layout.shares_prompts and not checks
    prompt = run.prompt_tokens + (2 * EXTRA_PADDING if checks else 0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(
            config,
            torch.bfloat16 if in_16_bits else torch.float32,
            get_peft_config(arguments),
            torch.bfloat16 if is_split or run.quantised_bytes is not None else torch.float32,
            quantised=run.quantised_bytes is not None,
        )
        meter = measure(
            model,
            Batch(min(run.rows, COMPARED_ROWS) if checks else run.rows, prompt, run.config.max_completion_length),
            checkpointing=run.config.gradient_checkpointing and not checks,
            autocast=run.mixed_precision and not is_split,  # DeepSpeed and FSDP2 cast the model itself
            accumulates=run.config.gradient_accumulation_steps > 1 and not is_split and not checks,
            splits_gradients=is_split,
            group=run.config.num_generations if is_packed else None,
            segmented=is_packed and layout is not Layout.PACKED,
            varlen=False,
            full_kl=run.full_kl,
            trains=not checks,
        )
    return meter.peak


def check_case(case: Case, folder: Path) -> str:
    """Return a complaint unless the plan is no less than the peak, and at most 25 % more."""
    found, run = planned(case, folder)
    config, parts = CONFIGS[case.model], run.parts()
    most = peak(config, found, run)
    if run.micro_batch().layout.shares_prompts:
        most = max(most, peak(config, found, run, checks=True))
    # A rank's share of split gradients, and the buckets of DistributedDataParallel, are not measured.
    copies = 2 if run.sharding.num_processes > 1 else 1
    gradients = 0 if run.sharding.split != "none" else parts["gradients"] / copies
    held = parts["activations"] + gradients
    is_right = most <= held <= 1.25 * most
    return "" if is_right else f"{case}: {held / GIB:.2f} GiB planned, {most / GIB:.2f} GiB measured"


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_plan_holds_the_peak_of_a_small_models_micro_batch(case: Case, tmp_path: Path) -> None:
    assert check_case(case, tmp_path) == ""


@pytest.mark.slow
def test_the_plan_holds_the_peak_of_a_micro_batch(tmp_path: Path) -> None:
    assert [wrong for case in (*PUBLISHED, *OTHER_LAYERS) if (wrong := check_case(case, tmp_path))] == []
