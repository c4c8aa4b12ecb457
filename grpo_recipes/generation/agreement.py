"""Whether two computations of the same log-probabilities agree: how far they may differ, and completions against the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

TOLERANCE_FP32 = 1e-4
"""Largest difference of a log-probability, in float32."""
TOLERANCE_16BIT = 5e-2
"""Mean difference of the log-probabilities, in bfloat16 or float16. The largest is no measure there: over thousands of
tokens, two correct kernels differ by more than that on some."""


def disagreement(mean: Tensor, largest: Tensor, *, whole_precision: bool, where: str) -> str:
    """By how much log-probabilities differ on the tokens of `where`, as a phrase; empty within the tolerance."""
    value, limit = (largest, TOLERANCE_FP32) if whole_precision else (mean, TOLERANCE_16BIT)
    return "" if value <= limit else f"by {value:.1e} on {where}, {limit:.0e} allowed"


def has_whole_precision(model: nn.Module) -> bool:
    """Whether a model's weights are float32 or float64."""
    return next(model.parameters()).dtype in (torch.float32, torch.float64)


@torch.no_grad()
def differences(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    log_probs: Tensor,
    temperature: float,
) -> Tensor:
    """How far noted `log_probs`, (rows, T), are from those of a forward of each row by itself, (tokens of all rows,)."""
    gaps = []
    for prompt, completion, noted in zip(prompts, completions, log_probs, strict=True):
        ids = torch.tensor([*prompt, *completion], device=noted.device)
        keep = len(completion) + 1
        logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=keep).logits[0, -keep:-1].float()
        expected = (logits / temperature).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        gaps.append((noted[: len(completion)] - expected).abs())
    return torch.cat(gaps)
