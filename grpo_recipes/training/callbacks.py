"""Callbacks of the trainer that belong to no other part of the training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import HubStrategy

from grpo_recipes.runs import completions

logger = logging.getLogger(__name__)


class CompactCompletions(TrainerCallback):
    """Merges the files of logged completions after saves and at the end of a training
    (`grpo_recipes/runs/completions.py`).

    Only the first rank, which writes the files, does so.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._compaction: completions.Compaction | None = None
        self._is_due = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the completions after the step that the training goes on from: it logs these steps again."""
        self._compaction, self._is_due = None, False
        self.trainer.checkpoints.check_folder()  # on all ranks: to load the checkpoint may have taken minutes
        if not self.trainer.log_completions or not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / completions.FOLDER
        if dropped := completions.drop_after(folder, state.global_step):
            # A training that starts again in the same folder may do so by mistake.
            level = logging.INFO if state.global_step else logging.WARNING
            sentence = "%s: the completions of %d logged step(s) after step %d are removed"
            logger.log(level, sentence, folder, dropped, state.global_step)
        if reason := self._why_not():
            logger.warning("logged completions stay in one file per step: %s", reason)
        else:
            self._compaction = completions.Compaction(folder)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compact at the next step: the checkpoint, which is more urgent, has its manifest by then."""
        self._is_due = True

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Merge full thousands of files after a save."""
        if self._is_due:
            self._is_due = False
            self._compact(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Merge the files that are left."""
        self._compact(state.global_step, rest=True)

    def _compact(self, step: int, *, rest: bool = False) -> None:
        self.trainer.checkpoints.check_folder()  # on all ranks: another launch may have taken the folder over
        if self._compaction is not None:
            self._compaction.compact(step, rest=rest)

    def _why_not(self) -> str:
        """Return why the files must stay, or "" if they need not: the hub would hold each row twice."""
        if self.trainer.args.log_completions_hub_repo:
            return "`log_completions_hub_repo` has pushed the files already, and would push their rows again"
        if self.trainer.checkpoints.pushes and self.trainer.args.hub_strategy != HubStrategy.END:
            return "`push_to_hub` has pushed the files already, and would push their rows again (unless `hub_strategy: end`)"
        return ""
