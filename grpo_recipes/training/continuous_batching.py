"""Transformers' continuous batching (TRL's `use_transformers_continuous_batching`) beside packed rows, without its traps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from grpo_recipes.training.log_probs import has_packing_attention, packing_attention, stock_attention
from grpo_rewards.errors import UserError

CPU_BATCH_TOKENS = 512
"""Tokens of a forward on a CPU, if no more rows are decoded at once: longer prompts go through it in parts."""


def refuse_cast(model: torch.nn.Module, args: Any) -> None:
    """Raise `UserError` where TRL would cast weights that are trained in place to 16 bits, and Adam's state with them.

    It does so with `args.bf16` or `args.fp16`. DeepSpeed's own weights stay.
    """
    cast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if cast is not None and trained - {cast} and args.deepspeed_plugin is None:
        raise UserError(
            f"`use_transformers_continuous_batching` casts the trained weights to {cast} in place, and most updates would be "
            "lost: set it to false, or `bf16` and `fp16` to false"
        )


class ContinuousBatching:
    """The context of TRL's own call of `generate_batch`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.sized = config.num_blocks is not None
        """Whether the user has sized the cache."""
        self.batch_sized = config.max_batch_tokens is not None
        """Whether the user has sized a forward."""

    @contextmanager
    def around(self, model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[None]:
        """While it lasts, the attention is one that `generate_batch` knows; on a CPU the cache is as large as it can get.

        Left alone, transformers takes a share of all free memory, which it never needs, and reckons with a mask of 8,192
        tokens by the whole cache: gigabytes, for which it refuses a cache that is large enough.
        """
        packs = has_packing_attention(model)
        stock_attention(model)
        if not self.sized and model.device.type == "cpu":
            page = self.config.page_size
            self.config.num_blocks = sum(-(-(len(prompt) + max_new_tokens) // page) for prompt in prompts)
        if not self.batch_sized and model.device.type == "cpu":
            self.config.max_batch_tokens = max(CPU_BATCH_TOKENS, len(prompts))
        try:
            yield
        finally:
            if packs:
                packing_attention(model)
