"""AdamW for bfloat16 weights whose updates survive rounding: the 16 bits that bfloat16 drops are kept beside each weight.

A bfloat16 weight and its 16 bits are together the float32 number that AdamW updates, as in Split-SGD (Kalamkar et al. 2019,
arXiv:1905.12322, section 5). The moments are float32: in bfloat16 a second moment can't decay at beta2 = 0.999, since
a thousandth is less than half a unit in its last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

# Elements of a parameter that are updated at once: temporaries take a few times 4 bytes of this, and not of the parameter.
CHUNK = 2**22


class AdamWBF16(torch.optim.Optimizer):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), in float32 for weights stored in bfloat16 or float32.

    It holds 10 bytes a bfloat16 weight: `exp_avg` and `exp_avg_sq` in float32, and `low_bits`, int16. Weights in float32
    take the same step and have no `low_bits`. Works on DTensors (FSDP2), each rank on its own shard.

    Raises `TypeError` for a parameter of another dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Raises `TypeError` for a dtype that has no step here."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in (torch.bfloat16, torch.float32):
                raise TypeError(f"adamw_bf16 trains bfloat16 and float32 parameters, not {param.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
            if param.dtype == torch.bfloat16:
                state["low_bits"] = torch.zeros_like(param, dtype=torch.int16)
        state["step"] += 1
        step = float(state["step"])
        tensors = [param, param.grad, state["exp_avg"], state["exp_avg_sq"]]
        if "low_bits" not in state:
            for weight, grad, mean, square in _chunks(tensors):
                _adamw(weight, grad, mean, square, group, step)
            return
        for weight, grad, mean, square, low_bits in _chunks([*tensors, state["low_bits"]]):
            whole = merge(weight, low_bits)
            _adamw(whole, grad, mean, square, group, step)
            split_into(whole, weight, low_bits)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as it was saved: torch alone would cast the moments, and the bits, to the dtype of the weights."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name != "step":
                    self.state[param][name] = value.to(param.device)


def adamw_bf16(args: TrainingArguments) -> tuple[type[AdamWBF16], dict[str, Any]]:
    """The optimiser as transformers' `optimizer_cls_and_kwargs`; weight decay comes with the parameter groups."""
    return AdamWBF16, {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }


def merge(weight: Tensor, low_bits: Tensor) -> Tensor:
    """The float32 numbers of which bfloat16 weights are the upper 16 bits, rounded, and `low_bits` (int16) the rest."""
    # Below 0 there is no float32 of the same sign: only a weight that something else has set to 0 has such bits.
    low_bits = low_bits.masked_fill((weight == 0) & (low_bits < 0), 0)
    high = weight.view(torch.int16).to(torch.int32) << 16
    return high.add_(low_bits).view(torch.float32)


def split_into(whole: Tensor, weight: Tensor, low_bits: Tensor) -> None:
    """Write float32 numbers into weights (bfloat16, the nearest; halfway away from 0) and `low_bits`; `merge` undoes it."""
    # A NaN of other bits could run over in the addition below, and leave a number in its place.
    bits = whole.masked_fill(whole.isnan(), math.nan).view(torch.int32)
    high = (bits + 0x8000) >> 16
    weight.copy_(high.to(torch.int16).view(torch.bfloat16))
    low_bits.copy_(bits - (high << 16))


def _adamw(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, group: dict[str, Any], step: float
) -> None:
    """`torch.optim.AdamW`'s step on float32 numbers, operation by operation, in place."""
    beta1, beta2 = group["betas"]
    grad = grad.to(torch.float32)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.addcdiv_(exp_avg, denominator, value=-group["lr"] / (1 - beta1**step))


def _chunks(tensors: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """This rank's part of tensors of one shape, some rows at a time; what is written into a piece is written into its tensor."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    local = [tensor.unsqueeze(0) if tensor.dim() == 0 else tensor for tensor in local]
    rows = max(1, CHUNK // max(1, local[0][:1].numel()))
    return zip(*(tensor.split(rows) for tensor in local), strict=True)
