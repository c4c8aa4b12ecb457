"""Dtypes in which weights are stored, updated and computed, and the share of an update that survives rounding.

The neighbours of a weight w with b significant bits are 2^(floor(log2 |w|) - b + 1) away. An update smaller than half
of that distance leaves the weight unchanged, at every step: bfloat16 (b = 8) at a learning rate of 5e-6 loses nearly
all of what AdamW computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_recipes.recipe.recipe import Recipe
from grpo_recipes.recipe.trl_keys import ADAMW_BF16
from grpo_rewards.errors import UserError

SIGNIFICANT_BITS: Mapping[str, int] = {"bfloat16": 8, "float16": 11}

# transformers' optimizers that take AdamW's step and round it to the weight's dtype.
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused")

# With a smaller share of an update, the effective learning rate is far below the recipe's.
WARN_BELOW = 0.5


@dataclass(frozen=True)
class Precision:
    """Dtypes and optimizer of a run.

    Attributes:
        stored: Dtype of the trained weights.
        computed: Dtype of the matrix products.
        optim: Name of the optimizer.
        learning_rate: Largest learning rate.
        beta1: Decay rate of AdamW's first moment.
        optim_args: Options of the optimizer.
        deepspeed: True if DeepSpeed updates float32 weights of its own and rounds them into the stored ones.
    """

    stored: str
    computed: str
    optim: str
    learning_rate: float
    beta1: float
    optim_args: str | None = None
    deepspeed: bool = False

    @classmethod
    def of(cls, recipe: Recipe, optim: str, backend: str, *, is_adapter: bool) -> Precision:
        """Return the precision of a recipe's run, trained by `optim` under the `backend` torch, deepspeed or fsdp."""
        config, dtype, is_deepspeed = recipe.config, recipe.model.get("dtype"), backend == "deepspeed"
        mixed = None
        if uses_bf16(config):
            mixed = "bfloat16"
        elif config.fp16:
            mixed = "float16"
        # In this order, because DeepSpeed casts adapters too.
        if is_deepspeed:
            stored = mixed or "float32"  # DeepSpeed casts the model
        elif is_adapter and quantises(recipe):
            stored = "bfloat16"  # TRL casts an adapter on a quantized base
        elif is_adapter or (backend == "fsdp" and mixed is not None):
            stored = "float32"  # PEFT's `autocast_adapter_dtype`, accelerate's `fsdp2_prepare_model`
        elif dtype == "auto":
            stored = "bfloat16"  # published models are saved in it
        else:
            stored = dtype or "float32"
        computed, rate = mixed or stored, config.learning_rate
        return cls(stored, computed, optim, rate, config.adam_beta1, config.optim_args, is_deepspeed)

    @property
    def updated(self) -> str:
        """Dtype in which an update is added to a weight."""
        keeps_float32 = self.deepspeed or (self.optim == ADAMW_BF16 and self.stored == "bfloat16")
        return "float32" if keeps_float32 else self.stored

    def check(self, *, continuous_batching: bool = False) -> None:
        """Raise `UserError` if this precision can't be trained."""
        if self.optim == ADAMW_BF16 and self.deepspeed:
            problem = "DeepSpeed keeps its own float32 weights, so no update is lost"
            raise UserError("`optim: adamw_bf16`", problem, "remove `optim`")
        if self.optim == ADAMW_BF16 and self.optim_args:
            raise UserError("`optim_args`", f"`optim: adamw_bf16` has none, not {self.optim_args!r}", "remove the key")
        if self.stored == "float16" and not self.deepspeed:
            fix = "set `dtype: float32` with `fp16: true`, or `dtype: bfloat16` with `optim: adamw_bf16`"
            raise UserError("`dtype`", "weights in float16 can't be trained, as no gradient scaler works on them", fix)
        if continuous_batching and not self.deepspeed and self.computed != self.stored:
            problem = (
                f"TRL would cast the trained weights from {self.stored} to {self.computed} in place, and most updates "
                "would be lost"
            )
            fix = f"set it to false, or `{'fp16' if self.computed == 'float16' else 'bf16'}: false`"
            raise UserError("`use_transformers_continuous_batching`", problem, fix)

    def surviving(self, weights: NDArray[np.floating]) -> float | None:
        """Return the share of an update that survives rounding, in [0, 1], or None for an unknown optimizer.

        The share is the projection of the rounded update on the computed one. An AdamW step is modelled as learning
        rate × a normal number of standard deviation sqrt((1 - beta1) / (1 + beta1)), which is exact for gradients that
        are noise: 3 % for weights of N(0, 0.02) at 5e-6, as in 1,000 simulated steps.

        Args:
            weights: Sample of the trained weights, (N,).
        """
        if self.updated == "float32":
            return 1.0
        if self.optim not in ADAMW or self.optim_args:
            return None
        if not self.learning_rate:
            return 1.0
        # A weight of 0 has no exponent. A tiny one stands for it, whose spacing lets every update survive.
        sizes = np.maximum(np.abs(weights.astype(np.float64)), 1e-30)
        spacing = 2.0 ** (np.floor(np.log2(sizes)) - SIGNIFICANT_BITS[self.stored] + 1)
        deviation = ((1 - self.beta1) / (1 + self.beta1)) ** 0.5
        step = self.learning_rate * deviation * np.abs(_normal_quantiles(401))
        rounded = np.round(step / spacing[:, None]) * spacing[:, None]
        return float((rounded * step).sum() / ((step * step).sum() * len(sizes)))

    def describe(self, share: float | None) -> str:
        """Return one line on the dtypes, the optimizer and the share of an update that survives."""
        rate = f"learning_rate {self.learning_rate:g}"
        if share is None:
            kept = f"the share of an update at {rate} that survives is not known for this optimizer"
        elif self.updated == "float32":
            kept = "no update is lost to rounding"
        else:
            kept = f"{share:.0%} of an update at {rate} survives rounding"
        return (
            f"  precision       trained weights stored in {self.stored}, updated in {self.updated} by {self.optim}, "
            f"computed in {self.computed}: {kept}"
        )

    def warning(self, share: float | None) -> str | None:
        """Return what to do if most of an update is lost, or None if it survives or the share is not known."""
        if share is None or share >= WARN_BELOW:
            return None
        return (
            f"{share:.0%} of an update survives the rounding of the weights to {self.stored}: set "
            f"`optim: {ADAMW_BF16}` (docs/precision.md)"
        )


def quantises(recipe: Recipe) -> bool:
    """Return True if the recipe loads the base in 4 or 8 bits."""
    return bool(recipe.model.get("load_in_4bit") or recipe.model.get("load_in_8bit"))


def uses_bf16(config: Any) -> bool:
    """Return True if `config`, with the attributes of `GRPOConfig`, computes in bfloat16, which is TRL's default."""
    return not config.fp16 if config.bf16 is None else bool(config.bf16)


def initial_weights(initializer_range: float) -> NDArray[np.floating]:
    """Return quantiles of N(0, `initializer_range`), from which a model's weights are drawn, (4001,)."""
    return initializer_range * _normal_quantiles(4001)  # so many, since only the few smallest weights move at low rates


def _normal_quantiles(points: int) -> NDArray[np.floating]:
    """Return evenly spaced quantiles of the standard normal distribution, (points,)."""
    return np.array([NormalDist().inv_cdf((point + 0.5) / points) for point in range(points)])
