"""Data order and learning-rate schedule of a resumed run.

transformers and TRL restore parameters, optimizer, schedule and the random state of every rank. Three things go wrong
without this module: TRL's sampler replays the first epoch, the learning rate of the first step is that of the old
schedule, and a finished run takes one more step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from trl.trainer.utils import RepeatSampler

from grpo_rewards.errors import UserError


class EpochSampler(RepeatSampler):
    """TRL's `RepeatSampler`, which draws TRL's own order but can start at any epoch. Made from TRL's.

    TRL's sampler draws a new permutation in each epoch. A resumed process begins with a fresh generator, so TRL's
    sampler would draw the permutation of the first epoch again, which repeats some prompts and skips others.
    """

    epoch = 0
    """Epoch that the next iteration yields, counted from 0."""

    def __init__(self, stock: RepeatSampler) -> None:
        settings = (stock.mini_repeat_count, stock.batch_size, stock.repeat_count, stock.shuffle, stock.seed)
        super().__init__(stock.data_source, *settings)

    def __iter__(self) -> Iterator[int]:
        """Yield the row indices of the epoch."""
        if self.shuffle and self.seed is not None:
            # One permutation per finished epoch is drawn and discarded: the state of the generator after them depends
            # on the number of rows, so no seed could replace these draws.
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


class SetSamplerEpoch(TrainerCallback):
    """Sets the epoch of an `EpochSampler` when an epoch begins.

    transformers' `set_epoch` does not reach a sampler inside `SkipBatchSampler(BatchSamplerShard(...))`, which is how
    accelerate wraps the sampler of a resumed epoch on two or more ranks.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Set the sampler's epoch from the trainer's state, which a checkpoint restores."""
        self.sampler.epoch = int(state.epoch or 0)


class ContinueSchedule(TrainerCallback):
    """Sets the learning rate of a resumed run to that of its own schedule.

    A checkpoint holds the rate of the next step under the schedule that it was saved with (0 at the end of a linear
    schedule), and the first step after a resume would use that rate. With an unchanged `max_steps` both rates are equal
    to the bit.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Compute the rate of the next step again, after the checkpoint has been loaded.

        Raises:
            UserError: `learning_rate` differs from the peak of the schedule in the checkpoint. transformers would
                silently use the latter.
        """
        scheduler = kwargs["lr_scheduler"]
        scheduler = getattr(scheduler, "scheduler", scheduler)  # DeepSpeed's is wrapped
        if not isinstance(scheduler, LambdaLR):  # no other schedule depends on the length of the run
            return
        if any(rate != args.learning_rate for rate in scheduler.base_lrs):
            made_for = f"the schedule in the checkpoint was made for {scheduler.base_lrs[0]:g}"
            fix = "set that rate, or start another run from the checkpoint as its `model_name_or_path`"
            raise UserError("`learning_rate`", f"it is {args.learning_rate:g}, and {made_for}", fix)
        rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, (rate, factor) in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(scheduler.last_epoch)
        # The scheduler logs this copy of the rates, not those of the optimizer.
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


@contextmanager
def loading_only(trainer: Trainer, steps: int) -> Iterator[None]:
    """Make `trainer.train` load a checkpoint and take no step inside this block.

    When a finished run is resumed, transformers 5.23 takes one more step unless an epoch ends there too
    (`Trainer._run_epoch` reads `should_training_stop` only after a step).

    Args:
        trainer: trainer of the finished run.
        steps: length of the run in optimizer steps, which the trainer's state keeps.
    """
    args = trainer.args
    before = args.max_steps, args.num_train_epochs
    # A negative `max_steps` lets the number of epochs decide, and 0 epochs have no step.
    args.max_steps, args.num_train_epochs = -1, 0
    try:
        yield
    finally:
        args.max_steps, args.num_train_epochs = before
        trainer.state.max_steps = steps
