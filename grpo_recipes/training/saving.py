"""Complete checkpoints: what is added to those of transformers, in which order, and what a resume checks.

transformers writes its files, pushes them, and removes older checkpoints. Then come the callbacks, one of which writes
a refreshed reference. A run killed in between would be left with a checkpoint that lacks a file, and perhaps with no
other checkpoint. Pushing and removing therefore wait here until every file and the manifest are written.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.generation.models import run_folder
from grpo_recipes.process.faults import RunFault
from grpo_recipes.process.ranks import gather, on_first_rank, raise_alike, rank
from grpo_recipes.runs.checkpoints import Manifest, read_manifest, rejection, write_manifest
from grpo_recipes.runs.files import LIVE, NUMBER, NUMBER_OR_NULL, STEP, RunError, Shape, read_object, write_atomically
from grpo_recipes.runs.identity import Identity, compare
from grpo_recipes.runs.lock import GO_ON, FolderLost, Held
from grpo_recipes.runs.resume import ABANDONED, Resume, begin_launch, confirmed, decide, oldest_first, unfit
from grpo_rewards.files import give_default_mode

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

LOGGED = "logged.json"
"""File of a checkpoint with the sums that the next log entry continues."""
LOGGED_SHAPE: Shape = {
    "losses_since": [NUMBER],
    "logged_step": STEP,
    "loss_total": NUMBER,
    "metrics_since": {"*?": [NUMBER_OR_NULL]},
}

logger = logging.getLogger(__name__)


class CompleteCheckpoints(TrainerCallback):
    """Completes each checkpoint of a trainer with a manifest, and restores the sums of the next log entry from it.

    While training, `save_total_limit` and `push_to_hub` are switched off in the trainer's arguments, and carried out
    here once the manifest is written.

    Args:
        trainer: TRL's trainer, to which this callback is added.
        identify: function that returns the identity of the launch.
    """

    def __init__(self, trainer: TRLTrainer, identify: Callable[[], Identity]) -> None:
        self.trainer = trainer
        self.identify = identify
        self.identity = Identity({})
        """Data, weights, rewards and versions of this launch."""
        self.decision: Resume | None = None
        """Confirmed decision of `run/prepare.py`, which has compared everything already, or None for a script."""
        self.resumed_from: Path | None = None
        self.first_step: int
        """Optimizer step after which this launch began."""
        self.held: Held | None = None
        """Folder of the run, which this launch must still hold before it writes there, or None without a lock."""
        self.last_saved: Path | None = None
        self.limit: int | None = None
        self.pushes = False

    def resumption(self, requested: str | bool | None) -> str | bool | None:
        """Return the checkpoint to resume from, for `Trainer.train`. Collective.

        Args:
            requested: path of a checkpoint, or True for the newest one whose contents agree with its manifest.

        Raises:
            UserError: no checkpoint is complete, or data or weights have changed since it was saved.
        """
        self.resumed_from = None
        # The first rank answers for all: reading the rows takes seconds, and all ranks must decide alike.
        self.identity = on_first_rank(self.identify)
        if self.decision is not None:
            self.resumed_from = self.decision.newest
        elif requested:
            self.resumed_from = self._decide(requested)
        self._begin_launch()
        # Without any checkpoint, transformers raises its own error.
        return requested if self.resumed_from is None else str(self.resumed_from)

    def _decide(self, requested: str | Literal[True]) -> Path | None:
        """Return the checkpoint that a script resumes from, or None if there is none. Collective."""
        args = self.trainer.args
        point = raise_alike(lambda: decide(run_folder(args), requested, args.world_size, trusts_others=True))
        if point.newest is None and not point.rejected:
            return None
        point = confirmed(point, each_node=args.save_on_each_node)
        for one in point.rejected:
            logger.warning("%s: no run can resume from it", one.reason)
        newest = point.newest
        if newest is None:
            damage = point.rejected[0].damage
            raise RunError(damage.place, damage.problem, "name another checkpoint to resume from")
        manifest = read_manifest(newest)
        if manifest is not None and (reason := unfit(newest, args.world_size)):
            if manifest.model_only:
                raise reason
            logger.warning("%s", reason)  # transformers can resume on another number of processes, and a script may
        line = compare(newest, self.identity)
        if line is not None and rank() == 0:
            logger.warning("%s", line)
        return newest

    def _begin_launch(self) -> None:
        """Record the launch, so that a later `true` follows it even if it saves nothing. Collective."""
        args, source = self.trainer.args, self.resumed_from
        folder = run_folder(args)
        gather(None)  # every rank has read the folder before it is written to
        if self.held is not None:
            check_held(self.held, "before its first step", source)
        if args.should_save:
            if abandoned := begin_launch(folder, source):
                names = " and ".join(f"{path.name} is renamed to {path.name}{ABANDONED}" for path in abandoned)
                logger.warning("%s, because this launch begins at an earlier step", names)
            # The log of an earlier launch: a recipe writes it anew, and a script writes none.
            (folder / LIVE).unlink(missing_ok=True)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Become the last callback, so that a manifest lists what the others add. Take over rotation and pushing."""
        self.check_folder()  # other callbacks begin their files now, and loading the checkpoint may have taken minutes
        # Callbacks run in the order in which they were added, and a script adds its own after this one.
        handler = self.trainer.callback_handler
        handler.callbacks = [*(one for one in handler.callbacks if one is not self), self]
        # Already None or False if an earlier call of `train` was interrupted.
        self.limit, args.save_total_limit = args.save_total_limit or self.limit, None
        self.pushes, args.push_to_hub = args.push_to_hub or self.pushes, False
        self.first_step = state.global_step
        if self.resumed_from is not None:
            self._check_best(args, state)
            args.eval_on_start = False  # evaluated when the run began
            _restore_logged(self.trainer, self.resumed_from / LOGGED)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Restore the arguments."""
        args.save_total_limit, args.push_to_hub = self.limit, self.pushes

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the folder before transformers and TRL write a log, completions or a checkpoint."""
        if control.should_log or control.should_evaluate or control.should_save:
            self.check_folder()
        if control.should_save:
            checkpoint = run_folder(args) / f"checkpoint-{state.global_step}"
            is_blocked = checkpoint.is_symlink() or (checkpoint.exists() and not checkpoint.is_dir())
            if any(gather(is_blocked)):
                problem = "it is a link or a file, and a checkpoint is to be saved there"
                raise RunFault(f"{checkpoint}: {problem}: remove it")

    on_epoch_end = on_step_end

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the folder again if a save follows, because writing the completions may have taken long."""
        if control.should_save:
            self.check_folder()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Check the folder again, because an evaluation takes long and a save may follow."""
        self.check_folder()

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Complete the checkpoint. Then push it, and remove older checkpoints but the best."""
        self.check_folder()
        checkpoint = run_folder(args) / f"checkpoint-{state.global_step}"
        # Before the manifest, which would not list the file otherwise.
        _write_logged(self.trainer, checkpoint / LOGGED)
        if args.should_save:
            with suppress(OSError):  # a mode is no reason to end a run
                give_default_mode(checkpoint, "**/*.safetensors")
        manifest = Manifest(
            step=state.global_step,
            num_processes=args.world_size,
            model_only=args.save_only_model,
            files={},
            identity=self.identity.content,
        )
        write_manifest(checkpoint, manifest, each_node=args.save_on_each_node, writes=args.should_save)
        if self.pushes:
            self.trainer._push_from_checkpoint(str(checkpoint))
        self.last_saved = checkpoint
        if self.limit is None or self.limit <= 0:
            return
        self.check_folder()  # pushing may have taken minutes
        if args.should_save:
            # Never this checkpoint, even if the limit is 1 and another one is the best: a resume needs it.
            kept = {checkpoint, Path(state.best_model_checkpoint or checkpoint)}
            # transformers' own `rotate_checkpoints` may order by modification time, and does not count abandoned ones.
            checkpoints = oldest_first(run_folder(args))
            removable = [path for path in checkpoints if path not in kept]
            for path in removable[: max(0, len(checkpoints) - max(self.limit, len(kept)))]:
                shutil.rmtree(path, ignore_errors=True)

    def check_folder(self) -> None:
        """Raise `FolderLost` on every rank if the launch no longer holds the run's folder. Collective.

        Call it before anything is written there.
        """
        if self.held is not None:
            last_saved = self.last_saved or self.resumed_from
            check_held(self.held, f"after step {self.trainer.state.global_step}", last_saved)

    def _check_best(self, args: TrainingArguments, state: TrainerState) -> None:
        """Raise `RunError` if the best checkpoint, which `load_best_model_at_end` will load, is incomplete."""
        best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
        if not args.load_best_model_at_end or best is None or best == self.resumed_from:
            return
        point = confirmed(Resume(best.parent, args.world_size, best, [best]), each_node=args.save_on_each_node)
        found = rejection(best, args.world_size) if point.newest else point.rejected[0]
        if found is not None:
            damage, fix = found.damage, "restore it, or set `load_best_model_at_end: false`"
            raise RunError(damage.place, f"{damage.problem}, and it would be loaded at the end", fix)

    def correct_rates(self, logs: dict[str, float]) -> None:
        """Recompute the throughput in the last log entry of a run so that it counts only this launch's steps."""
        # transformers divides all steps of the run by the time of this launch.
        step = self.trainer.state.global_step
        if self.resumed_from is None or "train_loss" not in logs:
            return
        for name in ("train_samples_per_second", "train_steps_per_second"):
            if name in logs:
                logs[name] = round(logs[name] * (step - self.first_step) / max(step, 1), 3)


def check_held(held: Held, when: str, last_saved: Path | None) -> None:
    """Raise `FolderLost` on every rank if the first rank has lost the run's folder. Collective.

    Args:
        held: the folder, as each rank has it.
        when: moment at which this launch stops, for the message.
        last_saved: newest checkpoint, or None.
    """
    sentence = None
    if (loss := held.loss()) is not None:
        saved = f"{last_saved.name} is its last checkpoint" if last_saved else "it has no checkpoint"
        sentence = f"{loss}; this launch stops {when} and writes nothing more there, {saved}: {GO_ON}"
    # Only the first rank holds the folder. All ranks must leave together, or the others would wait for it.
    if found := next(filter(None, gather(sentence)), None):
        raise FolderLost(found)


def _write_logged(trainer: TRLTrainer, path: Path) -> None:
    """Write the sums since the last log entry and over all steps, which transformers and TRL keep in memory only."""
    losses = gather(trainer._tr_loss.item())  # every rank has its own
    if trainer.args.should_save:
        content = {
            "losses_since": losses,
            "logged_step": trainer._globalstep_last_logged,
            "loss_total": trainer._total_loss_scalar,
            "metrics_since": dict(trainer._metrics["train"]),
        }
        write_atomically(path, json.dumps(content) + "\n")


def _restore_logged(trainer: TRLTrainer, path: Path) -> None:
    """Restore the sums that `_write_logged` wrote, or start at zero without the file (another trainer's checkpoint)."""
    try:
        content = read_object(path, LOGGED_SHAPE, "resume from another checkpoint")
    except FileNotFoundError:
        return
    losses = content["losses_since"]
    is_same_layout = len(losses) == trainer.args.world_size
    trainer._tr_loss.fill_(losses[trainer.args.process_index] if is_same_layout else sum(losses) / len(losses))
    trainer._globalstep_last_logged = content["logged_step"]
    trainer._total_loss_scalar = content["loss_total"]
    trainer._initial_global_step = 0  # the average is over all steps
    # A finished run takes no step that would set this, and TRL would log these metrics as those of an evaluation.
    trainer.model.train()
    for name, values in content["metrics_since"].items():
        trainer._metrics["train"][name].extend(values)
