"""In what the trained weights are stored, updated and computed, and how much of an update survives the rounding to it.

A weight w stored with b significant bits has its neighbours 2^(floor(log2 |w|) - b + 1) away. An update smaller than half of
that leaves it as it was, in every step again: bfloat16 (b = 8) at 5e-6 loses nearly all of what AdamW computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_recipes.recipe.trl_keys import ADAMW_BF16

SIGNIFICANT_BITS: Mapping[str, int] = {"float32": 24, "bfloat16": 8, "float16": 11}

# Those of transformers' optimisers that take AdamW's step and round it to the weight's dtype.
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused")

# Below this share of an update, the run is another one than its learning rate says.
WARN_BELOW = 0.5


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. `stored` is that of the trained weights, `computed` that of the matrix products."""

    stored: str
    computed: str
    optim: str
    learning_rate: float
    beta1: float
    optim_args: str | None = None
    deepspeed: bool = False
    """Whether DeepSpeed updates float32 weights of its own and rounds them into the stored ones."""
    quantised: bool = False
    """Whether what is trained is an adapter on a base in 4 or 8 bits, whose dtype is not the recipe's."""

    @classmethod
    def of(
        cls,
        config: Any,
        dtype: str | None,
        optim: str,
        *,
        backend: str = "torch",
        is_adapter: bool = False,
        quantised: bool = False,
    ) -> Precision:
        """The precision of a run.

        `config` has the keys of `GRPOConfig`; `dtype` is the recipe's (None and TRL's default: float32); `backend` is
        `torch`, `deepspeed` or `fsdp`; `quantised` says that the base is loaded in 4 or 8 bits.
        """
        bf16 = not config.fp16 if config.bf16 is None else config.bf16
        mixed = "bfloat16" if bf16 else "float16" if config.fp16 else None
        stored = {None: "float32", "auto": "bfloat16"}.get(dtype, str(dtype))  # of the models that recipes name
        if backend == "deepspeed":
            stored = mixed or "float32"  # its engine casts the model
        elif is_adapter and quantised:
            stored = "bfloat16"  # TRL casts what is trained on a quantised base
        elif is_adapter:
            stored = "float32"  # PEFT's `autocast_adapter_dtype`
        elif backend == "fsdp" and mixed is not None:
            stored = "float32"  # accelerate's `fsdp2_prepare_model`
        return cls(
            stored,
            mixed or stored,
            optim,
            config.learning_rate,
            config.adam_beta1,
            config.optim_args,
            deepspeed=backend == "deepspeed",
            quantised=is_adapter and quantised,
        )

    @property
    def updated(self) -> str:
        """The dtype in which an update is added."""
        whole = self.deepspeed or (self.optim == ADAMW_BF16 and self.stored == "bfloat16")
        return "float32" if whole else self.stored

    def mistake(self, *, continuous_batching: bool = False) -> str | None:
        """Why this can't be trained, with the fix; None if it can."""
        if self.optim == ADAMW_BF16 and self.deepspeed:
            return "`optim: adamw_bf16`: DeepSpeed keeps float32 weights of its own, so that no update is lost: remove `optim`"
        if self.optim == ADAMW_BF16 and self.optim_args:
            return f"`optim_args`: `optim: adamw_bf16` has none, not {self.optim_args!r}: remove the key"
        if self.stored == "float16" and not self.deepspeed:
            return (
                "`dtype: float16`: weights in float16 can't be trained, as no gradient scaler works on them: set `dtype: "
                "float32` with `fp16: true`, or `dtype: bfloat16` with `optim: adamw_bf16`"
            )
        if continuous_batching and not self.deepspeed and self.computed != self.stored:
            return (
                "`use_transformers_continuous_batching`: TRL would cast the trained weights from "
                f"{self.stored} to {self.computed} in place, and most updates would be lost: set it to false, or "
                + ("`fp16: false`" if self.computed == "float16" else "`bf16: false`")
            )
        return None

    def surviving(self, weights: NDArray[np.floating]) -> float | None:
        """The share of an update that rounding leaves, of 1: the projection on the update as computed.

        `weights` are some of the trained weights. An AdamW step is taken as learning rate × a normal number of the spread
        sqrt((1 - beta1) / (1 + beta1)), which it has when gradients are noise: 3 % on weights of N(0, 0.02) at 5e-6,
        where 1,000 simulated steps leave 3 % too. None for an optimiser whose step is not known here.
        """
        if self.updated == "float32":
            return 1.0
        if self.optim not in ADAMW or self.optim_args:
            return None
        # A weight of 0 takes any update; its spacing is as good as none.
        sizes = np.maximum(np.abs(weights.astype(np.float64)), 1e-30)
        spacing = 2.0 ** (np.floor(np.log2(sizes)) - SIGNIFICANT_BITS[self.stored] + 1)
        spread = ((1 - self.beta1) / (1 + self.beta1)) ** 0.5
        step = self.learning_rate * spread * np.abs(_normal(401))
        if not self.learning_rate:
            return 1.0
        rounded = np.round(step / spacing[:, None]) * spacing[:, None]
        return float((rounded * step).sum() / ((step * step).sum() * len(sizes)))

    def describe(self, share: float | None) -> str:
        """One line on dtypes and optimiser, and on the share of an update that survives."""
        rate = f"learning_rate {self.learning_rate:g}"
        if share is None:
            kept = f"what of an update at {rate} survives is not known for this optimiser"
        elif self.updated == "float32":
            kept = "no update is lost to rounding"
        else:
            kept = f"{share:.0%} of an update at {rate} survives rounding"
        return (
            f"  precision       trained weights stored in {self.stored}, updated in {self.updated} by {self.optim}, "
            f"computed in {self.computed}: {kept}"
        )

    def warning(self, share: float | None) -> str | None:
        """What to do where most of an update is lost; None where it is not, or is not known."""
        if share is None or share >= WARN_BELOW:
            return None
        cures = f"set `optim: {ADAMW_BF16}`"
        if not self.quantised:
            cures += ", or `dtype: float32`, which `bf16: true` still computes in bfloat16"
        return f"{share:.0%} of an update survives the rounding of the weights to {self.stored}: {cures} (docs/precision.md)"


def initial_weights(initializer_range: float) -> NDArray[np.floating]:
    """Weights as a configuration says that they are drawn: quantiles of N(0, `initializer_range`)."""
    return initializer_range * _normal(4001)  # at low rates only the smallest weights move, of which there are few


def _normal(points: int) -> NDArray[np.floating]:
    """Evenly spaced quantiles of the standard normal distribution."""
    return np.array([NormalDist().inv_cdf((point + 0.5) / points) for point in range(points)])
