"""Callbacks of the trainer that no other module owns, and the identity that its checkpoints record."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from grpo_recipes.data.hub import hub_commit
from grpo_recipes.generation.models import run_folder
from grpo_recipes.process.ranks import largest_of_ranks, on_first_rank
from grpo_recipes.process.signals import drop_closed_outputs, heeds_hangup
from grpo_recipes.recipe.specs import ReferenceSpec
from grpo_recipes.runs import completions
from grpo_recipes.runs.identity import Identity, Source, identify, loaded_source, reward_models
from grpo_recipes.runs.weights import ADAPTER_CONFIG
from grpo_rewards.registry import BuiltReward
from grpo_rewards.reward import callable_name

ECHO_SECONDS = 2.0
"""Time after Ctrl-C within which a second one is a copy: the launcher passes on what all processes got already."""

logger = logging.getLogger(__name__)


class StopOnSignal(TrainerCallback):
    """Saves and stops at the end of a step after SIGTERM (pre-emption, `scancel`), SIGHUP or Ctrl-C.

    A signal may reach ranks at different steps, so each step ends with one reduction of the signal's number, and all
    ranks stop at the same step. A save in the middle of a generation batch would lose the completions that are still to
    be trained on, so the run continues to the end of the generation batch. A second Ctrl-C stops at once.

    transformers' own `enable_jit_checkpoint` saves in the middle of a step, after the random state has changed, so that
    a resumed run differs from an uninterrupted one.

    Args:
        ends_generation: function that returns True for the optimizer steps after which no completions are left.
    """

    def __init__(self, ends_generation: Callable[[int], bool]) -> None:
        self.ends_generation = ends_generation
        self.began = False
        """True once training has started, that is, after the model and the checkpoint are loaded."""
        self.requested = 0
        """Number of the signal that requested a stop, or 0."""
        self.stopped = False
        """True if the run was stopped before its last step."""
        self._handlers: dict[int, Any] = {}
        """Handlers of the signals before the training."""
        self._interrupted_at = 0.0

    @property
    def name(self) -> str:
        """Name of the signal that stopped the run."""
        return "Ctrl-C" if self.requested == signal.SIGINT else signal.Signals(self.requested).name

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Handle the signals from now on."""
        self.began = True
        numbers = [signal.SIGTERM, signal.SIGINT]
        if heeds_hangup():
            numbers.append(signal.SIGHUP)
        self._handlers = {number: signal.signal(number, self._request) for number in numbers}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree over the ranks whether to stop. If so, save and stop once the generation batch is used up."""
        drop_closed_outputs()
        self.requested = largest_of_ranks(self.requested, args.device)
        if self.requested and self.ends_generation(state.global_step):
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Restore the earlier signal handlers."""
        self.restore_handlers()

    def restore_handlers(self) -> None:
        """Restore the earlier signal handlers, also after a failure. A second call does nothing."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            drop_closed_outputs()
        if signum == signal.SIGINT:
            is_recent = time.monotonic() - self._interrupted_at < ECHO_SECONDS
            if self.requested == signal.SIGINT and not (is_recent and "TORCHELASTIC_RUN_ID" in os.environ):
                raise KeyboardInterrupt
            if not self.requested and os.environ.get("RANK", "0") == "0":
                # Not `print`: the signal may have come in the middle of one.
                os.write(2, b"\nCtrl-C: the run is saved and stops after this step; a second Ctrl-C stops it at once\n")
            self._interrupted_at = time.monotonic()
        self.requested = self.requested or signum


class DropLaterCompletions(TrainerCallback):
    """Removes the logged completions after the step that a training continues from: it logs these steps again."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Remove the files of later steps."""
        # On all ranks: another launch may have taken the folder over in the minutes that loading a checkpoint takes.
        self.trainer.checkpoints.check_folder()
        if not self.trainer.log_completions:
            return
        folder = run_folder(args) / completions.FOLDER
        # If the files can't be removed, all ranks must raise, or the others would wait for the first one.
        dropped = on_first_rank(lambda: completions.drop_after(folder, state.global_step))
        if dropped and state.is_world_process_zero:
            # A training that starts from step 0 in a used folder may do so by mistake.
            level = logging.INFO if state.global_step else logging.WARNING
            sentence = "%s: the completions of %d logged step(s) after step %d are removed"
            logger.log(level, sentence, folder, dropped, state.global_step)


class RecipeInTrackers(TrainerCallback):
    """Shows a recipe without secrets as configuration in the trackers (`report_to`) that have a place for one.

    Add it after the trackers' own callbacks, which open the run that it writes to.
    """

    def __init__(self, recipe: Mapping[str, Any], handler: CallbackHandler):
        self.recipe = dict(recipe)
        self.handler = handler

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Write the recipe, on the process that the trackers run on."""
        if not state.is_world_process_zero:
            return
        for tracker in self.handler.callbacks:
            match type(tracker).__name__:
                case "TensorBoardCallback" if tracker.tb_writer is not None:
                    text = yaml.safe_dump(self.recipe, sort_keys=False, allow_unicode=True)
                    # TensorBoard renders Markdown, in which four spaces keep text as it is.
                    tracker.tb_writer.add_text("recipe", "\n".join(f"    {line}" for line in text.splitlines()))
                # Trackers keep the first value of a key unless a change is allowed: a resumed run may have another
                # recipe.
                case "WandbCallback" if tracker._wandb is not None and tracker._wandb.run is not None:
                    tracker._wandb.config.update({"recipe": self.recipe}, allow_val_change=True)
                case "TrackioCallback":
                    tracker._trackio.config.update({"recipe": self.recipe}, allow_val_change=True)


def starting_weights(given: str | nn.Module, model: nn.Module, reference: Any) -> dict[str, Source]:
    """Return the sources of the weights of a policy and its reference, by role.

    Args:
        given: the trainer's `model` argument, a name or a model.
        model: the model that the trainer made of it.
        reference: the trainer's `reference` argument.
    """
    loaded = loaded_source(model.get_base_model() if isinstance(model, PeftModel) else model)
    sources = {"policy": loaded}
    # An adapter and its base may change independently, so each is a source of its own.
    if isinstance(given, PeftModel):
        # PEFT keeps no path of an adapter.
        sources = {"policy": Source(""), "base": loaded}
    elif isinstance(given, str) and (Path(given) / ADAPTER_CONFIG).is_file():
        sources = {"policy": Source(given), "base": loaded}
    if reference is not None and (adapter := ReferenceSpec.parse(reference).adapter) is not None:
        sources["reference"] = Source(adapter)
    return sources


def identity_of(trainer: Any, sources: Mapping[str, Source]) -> Identity:
    """Return the identity of the launch that begins with a trainer's `train`: its weights, rewards and data."""
    rewards = []
    for function, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
        rewards.append(BuiltReward(function, 1.0, name))
    sources = {**sources, **reward_models(rewards, hub_commit)}
    tools = {tool.__name__: tool for tool in getattr(trainer, "_standalone_tools", [])}
    for name, factory in (getattr(trainer, "environment_factories", None) or {}).items():
        tools[name or callable_name(factory)] = factory
    return identify(trainer.train_dataset, rewards, sources, tools)
