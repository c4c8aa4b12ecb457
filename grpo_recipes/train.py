"""Train a recipe with GRPO.

accelerate launch --config_file accelerate_configs/ddp.yaml -m grpo_recipes.train --config recipes/x.yaml [--key value
...]

The recipe is checked before any model is loaded. Afterwards the run's folder (`output_dir`) holds `run.json` (resolved
recipe, versions and geometry of each launch), `trainer_state.json` and `_log.jsonl` (the log), `completions/*.parquet`,
checkpoints, the final model or adapter, and its model card, `README.md`.

`prepare` checks the recipe and builds everything but the policy, `only_run` holds the run's folder, and `run` trains.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.process.signals import INTERRUPTED, NOTHING_DONE, leave_on_interrupt, raise_on_interrupt
from grpo_rewards.startup import prepare_libraries

if __name__ == "__main__":  # before the imports that take seconds
    leave_on_interrupt()
    prepare_libraries()

import torch
from peft import PeftModel
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl import GRPOConfig, get_peft_config, get_quantization_config

from grpo_recipes import __version__
from grpo_recipes.checks import checks, packages
from grpo_recipes.checks.checks import Checked, Machine
from grpo_recipes.checks.precision import Precision
from grpo_recipes.checks.rewards import checked_reward, describe_rewards, prefilled_notes
from grpo_recipes.checks.tokenizer import ChatTemplate, check_chat_template, load_tokenizer
from grpo_recipes.checks.tools import check_template
from grpo_recipes.data import rendering
from grpo_recipes.data.hub import hub_commit
from grpo_recipes.data.rendering import PromptTools
from grpo_recipes.generation.stop_strings import StopStrings
from grpo_recipes.plan.memory import check_adapter
from grpo_recipes.process import faults
from grpo_recipes.process.faults import print_last_line
from grpo_recipes.process.live_line import LiveLine, LiveLog
from grpo_recipes.process.messages import fewer_library_messages, progress
from grpo_recipes.recipe.recipe import (
    OUR_KEYS,
    Recipe,
    RecipeError,
    model_config,
    parse_recipe,
    resolved,
    shipped_files,
)
from grpo_recipes.recipe.trl_keys import ADAMW_BF16, DEFAULTS, RESUME_MAY_CHANGE, cautions
from grpo_recipes.reports.diagnostics import describe, diagnose
from grpo_recipes.reports.model_card import write_model_card
from grpo_recipes.reports.run import OutOfTime, Run
from grpo_recipes.runs import resume, weights
from grpo_recipes.runs.checkpoints import read_manifest, steps_done
from grpo_recipes.runs.files import LIVE, RECORD
from grpo_recipes.runs.identity import Identity, Source, compare, identify, reward_models
from grpo_recipes.runs.lock import GO_ON, FolderLost, Held, only_writer
from grpo_recipes.runs.record import add_launch, describe_launch
from grpo_recipes.runs.resume import Resume
from grpo_recipes.training.adamw_bf16 import adamw_bf16, draw_sample, stored_values
from grpo_recipes.training.adapters import load_adapter
from grpo_recipes.training.callbacks import RecipeInTrackers, StopOnSignal
from grpo_recipes.training.data_order import ContinueSchedule, loading_only
from grpo_recipes.training.offline import RecordedRollout
from grpo_recipes.training.saving import check_held
from grpo_recipes.training.trainer import GRPOTrainer
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import give_default_mode
from grpo_rewards.redaction import redacted, scrubbed, secret_values
from grpo_rewards.registry import leaves
from grpo_rewards.terminal import lasting_output, say, say_error, visible_messages

SILENCE_SECONDS = 30.0
"""Time that the other ranks wait before they print an error.

All ranks usually have the same error, and the launcher ends every rank once one has failed. The first rank must be able
to print the error before that."""

FOLDERS = ("PWD", "OLDPWD")
"""Variables of a shell that hold folders, although their names look like those of passwords."""

DIAGNOSIS_SECONDS = 5.0
"""Time that the diagnosis may delay the end of a training, and so the next launch."""


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
def main(args: Sequence[str] | None = None) -> int:
    """Train the recipe in `args` (default: the command line), and print the reason last if that fails.

    Returns:
        0, 1 if the run failed, 2 if the recipe can't run as written, or 130 if Ctrl-C stopped the run.
    """
    with lasting_output():
        return _main(sys.argv[1:] if args is None else args)


def _main(arguments: Sequence[str]) -> int:
    if {"-h", "--help", "--version"} & set(arguments):
        say(f"grpo-recipes {__version__}" if "--version" in arguments else help_text())
        return 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("grpo_recipes").setLevel(logging.INFO)
    recipe: Recipe | None = None
    prepared: Prepared | None = None
    try:
        recipe = parse_recipe(arguments)
        with visible_messages(), faults.no_exit():
            prepared = prepare(recipe, Machine.here())
            with only_run(prepared) as prepared:
                return run(prepared)
    except UserError as error:
        return _print_refusal(scrubbed(str(error), known_secrets(recipe) if recipe is not None else ()))
    except KeyboardInterrupt:
        return _end_interrupted_run(prepared)
    except FolderLost as error:
        return faults.end_with_error(str(error))  # writes nothing into a folder that belongs to another launch
    except Exception as error:  # the user gets one line for any error, and every rank prints the same line
        if prepared is None:  # nothing has begun, so the error is a bug of ours
            raise
        return _report_failure(prepared, error)
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


@dataclass(frozen=True)
class Prepared:
    """Everything that the checks of a recipe loaded or built, so that `run` does not repeat the work."""

    recipe: Recipe
    machine: Machine
    checked: Checked
    tokenizer: PreTrainedTokenizerBase
    training_args: GRPOConfig
    rollout: RecordedRollout | None
    identity: Identity
    """Data, weights, rewards and versions, which each checkpoint repeats."""
    point: Resume | None
    """Decision from which checkpoint the run resumes, or None if the run is new."""
    interruption: StopOnSignal
    held: Held | None = None
    """Folder of the run, once this launch holds it."""
    steps_before: int = 0
    """Optimizer step of the checkpoint. It is stored because the run may rotate the checkpoint away."""

    @property
    def checkpoint(self) -> Path | None:
        """Checkpoint that the run resumes from, or None if it starts at the beginning."""
        return self.point.newest if self.point is not None else None

    @property
    def steps(self) -> int:
        """Length of the run in optimizer steps."""
        return self.checked.geometry.optimizer_steps(self.recipe.config, len(self.checked.train_dataset))

    @property
    def is_over(self) -> bool:
        """True if the checkpoint is the end of the run."""
        return self.checkpoint is not None and self.steps_before >= self.steps

    def last_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint in the run's folder."""
        return resume.newest_checkpoint(self.recipe.output_dir, self.machine.num_processes)


def prepare(recipe: Recipe, machine: Machine) -> Prepared:
    """Check the recipe, and build everything that does not need the policy. Raises `UserError`."""
    checks.check_output_dir(recipe)
    checks.check_packages(recipe)
    point = checks.resume_point(recipe, machine)
    checkpoint = point.newest if point is not None else None
    before = earlier_launch(recipe, checkpoint) if point is not None else {}
    checked, tokenizer, rollout = build_inputs(recipe, machine)
    identity = identity_of(recipe, checked)
    if checkpoint is not None:
        if change := resume.layout_change(before, order_of(recipe, checked)):
            raise _other_run(recipe, change)
        check_same_content(recipe, checkpoint, identity)
    training_args = leave_token_to_environment(checks.grpo_config(recipe))
    # Trackers show this name.
    training_args.run_name = redacted(training_args.run_name or recipe.output_dir.resolve().name)
    num_prompts = len(checked.train_dataset)
    interruption = StopOnSignal(lambda step: checked.geometry.ends_generation(step, num_prompts))
    return Prepared(recipe, machine, checked, tokenizer, training_args, rollout, identity, point, interruption)


def build_inputs(recipe: Recipe, machine: Machine) -> tuple[Checked, PreTrainedTokenizerBase, RecordedRollout | None]:
    """Check the recipe, and return the inputs of its trainer: rows and rewards, the tokenizer, recorded responses.

    Raises:
        UserError: the recipe can't run as written. The folder of the run is not looked at.
    """
    check_weights(recipe)
    checked = checks.check(recipe, machine)
    check_adapter(recipe)
    toolset = checked.toolset
    tokenizer = load_tokenizer(recipe)
    check_chat_template(recipe, tokenizer, checked.train_dataset[0]["prompt"])
    tools = None
    if toolset is not None:
        tools = toolset.in_prompts(check_template(recipe, toolset, tokenizer))
    with recipe.naming_this_file():
        StopStrings.of(recipe.config.generation_kwargs, tokenizer)  # raises for a tokenizer that can't be searched
        checked = limit_prompts(recipe, checked, tokenizer, tools)
        packages.check_vllm_prompts(recipe.config, [checked.train_dataset, checked.eval_dataset], tokenizer, tools)
        rollout = None
        if recipe.offline is not None:
            limit = recipe.config.max_completion_length
            rollout = RecordedRollout(checked.train_dataset, tokenizer, recipe.offline, limit)
        template_kwargs = recipe.config.chat_template_kwargs or {}
        prompt = rendering.first_prompt(checked.train_dataset, tokenizer, template_kwargs, tools)
    return replace(checked, prompt_notes=prefilled_notes(checked.rewards, prompt)), tokenizer, rollout


def leave_token_to_environment(training_args: GRPOConfig) -> GRPOConfig:
    """Move `hub_token` into HF_TOKEN of this process, which the hub's client reads.

    TRL creates the repository of `log_completions_hub_repo` without passing a token on.
    """
    if training_args.hub_token:
        os.environ["HF_TOKEN"], training_args.hub_token = training_args.hub_token, None
    return training_args


@contextmanager
def only_run(prepared: Prepared) -> Iterator[Prepared]:
    """Hold the run's folder, confirm the checkpoint, load the reward models, and yield the updated `prepared`."""
    with prepared.recipe.naming_this_file(), only_writer(prepared.recipe.output_dir) as held:
        prepared = confirm_checkpoint(replace(prepared, held=held))
        load_reward_models(prepared.recipe, prepared.checked)
        try:
            yield prepared
        except (UserError, FolderLost):
            raise
        except Exception as error:
            # A library that could not write into a lost folder raises an error that does not name the reason.
            if loss := held.loss():
                raise FolderLost(f"{loss}; this launch failed ({type(error).__name__}): {GO_ON}") from error
            raise


def confirm_checkpoint(prepared: Prepared) -> Prepared:
    """Compare the checkpoint with its manifest, and fall back to the one before if it differs. Collective.

    Raises:
        RecipeError: no checkpoint is left, or data or weights have changed since it was saved.
    """
    if prepared.point is None:
        return prepared
    recipe = prepared.recipe
    point = resume.confirmed(prepared.point, each_node=recipe.config.save_on_each_node)
    if (reason := point.obstacle()) is not None:
        raise recipe.error(f"`resume_from_checkpoint`: {reason.place}", reason.problem, reason.fix)
    if point.newest is not None and point.newest != prepared.checkpoint:  # the one that `prepare` compared is damaged
        check_same_content(recipe, point.newest, prepared.identity)
    return replace(prepared, point=point, steps_before=steps_done(point.newest) if point.newest else 0)


def load_policy(recipe: Recipe, training_args: GRPOConfig) -> str | PeftModel:
    """Return TRL's `model` argument: the name of a model, or a trainable adapter on its base.

    Raises:
        UserError: the base of the adapter can't be loaded, or the recipe asks for a new adapter on top.
    """
    name, model_args = recipe.model["model_name_or_path"], model_config(recipe)
    config = weights.adapter_config(name, model_args.model_revision)
    if config is None:
        return name
    if model_args.use_peft:
        raise UserError("`use_peft`", "it asks for a new adapter, and `model_name_or_path` is one", "remove it")
    init = {}
    if (quantization := get_quantization_config(model_args)) is not None:
        init["quantization_config"] = quantization
    revision = model_args.model_revision
    return load_adapter(name, config, training_args, "model_name_or_path", revision=revision, **init)


def limit_prompts(
    recipe: Recipe, checked: Checked, tokenizer: PreTrainedTokenizerBase, tools: PromptTools | None = None
) -> Checked:
    """Apply `dataset.max_prompt_tokens`, print how many prompts are affected, and check that enough are left."""
    spec, given, eval_dataset = recipe.dataset, checked.train_dataset, checked.eval_dataset
    template_kwargs = recipe.config.chat_template_kwargs
    train_dataset, affected = rendering.limit_prompts(given, spec, tokenizer, template_kwargs, tools)
    if affected:
        done = "dropped" if spec.overlong_prompts == "drop" else "cut from the left"
        _say(f"{affected} of {len(given)} prompts over {spec.max_prompt_tokens} tokens were {done}")
    checked.geometry.check_dataset(len(train_dataset))
    if eval_dataset is not None:
        eval_dataset, _ = rendering.limit_prompts(eval_dataset, spec, tokenizer, template_kwargs, tools)
    return replace(checked, train_dataset=train_dataset, eval_dataset=eval_dataset)


@contextmanager
def _naming_key(recipe: Recipe, key: str, fix: str = "") -> Iterator[None]:
    """Turn an error inside this block into a `RecipeError` about a key, with a fix in place of the error's own."""
    try:
        yield
    except UserError as error:
        raise recipe.error(f"`{key}`: {error.place}", error.problem, fix or error.fix) from error
    except ValueError as error:  # a reward of another package raised it
        raise recipe.error(f"`{key}`", one_line(error), fix or "correct the value") from error


def check_weights(recipe: Recipe) -> None:
    """Raise `RecipeError` if the folder of the policy, its base or its reference has missing or damaged weights."""
    name, base = recipe.model["model_name_or_path"], None
    if Path(name).is_dir():
        with _naming_key(recipe, "model_name_or_path"):
            config = weights.adapter_config(name)
        base = config.base_model_name_or_path if config is not None else None
    if base is not None and Path(base).is_absolute() and not Path(base).exists():
        problem = f"{name} is an adapter, and its base {base} is missing"
        fix = "set `base_model_name_or_path` in its adapter_config.json"
        raise recipe.error("`model_name_or_path`", problem, fix)
    _check_folder_weights(recipe, "base_model_name_or_path", base)
    _check_folder_weights(recipe, "model_name_or_path", name)
    _check_folder_weights(recipe, "reference.adapter", recipe.reference.adapter)


def _check_folder_weights(recipe: Recipe, key: str, folder: str | None) -> None:
    if folder is not None and Path(folder).is_dir():
        with _naming_key(recipe, key, "copy or save it again, or name another model"):
            weights.check_weight_files(Path(folder))


def load_reward_models(recipe: Recipe, checked: Checked) -> None:
    """Load every reward model, and request one score from every judge, before the policy is loaded.

    Raises:
        RecipeError: a reward model can't be loaded, or a judge does not answer.
    """
    for leaf in leaves(checked.rewards):
        reward = leaf.declared
        if reward.model_source is not None and (Path(reward.model_source) / "config.json").is_file():
            _check_folder_weights(recipe, "rewards", reward.model_source)
        with _naming_key(recipe, "rewards"):
            line = reward.prepare()
        if line is not None:
            _say(line)


def known_secrets(recipe: Recipe) -> set[str]:
    """Return the secrets in the recipe, and those in the environment, from which a reward may read its key."""
    environment = {name: value for name, value in os.environ.items() if name not in FOLDERS}
    return secret_values(recipe.as_dict()) | secret_values(environment)


def describe_resumption(prepared: Prepared, point: Resume) -> str:
    """Return one line on the checkpoint that a run resumes from, and on those that it passes over."""
    line = "".join(f"{one.reason}, and is set aside as {one.aside.name}: " for one in point.passed_over)
    if point.newest is None:
        return f"{line}{prepared.recipe.output_dir} has no checkpoint to resume from: starting at the beginning"
    return f"{line}resuming from {point.newest}"


def earlier_launch(recipe: Recipe, checkpoint: Path | None) -> Mapping[str, Any]:
    """Return the launch that a resume continues, after comparing its recipe with that of this launch.

    Raises:
        RecipeError: `run.json` is damaged or missing, or a key has changed that a resume may not change.
    """
    with _naming_key(recipe, "resume_from_checkpoint"):
        before = resume.earlier_launch(recipe.output_dir, checkpoint)
    if checkpoint is None:
        return before
    if not before:
        _say(
            f"{checkpoint} is of another trainer, without a manifest and a {RECORD}: only the headers of its files are "
            "checked, and not whether it is of this recipe"
        )
        return before
    earlier, now = redacted(resolved(before["recipe"])), redacted(resolved(recipe.as_dict()))
    refused, applied = resume.recipe_changes(earlier, now, before.get("directory", "."), RESUME_MAY_CHANGE)
    if refused:
        raise _other_run(recipe, ", ".join(refused))
    if applied:
        _say(f"changed for the rest of the run: {', '.join(applied)}")
    return before


def order_of(recipe: Recipe, checked: Checked) -> dict[str, Any]:
    """Return the entries of `run.json` that determine which prompts an optimizer step reads.

    The prompts themselves are a part of the identity in the manifest of each checkpoint.
    """
    return {
        "geometry": checked.geometry.as_dict(),
        "train_prompts": len(checked.train_dataset),
        "seed": recipe.config.seed,
        "shuffle_dataset": recipe.config.shuffle_dataset,
    }


def identity_of(recipe: Recipe, checked: Checked) -> Identity:
    """Return the identity of the launch: its rows, the weights that it loads, the code of its rewards, and versions."""
    name, revision = recipe.model["model_name_or_path"], model_config(recipe).model_revision
    sources = {"policy": Source(name, hub_commit(name, revision))}
    if (config := weights.adapter_config(name, revision)) is not None and config.base_model_name_or_path:
        base = config.base_model_name_or_path
        sources["base"] = Source(base, hub_commit(base, config.revision))
    if (reference := recipe.reference.adapter) is not None:
        sources["reference"] = Source(reference, hub_commit(reference))
    sources |= reward_models(checked.rewards, hub_commit)
    tools = checked.toolset.sources if checked.toolset is not None else {}
    with recipe.naming_this_file():
        template = ChatTemplate.read(recipe.chat_template_path)
    digest = template.digest if template is not None else None
    return identify(checked.train_dataset, checked.rewards, sources, tools, digest)


def check_same_content(recipe: Recipe, checkpoint: Path, identity: Identity) -> None:
    """Print changes since a checkpoint was saved. Raises `RecipeError` for changed data or weights."""
    if read_manifest(checkpoint) is None:  # another trainer's: `earlier_launch` has printed what is not checked
        return
    with _naming_key(recipe, "resume_from_checkpoint"):
        line = compare(checkpoint, identity)
    if line is not None:
        _say(line)


def launch_entry(prepared: Prepared) -> dict[str, Any]:
    """Return the entry of this launch in `run.json`."""
    recipe, checked = prepared.recipe, prepared.checked
    return describe_launch(
        recipe.as_dict(),
        vars(recipe.config),
        checked.all_rewards,
        recipe.arguments,
        source=recipe.source,
        hardware=hardware(prepared.training_args),
        resumed_from=prepared.checkpoint,
        world_size=prepared.training_args.world_size,
        **order_of(recipe, checked),
        identity=prepared.identity.content,
        **({"unscorable_golds": checked.golds.as_dict()} if checked.golds else {}),
    )


def hardware(training_args: GRPOConfig) -> str:
    """Return the number and name of the accelerators of a launch, or the cores of this machine."""
    device, count = training_args.device, training_args.world_size
    if device.type == "cpu":
        return f"CPU ({platform.machine()}, {os.cpu_count()} cores), {count} process{'es' * (count > 1)}"
    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return f"{count} × {named(device) if named else device.type}"


def _other_run(recipe: Recipe, change: str) -> RecipeError:
    fix = "launch as before, or start another run from the checkpoint as its `model_name_or_path`"
    return recipe.error("`resume_from_checkpoint`", change, fix)


def run(prepared: Prepared) -> int:
    """Train, and write model or adapter, tokenizer, model card and the run's files into `output_dir`.

    After SIGTERM or Ctrl-C the run is saved as a checkpoint instead.

    Returns:
        0, or 130 after Ctrl-C.
    """
    recipe, training_args = prepared.recipe, prepared.training_args
    check_folder(prepared)  # confirming the checkpoint and loading the reward models may have taken minutes
    if prepared.point is not None:
        if training_args.should_save:  # on each node, if each has a disk of its own
            resume.set_aside(prepared.point.passed_over)
        _say(describe_resumption(prepared, prepared.point))
    faults.remove_fault_file(recipe.output_dir)
    trainer = build_trainer(prepared)
    describe_run(prepared, trainer)
    check_folder(prepared)
    if trainer.accelerator.is_main_process:
        add_launch(recipe.output_dir, launch_entry(prepared))
    started = time.monotonic()
    train(prepared, trainer)
    if prepared.interruption.stopped:
        return _end_stopped_run(prepared, trainer)
    if not prepared.is_over and trainer.state.global_step == prepared.steps_before:
        raise faults.NothingTrained(f"no optimizer step was taken, of {prepared.steps}: the model is unchanged")
    trainer.checkpoints.check_folder()
    # An internal call does not push to the hub, which `finish` does after everything is written.
    trainer.save_model(training_args.output_dir, _internal_call=True)
    trainer.checkpoints.check_folder()
    finish(prepared, trainer, time.monotonic() - started)
    return 0


def check_folder(prepared: Prepared) -> None:
    """Raise `FolderLost` on every rank if this launch has lost the run's folder before its first step. Collective."""
    if prepared.held is not None:
        check_held(prepared.held, "before its first step", prepared.checkpoint)


def describe_run(prepared: Prepared, trainer: GRPOTrainer) -> None:
    """Print sizes, rewards, reference, precision and geometry of a run, and notes on possible mistakes."""
    recipe, checked = prepared.recipe, prepared.checked
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    trained = f"{size:,} parameters, {trainer.get_num_trainable_parameters():,} trained"
    _say(f"{recipe.source}: {trained}, rewards {describe_rewards(checked.all_rewards)}")
    if checked.toolset is not None:
        _say(f"  tools           {checked.toolset.describe(recipe.config.max_tool_calling_iterations)}")
    _say(f"  reference       {trainer.reference_sentence}")
    precision, surviving = measured_precision(prepared, trainer)
    _say(precision.describe(surviving))
    _say(checked.geometry.describe())
    _say(checked.geometry.describe_epoch(len(checked.train_dataset), recipe.config.max_completion_length))
    notes = cautions(recipe.config, recipe.model)
    if warning := precision.warning(surviving):
        notes.append(warning)
    if checked.golds:
        notes.append(checked.golds.describe())
    notes += [*checked.gold_notes, *checked.prompt_notes]
    for note in notes:
        _say(f"  note            {note}")


def measured_precision(prepared: Prepared, trainer: GRPOTrainer) -> tuple[Precision, float | None]:
    """Return the dtypes of a run, and the share of an update that survives rounding, measured on the loaded weights.

    The share is None if it is not known.
    """
    recipe = prepared.recipe
    precision = checks.precision_of(recipe, prepared.machine, is_adapter=isinstance(trainer.model, PeftModel))
    # If FSDP loads the weights on one rank, the other ranks hold no values yet.
    if precision.updated == "float32" or not _is_first_rank():
        return precision, 1.0
    sample = stored_values(draw_sample(trainer.model.parameters()))
    return precision, precision.surviving(sample.cpu().numpy())


def train(prepared: Prepared, trainer: GRPOTrainer) -> None:
    """Run the training loop from the checkpoint, if there is one. For a finished run only the checkpoint is loaded."""
    if prepared.is_over:
        _say(f"already finished: {prepared.checkpoint} is the end of the run, and nothing remains to train")
    checkpoint = str(prepared.checkpoint) if prepared.checkpoint else None
    try:
        with loading_only(trainer, prepared.steps) if prepared.is_over else nullcontext():
            trainer.train(resume_from_checkpoint=checkpoint)
    except (Exception, KeyboardInterrupt):
        faults.close_progress_bars(trainer.callback_handler.callbacks)
        raise


def build_trainer(prepared: Prepared) -> GRPOTrainer:
    """Load the policy and its reference, and return the trainer of the run."""
    recipe, training_args = prepared.recipe, prepared.training_args
    inputs = (prepared.checked, prepared.tokenizer, prepared.rollout)
    trainer = bare_trainer(recipe, prepared.machine, training_args, *inputs)
    trainer.checkpoints.decision, trainer.checkpoints.held = prepared.point, prepared.held
    trainer.checkpoints.identify = lambda: prepared.identity
    add_callbacks(prepared, trainer)
    return trainer


def bare_trainer(
    recipe: Recipe,
    machine: Machine,
    training_args: GRPOConfig,
    checked: Checked,
    tokenizer: PreTrainedTokenizerBase,
    rollout: RecordedRollout | None = None,
) -> GRPOTrainer:
    """Load the policy and its reference, and return a trainer without the callbacks and the checkpoint of a run."""
    training_args.reward_weights = [reward.weight for reward in checked.rewards]
    model_args = model_config(recipe)
    optimizer = checks.optimizer_name(recipe, machine)
    toolset = checked.toolset
    trainer = GRPOTrainer(
        model=load_policy(recipe, training_args),
        reward_funcs=[checked_reward(reward.function) for reward in checked.rewards],
        args=training_args,
        train_dataset=checked.train_dataset.select_columns(["prompt"]) if rollout else checked.train_dataset,
        eval_dataset=checked.eval_dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        rollout_func=rollout,
        tools=toolset.functions if toolset is not None else None,
        environment_factory=toolset.factory if toolset is not None else None,
        tool_limits=recipe.tool_limits,
        kl_estimator=recipe.kl_estimator,
        micro_batching=recipe.micro_batching,
        generation=recipe.generation,
        sampling=recipe.sampling,
        advantages=recipe.advantages,
        generation_check=recipe.generation_check,
        reference=recipe.reference,
        optimizer_cls_and_kwargs=adamw_bf16(training_args) if optimizer == ADAMW_BF16 else None,
    )
    # TRL adds the rewards of environments to those of the recipe.
    for place in range(len(checked.rewards), len(trainer.reward_funcs)):
        reward: Any = trainer.reward_funcs[place]
        reward.__name__ = trainer.reward_func_names[place]
        trainer.reward_funcs[place] = checked_reward(reward)
    return trainer


def add_callbacks(prepared: Prepared, trainer: GRPOTrainer) -> None:
    """Add the callbacks of a recipe's run to its trainer, and replace TRL's model card."""
    recipe, training_args = prepared.recipe, prepared.training_args

    def create_model_card(**ignored: Any) -> None:
        if trainer.accelerator.is_main_process:
            attempt(recipe, "its model card was not written", write_model_card, recipe.output_dir)

    # TRL calls it with each checkpoint, and before it pushes. The class keeps TRL's, for scripts.
    trainer.create_model_card = create_model_card  # type: ignore[method-assign, assignment]
    if prepared.checkpoint is not None:
        trainer.add_callback(ContinueSchedule())
    trainer.add_callback(prepared.interruption)
    trainer.add_callback(LiveLog(recipe.output_dir / LIVE))
    if not training_args.disable_tqdm:
        # The bar for notebooks in transformers 5.23 raises when a run ends after its first step.
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.add_callback(LiveLine([reward.name for reward in prepared.checked.all_rewards], replaced=[progress]))
    if recipe.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.early_stopping_patience))
    if training_args.report_to:
        trainer.add_callback(RecipeInTrackers(redacted(resolved(recipe.as_dict())), trainer.callback_handler))


def _report_failure(prepared: Prepared, error: Exception) -> int:
    """Print why a run failed and from which checkpoint it can resume, and return exit code 1."""
    began = prepared.interruption.began
    checkpoint = prepared.last_checkpoint() if began else prepared.checkpoint
    folder, secrets = prepared.recipe.output_dir, known_secrets(prepared.recipe)
    faults.report(error, folder, checkpoint, resumable=faults.is_resumable(error, began=began), secrets=secrets)
    return 1


def finish(prepared: Prepared, trainer: GRPOTrainer, seconds: float) -> None:
    """Write logs, model card and summary after the model is saved. A failure is only a warning: the run is finished."""
    recipe = prepared.recipe
    if prepared.training_args.should_save:
        loss = "its weights may be unreadable for other users"
        attempt(recipe, loss, give_default_mode, recipe.output_dir, "*.safetensors")
    attempt(recipe, "its trainer_state.json was not written", save_state, trainer)
    trainer.create_model_card()
    attempt(recipe, "its summary was not made", lambda: _say(summary(trainer, seconds)))
    if trainer.accelerator.is_main_process:
        attempt(recipe, "it was not diagnosed", lambda: _say(diagnosis(recipe.output_dir)))
    if prepared.training_args.push_to_hub:
        attempt(recipe, "it was not pushed to the hub", trainer.push_to_hub)
    attempt(recipe, "its logs may not be complete", trainer.end)


def save_state(trainer: GRPOTrainer) -> None:
    """Write the run's own `trainer_state.json`, then mark `_log.jsonl` as complete."""
    trainer.save_state()
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, LiveLog):
            callback.end(trainer.state.global_step)


def attempt(recipe: Recipe, loss: str, function: Callable[..., Any], *args: Any) -> None:
    """Call `function`, and turn an error into a warning that says what the run in `output_dir` now lacks."""
    try:
        function(*args)
    except Exception as error:  # an error of the hub, a tracker, a disk or our own: none of them undoes the run
        reason = scrubbed(one_line(f"{type(error).__name__}: {error}"), known_secrets(recipe))
        say_error(f"{recipe.output_dir}: {loss} ({reason})", kind="warning")


def _end_stopped_run(prepared: Prepared, trainer: GRPOTrainer) -> int:
    """End a run that a signal has stopped, print how to resume it, and return the exit code."""
    trainer.accelerator.wait_for_everyone()  # the end of one rank may end its node, and interrupt the others' saves
    code = INTERRUPTED if prepared.interruption.requested == signal.SIGINT else 0
    rest = "`--resume_from_checkpoint true` goes on from there"
    if prepared.training_args.save_only_model:
        rest = "without its optimizer (`save_only_model`), so no run can resume from there"
    by, state = prepared.interruption.name, trainer.state
    trainer.end()
    if _is_first_rank():
        message = f"stopped by {by} after step {state.global_step} of {state.max_steps}, which is saved: {rest}"
        faults.record_stop(message, prepared.recipe.output_dir)
        print_last_line(message, code)
    return code


def _end_interrupted_run(prepared: Prepared | None) -> int:
    """Print what is saved of a run that Ctrl-C ended at once, and return the exit code."""
    if prepared is None or not prepared.recipe.output_dir.exists():
        return _print_interruption(NOTHING_DONE)
    rest = "nothing is saved yet: `--resume_from_checkpoint true` starts again"
    if (last := prepared.last_checkpoint()) is not None:
        rest = f"{last} is saved: `--resume_from_checkpoint true` goes on from there"
    if _is_first_rank():
        faults.record_stop(f"stopped by Ctrl-C: {rest}", prepared.recipe.output_dir)
    return _print_interruption(rest)


def _print_interruption(rest: str) -> int:
    if _is_first_rank():
        print_last_line(f"stopped by Ctrl-C: {rest}", INTERRUPTED)
    return INTERRUPTED


def diagnosis(folder: Path) -> str:
    """Return the findings on a finished run, or why it was not diagnosed. The run is saved in either case."""
    try:
        return describe(diagnose(Run.read(folder, within=DIAGNOSIS_SECONDS)))
    except OutOfTime:
        command = f"`grpo-recipes diagnose {folder}`"
        return f"diagnosis: skipped after {DIAGNOSIS_SECONDS:.0f} s: {command} takes the time it needs"
    except UserError as error:
        return f"diagnosis: skipped, {error}"


def summary(trainer: GRPOTrainer, seconds: float) -> str:
    """Return one line on a finished run: steps, time, first and last logged reward, and the folder of the model."""
    rewards = [entry["reward"] for entry in trainer.state.log_history if entry.get("reward") is not None]
    change = f", reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else ""
    kind = "adapter" if hasattr(trainer.model, "peft_config") else "model"
    steps, folder = trainer.state.global_step, trainer.args.output_dir
    return f"{steps} optimizer steps in {seconds:.0f} s{change}; the {kind} is in {folder}"


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    if _is_first_rank():
        say(text)


def _print_refusal(sentence: str) -> int:
    """Print why the recipe can't run, and return exit code 2. Ranks other than the first wait before they print."""
    if not _is_first_rank():
        time.sleep(SILENCE_SECONDS)
    return print_last_line(f"error: {sentence}", 2)


def leave(code: int) -> None:
    """End this process. One of several ranks skips the interpreter's teardown, in which gloo's threads may abort."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    raise_on_interrupt()
    leave(main())
