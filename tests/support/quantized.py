"""Tiny policies on a base in 4 bits, which bitsandbytes loads on a CPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, PreTrainedModel

from tests.support import tiny
from tests.support.short_runs import moved

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: it has no wheel for some platforms"
)


def save_policy(folder: Path, dtype: torch.dtype, config_class: Any = LlamaConfig) -> Path:
    """Save a tiny policy whose rows fill the blocks of 64 weights that share a scale."""
    tiny.policy(config_class, hidden_size=64, intermediate_size=128).to(dtype).save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


def in_4_bits(folder: Path, dtype: torch.dtype, *, repacks: bool) -> PreTrainedModel:
    """Load a policy with nested NF4.

    Args:
        folder: Folder of the policy.
        dtype: Dtype of the other weights, and of the computation.
        repacks: True if an evaluation repacks the weights, as on a CPU with AVX512-BF16. False if none does.
    """
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=dtype)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = repacks
    return base


def save_run(folder: Path) -> Path:
    """Write a run with a bfloat16 base in `folder/base`, on which an adapter was trained in 4 bits.

    Return the run's checkpoint. Neither bitsandbytes nor a training is needed.
    """
    base = AutoModelForCausalLM.from_pretrained(save_policy(folder / "base", torch.bfloat16), dtype="auto")
    checkpoint = folder / "run" / "checkpoint-2"
    torch.manual_seed(0)
    moved(get_peft_model(base, LORA)).save_pretrained(checkpoint)
    recipe = {"load_in_4bit": True, "use_bnb_nested_quant": True, "dtype": "bfloat16", "learning_rate": 1e-5}
    (folder / "run" / "run.json").write_text(json.dumps({"recipe": recipe}))
    return checkpoint


def trained_policy(folder: Path) -> PeftModel:
    """Load the policy that the run of `save_run` trained: its adapter on the base in 4 bits."""
    base = in_4_bits(folder / "base", torch.bfloat16, repacks=False)
    return PeftModel.from_pretrained(base, folder / "run" / "checkpoint-2")
