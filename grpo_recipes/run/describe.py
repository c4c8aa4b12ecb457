"""Description of a run: what it prints before its first step and after its last one, and its entry in `run.json`."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from trl import GRPOConfig

from grpo_recipes.checks.checks import precision_of
from grpo_recipes.checks.precision import Precision
from grpo_recipes.checks.rewards import describe_rewards
from grpo_recipes.process.messages import say_once
from grpo_recipes.process.ranks import launched_rank
from grpo_recipes.recipe.trl_keys import cautions
from grpo_recipes.reports.diagnostics import describe, diagnose
from grpo_recipes.reports.run import OutOfTime, Run
from grpo_recipes.run.prepare import Prepared, order_of
from grpo_recipes.runs.record import describe_launch
from grpo_recipes.runs.resume import Resume
from grpo_recipes.training.adamw_bf16 import draw_sample, stored_values
from grpo_recipes.training.trainer import GRPOTrainer
from grpo_rewards.errors import UserError

DIAGNOSIS_SECONDS = 5.0
"""Time that the diagnosis may delay the end of a training, and so the next launch."""


def describe_resumption(folder: Path, point: Resume) -> str:
    """Return one line on the checkpoint that the run in `folder` resumes from, and on those that it passes over."""
    line = "".join(f"{one.reason}, and is set aside as {one.aside.name}: " for one in point.passed_over)
    if point.newest is None:
        return f"{line}{folder} has no checkpoint to resume from: starting at the beginning"
    return f"{line}resuming from {point.newest}"


def describe_run(prepared: Prepared, trainer: GRPOTrainer) -> None:
    """Print sizes, rewards, reference, precision and geometry of a run, and notes on possible mistakes."""
    recipe, checked = prepared.recipe, prepared.checked
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    trained = f"{size:,} parameters, {trainer.get_num_trainable_parameters():,} trained"
    precision, surviving = measured_precision(prepared, trainer)
    lines = [f"{recipe.source}: {trained}, rewards {describe_rewards(checked.all_rewards)}"]
    if checked.toolset is not None:
        lines.append(f"  tools           {checked.toolset.describe(recipe.config.max_tool_calling_iterations)}")
    lines += [f"  reference       {trainer.reference_sentence}", precision.describe(surviving)]
    lines.append(checked.geometry.describe())
    lines.append(checked.geometry.describe_epoch(len(checked.train_dataset), recipe.config.max_completion_length))
    notes = cautions(recipe.config, recipe.model)
    if warning := precision.warning(surviving):
        notes.append(warning)
    if checked.golds:
        notes.append(checked.golds.describe())
    for note in [*notes, *checked.gold_notes, *checked.prompt_notes]:
        lines.append(f"  note            {note}")
    for line in lines:
        say_once(line)


def measured_precision(prepared: Prepared, trainer: GRPOTrainer) -> tuple[Precision, float | None]:
    """Return the dtypes of a run, and the share of an update that survives rounding, measured on the loaded weights.

    The share is None if it is not known.
    """
    precision = precision_of(prepared.recipe, prepared.machine, is_adapter=isinstance(trainer.model, PeftModel))
    # If FSDP loads the weights on one rank, the other ranks hold no values yet.
    if precision.updated == "float32" or launched_rank() != 0:
        return precision, 1.0
    sample = stored_values(draw_sample(trainer.model.parameters()))
    return precision, precision.surviving(sample.cpu().numpy())


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


def summary(trainer: GRPOTrainer, seconds: float) -> str:
    """Return one line on a finished run: steps, time, first and last logged reward, and the folder of the model."""
    rewards = [entry["reward"] for entry in trainer.state.log_history if entry.get("reward") is not None]
    change = f", reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else ""
    kind = "adapter" if hasattr(trainer.model, "peft_config") else "model"
    steps, folder = trainer.state.global_step, trainer.args.output_dir
    return f"{steps} optimizer steps in {seconds:.0f} s{change}; the {kind} is in {folder}"


def diagnosis(folder: Path) -> str:
    """Return the findings on a finished run, or why it was not diagnosed. The run is saved in either case."""
    try:
        return describe(diagnose(Run.read(folder, within=DIAGNOSIS_SECONDS)))
    except OutOfTime:
        command = f"`grpo-recipes diagnose {folder}`"
        return f"diagnosis: skipped after {DIAGNOSIS_SECONDS:.0f} s: {command} takes the time it needs"
    except UserError as error:
        return f"diagnosis: skipped, {error}"
