"""Train a recipe with GRPO.

accelerate launch --config_file accelerate_configs/ddp.yaml -m grpo_recipes.train --config recipes/x.yaml [--key value ...]

The recipe is checked before any model is loaded. The run's folder (`output_dir`) then holds `run.json` (the recipe as
resolved, versions, geometry; an entry for each launch), `trainer_state.json` and `_log.jsonl` (the log),
`completions/*.parquet`, checkpoints, the final model or adapter, and its model card, `README.md`.
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

if __name__ == "__main__":  # before the imports that take seconds
    leave_on_interrupt()

import torch
from peft import PeftModel
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl import GRPOConfig, get_peft_config, get_quantization_config

from grpo_recipes import __version__
from grpo_recipes.checks import checks, packages
from grpo_recipes.checks.checks import Checked, Machine
from grpo_recipes.checks.precision import Precision
from grpo_recipes.checks.rewards import checked_reward, describe_rewards
from grpo_recipes.checks.tokenizer import check_chat_template, load_tokenizer
from grpo_recipes.data import prompts
from grpo_recipes.data.hub import hub_commit
from grpo_recipes.generation.stop_strings import StopStrings
from grpo_recipes.plan.memory import check_adapter
from grpo_recipes.process import faults
from grpo_recipes.process.faults import print_last_line
from grpo_recipes.process.live_line import LiveLine, LiveLog
from grpo_recipes.process.messages import fewer_library_messages
from grpo_recipes.recipe.recipe import (
    OUR_KEYS,
    Recipe,
    RecipeError,
    model_config,
    parse_recipe,
    resolved,
    shipped_names,
)
from grpo_recipes.recipe.trl_keys import ADAMW_BF16, DEFAULTS, RESUME_MAY_CHANGE, cautions
from grpo_recipes.reports.diagnostics import describe, diagnose
from grpo_recipes.reports.model_card import write_model_card
from grpo_recipes.reports.run import OutOfTime, Run
from grpo_recipes.runs import resume, weights
from grpo_recipes.runs.checkpoints import read_manifest, steps_done
from grpo_recipes.runs.files import LIVE, RECORD, RunError
from grpo_recipes.runs.identity import Identity, Source, compare, identify, reward_models
from grpo_recipes.runs.lock import FolderLost, Held, only_launch
from grpo_recipes.runs.record import add_launch, data_order, describe_launch
from grpo_recipes.runs.resume import Resume
from grpo_recipes.training.adamw_bf16 import adamw_bf16, draw_sample, stored_values
from grpo_recipes.training.adapters import load_adapter
from grpo_recipes.training.callbacks import RecipeInTrackers, StopOnSignal
from grpo_recipes.training.data_order import ContinueSchedule, loading_only
from grpo_recipes.training.offline import RecordedRollout
from grpo_recipes.training.reference import REF
from grpo_recipes.training.saving import check_held
from grpo_recipes.training.trainer import GRPOTrainer
from grpo_recipes.training.trainer import logger as efficiency
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.redaction import redacted, scrubbed, secret_values
from grpo_rewards.registry import leaves
from grpo_rewards.terminal import lasting_output, say, say_error, visible_messages

# How long the other ranks wait before they print an error: usually all ranks have the same one, and the launcher ends every
# rank once one has failed, so the first rank must get to print it.
SILENCE_SECONDS = 30.0

# Variables of a shell whose names sound like a password's: the working directory, and the one before.
FOLDERS = ("PWD", "OLDPWD")

# How long a diagnosis may hold up the end of a training, and the launch of the next.
DIAGNOSIS_SECONDS = 5.0


HELP = """usage: accelerate launch --config_file FILE -m grpo_recipes.train --config RECIPE [--key value ...]
       python -m grpo_recipes.train --config RECIPE [--key value ...]      (one process)

Train a recipe with GRPO. RECIPE is a YAML file, or the name of one that ships:
{recipes}

Every key of the recipe can be given here too, and wins: `--learning_rate 1e-6`. A key inside another is
written with dots, an entry of a list by its number: `--dataset.path train.jsonl`, `--rewards.0.weight 2`.

Our keys (docs/ and recipes/ show each in use):
{ours}

Every other key is one of TRL's GRPOConfig or ModelConfig, with TRL's name and default, except for
{defaults}. All of them are described
by `trl grpo --help`, and those of GRPO and of transformers' trainer (max_steps, save_steps, ...) in
  https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig
  https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments

options:
  -h, --help      this text
  --version       the version

`grpo-recipes plan RECIPE [--key value ...]` checks all of it without loading a model.
Exit codes: 0 trained, 1 failed while training, 2 refused before a model was loaded.
"""


def help_text() -> str:
    """What `--help` prints: our keys, how to override them, and where TRL's are described."""
    names = textwrap.fill(
        ", ".join(shipped_names("recipes")), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    changed = ", ".join(f"{key} {str(value).lower()}" for key, value in DEFAULTS.items())
    ours = "\n".join(f"  {key:<15} {meaning}" for key, meaning in OUR_KEYS.items())
    return HELP.format(recipes=names, ours=ours, defaults=changed)


@fewer_library_messages()
def main(args: Sequence[str] | None = None) -> int:
    """Train the recipe that `args` (default: the command line) name.

    Returns 0, 2 if the recipe can't run as written, 1 if the run failed, or 130 if Ctrl-C stopped it; then the sentence that
    matters is printed last.
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
        with visible_messages():
            prepared = prepare(recipe, Machine.here())
            with only_run(prepared) as prepared:
                return run(prepared)
    except UserError as error:
        return _refuse(scrubbed(str(error), known_secrets(recipe) if recipe is not None else ()))
    except KeyboardInterrupt:
        return _stopped_at_once(prepared)
    except FolderLost as error:
        return faults.end_with_error(str(error))  # not a file more in a folder that belongs to another launch
    except Exception as error:  # whatever it is, the user gets a sentence, and every rank the same one
        if prepared is None:  # nothing has begun: an error of our own
            raise
        return _failed(prepared, error)
    finally:
        if prepared is not None:
            prepared.interruption.restore_handlers()


@fewer_library_messages()
def run_recipe(recipe: Recipe) -> int:
    """Check and train a recipe in this process, alone or as one of those that a launcher started: `main` without its words.

    Returns 0, or 130 if Ctrl-C stopped it after a checkpoint. Raises `UserError` for what is refused before a model is loaded,
    and otherwise what the training raised.
    """
    prepared = prepare(recipe, Machine.here())
    try:
        with only_run(prepared) as confirmed:
            return run(confirmed)
    finally:
        prepared.interruption.restore_handlers()


@dataclass(frozen=True)
class Prepared:
    """What the checks of a recipe leave for its run: nothing is read or built twice."""

    recipe: Recipe
    machine: Machine
    checked: Checked
    tokenizer: PreTrainedTokenizerBase
    training_args: GRPOConfig
    rollout: RecordedRollout | None
    identity: Identity
    """Data, weights, rewards and versions, which each checkpoint repeats."""
    point: Resume | None
    """Where a resumed run may go on, and does once `confirm_checkpoint` has read it; None if the run is a new one."""
    interruption: StopOnSignal
    held: Held | None = None
    """The run's folder, once this launch holds it."""
    steps_before: int = 0
    """The optimiser steps that the checkpoint has behind it: read at once, since the run may rotate the checkpoint away."""

    @property
    def checkpoint(self) -> Path | None:
        """What a resumed run goes on from, if anything was saved."""
        return self.point.newest if self.point is not None else None

    @property
    def steps(self) -> int:
        """The run's length in optimiser steps."""
        return self.checked.geometry.optimizer_steps(self.recipe.config, len(self.checked.train_dataset))

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint is the end of the run."""
        return self.checkpoint is not None and self.steps_before >= self.steps

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint in the run's folder."""
        return resume.newest_checkpoint(self.recipe.output_dir, self.machine.num_processes)


def prepare(recipe: Recipe, machine: Machine) -> Prepared:
    """Check and build everything that does not need the policy, before it is loaded.

    Raises `UserError`, of which `sources.DatasetUnreachable` is one.
    """
    checks.check_output_dir(recipe)
    checks.check_packages(recipe)
    point = checks.resume_point(recipe, machine)
    checkpoint = point.newest if point is not None else None
    before = earlier_launch(recipe, checkpoint)
    if checkpoint is not None:
        check_same_recipe(recipe, before)
    check_weights(recipe)
    checked = checks.check(recipe, machine)
    check_adapter(recipe)
    tokenizer = load_tokenizer(recipe, checked.train_dataset)
    check_chat_template(recipe, tokenizer, checked.train_dataset[0]["prompt"])
    with recipe.naming_this_file():
        StopStrings.of(recipe.config.generation_kwargs, tokenizer)  # raises for a tokenizer that can't be searched
        checked = limit_prompts(recipe, checked, tokenizer)
        packages.check_vllm_prompts(recipe.config, [checked.train_dataset, checked.eval_dataset], tokenizer)
        rollout = None
        if recipe.offline is not None:
            limit = recipe.config.max_completion_length
            rollout = RecordedRollout(checked.train_dataset, tokenizer, recipe.offline, limit)
    if checkpoint is not None:
        check_same_order(recipe, checked, before)
    identity = identity_of(recipe, checked)
    if checkpoint is not None:
        check_same_content(recipe, checkpoint, identity)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        packages.check_build_locks()
    training_args = leave_token_to_environment(checks.grpo_config(recipe))
    # Trackers show this name.
    training_args.run_name = redacted(training_args.run_name or recipe.output_dir.resolve().name)
    num_prompts = len(checked.train_dataset)
    interruption = StopOnSignal(lambda step: checked.geometry.ends_generation(step, num_prompts))
    return Prepared(
        recipe,
        machine,
        checked,
        tokenizer,
        training_args,
        rollout,
        identity,
        point,
        interruption,
    )


def leave_token_to_environment(training_args: GRPOConfig) -> GRPOConfig:
    """Move `hub_token` into this process's HF_TOKEN, where the hub's client looks.

    TRL makes the repository of `log_completions_hub_repo` without passing a token on.
    """
    if training_args.hub_token:
        os.environ["HF_TOKEN"], training_args.hub_token = training_args.hub_token, None
        _say("  note            `hub_token` is kept in this process's HF_TOKEN: no file of the run holds it")
    return training_args


@contextmanager
def only_run(prepared: Prepared) -> Iterator[Prepared]:
    """Hold the run's folder alone; yields what was prepared, its checkpoint confirmed, and the reward models loaded."""
    with prepared.recipe.naming_this_file(), only_launch(prepared.recipe.output_dir) as held:
        prepared = confirm_checkpoint(replace(prepared, held=held))
        load_reward_models(prepared.recipe, prepared.checked)
        try:
            yield prepared
        except (UserError, FolderLost):
            raise
        except Exception as error:
            # An error of a library that could not write there does not name the reason.
            if loss := held.loss():
                raise FolderLost(f"{loss.reason}; this launch failed ({type(error).__name__}): {loss.fix}") from error
            raise


def confirm_checkpoint(prepared: Prepared) -> Prepared:
    """Hold the checkpoint to go on from against its manifest, byte by byte; where it differs, the one before.

    A collective call. Raises `RecipeError` if none is left.
    """
    if prepared.point is None:
        return prepared
    recipe = prepared.recipe
    point = resume.confirmed(prepared.point, each_node=recipe.config.save_on_each_node)
    if (reason := point.obstacle()) is not None:
        raise recipe.error(f"`resume_from_checkpoint`: {reason}")
    if point.newest is not None and point.newest != prepared.checkpoint:  # the one that `prepare` compared is damaged
        check_same_content(recipe, point.newest, prepared.identity)
    return replace(prepared, point=point, steps_before=steps_done(point.newest) if point.newest else 0)


def load_policy(recipe: Recipe, training_args: GRPOConfig) -> str | PeftModel:
    """What TRL's `model` argument gets: the model's name, or, if that is an adapter's, the adapter on its base, trainable.

    Raises `UserError` if the adapter's base can't be loaded, or if the recipe asks for a new adapter on top.
    """
    name, model_args = recipe.model["model_name_or_path"], model_config(recipe)
    config = weights.adapter_config(name, model_args.model_revision)
    if config is None:
        return name
    if model_args.use_peft:
        raise UserError("`use_peft` asks for a new adapter, and `model_name_or_path` is one: remove `use_peft`")
    init = {}
    if (quantization := get_quantization_config(model_args)) is not None:
        init["quantization_config"] = quantization
    revision = model_args.model_revision
    return load_adapter(name, config, training_args, "model_name_or_path", adapter_revision=revision, **init)


def limit_prompts(recipe: Recipe, checked: Checked, tokenizer: PreTrainedTokenizerBase) -> Checked:
    """Apply `dataset.max_prompt_tokens`, say how many prompts it touched, and check that enough are left."""
    spec, given, eval_dataset = recipe.dataset, checked.train_dataset, checked.eval_dataset
    template_kwargs = recipe.config.chat_template_kwargs
    train_dataset, touched = prompts.limit_prompts(given, spec, tokenizer, template_kwargs)
    if touched:
        done = "dropped" if spec.overlong_prompts == "drop" else "cut from the left"
        _say(f"{touched} of {len(given)} prompts over {spec.max_prompt_tokens} tokens were {done}")
    checked.geometry.check_dataset(len(train_dataset))
    if eval_dataset is not None:
        eval_dataset, _ = prompts.limit_prompts(eval_dataset, spec, tokenizer, template_kwargs)
    return replace(checked, train_dataset=train_dataset, eval_dataset=eval_dataset)


def check_weights(recipe: Recipe) -> None:
    """Raise `RecipeError` if the policy, the base under it or its reference is a folder whose weights are not whole."""
    name, reference, base = recipe.model["model_name_or_path"], recipe.reference.adapter, None
    for key, folder in {"model_name_or_path": name, "reference.adapter": reference}.items():
        try:
            config = weights.adapter_config(folder) if folder is not None and Path(folder).is_dir() else None
        except RunError as error:
            raise recipe.error(f"`{key}`: {error}") from error
        if config is not None and folder == name:
            base = config.base_model_name_or_path
    if base is not None and Path(base).is_absolute() and not Path(base).exists():
        raise recipe.error(
            f"`model_name_or_path` {name} is an adapter, and its base {base} is not there: set "
            "`base_model_name_or_path` in its adapter_config.json"
        )
    folders = {"base_model_name_or_path": base, "model_name_or_path": name, "reference.adapter": reference}
    for key, folder in folders.items():
        if folder is not None and Path(folder).is_dir():
            _check_weights(recipe, key, Path(folder))


def _check_weights(recipe: Recipe, key: str, folder: Path) -> None:
    try:
        weights.check_weight_files(folder)
    except UserError as error:
        raise recipe.error(f"`{key}`: {error}: copy or save it again, or name another model") from error


def load_reward_models(recipe: Recipe, checked: Checked) -> None:
    """Load every reward model, and ask every judge for one score, before the policy is loaded; say how that went.

    Raises `RecipeError` if one can't be loaded, or does not answer.
    """
    for reward in (leaf.declared for leaf in leaves(checked.rewards)):
        folder = Path(reward.model_source or "")
        if (folder / "config.json").is_file():
            _check_weights(recipe, "rewards", folder)
        try:
            line = reward.prepare()
        except ValueError as error:
            raise recipe.error(f"`rewards`: {error}") from error
        if line is not None:
            _say(line)


def known_secrets(recipe: Recipe) -> set[str]:
    """Return the secrets that the recipe holds, and those in the environment, where a reward may have its key from."""
    environment = {name: value for name, value in os.environ.items() if name not in FOLDERS}
    return secret_values(recipe.as_dict()) | secret_values(environment)


def describe_resumption(prepared: Prepared) -> str:
    """Where a resumed run goes on from, and which checkpoints it leaves out and why."""
    assert prepared.point is not None, "only a resumed run is described so"
    aside = "".join(f"{one.reason}, and is set aside as {one.aside.name}: " for one in prepared.point.passed_over)
    if left := prepared.point.abandoned:
        aside += f"the last launch did not resume from {resume.names_of(left)}, which an earlier one saved: "
    if prepared.checkpoint is None:
        return f"{aside}{prepared.recipe.output_dir} has no checkpoint to go on from: starting at the beginning"
    return f"{aside}going on from {prepared.checkpoint}"


def earlier_launch(recipe: Recipe, checkpoint: Path | None) -> Mapping[str, Any]:
    """The newest launch in the `run.json` beside a checkpoint, or in the run's folder; {} if another trainer's has none.

    Raises `RecipeError` if it is damaged, or missing beside a checkpoint of ours.
    """
    if not recipe.resumes:
        return {}
    try:
        before = resume.earlier_launch(recipe.output_dir, checkpoint)
    except UserError as error:
        raise recipe.error(f"`resume_from_checkpoint`: {error}") from error
    if not before and checkpoint is not None:
        _say(
            f"{checkpoint} is of another trainer, without a manifest and a {RECORD}: only the headers of its files are "
            "checked, and not whether it is of this recipe"
        )
    return before


def check_same_recipe(recipe: Recipe, before: Mapping[str, Any]) -> None:
    """Say what the run to resume was launched with that is different now.

    Raises `RecipeError` for what a resume may not change.
    """
    if not before:
        return
    earlier, now = redacted(resolved(before["recipe"])), redacted(resolved(recipe.as_dict()))
    refused, applied = resume.recipe_changes(earlier, now, before.get("directory", "."), RESUME_MAY_CHANGE)
    if refused:
        raise _another_run(recipe, ", ".join(refused))
    if applied:
        _say(f"changed for the rest of the run: {', '.join(applied)}")


def check_same_order(recipe: Recipe, checked: Checked, before: Mapping[str, Any]) -> None:
    """Raise `RecipeError` if the run to resume was laid out otherwise, so that its place in the data means nothing here."""
    if change := resume.layout_change(before, order_of(recipe, checked)):
        raise _another_run(recipe, change)


def order_of(recipe: Recipe, checked: Checked) -> dict[str, Any]:
    """What determines which prompts an optimiser step sees."""
    return data_order(checked.geometry.as_dict(), checked.train_dataset["prompt"], vars(recipe.config))


def identity_of(recipe: Recipe, checked: Checked) -> Identity:
    """Return the identity of the launch: the rows, the weights that it loads, the code of its rewards, the versions."""
    name, revision = recipe.model["model_name_or_path"], model_config(recipe).model_revision
    sources = {"policy": Source(name, hub_commit(name, revision))}
    if (config := weights.adapter_config(name, revision)) is not None and config.base_model_name_or_path:
        base = config.base_model_name_or_path
        sources["base"] = Source(base, hub_commit(base, config.revision))
    if (reference := recipe.reference.adapter) is not None:
        sources["reference"] = Source(reference, hub_commit(reference))
    sources |= reward_models(checked.rewards, hub_commit)
    # With recorded responses every column is one of them, or what they were paid.
    return identify(checked.train_dataset, checked.rewards, sources, all_columns=recipe.offline is not None)


def check_same_content(recipe: Recipe, checkpoint: Path, identity: Identity) -> None:
    """Say what else changed since a checkpoint was saved. Raises `RecipeError` for other data or weights."""
    manifest = read_manifest(checkpoint)
    if manifest is None:  # of another trainer: `earlier_launch` has said what is not checked
        return
    found = compare(manifest.identity, identity)
    if (line := found.line(checkpoint)) is not None:
        _say(line)
    if (reason := found.refused_change(checkpoint)) is not None:
        raise _another_run(recipe, reason)


def launch_entry(prepared: Prepared) -> dict[str, Any]:
    """The entry of a launch in `run.json`."""
    recipe, checked = prepared.recipe, prepared.checked
    return describe_launch(
        recipe.as_dict(),
        vars(recipe.config),
        checked.rewards,
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
    """What a launch runs on: its accelerators by name, or the cores of this machine."""
    device, count = training_args.device, training_args.world_size
    if device.type == "cpu":
        return f"CPU ({platform.machine()}, {os.cpu_count()} cores), {count} process{'es' * (count > 1)}"
    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return f"{count} × {named(device) if named else device.type}"


def _another_run(recipe: Recipe, change: str) -> RecipeError:
    return recipe.error(
        f"`resume_from_checkpoint`: {change}: launch as before, or start another run from the checkpoint as "
        "its `model_name_or_path`"
    )


def run(prepared: Prepared) -> int:
    """Train, and leave the model or adapter, the tokenizer, a model card and the run's files in `output_dir`.

    After SIGTERM or Ctrl-C it leaves a checkpoint instead and says so. Returns 0, or 130 after Ctrl-C.
    """
    recipe, training_args = prepared.recipe, prepared.training_args
    check_folder(prepared)  # to confirm a checkpoint, and to load reward models, may have taken minutes
    if prepared.point is not None:
        if training_args.should_save:  # of each node, where each has a disk of its own
            resume.set_aside(prepared.point.passed_over)
        _say(describe_resumption(prepared))
    faults.remove_fault_file(recipe.output_dir)
    trainer = build_trainer(prepared)
    describe_run(prepared, trainer)
    check_folder(prepared)
    if trainer.accelerator.is_main_process:
        add_launch(recipe.output_dir, launch_entry(prepared))
    started = time.monotonic()
    train(prepared, trainer)
    if prepared.interruption.stopped:
        return _stopped(prepared, trainer)
    if not prepared.is_over and trainer.state.global_step == prepared.steps_before:
        raise faults.NothingTrained(f"no optimiser step was taken, of {prepared.steps}: the model is as it was")
    trainer.checkpoints.check_folder()
    # As TRL's own call: ours pushes to the hub later, in `finish`.
    trainer.save_model(training_args.output_dir, _internal_call=True)
    trainer.checkpoints.check_folder()
    try:
        finish(prepared, trainer, time.monotonic() - started)
    except KeyboardInterrupt:
        return _interrupted(f"the run is finished, and its model is in {recipe.output_dir}")
    return 0


def check_folder(prepared: Prepared) -> None:
    """Raise `FolderLost` on every rank if this launch lost the run's folder before its first step. Collective."""
    if prepared.held is not None:
        saved = prepared.checkpoint.name if prepared.checkpoint else None
        check_held(prepared.held, "before its first step", saved)


def describe_run(prepared: Prepared, trainer: GRPOTrainer) -> None:
    """Print what will be trained: sizes, rewards, the reference, the geometry, and what may be a mistake."""
    recipe, checked = prepared.recipe, prepared.checked
    _say(f"{recipe.source}: {_size(trainer)}, rewards {describe_rewards(checked.rewards)}")
    _say(f"  reference       {describe_reference(recipe, trainer)}")
    precision, surviving = measured_precision(prepared, trainer)
    _say(precision.describe(surviving))
    _say(checked.geometry.describe())
    _say(checked.geometry.describe_epoch(len(checked.train_dataset)))
    warning = precision.warning(surviving)
    golds = [checked.golds.describe()] if checked.golds else []
    golds += checks.sampling_note(recipe, checked.geometry, len(checked.train_dataset))
    for note in [*cautions(recipe.config), *([warning] if warning else []), *golds]:
        _say(f"  note            {note}")


def measured_precision(prepared: Prepared, trainer: GRPOTrainer) -> tuple[Precision, float | None]:
    """The dtypes of a run, and the share of an update that rounding leaves of the weights as loaded; None if not known."""
    recipe = prepared.recipe
    precision = Precision.of(
        recipe.config,
        recipe.model.get("dtype"),
        checks.optimiser(recipe, prepared.machine),
        backend=checks.backend_of(recipe, prepared.machine),
        is_adapter=isinstance(trainer.model, PeftModel),
        quantised=get_quantization_config(model_config(recipe)) is not None,
    )
    # Where FSDP loads on one rank, the others hold no values yet.
    if precision.updated == "float32" or not _is_first_rank():
        return precision, 1.0
    sample = stored_values(draw_sample(trainer.model.parameters()))
    return precision, precision.surviving(sample.cpu().numpy())


def train(prepared: Prepared, trainer: GRPOTrainer) -> None:
    """Run the training loop from the checkpoint, if there is one; of a finished run it only loads the checkpoint."""
    if prepared.is_over:
        _say(f"already finished: {prepared.checkpoint} is the end of the run, nothing is left to train")
    checkpoint = str(prepared.checkpoint) if prepared.checkpoint else None
    try:
        with loading_only(trainer, prepared.steps) if prepared.is_over else nullcontext():
            trainer.train(resume_from_checkpoint=checkpoint)
    except (Exception, KeyboardInterrupt):
        faults.close_progress_bars(trainer.callback_handler.callbacks)
        raise


def build_trainer(prepared: Prepared) -> GRPOTrainer:
    """The trainer of a run, the policy and its reference loaded."""
    recipe, checked, training_args = prepared.recipe, prepared.checked, prepared.training_args
    training_args.reward_weights = [reward.weight for reward in checked.rewards]
    model_args = model_config(recipe)
    train_dataset = checked.train_dataset
    optimiser = checks.optimiser(recipe, prepared.machine)
    trainer = GRPOTrainer(
        model=load_policy(recipe, training_args),
        reward_funcs=[checked_reward(reward.function) for reward in checked.rewards],
        args=training_args,
        train_dataset=train_dataset.select_columns(["prompt"]) if prepared.rollout else train_dataset,
        eval_dataset=checked.eval_dataset,
        processing_class=prepared.tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        rollout_func=prepared.rollout,
        kl_estimator=recipe.kl_estimator,
        micro_batching=recipe.micro_batching,
        generation=recipe.generation,
        sampling=recipe.sampling,
        advantages=recipe.advantages,
        generation_check=recipe.generation_check,
        reference=recipe.reference,
        optimizer_cls_and_kwargs=adamw_bf16(training_args) if optimiser == ADAMW_BF16 else None,
    )
    trainer.checkpoints.decision, trainer.checkpoints.held = prepared.point, prepared.held
    trainer.checkpoints.identify = lambda: prepared.identity
    if prepared.checkpoint is not None:
        trainer.add_callback(ContinueSchedule())
    trainer.add_callback(prepared.interruption)
    trainer.add_callback(LiveLog(recipe.output_dir / LIVE))
    if not training_args.disable_tqdm:  # then transformers draws no bar either
        # In a notebook another one, which in transformers 5.23 raises when a run ends after its first step.
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.add_callback(LiveLine([reward.name for reward in checked.rewards], replaced=[efficiency]))
    if recipe.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.early_stopping_patience))
    if training_args.report_to:
        trainer.add_callback(RecipeInTrackers(redacted(resolved(recipe.as_dict())), trainer.callback_handler))

    def create_model_card(**ignored: Any) -> None:
        if trainer.accelerator.is_main_process:
            attempt(recipe, "its model card was not written", write_model_card, recipe.output_dir)

    trainer.create_model_card = create_model_card  # TRL calls it with each checkpoint, and before it pushes
    return trainer


def _failed(prepared: Prepared, error: Exception) -> int:
    """Say why a run ended, and from where it can go on. Returns 1."""
    began = prepared.interruption.began
    checkpoint = prepared.last_checkpoint() if began else prepared.checkpoint
    folder, secrets = prepared.recipe.output_dir, known_secrets(prepared.recipe)
    faults.report(error, folder, checkpoint, resumable=faults.is_resumable(error, began=began), secrets=secrets)
    return 1


def finish(prepared: Prepared, trainer: GRPOTrainer, seconds: float) -> None:
    """What follows once the model is saved: whatever fails here is a warning, for the run is finished."""
    recipe = prepared.recipe
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
    """Call `function`; a failure is one line of warning that says what the run in `output_dir` now lacks."""
    try:
        function(*args)
    except Exception as error:  # of a hub, a tracker, a disk or our own: none of them undoes the run
        reason = scrubbed(one_line(f"{type(error).__name__}: {error}"), known_secrets(recipe))
        say_error(f"{recipe.output_dir}: {loss} ({reason})", kind="warning")


def _stopped(prepared: Prepared, trainer: GRPOTrainer) -> int:
    """Say where a run goes on that was asked to stop, and end it."""
    trainer.accelerator.wait_for_everyone()  # a rank that leaves may take its node, and the others' saves, with it
    code = INTERRUPTED if prepared.interruption.requested == signal.SIGINT else 0
    rest = "`--resume_from_checkpoint true` goes on from there"
    if prepared.training_args.save_only_model:
        rest = "without its optimiser (`save_only_model`), so no run can go on from there"
    by, state = prepared.interruption.name, trainer.state
    trainer.end()
    if _is_first_rank():
        print_last_line(
            f"stopped by {by} after step {state.global_step} of {state.max_steps}, which is saved: {rest}", code
        )
    return code


def _stopped_at_once(prepared: Prepared | None) -> int:
    """Say what is left of a run that Ctrl-C ended where it was."""
    if prepared is None or not prepared.recipe.output_dir.exists():
        return _interrupted(NOTHING_DONE)
    if (last := prepared.last_checkpoint()) is not None:
        return _interrupted(f"{last} is saved: `--resume_from_checkpoint true` goes on from there")
    return _interrupted("nothing is saved yet: `--resume_from_checkpoint true` starts again")


def _interrupted(rest: str) -> int:
    if _is_first_rank():
        print_last_line(f"stopped by Ctrl-C: {rest}", INTERRUPTED)
    return INTERRUPTED


def describe_reference(recipe: Recipe, trainer: GRPOTrainer) -> str:
    """What the reference is, and which references a checkpoint offers that this run begins from."""
    kept = Path(recipe.model["model_name_or_path"]) / REF
    sentence = trainer.reference_sentence
    if trainer.beta and (kept / "adapter_config.json").is_file() and recipe.reference.adapter != str(kept):
        sentence += f"; {kept} holds that of the run that wrote it: `reference: {{adapter: {kept}}}` keeps it instead"
    return sentence


def diagnosis(folder: Path) -> str:
    """What looks wrong in a finished run, or why that can't be told: the run is trained and saved in either case."""
    try:
        return describe(diagnose(Run.read(folder, within=DIAGNOSIS_SECONDS)))
    except OutOfTime:
        seconds = f"{DIAGNOSIS_SECONDS:.0f} s"
        return f"diagnosis: left out, as it takes more than {seconds}: `grpo-recipes diagnose {folder}` makes it"
    except UserError as error:
        return f"diagnosis: left out, {error}"


def summary(trainer: GRPOTrainer, seconds: float) -> str:
    """One paragraph on a finished run: steps, time, first and last logged reward, where the result lies."""
    rewards = [entry["reward"] for entry in trainer.state.log_history if entry.get("reward") is not None]
    change = f", reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else ""
    kind = "adapter" if hasattr(trainer.model, "peft_config") else "model"
    return f"{trainer.state.global_step} optimiser steps in {seconds:.0f} s{change}; the {kind} is in {trainer.args.output_dir}"


def _size(trainer: GRPOTrainer) -> str:
    total = sum(parameter.numel() for parameter in trainer.model.parameters())
    return f"{total:,} parameters, {trainer.get_num_trainable_parameters():,} trained"


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    if _is_first_rank():
        say(text)


def _refuse(sentence: str) -> int:
    """Print why the recipe can't run, once per launch; a lone failure of another rank is printed after a while."""
    if not _is_first_rank():
        time.sleep(SILENCE_SECONDS)
    return print_last_line(f"error: {sentence}", 2)


def leave(code: int) -> None:
    """End this process with `code`: of several ranks, without the interpreter's teardown, in which gloo's threads may abort."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    raise_on_interrupt()
    leave(main())
