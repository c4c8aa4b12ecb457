"""Checkpoints that are complete or are not: what is added to transformers' own, in which order, and what a resume checks.

transformers writes its files, pushes, and removes older checkpoints; then come the callbacks, one of which writes a refreshed
reference. A run killed in between is left with a checkpoint that lacks a file, and perhaps with no other. So pushing and
removing wait here until every file is written and the manifest stands.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.runs.branches import LastLaunch, new_branch, oldest_first, write_launch
from grpo_recipes.runs.checkpoints import is_of_ours, newest_confirmed, rejection, step_of, unfit
from grpo_recipes.runs.files import LIVE, NUMBER, NUMBER_OR_NULL, STEP, Shape, mismatch, write_atomically
from grpo_recipes.runs.identity import ContentChanged, Identity, compare
from grpo_recipes.runs.lock import FolderLost, Held
from grpo_recipes.runs.manifest import (
    CheckpointDamaged,
    Manifest,
    gathered,
    rank,
    read_manifest,
    write_manifest,
)
from grpo_recipes.runs.resume import Resume, decide
from grpo_rewards.errors import UserError
from grpo_rewards.files import UnreadableFile, read_json

LOGGED = "logged.json"  # in each checkpoint: what is to be logged next
LOGGED_SHAPE: Shape = {
    "losses_since": [NUMBER],
    "logged_step": STEP,
    "loss_total": NUMBER,
    "metrics_since": {"*?": [NUMBER_OR_NULL]},
}

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class CompleteCheckpoints(TrainerCallback):
    """Completes each checkpoint of `trainer` (TRL's) with a manifest, and restores from it what is to be logged next.

    While training, `save_total_limit` and `push_to_hub` are switched off in the trainer's arguments, and carried out here
    once the manifest stands.

    Args:
        trainer: TRL's, which this callback is added to.
        identify: returns the identity of the launch that begins.
    """

    def __init__(self, trainer: Trainer, identify: Callable[[], Identity]) -> None:
        self.trainer = trainer
        self.limit: int | None = None
        self.pushes = False
        self.confirmed: Path | None = None
        """A checkpoint whose contents have been read and compared already: once is enough."""
        self.resumed_from: Path | None = None
        self.identify = identify
        self.identity = Identity({})
        """Data, weights, rewards and versions of this launch."""
        self.launch = LastLaunch()
        """This launch, and the earlier ones that its checkpoints descend from."""
        self.first_step = 0
        """The optimiser steps that this launch began after."""
        self.held: Held | None = None
        """The run's folder, which this launch must still hold before it writes there; None if the folder has no lock."""
        self.last_saved: Path | None = None

    def resumption(self, asked: str | bool | None) -> str | bool | None:
        """The checkpoint to go on from: `asked`, or for True the newest one that its manifest confirms. Collective.

        Raises `CheckpointDamaged` if it is not whole, or none is, and `ContentChanged` for other data or weights.
        """
        self.resumed_from = None
        # The first rank's answer serves all: to read the rows takes seconds, and all ranks must decide alike.
        self.identity = _of_first_rank(self.identify)
        if asked:
            self.resumed_from = self._chosen(asked)
        self._begin_launch()
        # Where there is no checkpoint, transformers says so.
        return asked if self.resumed_from is None else str(self.resumed_from)

    def _chosen(self, asked: str | Literal[True]) -> Path | None:
        """Return the checkpoint that `resumption` is asked for."""
        args = self.trainer.args
        point = self._decided(asked)
        if point.newest is None and not point.rejected:
            return None
        is_confirmed = len(point.checkpoints) == 1 and point.newest == self.confirmed
        unread = [] if is_confirmed else point.checkpoints
        read, damaged = newest_confirmed(unread, each_node=args.save_on_each_node)
        newest = point.newest if is_confirmed else read
        for one in [*point.rejected, *damaged]:
            logger.warning("%s: no run can go on from it", one.reason)
        if newest is None:
            raise CheckpointDamaged(f"{[*point.rejected, *damaged][0].reason}: name another checkpoint to resume from")
        if point.abandoned and rank() == 0:
            names = " and ".join(path.name for path in point.abandoned)
            logger.warning("going on from %s: the last launch did not go on from %s", newest, names)
        manifest = read_manifest(newest)
        if manifest is not None and (reason := unfit(newest, args.world_size)):
            if manifest.model_only:
                raise CheckpointDamaged(reason)
            logger.warning("%s", reason)  # transformers does so too, in a script that may know why
        if not is_confirmed:
            self._check_identity(newest, manifest)
        return newest

    def _check_identity(self, checkpoint: Path, manifest: Manifest | None) -> None:
        """Log what else has changed since a checkpoint was saved; raise `ContentChanged` for other data or weights."""
        found = compare(manifest.identity if manifest is not None else None, self.identity)
        if (line := found.line(checkpoint)) is not None and rank() == 0:
            logger.warning("%s", line)
        if (reason := found.refused_change(checkpoint)) is not None:
            raise ContentChanged(
                f"{reason}: train on what the run was trained on, or start another run from the checkpoint as its model"
            )

    def _decided(self, asked: str | Literal[True]) -> Resume:
        """Return what all ranks decide; if one of them refuses, all do. Collective."""
        args = self.trainer.args
        folder, point, refused = Path(args.output_dir), None, None
        try:
            if asked is not True and self._is_another_trainers(Path(asked)):
                point = Resume(folder, args.world_size, Path(asked), [Path(asked)])
            else:
                point = decide(folder, asked, args.world_size)
        except UserError as error:
            refused = error
        for one in gathered(refused):
            if one is not None:
                raise one
        assert point is not None, "no rank refused"
        return point

    def _is_another_trainers(self, checkpoint: Path) -> bool:
        """Return True if a checkpoint has no manifest and is not one of ours that was cut off: transformers checks it."""
        if read_manifest(checkpoint) is not None:
            return False
        # `train.py` has checked it, and written `run.json` beside it since.
        return checkpoint == self.confirmed or not is_of_ours(checkpoint.parent)

    def _begin_launch(self) -> None:
        """Record the launch that now begins, so that a later `true` follows it even if it saves nothing. Collective."""
        args, source = self.trainer.args, self.resumed_from
        folder = Path(args.output_dir)
        branch = _of_first_rank(lambda: new_branch(folder, source, step_of(source) if source is not None else 0))
        # Each rank has read the folder when the first one's answer arrives, and only then is it written to.
        self.launch = LastLaunch(branch, source)
        if self.held is not None:
            check_held(self.held, "before its first step", source.name if source is not None else None)
        if args.should_save:
            write_launch(folder, self.launch)
            # The log of an earlier launch: a recipe writes it anew, and a script writes none.
            (folder / LIVE).unlink(missing_ok=True)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Become the last callback, so that a manifest lists what the others add; take over rotation and pushing."""
        self.check_folder()  # other callbacks begin their files now, and to load the checkpoint may have taken minutes
        handler = self.trainer.callback_handler
        handler.callbacks = [*(one for one in handler.callbacks if one is not self), self]
        # Already None or False if an earlier call of `train` was interrupted.
        self.limit, args.save_total_limit = args.save_total_limit or self.limit, None
        self.pushes, args.push_to_hub = args.push_to_hub or self.pushes, False
        self.first_step = state.global_step
        if self.resumed_from is not None:
            self._check_best(args, state)
            args.eval_on_start = False  # done when the run began
            _restore_logged(self.trainer, self.resumed_from / LOGGED)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the arguments back as they were."""
        args.save_total_limit, args.push_to_hub = self.limit, self.pushes

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the folder before transformers and TRL write a log, completions or a checkpoint."""
        if control.should_log or control.should_evaluate or control.should_save:
            self.check_folder()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the folder as after a step."""
        self.on_step_end(args, state, control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the folder again if a save follows: to write the completions may have taken a while."""
        if control.should_save:
            self.check_folder()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the folder again: an evaluation takes its time, and a save may follow it."""
        self.check_folder()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint; then push it, and remove older ones but the best."""
        self.check_folder()
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        _write_logged(self.trainer, checkpoint / LOGGED)
        about = (state.global_step, args.world_size, args.save_only_model)
        manifest = Manifest(*about, files={}, branch=self.launch.branch, identity=self.identity.content)
        write_manifest(checkpoint, manifest, each_node=args.save_on_each_node, writes=args.should_save)
        if self.pushes:
            self.trainer._push_from_checkpoint(str(checkpoint))
        self.last_saved = checkpoint
        if self.limit is None or self.limit <= 0:
            return
        self.check_folder()  # to push may have taken minutes
        if args.should_save:
            best = Path(state.best_model_checkpoint or checkpoint)
            _rotate(oldest_first(Path(args.output_dir), self.launch), self.limit, {checkpoint, best})

    def check_folder(self) -> None:
        """Raise `FolderLost` on every rank if the launch no longer holds the run's folder. Collective.

        Call it before anything is written there.
        """
        if self.held is not None:
            last = self.last_saved or self.resumed_from
            check_held(self.held, f"after step {self.trainer.state.global_step}", last.name if last else None)

    def _check_best(self, args: TrainingArguments, state: TrainerState) -> None:
        """Raise `CheckpointDamaged` if the best checkpoint, which `load_best_model_at_end` would end with, is not whole."""
        best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
        if not args.load_best_model_at_end or best is None or best == self.resumed_from:
            return
        _, damaged = newest_confirmed([best], each_node=args.save_on_each_node)
        if damaged or rejection(best, args.world_size):
            reason = damaged[0].reason if damaged else f"{best} is not whole"
            raise CheckpointDamaged(
                f"{reason}, and `load_best_model_at_end` would end with it: restore it, or set that to false"
            )

    def correct_rates(self, logs: dict[str, float]) -> None:
        """Make the rates of a run's last entry, which count all its steps, those of this launch again."""
        step = self.trainer.state.global_step
        if self.resumed_from is None or "train_loss" not in logs:
            return
        for name in ("train_samples_per_second", "train_steps_per_second"):
            if name in logs:
                logs[name] = round(logs[name] * (step - self.first_step) / max(step, 1), 3)


def _of_first_rank(function: Callable[[], Value]) -> Value:
    """Return the first rank's answer on every rank. Collective. Raises the first rank's `UserError` on every rank."""
    answer: Value | None = None
    refused: UserError | None = None
    if rank() == 0:
        try:
            answer = function()
        except UserError as error:  # raised there alone, the others would wait for an answer
            refused = error
    answer, refused = gathered((answer, refused))[0]
    if refused is not None:
        raise refused
    return cast(Value, answer)


def check_held(held: Held, when: str, last_saved: str | None) -> None:
    """Raise `FolderLost` on every rank if the first one has lost the folder. Collective.

    Args:
        held: the folder, as each rank has it.
        when: when this launch stops, for the message.
        last_saved: the name of the newest checkpoint that is saved, or None.
    """
    loss = held.loss()
    saved = f"{last_saved} is its last checkpoint" if last_saved else "it has no checkpoint"
    sentence = loss and f"{loss.reason}; this launch stops {when} and writes nothing more there, {saved}: {loss.fix}"
    # Only the first rank holds the folder. All ranks must leave together, or the others would wait for it.
    if found := next(filter(None, gathered(sentence)), None):
        raise FolderLost(found)


def _rotate(checkpoints: Sequence[Path], limit: int, kept: Set[Path]) -> None:
    """Remove the first of `checkpoints` until `limit` are left, but none of those to be kept.

    transformers' own `rotate_checkpoints` orders by modification time or by step. Either may remove the only checkpoint
    of a branch and keep an abandoned one.
    """
    removable = [path for path in checkpoints if path not in kept]
    for checkpoint in removable[: max(0, len(checkpoints) - max(limit, len(kept)))]:
        shutil.rmtree(checkpoint, ignore_errors=True)


def _write_logged(trainer: Any, path: Path) -> None:
    """Write what was added up since the last log entry and over all steps, which transformers and TRL keep in memory."""
    losses = gathered(trainer._tr_loss.item())  # each rank's own
    if trainer.args.should_save:
        content = {
            "losses_since": losses,
            "logged_step": trainer._globalstep_last_logged,
            "loss_total": trainer._total_loss_scalar,
            "metrics_since": dict(trainer._metrics["train"]),
        }
        write_atomically(path, json.dumps(content) + "\n")


def _restore_logged(trainer: Any, path: Path) -> None:
    """Go on adding up where the run that wrote a checkpoint was; without the file (another trainer's) from zero."""
    try:
        content = read_json(path)
        problem = mismatch(content, LOGGED_SHAPE)
    except FileNotFoundError:
        return
    except UnreadableFile as error:
        problem = error.problem
    if problem is not None:
        raise CheckpointDamaged(f"{path} is damaged: {problem}: resume from another checkpoint")
    losses = content["losses_since"]
    is_same_layout = len(losses) == trainer.args.world_size
    trainer._tr_loss.fill_(losses[trainer.args.process_index] if is_same_layout else sum(losses) / len(losses))
    trainer._globalstep_last_logged = content["logged_step"]
    trainer._total_loss_scalar = content["loss_total"]
    trainer._initial_global_step = 0  # the average is over all steps
    trainer.model.train()  # at the end of a run no step does so, and TRL would log these for an evaluation's
    for name, values in content["metrics_since"].items():
        trainer._metrics["train"][name].extend(values)
