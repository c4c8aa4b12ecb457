"""Transformers' continuous batching (TRL's `use_transformers_continuous_batching`) beside packed rows, without its traps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from grpo_recipes.training.log_probs import has_packing_attention, packing_attention, stock_attention
from grpo_rewards.errors import UserError

DROPPED = {"encoder_repetition_penalty": 1.0, "min_length": 0, "min_new_tokens": 0, "repetition_penalty": 1.0}
"""Options that transformers 5.23 drops with a warning, and the value with which nothing is lost."""


def refuse(config: GenerationConfig, stop: Any, model: Any, args: Any) -> None:
    """Raise `UserError` for what continuous batching would do silently: leave an option out, or cast the trained weights.

    TRL casts `model` in place to the dtype of `args.bf16` or `args.fp16`, Adam's state with it. DeepSpeed's own weights stay.
    """
    cast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if cast is not None and trained - {cast} and args.deepspeed_plugin is None:
        raise UserError(
            f"`use_transformers_continuous_batching` casts the trained weights to {cast} in place, and most updates would be "
            "lost: set it to false, or `bf16` and `fp16` to false"
        )
    lost = [name for name, neutral in DROPPED.items() if (getattr(config, name, None) or neutral) != neutral]
    lost += ["stop"] if stop is not None else []
    if lost:
        raise UserError(
            f"`use_transformers_continuous_batching` leaves out {', '.join(lost)}: set it to false, or drop the option"
        )


class ContinuousBatching:
    """The context of TRL's own call of `generate_batch`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.sized = config.num_blocks is not None
        """Whether the user has sized the cache."""

    @contextmanager
    def around(self, model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[None]:
        """While it lasts, the attention is one that `generate_batch` knows; on a CPU the cache is as large as it can get.

        Left alone, transformers takes a share of all free memory, which it never needs.
        """
        packs = has_packing_attention(model)
        stock_attention(model)
        if not self.sized and model.device.type == "cpu":
            page = self.config.page_size
            self.config.num_blocks = sum(-(-(len(prompt) + max_new_tokens) // page) for prompt in prompts)
        try:
            yield
        finally:
            if packs:
                packing_attention(model)
