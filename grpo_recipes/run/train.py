"""Flow of a training run, from the arguments of its command to the exit code.

`prepare` checks the recipe and builds everything but the policy, `only_run` holds the run's folder, and `run` trains.
The folder (`output_dir`) then holds `run.json` (resolved recipe, versions and geometry of each launch),
`trainer_state.json` and `_log.jsonl` (the log), `completions/*.parquet`, checkpoints, the final model or adapter, and
its model card, `README.md`.
"""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import nullcontext

from grpo_recipes import __version__
from grpo_recipes.checks.checks import Machine
from grpo_recipes.process.faults import RunFault, fault_file, no_exit
from grpo_recipes.process.messages import fewer_library_messages, say_once
from grpo_recipes.recipe.recipe import OUR_KEYS, Recipe, parse_recipe, shipped_files
from grpo_recipes.recipe.trl_keys import DEFAULTS
from grpo_recipes.run.build import build_trainer
from grpo_recipes.run.describe import describe_resumption, describe_run, diagnosis, launch_entry, summary
from grpo_recipes.run.endings import attempt, end_failed, end_interrupted, end_refused, end_stopped, end_with_error
from grpo_recipes.run.live_line import LiveLog, close_progress_bars
from grpo_recipes.run.prepare import Prepared, only_run, prepare
from grpo_recipes.runs.lock import FolderLost
from grpo_recipes.runs.record import add_launch
from grpo_recipes.runs.resume import set_aside
from grpo_recipes.training.data_order import loading_only
from grpo_recipes.training.trainer import GRPOTrainer
from grpo_rewards.errors import UserError
from grpo_rewards.files import give_default_mode
from grpo_rewards.terminal import lasting_output, say, visible_messages

HELP = """usage: accelerate launch --config_file FILE -m grpo_recipes.train --config RECIPE [--key value ...]
       python -m grpo_recipes.train --config RECIPE [--key value ...]      (one process)

Train a recipe with GRPO. RECIPE is a YAML file, or the name of one that ships:
{recipes}

An option overrides the recipe's key of the same name: `--learning_rate 1e-6`. A key inside another key is
written with dots, an entry of a list by its number: `--dataset.path train.jsonl`, `--rewards.0.weight 2`.

Our keys (docs/ and recipes/ show each in use):
{ours}

Every other key is one of TRL's GRPOConfig or ModelConfig, with TRL's name and default, except for
{defaults}. `trl grpo --help` describes
all of them, and these pages describe those of GRPO and of transformers' trainer (max_steps, save_steps, ...):
  https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig
  https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments

options:
  -h, --help      print this text
  --version       print the version

`grpo-recipes plan RECIPE [--key value ...]` checks the recipe without loading a model.
Exit codes: 0 trained, 1 failed while training, 2 refused before a model was loaded.
"""


def help_text() -> str:
    """Return the text of `--help`."""
    names = textwrap.fill(
        ", ".join(shipped_files("recipes")), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    changed = ", ".join(f"{key} {str(value).lower()}" for key, value in DEFAULTS.items())
    ours = "\n".join(f"  {key:<15} {meaning}" for key, meaning in OUR_KEYS.items())
    return HELP.format(recipes=names, ours=ours, defaults=changed)


@fewer_library_messages()
@lasting_output()
def main(args: Sequence[str] | None = None) -> int:
    """Train the recipe in `args` (default: the command line), and print the reason last if that fails.

    Returns:
        0, 1 if the run failed, 2 if the recipe can't run as written, or 130 if Ctrl-C stopped the run.
    """
    arguments = sys.argv[1:] if args is None else args
    if {"-h", "--help", "--version"} & set(arguments):
        say(f"grpo-recipes {__version__}" if "--version" in arguments else help_text())
        return 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("grpo_recipes").setLevel(logging.INFO)
    recipe: Recipe | None = None
    prepared: Prepared | None = None
    try:
        recipe = parse_recipe(arguments)
        with visible_messages(), no_exit():
            prepared = prepare(recipe, Machine.here())
            with only_run(prepared) as prepared:
                return run(prepared)
    except UserError as error:
        return end_refused(error, recipe)
    except KeyboardInterrupt:
        return end_interrupted(prepared)
    except FolderLost as error:
        return end_with_error(str(error))  # writes nothing into a folder that belongs to another launch
    except Exception as error:  # the user gets one line for any error, and every rank prints the same line
        if prepared is None:  # nothing has begun, so the error is a bug of ours
            raise
        return end_failed(prepared, error)
    finally:
        if prepared is not None:
            prepared.interruption.restore_handlers()


@fewer_library_messages()
def run_recipe(recipe: Recipe) -> int:
    """Check and train a recipe like `main`, but raise errors instead of printing them.

    Call it in a single process, or in every process that a launcher has started.

    Returns:
        0, or 130 if Ctrl-C stopped the run after a checkpoint.

    Raises:
        UserError: the recipe can't run as written. No model was loaded.
        Exception: any error of the training.
    """
    prepared = prepare(recipe, Machine.here())
    try:
        with only_run(prepared) as confirmed:
            return run(confirmed)
    finally:
        prepared.interruption.restore_handlers()


def run(prepared: Prepared) -> int:
    """Train, and write model or adapter, tokenizer, model card and the run's files into `output_dir`.

    After SIGTERM or Ctrl-C the run is saved as a checkpoint instead.

    Returns:
        0, or 130 after Ctrl-C.
    """
    recipe, training_args = prepared.recipe, prepared.training_args
    prepared.check_folder()  # confirming the checkpoint and loading the reward models may have taken minutes
    if prepared.point is not None:
        if training_args.should_save:  # on each node, if each has a disk of its own
            set_aside(prepared.point.passed_over)
        say_once(describe_resumption(recipe.output_dir, prepared.point))
    fault_file(recipe.output_dir).unlink(missing_ok=True)  # another attempt may have left it
    trainer = build_trainer(prepared)
    describe_run(prepared, trainer)
    prepared.check_folder()
    if trainer.accelerator.is_main_process:
        add_launch(recipe.output_dir, launch_entry(prepared))
    started = time.monotonic()
    train(prepared, trainer)
    if prepared.interruption.stopped:
        return end_stopped(prepared, trainer)
    if not prepared.is_over and trainer.state.global_step == prepared.steps_before:
        raise RunFault(f"no optimizer step was taken, of {prepared.steps}: the model is unchanged")
    trainer.checkpoints.check_folder()
    # An internal call does not push to the hub, which `finish` does after everything is written.
    trainer.save_model(training_args.output_dir, _internal_call=True)
    trainer.checkpoints.check_folder()
    finish(prepared, trainer, time.monotonic() - started)
    return 0


def train(prepared: Prepared, trainer: GRPOTrainer) -> None:
    """Run the training loop from the checkpoint, if there is one. For a finished run only the checkpoint is loaded."""
    if prepared.is_over:
        say_once(f"already finished: {prepared.checkpoint} is the end of the run, and nothing remains to train")
    try:
        with loading_only(trainer, prepared.steps) if prepared.is_over else nullcontext():
            trainer.train(resume_from_checkpoint=str(prepared.checkpoint) if prepared.checkpoint else None)
    except (Exception, KeyboardInterrupt):
        close_progress_bars(trainer.callback_handler.callbacks)
        raise


def finish(prepared: Prepared, trainer: GRPOTrainer, seconds: float) -> None:
    """Write logs, model card and summary after the model is saved. A failure is only a warning: the run is finished."""
    recipe, folder = prepared.recipe, prepared.recipe.output_dir
    if prepared.training_args.should_save:
        attempt(recipe, "its weights may be unreadable for other users", give_default_mode, folder, "*.safetensors")
    attempt(recipe, "its trainer_state.json was not written", save_state, trainer)
    trainer.create_model_card()
    attempt(recipe, "its summary was not made", lambda: say_once(summary(trainer, seconds)))
    if trainer.accelerator.is_main_process:
        attempt(recipe, "it was not diagnosed", lambda: say_once(diagnosis(folder)))
    if prepared.training_args.push_to_hub:
        attempt(recipe, "it was not pushed to the hub", trainer.push_to_hub)
    attempt(recipe, "its logs may not be complete", trainer.end)


def save_state(trainer: GRPOTrainer) -> None:
    """Write the run's own `trainer_state.json`, then mark `_log.jsonl` as complete."""
    trainer.save_state()
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, LiveLog):
            callback.end(trainer.state.global_step)
