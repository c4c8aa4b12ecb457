"""Stopping and going on without loss: the order of the data, which checkpoint to trust, and SIGTERM.

transformers and TRL restore parameters, optimiser, schedule and every rank's random state. What they leave to chance is
here: TRL's sampler replays epoch 1 after a resume, the newest checkpoint is taken even if it was cut off while it was
written, and SIGTERM loses everything since the last save. `trainer.py` plugs the sampler in; `train.py` the rest.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.utils import RepeatSampler

LAYOUT_KEYS = ("geometry", "train_prompts", "train_prompts_sha256", "seed", "shuffle_dataset")


class EpochSampler(RepeatSampler):
    """TRL's `RepeatSampler` in TRL's own order, which can start at any epoch: set `epoch` before iterating.

    The plain sampler draws a new permutation at each pass; a resumed process starts its generator afresh and draws
    that of epoch 1 again, repeating some prompts and skipping others.
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


class StopOnSigterm(TrainerCallback):
    """On SIGTERM (pre-emption, `scancel`), saves at the end of the step and stops, on every rank alike.

    A signal reaches ranks at different steps, so each step ends with one reduction of the flag. A save inside a
    generation would lose the completions that are still to be trained on: `ends_generation` says after which
    optimiser steps none are left, and the run goes on to the next of those.

    transformers' own `enable_jit_checkpoint` saves in the middle of a step, after the random state has moved on; such a
    run does not go on as if it had not been stopped.
    """

    def __init__(self, ends_generation: Callable[[int], bool]):
        self.ends_generation = ends_generation
        self.requested = False
        self.stopped = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Listen for SIGTERM."""
        self._previous = signal.signal(signal.SIGTERM, self._request)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree over the ranks whether to stop; if so, save and stop where nothing is lost."""
        self.requested = _any_rank(self.requested, args.device)
        if self.requested and self.ends_generation(state.global_step):
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give SIGTERM back to whoever had it."""
        signal.signal(signal.SIGTERM, self._previous)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True


def last_complete_checkpoint(folder: Path, num_processes: int) -> tuple[Path | None, list[Path]]:
    """The newest complete checkpoint in a run's folder, and the newer ones that were cut off while being written."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    cut_off: list[Path] = []
    for checkpoint in sorted(checkpoints, key=lambda path: int(path.name.partition("-")[2]), reverse=True):
        if is_complete(checkpoint, num_processes):
            return checkpoint, cut_off
        cut_off.append(checkpoint)
    return None, cut_off


def is_complete(checkpoint: Path, num_processes: int) -> bool:
    """Whether a checkpoint of `num_processes` ranks was written to its end.

    Each rank writes its random state after its part of model and optimiser, and the first rank writes
    `trainer_state.json` after that (`Trainer._save_checkpoint`): these files, whole, vouch for the others.
    """
    ranks = [f"rng_state_{rank}.pth" for rank in range(num_processes)] if num_processes > 1 else ["rng_state.pth"]
    # torch.save writes a zip file, whose directory comes last: a file cut short is none.
    return has_state(checkpoint) and all(zipfile.is_zipfile(checkpoint / name) for name in ranks)


def has_state(checkpoint: Path) -> bool:
    """Whether a checkpoint has the file that is written last, whole."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def steps_done(checkpoint: Path) -> int:
    """The optimiser step that a complete checkpoint was saved after."""
    return json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]


@contextmanager
def loading_only(trainer: Trainer, steps: int) -> Iterator[None]:
    """While it lasts, `trainer.train` loads a checkpoint and takes no step; `steps` is the length of the run.

    Resumed at the end of a run, transformers 5.23 takes a step beyond it unless an epoch ends there too
    (`Trainer._run_epoch` looks at `should_training_stop` after a step).
    """
    args = trainer.args
    before = args.max_steps, args.num_train_epochs
    args.max_steps, args.num_train_epochs = -1, 0
    try:
        yield
    finally:
        args.max_steps, args.num_train_epochs = before
        trainer.state.max_steps = steps


def set_aside(checkpoints: list[Path]) -> None:
    """Rename cut-off checkpoints so that neither resuming nor the clean-up of old checkpoints counts them."""
    for checkpoint in checkpoints:
        aside = checkpoint.with_name(f"incomplete-{checkpoint.name}")
        shutil.rmtree(aside, ignore_errors=True)  # of an earlier attempt that was cut off at the same step
        checkpoint.rename(aside)


def layout_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What about a run's data order differs from when it was started, as `key was x and is y`; None if nothing does.

    Both are records as in `run.json`. The position in the data is stored as a number of optimiser steps, which means
    the same prompts only if all of `LAYOUT_KEYS` are as they were.
    """
    old, new = (_flat(record) for record in (before, now))
    return next((f"{key} was {old[key]} and is {new[key]}" for key in new if key in old and old[key] != new[key]), None)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a run record that settle the order of the data, on one level."""
    entries = {key: record[key] for key in LAYOUT_KEYS if key in record}
    return {**entries.pop("geometry", {}), **entries}


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set on any rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    reduced = torch.tensor(int(flag), device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return bool(reduced.item())
