"""Rules by which settings, configuration and modules of a model forbid a layout, without reading a weight.

They are the first of three checks (`layout_check.py`). `plan` applies them before the model is loaded
(`layout_facts.py`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from grpo_recipes.generation.models import (
    base_model,
    describe_dropout,
    rotary_of_the_longest,
    scaled_by_position,
    unfit_adapter,
)
from grpo_recipes.training.packing import Layout

VERIFIED_UNDER_SHARDING = frozenset({"gpt_oss", "granitemoehybrid", "lfm2", "mamba2", "qwen3_5_text"})
"""Model types that train to TRL's weights on two ranks with shared prompts, under ZeRO-3 and FSDP2
(`test_segments_distributed.py`)."""

ZERO3, FSDP1, FSDP2 = "zero3", "fsdp1", "fsdp2"
"""Ways in which the weights are split over ranks."""

Choice = tuple[Layout, str]
"""A layout, and the reason for which no more preferred layout was chosen, or ""."""


@dataclass(frozen=True)
class LayoutRules:
    """Settings of a run that decide, with a model, which layouts may be tried.

    The rules read a model's configuration and modules, and no weight: `plan` asks them before the model is loaded.
    """

    args: Any
    """`GRPOConfig`, or an object with its attributes."""
    router_loss: bool = False
    """True if the loss has the auxiliary loss of a mixture of experts."""
    padded_because: str = ""
    """Reason for which rows must stay padded, because something else reads them in the forward, or ""."""
    dropout_ends: bool = False
    """True if the run will switch off the dropout that the model has now."""

    def allowed(self, bare: nn.Module, wanted: Layout, sharding: str) -> Choice:
        """Return the most preferred layout up to `wanted` that settings and model allow.

        Args:
            bare: the model inside accelerate's wrappers.
            wanted: most preferred layout allowed.
            sharding: way in which the weights are split over ranks, as `sharding_of` returns it.
        """
        if reason := self._padded(bare):
            return Layout.PADDED, reason
        if scale := scaled_by_position(text_config(bare)):
            reason = f"attention is scaled by a token's place in the row, padding included ({scale})"
            return self.in_columns(bare, wanted, sharding), reason
        if not wanted.shares_prompts:
            return wanted, ""
        unpacked = ""
        if wanted is Layout.PACKED:
            unpacked = self.unshared(bare) or unsupported(bare)
            if not unpacked:
                return wanted, ""
        unshared = self.unshared(bare) or unsupported_under_sharding(bare, sharding)
        if not unshared:
            return min(wanted, Layout.SHARED), unpacked
        return (Layout.PADDED if wanted is Layout.SHARED_PADDED else Layout.TRIMMED), unpacked or unshared

    def in_columns(self, bare: nn.Module, wanted: Layout, sharding: str) -> Layout:
        """Return the most preferred layout up to `wanted` for a model whose results depend on padding."""
        unfit = not wanted.shares_prompts or self.unshared(bare) or sharding
        return Layout.PADDED if unfit else Layout.SHARED_PADDED

    def unshared(self, bare: nn.Module) -> str:
        """Return why completions must not share a prompt, in any layout, or "" if nothing forbids it."""
        if self.router_loss:
            return "a shared prompt would count once in the router loss"
        if self.args.torch_compile:
            return "torch.compile would compile again for each shape of a micro-batch"
        if is_compiled(bare):
            return "the model is compiled, and would be compiled again for each shape of a micro-batch"
        if reason := unfit_adapter(bare):
            return reason
        dropout = "" if self.dropout_ends else describe_dropout(base_model(bare))
        return dropout and f"{dropout}, and a shared prompt would share one mask among its completions"

    def _padded(self, bare: nn.Module) -> str:
        """Return why rows must keep TRL's width, or "" if nothing requires it."""
        if self.args.pad_to_multiple_of is not None:
            return "pad_to_multiple_of asks for the shapes that TRL makes"
        if self.padded_because:
            return self.padded_because
        if self.args.neftune_noise_alpha is not None:
            return "neftune_noise_alpha adds noise by the width of the rows, padding included"
        if getattr(getattr(bare, "active_peft_config", None), "velora_config", None) is not None:
            return "the adapter's gradient is compressed by an average over whole micro-batches (VeLoRA)"
        if rotary := rotary_of_the_longest(text_config(bare)):
            return f"a rotary table of type {rotary} depends on the longest row, padding included"
        return ""


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model."""
    return base_model(model).config.get_text_config()


def attention_window(config: Any) -> int | None:
    """Return the sliding window of a model's attention in tokens, or None if no layer has one."""
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) if slides else None


def unsupported_under_sharding(model: nn.Module, sharding: str) -> str:
    """Return why a model's prompts are not shared through a cache, or "" if they may be.

    Args:
        model: the model inside accelerate's wrappers.
        sharding: way in which the weights are split over ranks, as `sharding_of` returns it.
    """
    if not sharding:
        return ""
    # Only log-probabilities are compared there. A kernel that drops the gradient of a state would pass.
    kind = text_config(model).model_type
    if sharding == FSDP1:
        return "shared prompts were verified under FSDP2, and not under FSDP1"
    if kind not in VERIFIED_UNDER_SHARDING:
        return f"the gradients of {kind} behind a shared prompt were not verified under ZeRO-3 and FSDP"
    return ""


def unsupported(model: nn.Module) -> str:
    """Return why this model cannot be packed, or "" if its configuration and modules show no reason."""
    base, config = base_model(model), text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    parameters = inspect.signature(base.base_model.forward).parameters
    # These cases can pass the comparisons by chance, or fail inside the model, so they are ruled out first.
    if config is not base.config:
        return "the model is multimodal"
    if kinds:
        return f"the model has layers of {', '.join(sorted(kinds))}"
    if not base._can_set_attn_implementation():
        return f"the attention of {type(base).__name__} does not go through transformers' AttentionInterface"
    if not base._supports_sdpa:
        return f"the attention of {type(base).__name__} is not that of SDPA"
    if "position_ids" not in parameters or "kwargs" not in parameters:
        return f"the forward of {type(base.base_model).__name__} takes no position_ids or no further arguments"
    return ""


def learns_positions(model: PreTrainedModel) -> bool:
    """Return True if the model has an embedding table other than that of its tokens."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(table is not model.get_input_embeddings() for table in tables)


def is_compiled(model: nn.Module) -> bool:
    """Return True if a model or a part of it was compiled, by `torch.compile` or in place by `compile()`."""
    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in model.modules()
    )


def sharding_of(model: nn.Module) -> str:
    """Return how the weights are split over ranks, `ZERO3`, `FSDP1` or `FSDP2`, or "" if each rank holds all of them.

    A call of a model whose weights are split is a collective.
    """
    # FSDP1 wraps modules, and FSDP2 can ignore single parameters.
    if any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
        return FSDP1
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return FSDP2
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            return ZERO3
        if isinstance(parameter, DTensor):
            return FSDP2
    return ""


def is_sharded(model: nn.Module) -> bool:
    """Return True if each rank holds only a part of the weights (ZeRO-3, FSDP)."""
    return bool(sharding_of(model))
