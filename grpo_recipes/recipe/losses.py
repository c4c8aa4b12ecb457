"""Table of TRL's loss types. A new loss type of TRL needs one row in `LOSS_TYPES`.

TRL sums the token losses of a micro-batch and divides the sum. The divisor decides how a term that is added to TRL's
loss must weigh each token. It also decides whether a row can move to another micro-batch without changing the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossType:
    """Reduction of the token losses of a micro-batch in TRL's `_compute_loss`."""

    divisor: Callable[[Tensor, int], Tensor | int] | None
    """Divisor of the summed token losses, or None for one rank's share of the tokens of the whole optimizer step.

    The arguments are the mask (B, T) of a micro-batch and `max_completion_length`. The result is a scalar or (B, 1).
    TRL multiplies it by the number of micro-batches per optimizer step.
    """
    counts_other_rows: bool = False
    """True if the weight of a row depends on the lengths of the other rows in its micro-batch."""
    levels: tuple[str, ...] = ("token",)
    """Values of `importance_sampling_level` for which the loss is the objective of its paper."""
    clips: Literal["region", "above", ""] = "region"
    """Ratios at which TRL clips a token: outside 1 - epsilon to 1 + `epsilon_high`, above `epsilon_high`, or none."""

    @property
    def is_sum_over_rows(self) -> bool:
        """True if the loss is a sum of one term per row, divided by a constant and the number of rows."""
        return self.divisor is not None and not self.counts_other_rows

    def clipped_outside(self, epsilon_low: float, epsilon_high: float) -> tuple[float, float]:
        """Return two ratios: tokens with a negative advantage are clipped below the first, others above the second.

        This is the rule of TRL's `clip_ratio/region_mean` and `cispo_clip_ratio`. The bound `delta` does not count.
        """
        if self.clips == "region":
            return 1 - epsilon_low, 1 + epsilon_high
        return -math.inf, epsilon_high if self.clips == "above" else math.inf

    def token_weights(
        self, mask: Tensor, accumulation: int, max_completion_length: int, step_tokens: Tensor | float
    ) -> Tensor:
        """Return the weight of each token's loss in the loss of a micro-batch, (B, T).

        Args:
            mask: (B, T), 1 for each token that enters the loss.
            accumulation: number of micro-batches per optimizer step, 1 in evaluation.
            max_completion_length: constant length by which `dr_grpo` divides.
            step_tokens: one rank's share of the tokens of an optimizer step.
        """
        if self.divisor is None:
            return mask / step_tokens
        return mask / (self.divisor(mask, max_completion_length) * accumulation)


def _row_mean(mask: Tensor, max_completion_length: int) -> Tensor:
    """Return the divisor (B, 1) for a mean over rows of the mean over each row's tokens."""
    return len(mask) * mask.sum(1, keepdim=True).clamp(min=1)


LOSS_TYPES: dict[str, LossType] = {
    "grpo": LossType(_row_mean, levels=("token", "sequence")),
    "bnpo": LossType(lambda mask, _: mask.sum().clamp(min=1), counts_other_rows=True),
    "dr_grpo": LossType(lambda mask, max_completion_length: len(mask) * max_completion_length),
    "dapo": LossType(None),
    "cispo": LossType(None, clips="above"),
    "sapo": LossType(_row_mean, clips=""),
    "luspo": LossType(lambda mask, _: len(mask), levels=("sequence",)),
    "vespo": LossType(None, clips=""),
}
