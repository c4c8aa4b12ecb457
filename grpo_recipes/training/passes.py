"""Effective sample size and clip share of each pass over a generation batch, over all ranks.

The first pass trains with the weights that generated, and pass n after n - 1 optimizer steps since the generation. With
`num_iterations` above 1 a pass is the whole generation batch. With `steps_per_generation` above
`gradient_accumulation_steps` it is a part of the batch. The effective sample size of n tokens with the importance
weights w is (sum w)^2 / (n sum w^2), as a share of n (Kong, 1992). It is 1 if all weights are equal, and 1/n if one
token has all the weight.

TRL logs the clip share too, but as a mean over all passes. It has no effective sample size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.training.micro_batches import loss_mask

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

STALENESS, WITH_MISMATCH = "effective_sample_size", "effective_sample_size_with_mismatch"
CLIPPED = "clip_share"
"""Last parts of the metrics' names, behind `passes/N/`."""

LARGEST_LOG_RATIO = 20.0
"""Bound of a log-ratio, as in TRL's `vespo`: the square of its exponential is finite in float32."""


class Passes:
    """Sums over the tokens of each pass since the last log, on the device.

    Only tokens with a policy gradient count, that is, those in the loss of rows whose advantage is not zero. The
    metrics are therefore the same for all layouts of micro-batches, with skipped rows and without. Nothing here makes
    the host wait for the device before a log.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self.trainer = trainer
        self._generated_at = 0
        self._of_step: dict[int, Tensor] = {}
        """Sums of this rank in the current optimizer step, by the number of the pass."""
        self._of_ranks: dict[int, Tensor] = {}
        """Sums of all ranks since the last log, by the number of the pass."""

    def start(self) -> None:
        """Begin the first pass of a new generation batch."""
        self._generated_at = self.trainer.state.global_step

    def add(self, inputs: Mapping[str, Any], log_probs: Tensor | None) -> None:
        """Add a training micro-batch. The last one of an optimizer step is a collective.

        Args:
            inputs: TRL's inputs of the micro-batch.
            log_probs: log-probabilities (B, T) of the policy in the loss, detached. None is ignored.
        """
        # Without these TRL takes the policy's own, and every ratio is 1.
        if log_probs is None or inputs.get("old_per_token_logps") is None:
            return
        number = self.trainer.state.global_step - self._generated_at + 1
        self._of_step[number] = self._of_step.get(number, 0.0) + self._of(inputs, log_probs)
        # Not in `log`, which a script's callback may call on one rank alone.
        if self.trainer.accelerator.sync_gradients:
            for number, sums in self._of_step.items():
                self._of_ranks[number] = self._of_ranks.get(number, 0.0) + self.trainer.accelerator.reduce(sums)
            self._of_step = {}

    def _of(self, inputs: Mapping[str, Any], log_probs: Tensor) -> Tensor:
        """Return the sums of a micro-batch, (7,): n, w, w^2 and clipped tokens, and n, w and w^2 with the mismatch."""
        mask = loss_mask(dict(inputs)).bool()
        advantages = inputs["advantages"].reshape(len(mask), -1)  # (B, 1) or (B, T)
        counted = mask & (advantages != 0)
        ratio = self._ratios(log_probs - inputs["old_per_token_logps"], mask)
        # Tokens without a gradient because of their ratio, by TRL's rule for the loss.
        loss = LOSS_TYPES[self.trainer.loss_type]
        low, high = loss.clipped_outside(self.trainer.epsilon_low, self.trainer.epsilon_high)
        clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
        parts = [*_moments(ratio, counted), (clipped & counted).sum().float()]
        sampled = inputs.get("sampling_per_token_logps")
        if sampled is None:
            return torch.stack([*parts, *[torch.zeros_like(parts[0])] * 3])
        # vLLM gives NaN for some tokens.
        known = sampled.isfinite()
        difference = torch.where(known, log_probs - sampled, 0.0)
        return torch.stack([*parts, *_moments(self._ratios(difference, mask), counted & known)])

    def _ratios(self, log_ratios: Tensor, mask: Tensor) -> Tensor:
        """Return the importance weights of the loss, (B, T): of each token, or of its whole completion."""
        log_ratios = torch.where(mask, log_ratios.float(), 0.0)
        if self.trainer.importance_sampling_level == "sequence":
            mean = log_ratios.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
            log_ratios = mean.expand_as(log_ratios)
        return log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all ranks since the last call by name, and begin anew."""
        if not self._of_ranks:
            return {}
        numbers, table = list(self._of_ranks), torch.stack(list(self._of_ranks.values())).tolist()
        self._of_ranks = {}
        found: dict[str, float] = {}
        for number, (count, total, square, clipped, *with_mismatch) in zip(numbers, table, strict=True):
            if count:  # else every advantage was zero
                found[f"passes/{number}/{STALENESS}"] = _effective(count, total, square)
                if LOSS_TYPES[self.trainer.loss_type].clips:
                    found[f"passes/{number}/{CLIPPED}"] = clipped / count
            if with_mismatch[0]:
                found[f"passes/{number}/{WITH_MISMATCH}"] = _effective(*with_mismatch)
        return found


def _moments(ratio: Tensor, counted: Tensor) -> list[Tensor]:
    """Return the number of counted tokens, and the sums of their weights and of the squared weights."""
    weights = torch.where(counted, ratio, 0.0)
    return [counted.sum().float(), weights.sum(), weights.square().sum()]


def _effective(count: float, total: float, square: float) -> float:
    """Return the effective sample size as a share of the tokens, in (0, 1]."""
    return min(1.0, total * total / (count * square))  # float32 sums may round it above 1
