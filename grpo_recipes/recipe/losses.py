"""TRL's loss types. To add one, add its row to `LOSS_TYPES`.

TRL sums the token losses of a micro-batch and divides the sum. That divisor decides what a term beside TRL's loss has to
weigh at each token, and whether a row may move to another micro-batch without a change of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossType:
    """How TRL's `_compute_loss` reduces the token losses of a micro-batch."""

    divisor: Callable[[Tensor, int], Tensor | int] | None
    """Of the mask (B, T) of a micro-batch and `max_completion_length`: a scalar or (B, 1), to be multiplied by the number
    of micro-batches per optimiser step. None: one rank's share of the tokens of the whole optimiser step."""
    counts_other_rows: bool = False
    """Whether the weight of a row depends on how long the other rows of its micro-batch are."""

    @property
    def is_sum_over_rows(self) -> bool:
        """Whether the loss is a sum of one term for each row, divided by a constant and the number of rows."""
        return self.divisor is not None and not self.counts_other_rows

    def token_weights(
        self, mask: Tensor, accumulation: int, max_completion_length: int, step_tokens: Tensor | float
    ) -> Tensor:
        """The weight of each token's loss in the loss of a micro-batch, (B, T).

        Args:
            mask: (B, T), 1 where a token enters the loss.
            accumulation: micro-batches per optimiser step; 1 in evaluation.
            max_completion_length: the constant length of `dr_grpo`.
            step_tokens: one rank's share of the tokens of an optimiser step.
        """
        if self.divisor is None:
            return mask / step_tokens
        return mask / (self.divisor(mask, max_completion_length) * accumulation)


_STEP_TOKENS = LossType(None)
_MEAN_OF_ROW_MEANS = LossType(lambda mask, _: len(mask) * mask.sum(1, keepdim=True).clamp(min=1))

LOSS_TYPES: dict[str, LossType] = {
    "grpo": _MEAN_OF_ROW_MEANS,
    "bnpo": LossType(lambda mask, _: mask.sum().clamp(min=1), counts_other_rows=True),
    "dr_grpo": LossType(lambda mask, max_completion_length: len(mask) * max_completion_length),
    "dapo": _STEP_TOKENS,
    "cispo": _STEP_TOKENS,
    "sapo": _MEAN_OF_ROW_MEANS,
    "luspo": LossType(lambda mask, _: len(mask)),
    "vespo": _STEP_TOKENS,
}
