"""What a layout is tried on beside the first micro-batch: a few short rows, with an adapter that already has an effect.

A new adapter adds nothing yet, and new norms have one weight in every channel. Then the first micro-batch agrees in every
layout and proves nothing about the steps to come. So a few rows are cut short, every trainable tensor that holds one value
is given others for the moment, weights of 16 bit are widened where memory allows, and gradients are compared too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_recipes.generation.models import base_model, half_precision
from grpo_recipes.generation.rows import Rows
from grpo_recipes.training.adapters import gathered

SAMPLE_TOKENS = 64
"""The tokens of a prompt, and of a completion, that are left of each row."""

NOISE_AROUND_ZERO, NOISE_RELATIVE = 0.05, 0.1
"""Standard deviation of what is added to a trainable tensor of zeros, and to one of another value as a share of it."""

COMPARED_WEIGHTS = 2**26
"""Gradients are compared of the smallest trainable tensors, of this many weights together: every layer has some."""

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
    needed = 4 * sum(tensor.numel() for tensor in half_precision(model))
    if not needed:
        return True
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return needed * 1.25 <= free


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
