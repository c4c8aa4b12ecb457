"""How many of the trained weights a step really changes: a sample of their stored values before and after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

# Enough that a share of 5 % is known to 0.4 points from one step. A tensor costs more to read than its places do.
SAMPLE, TENSORS = 4096, 64
CHANGED, EXPECTED = "updates/changed", "updates/expected"


@dataclass(frozen=True)
class Sampled:
    """A trained parameter, and where it is sampled: `places` (n,), int64, count over this rank's part of it."""

    parameter: Tensor
    places: Tensor
    dtype: torch.dtype
    """The parameter's, when the sample was drawn."""

    def take(self, tensor: Tensor) -> Tensor:
        """The sampled entries of a tensor of the parameter's shape, (n,), float32."""
        return torch.take(_local(tensor), self.places).float()


class UpdateSample(TrainerCallback):
    """Logs which share of the sampled weights changed in a step, and which share would if no update were lost.

    `updates/changed` is the share whose stored value differs, of those that the optimiser was to move. `updates/expected` is
    the mean over the same weights of min(1, |update| / spacing of the dtype at the weight), the update being AdamW's from
    its own moments: where the part that is rounded off is kept, as many change. It is logged where the optimiser has such
    moments; without them `updates/changed` is of all weights. Each rank samples its own shard, and none waits for another.
    """

    def __init__(self, metrics: MutableMapping[str, list[float]]) -> None:
        self.metrics = metrics
        self.sample: list[Sampled] = []
        self.before = torch.empty(0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the sample: a second training may have another optimiser."""
        self.sample = draw(parameter for group in kwargs["optimizer"].param_groups for parameter in group["params"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the values as they are before the step: what its generation does to them counts too."""
        self.before = stored_values(self.sample)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare, before anything else changes them."""
        optimizer = kwargs["optimizer"]
        if not self.sample or getattr(optimizer, "step_was_skipped", False):
            return
        changed = stored_values(self.sample) != self.before
        update = _adamw_update(self.sample, self.before, optimizer)
        if update is None:
            self.metrics[CHANGED].append(float(changed.float().mean()))
            return
        moves = update > 0
        exponent = torch.frexp(self.before).exponent
        bits = torch.cat([torch.full_like(part.places, _significant_bits(part.dtype)) for part in self.sample])
        expected = torch.ldexp(update, bits - exponent).clamp(max=1)
        # A weight of 0 has exponent 0, and any update moves it.
        expected = torch.where(self.before == 0, 1.0, expected)
        counts = torch.stack([moves.sum(), (changed & moves).sum(), (expected * moves).sum()]).tolist()
        if counts[0]:
            self.metrics[CHANGED].append(counts[1] / counts[0])
            self.metrics[EXPECTED].append(counts[2] / counts[0])


def draw(parameters: Iterable[Tensor]) -> list[Sampled]:
    """A sample of `SAMPLE` weights of this rank's part of the parameters, each as likely; the same ones in every run.

    `TENSORS` parameters are drawn, each as likely as it is large, and as many places in each.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad and _local(parameter).numel()]
    if not trained:
        return []
    ends = torch.tensor([_local(parameter).numel() for parameter in trained]).cumsum(0)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.searchsorted(ends, torch.randint(int(ends[-1]), (TENSORS,), generator=generator), right=True)
    sample = []
    for index, times in zip(*(tensor.tolist() for tensor in drawn.unique(return_counts=True)), strict=True):
        local = _local(trained[index])
        places = torch.randint(local.numel(), (times * SAMPLE // TENSORS,), generator=generator).to(local.device)
        sample.append(Sampled(trained[index], places, trained[index].dtype))
    return sample


def stored_values(sample: list[Sampled]) -> Tensor:
    """The sampled weights as they are now, (`SAMPLE`,), float32."""
    return torch.cat([part.take(part.parameter.detach()) for part in sample]) if sample else torch.empty(0)


def _adamw_update(sample: list[Sampled], before: Tensor, optimizer: Any) -> Tensor | None:
    """The size of the update that AdamW has just computed for the sampled weights; None for another optimiser.

    After the step, so that moments, step count and learning rate are those that the step used.
    """
    updates = []
    settings = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    values = before.split([len(part.places) for part in sample])
    correction: dict[int, tuple[float, float]] = {}
    for part, value in zip(sample, values, strict=True):
        group, state = settings[id(part.parameter)], optimizer.state.get(part.parameter, {})
        if not state and part.parameter.grad is None:
            updates.append(torch.zeros_like(value))
            continue
        if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys() or "betas" not in group:
            return None
        if id(group) not in correction:  # one number for a group: the steps of a GPU's states cost a wait each
            step = float(state["step"])
            correction[id(group)] = (1 - group["betas"][0] ** step, 1 - group["betas"][1] ** step)
        first, second = correction[id(group)]
        mean, square = part.take(state["exp_avg"]) / first, part.take(state["exp_avg_sq"]) / second
        decayed = value * group.get("weight_decay", 0.0)
        updates.append(group["lr"] * (mean / (square.sqrt() + group["eps"]) + decayed).abs() * (mean != 0))
    return torch.cat(updates)


def _significant_bits(dtype: torch.dtype) -> int:
    """24 for float32, 8 for bfloat16."""
    return 2 - math.frexp(torch.finfo(dtype).eps)[1]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 shards; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
