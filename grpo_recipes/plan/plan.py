"""Plan of a recipe on a machine: batch geometry, epoch, prompts, precision and memory, without loading weights."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.checks import packages
from grpo_recipes.checks.checks import Machine, check, check_model_exists, dry_config, model_positions, precision_of
from grpo_recipes.checks.geometry import Geometry, geometry_of
from grpo_recipes.checks.precision import Precision, initial_weights
from grpo_recipes.checks.rewards import describe_rewards, prefilled_notes
from grpo_recipes.checks.tools import Toolset, load_toolset
from grpo_recipes.data.sources import DatasetUnreachable
from grpo_recipes.plan.memory import RunEstimate, estimate, parse_size
from grpo_recipes.plan.prompts import PromptReport, prompt_report
from grpo_recipes.recipe.recipe import Recipe, RecipeError, find_file, parse_recipe, resolved, shipped_files
from grpo_recipes.recipe.trl_keys import cautions, ignored_keys
from grpo_rewards.composed import leaves
from grpo_rewards.files import relative_to
from grpo_rewards.redaction import redacted
from grpo_rewards.registry import BuiltReward, UnbuiltReward
from grpo_rewards.terminal import WIDTH, Cell, Labelled, Part

_TEXT = len("  optimizer step  ")  # width of a label, after which the text of a line begins


@dataclass(frozen=True)
class Plan:
    """Plan of a recipe on a machine.

    Attributes:
        recipe: Recipe as resolved.
        geometry: Batch geometry.
        rewards: Rewards with their weights.
        prompts: Number of training prompts, or the reason why it is unknown.
        run: Layout, tokens and memory that the run is expected to have.
        precision: Dtypes and optimizer.
        surviving: Share of an update that survives rounding, in [0, 1], or None if it is not known.
        notes: Sentences on probable mistakes and on what was assumed.
        shown: First prompt and the lengths of all, or None if the dataset can't be reached.
        toolset: Tools and environments, or None without any.
    """

    recipe: Recipe
    geometry: Geometry
    rewards: Sequence[BuiltReward]
    prompts: int | str
    run: RunEstimate
    precision: Precision
    surviving: float | None
    notes: Sequence[str]
    shown: PromptReport | None
    toolset: Toolset | None = None

    def describe(self) -> list[Part]:
        """Return the plan for the terminal."""
        config = self.recipe.config
        texts = [f"  rewards         {describe_rewards(self.rewards)}"]
        if self.toolset is not None:
            texts.append(f"  tools           {self.toolset.describe(config.max_tool_calling_iterations)}")
        texts += [self.precision.describe(self.surviving), self.geometry.describe()]
        if isinstance(self.prompts, int):
            texts.append(self.geometry.describe_epoch(self.prompts, config.max_completion_length))
        else:
            texts.append(f"  epoch           unknown: {self.prompts}")
        head, prompt = self.shown.describe(self.recipe.dataset) if self.shown else ([], [])
        texts += [*self.run.describe_layout(), *head]
        lines = [line for text in texts for line in text.split("\n")]
        return [
            Cell(self.recipe.source, "head"),
            *(Labelled(line[:_TEXT].strip(), line[_TEXT:]) for line in lines),
            *prompt,
            "",
            *self.run.describe_memory(),
            *(Labelled("note", note) for note in self.notes),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for `--json`, sizes in bytes. Unknown values are null, and `unknown` lists the reasons."""
        longest = self.recipe.config.max_completion_length
        return {
            "recipe": self.recipe.source,
            "geometry": self.geometry.as_dict(),
            **({"tools": [tool.name for tool in self.toolset.all_tools]} if self.toolset else {}),
            "epoch": self.geometry.epoch(self.prompts, longest) if isinstance(self.prompts, int) else None,
            "prompts": asdict(self.shown) if self.shown else None,
            **self.run.as_dict(),
            "precision": {**asdict(self.precision), "updated": self.precision.updated, "surviving": self.surviving},
            "unknown": [reason for reason in (self.prompts, self.run.memory) if isinstance(reason, str)],
            "notes": list(self.notes),
        }


def plan(
    arguments: Sequence[str],
    *,
    accelerate_config: str | None = None,
    num_processes: int | None = None,
    gpu_memory: str | None = None,
    model_config_file: str | None = None,
    build: bool = False,
    options: Sequence[str] = (),
) -> Plan:
    """Plan a recipe.

    Args:
        arguments: Arguments of the training command, which name the recipe.
        accelerate_config: Name or path of an accelerate configuration, or None for this machine.
        num_processes: Number of processes, or None for that of the machine.
        gpu_memory: Memory of one GPU, such as `80GB`.
        model_config_file: Path of the model's config.json if the hub can't be reached.
        build: True to call classes and factories among the rewards of other packages, as training does. Otherwise they
            are only imported.
        options: Options of the command itself, for which an unknown argument may be a misspelling.

    Raises:
        UserError: The recipe can't run as written, or an option is wrong.
    """
    if model_config_file is not None and not Path(model_config_file).exists():
        problem = f"there is no such file{relative_to(model_config_file)}"
        raise RecipeError(f"--model_config {model_config_file}", problem, "give a model's config.json")
    gpu_bytes = parse_size(gpu_memory) if gpu_memory is not None else None
    recipe = parse_recipe(arguments, options)
    _check_what_is_here(recipe, has_config=model_config_file is not None, is_here=accelerate_config is None)
    layout_file = find_file("accelerate_configs", accelerate_config) if accelerate_config is not None else None
    machine = Machine.described(layout_file) if layout_file is not None else Machine.here()
    if num_processes is not None:
        machine = replace(machine, num_processes=num_processes)
    # Geometry and rewards are planned even if the dataset can't be reached, so `check` comes after them.
    geometry = geometry_of(recipe, machine.num_processes)
    config = dry_config(recipe, machine)
    rewards, toolset = _rewards_and_tools(recipe, build)
    lacking = [*packages.missing(recipe.config), *packages.missing_quantization(recipe.model)]
    notes = [*cautions(recipe.config, recipe.model), *map(str, lacking), *_unbuilt(rewards)]
    prompts, shown = _prompts(recipe, machine, build, notes)
    run = estimate(recipe, config, machine, geometry, rewards, shown, layout_file, gpu_bytes, model_config_file)
    precision = precision_of(recipe, machine)
    surviving = precision.surviving(initial_weights(run.spread))
    warning = precision.warning(surviving)
    notes += [*run.notes, *([warning] if warning else [])]
    return Plan(recipe, geometry, rewards, prompts, run, precision, surviving, notes, shown, toolset)


def _check_what_is_here(recipe: Recipe, *, has_config: bool, is_here: bool) -> None:
    """Raise `RecipeError` if the model does not exist, or the optimizer's package is missing on this machine.

    Args:
        recipe: Recipe that is planned.
        has_config: True if the model's configuration is given.
        is_here: True if the recipe is planned for this machine.
    """
    is_shipped = Path(recipe.source) in shipped_files("recipes").values()
    names_model = any(word.startswith("--model_name_or_path") for word in recipe.arguments)
    # Another command may have to make the model of a shipped recipe first.
    if not has_config and (names_model or not is_shipped):
        check_model_exists(recipe)
    if is_here:
        with recipe.naming_this_file():
            for error in packages.missing_optimizer(recipe.config):
                raise error


def _rewards_and_tools(recipe: Recipe, build: bool) -> tuple[Sequence[BuiltReward], Toolset | None]:
    """Return the rewards, those of tools and environments included, and the tools and environments."""
    rewards = recipe.build_rewards(call_factories=build)
    with recipe.naming_this_file():
        toolset = load_toolset(recipe)
    return (rewards, None) if toolset is None else ([*rewards, *toolset.rewards()], toolset)


def _prompts(recipe: Recipe, machine: Machine, build: bool, notes: list[str]) -> tuple[int | str, PromptReport | None]:
    """Return the number of prompts, or why it is unknown, and a report. Add notes on golds, tags and lengths."""
    try:
        checked = check(recipe, machine, call_factories=build)
        shown = prompt_report(recipe, checked.train_dataset, checked.toolset)
    except DatasetUnreachable as error:
        return str(error), None
    # A sample may miss the longest prompt: training measures all of them again.
    longest = shown.lengths.longest_trained(recipe.dataset) if shown.lengths else None
    if longest is not None:
        with recipe.naming_this_file():
            packages.check_vllm_lengths(recipe.config, longest)
    if checked.golds:
        notes.append(checked.golds.describe())
    notes += checked.gold_notes
    if shown.unknown is None:
        notes += prefilled_notes(checked.rewards, shown.text)
    if checked.eval_dataset is None and recipe.dataset.eval_share is not None:
        share = f"{recipe.dataset.eval_share:.0%}"
        notes.append(
            f"about {share} of the rows are held out, and no evaluation reads them: set `eval_strategy: steps`"
        )
    positions, completion = model_positions(recipe), recipe.config.max_completion_length
    if positions is not None and (longest or 0) + completion > positions:
        notes.append(
            f"`max_completion_length` {completion:,} after a prompt of {longest or 0:,} tokens needs "
            f"{(longest or 0) + completion:,} positions, and the model was made for {positions:,} "
            "(`max_position_embeddings`): lower it"
        )
    return len(checked.train_dataset), shown


def resolved_yaml(arguments: Sequence[str], options: Sequence[str] = ()) -> str:
    """Return a recipe as YAML, with TRL's default for every key that is missing and has an effect.

    Args:
        arguments: Arguments of the training command, which name the recipe.
        options: Options of the command itself, for which an unknown argument may be a misspelling.

    Raises:
        RecipeError: A key or its value is wrong.
    """
    recipe = parse_recipe(arguments, options)
    ignored = ignored_keys(recipe.config.loss_type)
    values = {key: value for key, value in resolved(recipe.as_dict()).items() if key not in ignored}
    return yaml.safe_dump(redacted(values), sort_keys=False, allow_unicode=True)


def shipped_recipes() -> str:
    """Return the names of the shipped recipes, each with the first sentence of its head."""
    lines = ["The shipped recipes; `grpo-recipes plan NAME` describes one of them."]
    for name, file in shipped_files("recipes").items():
        head = file.read_text(encoding="utf-8").partition("\n#\n")[0]
        text = " ".join(line.removeprefix("#").strip() for line in head.splitlines() if line.startswith("#"))
        sentence = re.split(r"(?<!\bDr)\.(?=\s|$)", text)[0]
        lines += ["", f"  {name}", *textwrap.wrap(sentence, WIDTH, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(lines)


def _unbuilt(rewards: Sequence[BuiltReward]) -> list[str]:
    """Return a note on the rewards that were only imported, and so not checked as training checks them."""
    names = [f"`{leaf.name}`" for leaf in leaves(rewards) if isinstance(leaf.unbound, UnbuiltReward)]
    if not names:
        return []
    return [f"of another package, imported and not built: {', '.join(names)}; `--build` builds them, as training does"]
