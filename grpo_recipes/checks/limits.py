"""The numbers that a recipe's keys may have: TRL checks most of these after the model is loaded, or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_rewards.errors import UserError

# What full fine-tuning takes is about 1e-6, an adapter 1e-5, the quickstart's tiny model 1e-4.
HIGH_LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Range:
    """The finite numbers from `low` to `high`; `above` leaves `low` out, `below` leaves `high` out, `or_` lets one more in."""

    low: int
    high: int | None = None
    above: bool = False
    below: bool = False
    or_: int | None = None

    def __contains__(self, value: float) -> bool:
        """Whether a key may have `value`."""
        if value == self.or_:
            return True
        is_high_enough = value > self.low if self.above else value >= self.low
        is_low_enough = self.high is None or (value < self.high if self.below else value <= self.high)
        return math.isfinite(value) and is_high_enough and is_low_enough

    def __str__(self) -> str:
        """The range in words that follow "set a number": `above 0 and at most 1`."""
        low = f"above {self.low:,}" if self.above else f"of at least {self.low:,}"
        high = "" if self.high is None else f" and {'below' if self.below else 'at most'} {self.high:,}"
        more = "" if self.or_ is None else f", or {self.or_}"
        return low + high + more


POSITIVE, NOT_NEGATIVE = Range(0, above=True), Range(0)
SHARE = Range(0, 1, above=True)
COUNT = Range(1)

RANGES: Mapping[str, Range] = {
    # sampling
    "temperature": POSITIVE,
    "top_p": SHARE,
    "top_k": Range(0, or_=-1),  # 0 is transformers' "off", -1 vLLM's
    "min_p": Range(0, 1),
    "repetition_penalty": POSITIVE,
    "max_completion_length": COUNT,
    "num_generations_eval": NOT_NEGATIVE,  # 0 is `num_generations`
    # the loss
    "beta": NOT_NEGATIVE,
    "epsilon": NOT_NEGATIVE,
    "epsilon_high": NOT_NEGATIVE,
    "delta": NOT_NEGATIVE,
    "top_entropy_quantile": SHARE,
    "sapo_temperature_neg": POSITIVE,
    "sapo_temperature_pos": POSITIVE,
    # the optimiser
    "learning_rate": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,  # 0 does not clip
    "adam_beta1": Range(0, 1, below=True),
    "adam_beta2": Range(0, 1, below=True),
    "adam_epsilon": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    # the run
    "max_steps": Range(1, or_=-1),
    "per_device_eval_batch_size": COUNT,
    "seed": Range(0, 2**32, below=True),  # numpy's
    "data_seed": Range(0, 2**32, below=True),
    "dataloader_num_workers": NOT_NEGATIVE,
    # the adapter
    "lora_r": COUNT,
    "lora_dropout": Range(0, 1),
    # vLLM
    "vllm_gpu_memory_utilization": SHARE,
    "vllm_tensor_parallel_size": COUNT,
    "vllm_server_port": Range(1, 65535),
}


def check(values: Mapping[str, Any]) -> None:
    """Raise `UserError` for a number of `values` that its key can't have. A key that is null has TRL's meaning of it."""
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        allowed = RANGES.get(key)
        if allowed is not None and value not in allowed:
            raise UserError(f"`{key}` is {value}: set a number {allowed}")
        if not math.isfinite(value):
            raise UserError(f"`{key}` is {value}: set a finite number")


def cautions(config: Any) -> list[str]:
    """What is allowed and probably a mistake, a sentence each."""
    if (rate := config.learning_rate) <= HIGH_LEARNING_RATE:
        return []
    return [f"`learning_rate` is {rate:g}, above {HIGH_LEARNING_RATE:g}: few models learn at such a rate"]
