"""What a layout is tried on beside the first micro-batch: a few short rows, with an adapter that already has an effect.

A new adapter adds nothing yet, and new norms have one weight in every channel. Then the first micro-batch agrees in every
layout and proves nothing about the steps to come. So a few rows are cut short, every trainable tensor that holds one value
is given others for the moment, weights of 16 bit are widened where memory allows, and gradients are compared too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_recipes.generation.models import base_model
from grpo_recipes.training.packing import Rows
from grpo_recipes.training.zero3 import gathered

SAMPLE_TOKENS = 64
"""The tokens of a prompt, and of a completion, that are left of each row."""

NOISE_AROUND_ZERO, NOISE_RELATIVE = 0.05, 0.1
"""Standard deviation of what is added to a trainable tensor of zeros, and to one of another value as a share of it."""

COMPARED_WEIGHTS = 2**26
"""Gradients are compared of the smallest trainable tensors, of this many weights together: every layer has some."""

GRADIENT_TOLERANCE_FP32, GRADIENT_TOLERANCE_16BIT = 1e-2, 0.2
"""Of the largest entry of a tensor's gradient; in 16 bit, of the norm over all tensors. A wrong mask gives 0.1 to 5."""

NOISE_FP32 = 1e-5
"""Log-probabilities of the same rows in float32 that differ by more follow random numbers."""

_HALF = (torch.bfloat16, torch.float16)

Gradients = Sequence[Tensor | None]
"""Of each parameter compared; None where the result does not depend on it."""


def sample(rows: Rows, index: Tensor) -> Rows:
    """Two completions of each of the two prompts at `index` with the most tokens, cut to `SAMPLE_TOKENS` on either side.

    A completion without a sibling stands in for it. Without an index, one row that has no label.
    """
    left, width = max(rows.prompt_mask.size(1) - SAMPLE_TOKENS, 0), min(rows.logits_to_keep, SAMPLE_TOKENS)
    if not len(index):
        return rows.select(index.new_zeros(1), left, width).unlabelled()
    some = rows.select(index, left, width)
    lengths = some.attention_mask.sum(1).tolist()
    members: dict[int, list[int]] = {}
    for row, number in enumerate(some.prompt_numbers()):
        members.setdefault(number, []).append(row)
    groups = sorted(members.values(), key=lambda group: (-len(group[:2]), -sum(lengths[row] for row in group)))
    chosen = [row for group in groups[:2] for row in (group * 2)[: max(2, min(len(group), 2))]]
    return some.select(torch.tensor(chosen, device=index.device))


def adapter_state(model: nn.Module) -> tuple[str, ...]:
    """Which adapters act in a model as it is now: a reference is scored by the policy's model with others, or with none."""
    if not isinstance(model, PeftModel):
        return ()
    layer = next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)
    return () if layer is not None and layer.disable_adapters else tuple(model.active_adapters)


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of the weights only (ZeRO-3, FSDP), so that a model call is a collective."""
    return any(
        hasattr(parameter, "ds_id") or isinstance(parameter, DTensor) for parameter in model.parameters()
    ) or any(isinstance(module, FSDPModule) or hasattr(module, "_fsdp_wrapped_module") for module in model.modules())


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Give each trainable tensor that holds one value random ones around it, and that value back afterwards, to the bit."""
    kept: list[tuple[nn.Parameter, Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(hasattr(parameter, "ds_id") for parameter in parameters) and not isinstance(model, PeftModel):
        parameters = []  # to gather each weight of a whole model would cost more than a step
    try:
        for parameter in parameters:
            with gathered([parameter], write=True):
                values = _local(parameter)
                if not _holds_one_value(values):
                    continue
                kept.append((parameter, values.clone()))
                value = abs(float(values.flatten()[0]))
                size = NOISE_RELATIVE * value if value else NOISE_AROUND_ZERO
                values.add_((size * torch.randn(values.shape, generator=generator)).to(values))
        yield
    finally:
        for parameter, before in kept:
            with gathered([parameter], write=True):
                _local(parameter).copy_(before)


def _local(parameter: nn.Parameter) -> Tensor:
    """This rank's values of a parameter, outside autograd."""
    return parameter.to_local().data if isinstance(parameter, DTensor) else parameter.data


def _holds_one_value(values: Tensor) -> bool:
    if not values.numel() or not values.is_floating_point():
        return False
    first = values.flatten()[:1]
    # Most tensors show in their first entries that they hold many values.
    return bool((values.flatten()[:64] == first).all()) and bool((values == first).all())


def fits_in_float32(model: nn.Module, device: torch.device) -> bool:
    """Whether the weights of 16 bit have room beside themselves in float32, with as much again for a few short rows."""
    if getattr(base_model(model), "is_quantized", False):
        return False
    needed = 4 * sum(tensor.numel() for tensor in _half_precision(model))
    if not needed:
        return True
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return needed * 1.25 <= free


def _half_precision(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.dtype in _HALF]


@contextmanager
def in_float32(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Run `model` with float32 copies of its 16-bit weights and without autocast; afterwards it has its own again.

    The copies are other parameters. To swap the data of the model's own would reset their gradient accumulators, as torch does
    where a dtype changes, and with them go the hooks by which DistributedDataParallel averages gradients: the ranks would then
    train apart without a word.
    """
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    copies: dict[Tensor, Tensor] = {}
    native, precision = accelerator.native_amp, torch.get_float32_matmul_precision()
    autocast = vars(model).get("forward") if "_original_forward" in vars(model) else None
    try:
        for module in model.modules():
            stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for held in stores:
                for name, tensor in held.items():
                    if tensor is None or tensor.dtype not in _HALF:
                        continue
                    kept.append((held, name, tensor))
                    if tensor not in copies:  # tied weights stay tied
                        copies[tensor] = _float32_copy(tensor)
                    held[name] = copies[tensor]
        accelerator.native_amp = False
        if autocast is not None:
            vars(model)["forward"] = vars(model)["_original_forward"]
        torch.set_float32_matmul_precision("highest")
        with torch.autocast(accelerator.device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if autocast is not None:
            vars(model)["forward"] = autocast
        accelerator.native_amp = native
        for held, name, tensor in kept:
            held[name] = tensor


def _float32_copy(tensor: Tensor) -> Tensor:
    wide = tensor.detach().float()
    return nn.Parameter(wide, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide


@contextmanager
def in_training(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In training mode; random numbers drawn and buffers changed by it are given back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for buffer, values in buffers:
            if not torch.equal(buffer, values):
                buffer.copy_(values)
        for module, training in modes:
            module.training = training


def random_state(device: torch.device) -> Tensor:
    """The state of the generator that a model on `device` draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def compared(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters whose gradients are compared, from the smallest; at least one, if there is one."""
    trainable = sorted((parameter for parameter in model.parameters() if parameter.requires_grad), key=Tensor.numel)
    found, weights = trainable[:1], 0
    for parameter in trainable[1:]:
        weights += parameter.numel()
        if weights > COMPARED_WEIGHTS:
            break
        found.append(parameter)
    return found


def gradients(log_probs: Tensor, parameters: Sequence[nn.Parameter]) -> Gradients:
    """The gradients of a fixed random combination of `log_probs`, (B, T)."""
    if not parameters or not log_probs.requires_grad:
        return [None] * len(parameters)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(log_probs.shape, generator=generator).to(log_probs)
    return torch.autograd.grad((log_probs * weights).sum(), parameters, allow_unused=True)


def gradient_disagreement(got: Gradients, expected: Gradients, *, whole_precision: bool) -> str:
    """By how much two gradients differ, as a phrase; empty within the tolerance."""
    pairs = []
    for mine, theirs in zip(got, expected, strict=True):
        like = mine if mine is not None else theirs
        if like is not None:
            nothing = torch.zeros_like(like)
            pairs.append(tuple((nothing if part is None else part).float() for part in (mine, theirs)))
    if not pairs:
        return ""
    if not all(part.isfinite().all() for pair in pairs for part in pair):
        return "gradients that are not finite"
    if whole_precision:
        largest = [float(theirs.abs().max()) if theirs.numel() else 0.0 for _, theirs in pairs]
        # A tensor whose gradient is zero but for rounding is compared with the largest entry of all.
        floor = max(1e-3 * max(largest), 1e-30)
        value = max(
            float((mine - theirs).abs().max()) / max(size, floor)
            for (mine, theirs), size in zip(pairs, largest, strict=True)
            if mine.numel()
        )
        limit = GRADIENT_TOLERANCE_FP32
    else:
        off, size = (
            math.sqrt(sum(float(part.square().sum()) for part in parts))
            for parts in (
                [mine - theirs for mine, theirs in pairs],
                [theirs for _, theirs in pairs],
            )
        )
        value, limit = off / max(size, 1e-30), GRADIENT_TOLERANCE_16BIT
    return "" if value <= limit else f"gradients by {value:.1e} of their size on a few short rows, {limit:.0e} allowed"
