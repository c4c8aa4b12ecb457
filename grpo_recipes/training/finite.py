"""A step whose loss, gradient or weights are NaN or infinite ends the run, and is not saved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.generation.models import describe_nonfinite
from grpo_recipes.process.faults import NotFinite
from grpo_rewards.errors import UserError

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

FIX = "lower `learning_rate`, or compute in a wider dtype"

LARGEST_REWARD = 1e18
"""Largest reward that can be compared with others. TRL computes their standard deviation in float32, where the square
of a larger one is infinite, and then takes each advantage for 0."""


class FiniteSteps(TrainerCallback):
    """Raises `NotFinite` for the first step whose loss or gradient norm is not finite.

    To read a value of each step would make the host wait for the device. The values are therefore kept on the device,
    and read together where the host waits anyway: when the trainer logs, evaluates or saves, and before it generates.
    All ranks reach these places at the same steps, and decide alike.
    """

    def __init__(self, trainer: TRLTrainer) -> None:
        self.trainer = trainer
        self.norm: Tensor | float | None = None
        """Gradient norm of the current step, as `Trainer._get_grad_norm` returns it."""
        self._losses: list[Tensor] = []
        """Losses of this rank's micro-batches of the current step."""
        self._steps: list[tuple[int, list[Tensor], Tensor | float | None]] = []
        """Steps that were not read yet: number, losses and gradient norm."""

    def add_loss(self, loss: Tensor) -> None:
        """Keep the loss of a micro-batch of the current step."""
        self._losses.append(loss.detach())

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Raise `UserError` if the weights that training begins with are not finite."""
        self._losses, self._steps = [], []
        if clause := describe_nonfinite(self.trainer.model):
            raise UserError("the policy", f"it can't be trained, because {clause}", "name another model or checkpoint")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the values of a step, and read all that are kept if the host waits for the device now anyway."""
        # fp16's loss scaling skips a step whose scaled gradient overflows, and lowers the scale. DeepSpeed skips such a
        # step in every dtype, where no later one fares better.
        accelerator = self.trainer.accelerator
        if accelerator.mixed_precision != "fp16" or not accelerator.optimizer_step_was_skipped:
            self._steps.append((state.global_step, self._losses, self.norm))
        self._losses, self.norm = [], None
        if control.should_log or control.should_evaluate or control.should_save:
            self.check_steps()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Check the weights that the training ends with, which a run saves next."""
        self.check_weights()

    def check_steps(self) -> None:
        """Raise `NotFinite` if the loss or the gradient norm of a step is not finite. Collective."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        device = self.trainer.accelerator.device
        values = []
        for _, losses, norm in steps:
            # A sum of losses is finite only if each of them is.
            loss = torch.stack(losses).float().sum() if losses else torch.zeros((), device=device)
            values.append(torch.stack([loss, _norm(norm, device)]))
        counts = self.trainer.accelerator.reduce((~torch.stack(values).isfinite()).int()).tolist()
        for (step, _, _), (losses, norms) in zip(steps, counts, strict=True):
            if losses or norms:
                what = "the loss" if losses else "the gradient norm"
                clause = describe_nonfinite(self.trainer.model) or "its weights are still finite"
                raise NotFinite(f"step {step}: {what} of the policy is not finite, and {clause}: {FIX}")

    def check_weights(self) -> None:
        """Raise `NotFinite` if a step or the weights are not finite, before they are saved. Collective."""
        self.check_steps()
        if clause := describe_nonfinite(self.trainer.model):
            raise NotFinite(f"step {self.trainer.state.global_step}: the policy is not saved, because {clause}: {FIX}")

    def check_rewards(self) -> None:
        """Raise `NotFinite` if a reward of the last generation batch is too large for TRL's advantages."""
        # TRL has gathered them from all ranks to log them. NaN stands for a completion without a reward.
        rewards = cast("dict[str, list[float]]", self.trainer._logs["rewards"])
        for name, values in rewards.items():
            for value in values:
                if abs(value) > LARGEST_REWARD:
                    raise NotFinite(
                        f"step {self.trainer.state.global_step + 1}: the reward {name} pays {value:g}, which leaves no "
                        f"finite advantages: let it pay at most {LARGEST_REWARD:g}"
                    )


def _norm(norm: Tensor | float | None, device: torch.device) -> Tensor:
    """Return a gradient norm as a tensor. DeepSpeed writes -1 for a norm that is not finite."""
    if norm is None:
        return torch.zeros((), device=device)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    value = torch.as_tensor(norm, dtype=torch.float32, device=device)
    return torch.where(value < 0, math.nan, value)
