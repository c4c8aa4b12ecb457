"""Stopping and resuming a run: the order of the data, what a resume may change, SIGTERM and Ctrl-C.

transformers and TRL restore parameters, optimiser, schedule and every rank's random state. Three things they get wrong are
handled here: TRL's sampler replays epoch 1 after a resume, a changed recipe is followed in part and without a warning, and
SIGTERM loses everything since the last save. `training/trainer.py` uses the sampler, `train.py` the rest.
"""

from __future__ import annotations

import filecmp
import fnmatch
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.utils import RepeatSampler

from grpo_recipes.process.signals import drop_closed_outputs, heeds_hangup, largest_of_ranks
from grpo_recipes.recipe.trl_keys import RESUME_MAY_CHANGE
from grpo_rewards.errors import UserError

LAYOUT_KEYS = ("geometry", "train_prompts", "train_prompts_sha256", "seed", "shuffle_dataset")

# Not compared as keys: the batch geometry, which is compared too, holds what follows from them.
IN_GEOMETRY = ("generation_batch_size", "steps_per_generation")

NOT_SET = "not set"

# The terminal sends Ctrl-C to the launcher and to its processes, and the launcher then sends it to them again: a signal
# that comes so soon after the first is that copy.
ECHO_SECONDS = 2.0


class EpochSampler(RepeatSampler):
    """TRL's `RepeatSampler` in TRL's own order, which can start at any epoch: set `epoch` before iterating.

    TRL's sampler draws a new permutation at each pass. A resumed process begins with a fresh generator and so draws the
    permutation of epoch 1 again, which repeats some prompts and skips others.
    """

    epoch = 0

    @classmethod
    def like(cls, sampler: RepeatSampler) -> EpochSampler:
        """The sampler with the settings of `sampler`."""
        return cls(
            sampler.data_source,
            sampler.mini_repeat_count,
            sampler.batch_size,
            sampler.repeat_count,
            sampler.shuffle,
            sampler.seed,
        )

    def __iter__(self) -> Any:
        """Yield the row indices of epoch `epoch`, counted from 0."""
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


class TellEpoch(TrainerCallback):
    """Tells an `EpochSampler` which epoch begins.

    A callback, since `set_epoch` does not reach a sampler inside `SkipBatchSampler(BatchSamplerShard(...))`: the
    resumed epoch on two or more ranks.
    """

    def __init__(self, sampler: EpochSampler):
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the sampler's epoch from the trainer's state, which a checkpoint restores."""
        self.sampler.epoch = int(state.epoch or 0)


class ContinueSchedule(TrainerCallback):
    """Sets a resumed run's learning rate to that of its own schedule.

    A checkpoint holds the rate of the next step under the schedule that it was saved with (0 at the end of a linear one),
    and the first step after a resume would use it. With an unchanged `max_steps` the two rates are equal to the bit.

    The schedule's own peak decides, which the checkpoint holds too: another `learning_rate` would be ignored, so it is refused.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compute the rate of the next step anew, once the checkpoint has been loaded."""
        scheduler = kwargs["lr_scheduler"]
        scheduler = getattr(scheduler, "scheduler", scheduler)  # DeepSpeed's is wrapped
        if not isinstance(scheduler, LambdaLR):  # no other depends on the length of the run
            return
        if any(rate != args.learning_rate for rate in scheduler.base_lrs):
            raise UserError(
                f"`learning_rate` is {args.learning_rate:g}, and the schedule in the checkpoint to resume was made for "
                f"{scheduler.base_lrs[0]:g}: set that, or start another run from the checkpoint as its `model_name_or_path`"
            )
        rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, (rate, factor) in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


class StopOnSignal(TrainerCallback):
    """On SIGTERM (pre-emption, `scancel`), SIGHUP (a closed terminal) or Ctrl-C, saves at the end of the step and
    stops.

    All ranks stop at the same step.

    A signal may reach ranks at different steps, so each step ends with one reduction of its number. A save in the middle
    of a generation batch would lose the completions that are still to be trained on: `ends_generation` says after which
    optimiser steps none are left, and the run continues to the next of those. A second Ctrl-C stops at once.

    transformers' own `enable_jit_checkpoint` saves in the middle of a step, after the random state has changed, so that a
    resumed run differs from one that was never stopped.
    """

    def __init__(self, ends_generation: Callable[[int], bool]):
        self.ends_generation = ends_generation
        self.began = False
        """Whether the first step was reached: model and checkpoint are loaded."""
        self.requested = 0
        """The number of the signal that asked for a stop, or 0."""
        self.stopped = False

    @property
    def name(self) -> str:
        """What stopped the run."""
        return "Ctrl-C" if self.requested == signal.SIGINT else signal.Signals(self.requested).name

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Listen for the signals."""
        self.began = True
        numbers = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if heeds_hangup() else [])]
        self._previous = {number: signal.signal(number, self._request) for number in numbers}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree over the ranks whether to stop; if so, save and stop where nothing is lost."""
        drop_closed_outputs()
        self.requested = largest_of_ranks(self.requested, args.device)
        if self.requested and self.ends_generation(state.global_step):
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the earlier signal handlers."""
        self.forget()

    def forget(self) -> None:
        """Restore the earlier signal handlers, also after a failure; a second call does nothing."""
        for number, handler in self.__dict__.pop("_previous", {}).items():
            signal.signal(number, handler)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            drop_closed_outputs()
        if signum == signal.SIGINT:
            if self.requested == signal.SIGINT and not self._is_echo():
                raise KeyboardInterrupt
            if not self.requested and os.environ.get("RANK", "0") == "0":
                # Not print: the signal may have come in the middle of one.
                os.write(2, b"\nCtrl-C: the run is saved and stops after this step; a second Ctrl-C stops it at once\n")
            self._interrupted_at = time.monotonic()
        self.requested = self.requested or signum

    def _is_echo(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._interrupted_at < ECHO_SECONDS


@contextmanager
def loading_only(trainer: Trainer, steps: int) -> Iterator[None]:
    """Inside this block `trainer.train` loads a checkpoint and takes no step; `steps` is the length of the run.

    When a finished run is resumed, transformers 5.23 takes one more step unless an epoch ends there too
    (`Trainer._run_epoch` looks at `should_training_stop` only after a step).
    """
    args = trainer.args
    before = args.max_steps, args.num_train_epochs
    args.max_steps, args.num_train_epochs = -1, 0
    try:
        yield
    finally:
        args.max_steps, args.num_train_epochs = before
        trainer.state.max_steps = steps


def layout_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What about a run's data order differs from when it was started, as `key was x and is y`; None if nothing does.

    Both are records as in `run.json`. A checkpoint stores the position in the data as a number of optimiser steps, which
    stands for the same prompts only if all of `LAYOUT_KEYS` are as they were.
    """
    old, new = (_flat(record) for record in (before, now))
    return next((f"{key} was {old[key]} and is {new[key]}" for key in new if key in old and old[key] != new[key]), None)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a run record that determine the order of the data, on one level."""
    entries = {key: record[key] for key in LAYOUT_KEYS if key in record}
    return {**entries.pop("geometry", {}), **entries}


def recipe_changes(before: Mapping[str, Any], now: Mapping[str, Any], directory: str) -> list[str]:
    """What a resumed run may not change and did, each as "`key` was x and is y".

    Both are recipes with every key resolved; `directory` is where the relative paths of `before` begin.
    """
    return [change for key, change in _changes(before, now, directory) if not _may_change(key)]


def applied_changes(before: Mapping[str, Any], now: Mapping[str, Any], directory: str) -> list[str]:
    """What a resumed run may change and did, as `recipe_changes` says it; without the keys that name the resume itself."""
    unsaid = ("resume_from_checkpoint", "output_dir", "hub_token")
    return [change for key, change in _changes(before, now, directory) if _may_change(key) and key not in unsaid]


def _may_change(key: str) -> bool:
    return any(fnmatch.fnmatch(key, pattern) for pattern in RESUME_MAY_CHANGE)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], directory: str) -> Iterator[tuple[str, str]]:
    """Each key whose value differs, and how."""
    old, new = (dict(_leaves(_normal(recipe))) for recipe in (before, now))
    for key in [*new, *(key for key in old if key not in new)]:
        was, now_is = old.get(key, NOT_SET), new.get(key, NOT_SET)
        if not _same_value(was, now_is, directory):
            yield key, f"`{key}` was {_shown(was)} and is {_shown(now_is)}"


def _normal(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved recipe as JSON gives it back, with defaults filled in where two spellings mean the same."""
    values = json.loads(json.dumps(dict(recipe), default=str))
    if values.get("bf16") is None:
        values["bf16"] = not values.get("fp16")
    if values.get("epsilon_high") is None:
        values["epsilon_high"] = values.get("epsilon")
    values.setdefault("generation", "off")  # what every run was before there was the key
    values["rewards"] = [_normal_reward(reward) for reward in values.get("rewards") or []]
    return {key: value for key, value in values.items() if key not in IN_GEOMETRY}


def _normal_reward(reward: Any) -> dict[str, Any]:
    spec = {"name": reward} if isinstance(reward, str) else dict(reward)
    if "rewards" in spec:
        spec["rewards"] = [_normal_reward(part) for part in spec["rewards"]]
    return {**spec, "weight": spec.get("weight", 1.0)}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values of a recipe under dotted keys, as the command line spells them; nothing for what is not set."""
    dot = f"{key}." if key else ""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from _leaves(entry, f"{dot}{name}")
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for index, entry in enumerate(value):
            yield from _leaves(entry, f"{dot}{index}")
    elif value is not None:
        yield key, value


def _same_value(was: Any, now: Any, directory: str) -> bool:
    if was == now:
        return True
    return isinstance(was, str) and isinstance(now, str) and _same_contents(Path(directory, was), Path(now))


def _same_contents(one: Path, other: Path) -> bool:
    """Whether two paths are of one file or folder, or of equal ones."""
    if not (one.exists() and other.exists()):
        return False
    if one.samefile(other):
        return True
    if one.is_file() or other.is_file():
        return filecmp.cmp(one, other, shallow=False)  # false of a file and a folder
    names, others = ({path.relative_to(top) for path in top.rglob("*") if path.is_file()} for top in (one, other))
    return names == others and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
