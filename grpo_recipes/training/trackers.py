"""What a tracker of transformers (`report_to`) is told of a run beside TRL's arguments and metrics: its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler


class RecipeInTrackers(TrainerCallback):
    """Shows `recipe`, a mapping without secrets, as configuration in the trackers of a run that have a place for one.

    Add it after the trackers' own callbacks, which open the run that it writes to.
    """

    def __init__(self, recipe: Mapping[str, Any], handler: CallbackHandler):
        self.recipe = dict(recipe)
        self.handler = handler

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the recipe, on the process that the trackers run on."""
        if not state.is_world_process_zero:
            return
        for tracker in self.handler.callbacks:
            match type(tracker).__name__:
                case "TensorBoardCallback" if tracker.tb_writer is not None:
                    text = yaml.safe_dump(self.recipe, sort_keys=False, allow_unicode=True)
                    tracker.tb_writer.add_text("recipe", "\n".join(f"    {line}" for line in text.splitlines()))
                case "WandbCallback" if tracker._wandb is not None and tracker._wandb.run is not None:
                    tracker._wandb.config.update({"recipe": self.recipe}, allow_val_change=True)
                case "TrackioCallback":
                    tracker._trackio.config.update({"recipe": self.recipe}, allow_val_change=True)
