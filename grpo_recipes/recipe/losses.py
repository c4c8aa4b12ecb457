"""TRL's loss types. To add one, add its row to `LOSS_TYPES`.

TRL sums the token losses of a micro-batch and divides the sum. That divisor decides what a term beside TRL's loss has to
weigh at each token, and whether a row may move to another micro-batch without a change of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from grpo_rewards.errors import UserError

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
    keys: tuple[str, ...] = ("epsilon", "epsilon_high", "delta")
    """Those of `OBJECTIVE_KEYS` that its token loss reads; TRL takes the others and ignores them."""
    levels: tuple[str, ...] = ("token",)
    """The values of `importance_sampling_level` with which it is the objective of its paper."""

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


def _row_mean(mask: Tensor, max_completion_length: int) -> Tensor:
    """Of a mean over rows of the mean over each row's tokens."""
    return len(mask) * mask.sum(1, keepdim=True).clamp(min=1)


LOSS_TYPES: dict[str, LossType] = {
    "grpo": LossType(_row_mean, levels=("token", "sequence")),
    "bnpo": LossType(lambda mask, _: mask.sum().clamp(min=1), counts_other_rows=True),
    "dr_grpo": LossType(lambda mask, max_completion_length: len(mask) * max_completion_length),
    "dapo": LossType(None),
    "cispo": LossType(None, keys=("epsilon_high",)),
    "sapo": LossType(_row_mean, keys=("sapo_temperature_neg", "sapo_temperature_pos")),
    "luspo": LossType(lambda mask, _: len(mask), levels=("sequence",)),
    "vespo": LossType(None, keys=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
}

AdvantageRule = Literal["max_rl"]
"""Name of a rule for advantages that TRL's options cannot express; `training/advantages.py` computes them."""

OBJECTIVE_KEYS = tuple(dict.fromkeys(key for loss in LOSS_TYPES.values() for key in loss.keys))
"""The keys of TRL that some loss types read and others ignore."""


def ignored_keys(loss_type: str) -> tuple[str, ...]:
    """The keys that have no effect with this loss type."""
    return tuple(key for key in OBJECTIVE_KEYS if key not in LOSS_TYPES[loss_type].keys)


def check(given: Mapping[str, Any], config: Any, *, sampled_kl: bool) -> None:
    """Refuse keys that would train something else than they say, or nothing.

    Args:
        given: the keys that the recipe sets itself.
        config: every key of `GRPOConfig`, as attributes.
        sampled_kl: whether the KL term, if there is one, is TRL's on the sampled tokens.

    Raises `UserError`.
    """
    loss = LOSS_TYPES[config.loss_type]
    for key in ignored_keys(config.loss_type):
        if given.get(key) is not None:
            raise UserError(
                f"`{key}` has no effect with `loss_type: {config.loss_type}`, which reads {_listed(loss.keys)}: remove it"
            )
    if config.loss_type == "cispo" and (config.epsilon_high is None or config.epsilon_high < 1):
        said = "is not set, and TRL takes `epsilon`" if config.epsilon_high is None else f"is {config.epsilon_high}"
        raise UserError(
            f"`epsilon_high` {said}: `loss_type: cispo` bounds the ratio by that number itself, not by 1 + it, so that below 1 "
            "it scales down every token: set `epsilon_high` to 1 or more, as 5.0"
        )
    _check_level(loss, config, sampled_kl=sampled_kl)
    if config.multi_objective_aggregation == "normalize_then_sum" and config.scale_rewards != "group":
        raise UserError(
            f"`scale_rewards: {config.scale_rewards}` has no effect with `multi_objective_aggregation: normalize_then_sum`, "
            "which divides each reward by the deviation of its group, and their sum by that of the batch: remove it"
        )


def _check_level(loss: LossType, config: Any, *, sampled_kl: bool) -> None:
    """Refuse a ratio of whole completions among terms of single tokens, or the reverse. Raises `UserError`."""
    if config.importance_sampling_level not in loss.levels:
        if config.importance_sampling_level == "sequence":
            raise UserError(
                f"`importance_sampling_level: sequence` gives a completion one ratio, and `loss_type: {config.loss_type}` is "
                "made of tokens with a ratio each: set `loss_type: grpo` (which is GSPO) or `luspo`, or "
                "`importance_sampling_level: token`"
            )
        raise UserError(
            f"`loss_type: {config.loss_type}` is made of completions with one ratio each: set "
            "`importance_sampling_level: sequence`"
        )
    if config.importance_sampling_level != "sequence":
        return
    if config.beta and sampled_kl and config.use_bias_correction_kl:
        raise UserError(
            "`importance_sampling_level: sequence` gives a completion one ratio, and `use_bias_correction_kl` (TRL's default) "
            "would weigh the KL of each token by it, which is the gradient of no KL: set `use_bias_correction_kl: false`"
        )
    if config.top_entropy_quantile < 1:
        raise UserError(
            "`importance_sampling_level: sequence` gives a completion one ratio, of all its tokens, and "
            "`top_entropy_quantile` leaves out tokens: remove one of them"
        )


def check_advantages(rule: AdvantageRule | None, config: Any) -> None:
    """Raise `UserError` for options of TRL that have no effect, because `rule` computes the advantages in place of TRL.

    Args:
        rule: the recipe's `advantages`.
        config: every key of `GRPOConfig`, as attributes.
    """
    if rule is None:
        return
    if config.multi_objective_aggregation != "sum_then_normalize":
        raise UserError(
            f"`multi_objective_aggregation: {config.multi_objective_aggregation}` has no effect with `advantages: {rule}`, "
            "which takes the weighted sum of the rewards: remove it"
        )
    if config.scale_rewards != "none":
        raise UserError(
            f"`scale_rewards: {config.scale_rewards}` has no effect with `advantages: {rule}`, which divides by no standard "
            "deviation: set `scale_rewards: none`"
        )


def _listed(keys: tuple[str, ...]) -> str:
    *others, last = [f"`{key}`" for key in keys]
    return f"{', '.join(others)} and {last}" if others else f"only {last}"
