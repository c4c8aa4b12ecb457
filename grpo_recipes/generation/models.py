"""What a model's configuration and modules tell of how it may be run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import PeftModel, PeftType
from torch import nn
from transformers import PreTrainedModel

MIXES_TOKENS = {PeftType.LILY, PeftType.SHADOW}
"""Adapters whose effect on a token depends on the rest of the batch (Lily), or on a cache of their own (Shadow)."""


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT model."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def rotary_of_the_longest(config: Any) -> str | None:
    """The type of a rotary table that transformers chooses by the largest position of each forward, None without one.

    TRL pads every pass over a generation batch to one width, and so gives all of them one table.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]  # or by layer type
    kinds = [table.get("rope_type") or "default" for table in tables]
    return next((kind for kind in kinds if "dynamic" in kind or kind == "longrope"), None)


def scaled_by_position(config: Any) -> str | None:
    """What makes a model scale its attention by a token's place in the row, padding included; None if nothing does.

    transformers has one name for it per family: Ministral 3 and Mistral 4, Llama 4, Inkling, and Beam, whose layers without
    a rotary table always do.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    if any(table.get("llama_4_scaling_beta") for table in tables):
        return "llama_4_scaling_beta"
    if getattr(config, "model_type", None) == "beam" and None in parameters.values():
        return "scalable softmax"
    return next(
        (name for name in ("attn_temperature_tuning", "log_scaling_n_floor") if getattr(config, name, None)), None
    )


def has_dropout(model: nn.Module) -> bool:
    """Whether a module drops activations: an `nn.Dropout` or the like, or a layer that holds its rate as a number.

    Transformers' attention layers call it `attention_dropout` or, as OPT's, `dropout`.
    """
    return any(
        isinstance(value, float) and value > 0 and "drop" in f"{type(module).__name__}.{name}".lower()
        for module in model.modules()
        for name, value in vars(module).items()
    )


def unfit(policy: nn.Module) -> str:
    """Why a policy, as it is now, is not decoded in groups; empty if nothing speaks against it."""
    adapter = getattr(policy, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        return "the adapter puts virtual tokens before the prompt"
    if getattr(adapter, "alora_invocation_tokens", None):
        return "the adapter is given the place in each row from which it acts (aLoRA)"
    if adapter is not None and adapter.peft_type in MIXES_TOKENS:
        return f"the adapter ({adapter.peft_type.value}) computes a token from more than those before it"
    if policy.training and has_dropout(base_model(policy)):
        return "the model has dropout, and completions of a prompt would share its mask"
    return ""
