"""What TRL 1.16 counts of completions that end with a string: it knows one end of a completion, a token.

It would count a row that ended with a string as cut off at `max_completion_length`. So rows are asked here whether they ended.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_recipes.generation.stop_strings import StopStrings


def take_over_mask(trainer: Any) -> bool:
    """Whether TRL was to mask truncated completions; from now on `corrected` does, which knows what ended with a string."""
    asked, trainer.mask_truncated_completions = trainer.mask_truncated_completions, False
    return asked


def corrected(trainer: Any, output: tuple[Any, ...], stop: StopStrings, masks_truncated: bool) -> tuple[Any, ...]:
    """What TRL's `_generate` returned, the truncated completions masked where asked; its metrics of them logged anew."""
    prompt_ids, completion_ids, tool_mask, *rest = output
    masks = tool_mask or [[1] * len(ids) for ids in completion_ids]
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    truncated = [ids[-1] not in ends and not stop.end(ids) for ids in completion_ids]
    local = torch.tensor([truncated, [sum(mask) for mask in masks]], device=trainer.accelerator.device)
    cut, lengths = trainer.accelerator.gather(local.T.contiguous()).T
    ended = lengths[cut == 0].float() if not cut.all() else torch.zeros(1)
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in {
        "clipped_ratio": cut.float().mean(),
        "mean_terminated_length": ended.mean(),
        "min_terminated_length": ended.min(),
        "max_terminated_length": ended.max(),
    }.items():
        metrics[f"completions/{name}"][-1] = value.item()
    if masks_truncated:  # as the mask of tool results, which the loss leaves out
        tool_mask = [[0] * len(mask) if gone else mask for mask, gone in zip(masks, truncated, strict=True)]
    return prompt_ids, completion_ids, tool_mask, *rest
