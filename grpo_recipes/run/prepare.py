"""Preparation of a run: everything but the policy is built, and compared with the launch that the run resumes.

A resumed launch must have the recipe, the order of the prompts, the data and the weights of the one before.
`runs/resume.py` decides from which checkpoint it resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from grpo_recipes.checks.checks import Checked, Machine, check_output_dir, check_packages, resume_point
from grpo_recipes.checks.tokenizer import ChatTemplate
from grpo_recipes.data.hub import hub_commit
from grpo_recipes.process.messages import say_once
from grpo_recipes.recipe.recipe import Recipe, RecipeError, model_config, naming, resolved
from grpo_recipes.recipe.trl_keys import RESUME_MAY_CHANGE
from grpo_recipes.run.inputs import Inputs, build_inputs, load_reward_models, training_arguments
from grpo_recipes.runs.checkpoints import read_manifest, steps_done
from grpo_recipes.runs.files import RECORD
from grpo_recipes.runs.identity import Identity, Source, compare, identify, reward_models
from grpo_recipes.runs.lock import GO_ON, FolderLost, Held, only_writer
from grpo_recipes.runs.resume import Resume, confirmed, earlier_launch, layout_change, newest_checkpoint, recipe_changes
from grpo_recipes.runs.weights import adapter_config
from grpo_recipes.training.callbacks import StopOnSignal
from grpo_recipes.training.saving import check_held
from grpo_rewards.errors import UserError
from grpo_rewards.redaction import redacted


@dataclass(frozen=True)
class Prepared(Inputs):
    """Everything that the checks of a recipe loaded or built, so that `run` does not repeat the work."""

    training_args: GRPOConfig
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
        return newest_checkpoint(self.recipe.output_dir, self.machine.num_processes)

    def check_folder(self) -> None:
        """Raise `FolderLost` on every rank if this launch lost the run's folder before its first step. Collective."""
        if self.held is not None:
            check_held(self.held, "before its first step", self.checkpoint)


def prepare(recipe: Recipe, machine: Machine) -> Prepared:
    """Check the recipe, and build everything that does not need the policy. Raises `UserError`."""
    check_output_dir(recipe)
    check_packages(recipe)
    point = resume_point(recipe, machine)
    checkpoint = point.newest if point is not None else None
    before = check_same_recipe(recipe, checkpoint) if point is not None else {}
    inputs = build_inputs(recipe, machine)
    checked, geometry = inputs.checked, inputs.checked.geometry
    identity = identity_of(recipe, checked)
    if checkpoint is not None:
        if change := layout_change(before, order_of(recipe, checked)):
            raise _other_run(recipe, change)
        check_same_content(recipe, checkpoint, identity)
    training_args = training_arguments(recipe)
    # Trackers show this name.
    training_args.run_name = redacted(training_args.run_name or recipe.output_dir.resolve().name)
    interruption = StopOnSignal(lambda step: geometry.ends_generation(step, len(checked.train_dataset)))
    return Prepared(
        **vars(inputs), training_args=training_args, identity=identity, point=point, interruption=interruption
    )


def check_same_recipe(recipe: Recipe, checkpoint: Path | None) -> Mapping[str, Any]:
    """Compare the recipe with that of the launch that a resume continues, and return that launch's entry in `run.json`.

    Raises:
        RecipeError: `run.json` is damaged or missing, or a key has changed that a resume may not change.
    """
    with naming(f"{recipe.source}: `resume_from_checkpoint`"):
        before = earlier_launch(recipe.output_dir, checkpoint)
    if checkpoint is None:
        return before
    if not before:
        say_once(
            f"{checkpoint} is of another trainer, without a manifest and a {RECORD}: only the headers of its files are "
            "checked, and not whether it is of this recipe"
        )
        return before
    earlier, now = redacted(resolved(before["recipe"])), redacted(resolved(recipe.as_dict()))
    refused, applied = recipe_changes(earlier, now, before.get("directory", "."), RESUME_MAY_CHANGE)
    if refused:
        raise _other_run(recipe, ", ".join(refused))
    if applied:
        say_once(f"changed for the rest of the run: {', '.join(applied)}")
    return before


def _other_run(recipe: Recipe, change: str) -> RecipeError:
    fix = "launch as before, or start another run from the checkpoint as its `model_name_or_path`"
    return recipe.error("`resume_from_checkpoint`", change, fix)


def check_same_content(recipe: Recipe, checkpoint: Path, identity: Identity) -> None:
    """Print changes since a checkpoint was saved. Raises `RecipeError` for changed data or weights."""
    if read_manifest(checkpoint) is None:  # another trainer's: `check_same_recipe` has printed what is not checked
        return
    with naming(f"{recipe.source}: `resume_from_checkpoint`"):
        if (line := compare(checkpoint, identity)) is not None:
            say_once(line)


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
    if (config := adapter_config(name, revision)) is not None and config.base_model_name_or_path:
        base = config.base_model_name_or_path
        sources["base"] = Source(base, hub_commit(base, config.revision))
    if (reference := recipe.reference.adapter) is not None:
        sources["reference"] = Source(reference, hub_commit(reference))
    sources |= reward_models(checked.rewards, hub_commit)
    tools = checked.toolset.sources if checked.toolset is not None else {}
    with recipe.naming_this_file():
        template = ChatTemplate.read(recipe.chat_template_path)
    return identify(checked.train_dataset, checked.rewards, sources, tools, template.digest if template else None)


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
    point = confirmed(prepared.point, each_node=recipe.config.save_on_each_node)
    if (reason := point.obstacle()) is not None:
        raise recipe.error(f"`resume_from_checkpoint`: {reason.place}", reason.problem, reason.fix)
    if point.newest is not None and point.newest != prepared.checkpoint:  # the one that `prepare` compared is damaged
        check_same_content(recipe, point.newest, prepared.identity)
    return replace(prepared, point=point, steps_before=steps_done(point.newest) if point.newest else 0)
