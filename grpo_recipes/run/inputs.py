"""Inputs of a recipe's trainer besides its policy: rows, rewards, tokenizer and recorded responses."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from grpo_recipes.checks.checks import Checked, Machine, check, grpo_config
from grpo_recipes.checks.packages import check_vllm_prompts
from grpo_recipes.checks.rewards import prefilled_notes
from grpo_recipes.checks.tokenizer import check_chat_template, load_tokenizer
from grpo_recipes.checks.tools import check_template
from grpo_recipes.data.rendering import first_prompt, limit_prompts
from grpo_recipes.generation.stop_strings import StopStrings
from grpo_recipes.plan.model_shape import check_adapter
from grpo_recipes.process.messages import say_once
from grpo_recipes.recipe.recipe import Recipe, naming
from grpo_recipes.runs.weights import adapter_config, check_weight_files
from grpo_recipes.training.offline import RecordedRollout
from grpo_rewards.composed import leaves
from grpo_rewards.errors import UserError, one_line


@dataclass(frozen=True)
class Inputs:
    """Everything that a trainer of a recipe receives besides its policy."""

    recipe: Recipe
    machine: Machine
    checked: Checked
    tokenizer: PreTrainedTokenizerBase
    rollout: RecordedRollout | None
    """Recorded responses that replace generation, or None."""


def build_inputs(recipe: Recipe, machine: Machine) -> Inputs:
    """Check the recipe, and build the inputs of its trainer. The folder of the run is not looked at.

    Prints how many prompts `dataset.max_prompt_tokens` affects.

    Raises:
        UserError: the recipe can't run as written.
    """
    check_weights(recipe)
    checked = check(recipe, machine)
    check_adapter(recipe)
    toolset, config = checked.toolset, recipe.config
    tokenizer = load_tokenizer(recipe)
    check_chat_template(recipe, tokenizer, checked.train_dataset[0]["prompt"])
    tools = None
    if toolset is not None:
        tools = toolset.in_prompts(check_template(recipe, toolset, tokenizer))
    with recipe.naming_this_file():
        StopStrings.of(config.generation_kwargs, tokenizer)  # raises for a tokenizer that can't be searched
        template_kwargs = config.chat_template_kwargs
        given, spec = checked.train_dataset, recipe.dataset
        train_dataset, affected = limit_prompts(given, spec, tokenizer, template_kwargs, tools)
        if affected:
            done = "dropped" if spec.overlong_prompts == "drop" else "cut from the left"
            say_once(f"{affected} of {len(given)} prompts over {spec.max_prompt_tokens} tokens were {done}")
        checked.geometry.check_dataset(len(train_dataset))
        if (eval_dataset := checked.eval_dataset) is not None:
            eval_dataset, _ = limit_prompts(eval_dataset, spec, tokenizer, template_kwargs, tools)
        check_vllm_prompts(config, [train_dataset, eval_dataset], tokenizer, tools)
        rollout = None
        if recipe.offline is not None:
            rollout = RecordedRollout(train_dataset, tokenizer, recipe.offline, config.max_completion_length)
        prompt = first_prompt(train_dataset, tokenizer, template_kwargs or {}, tools)
    notes = prefilled_notes(checked.rewards, prompt)
    checked = replace(checked, train_dataset=train_dataset, eval_dataset=eval_dataset, prompt_notes=notes)
    return Inputs(recipe, machine, checked, tokenizer, rollout)


def check_weights(recipe: Recipe) -> None:
    """Raise `RecipeError` if the folder of the policy, its base or its reference has missing or damaged weights."""
    name, base = recipe.model["model_name_or_path"], None
    if Path(name).is_dir():
        with naming(f"{recipe.source}: `model_name_or_path`"):
            config = adapter_config(name)
        base = config.base_model_name_or_path if config is not None else None
    if base is not None and Path(base).is_absolute() and not Path(base).exists():
        problem = f"{name} is an adapter, and its base {base} is missing"
        raise recipe.error("`model_name_or_path`", problem, "set `base_model_name_or_path` in its adapter_config.json")
    _check_folder_weights(recipe, "base_model_name_or_path", base)
    _check_folder_weights(recipe, "model_name_or_path", name)
    _check_folder_weights(recipe, "reference.adapter", recipe.reference.adapter)


def _check_folder_weights(recipe: Recipe, key: str, folder: str | None) -> None:
    if folder is None or not Path(folder).is_dir():
        return
    try:
        check_weight_files(Path(folder))
    except UserError as error:
        fix = "copy or save it again, or name another model"
        raise recipe.error(f"`{key}`: {error.place}", error.problem, fix) from error


def load_reward_models(recipe: Recipe, checked: Checked) -> None:
    """Load every reward model, and request one score from every judge, before the policy is loaded.

    Raises:
        RecipeError: a reward model can't be loaded, or a judge does not answer.
    """
    for leaf in leaves(checked.rewards):
        reward = leaf.declared
        if reward.model_source is not None and (Path(reward.model_source) / "config.json").is_file():
            _check_folder_weights(recipe, "rewards", reward.model_source)
        try:
            line = reward.prepare()
        except UserError as error:
            raise recipe.error(f"`rewards`: {error.place}", error.problem, error.fix) from error
        except ValueError as error:  # a reward of another package raised it
            raise recipe.error("`rewards`", one_line(error), "correct the value") from error
        if line is not None:
            say_once(line)


def training_arguments(recipe: Recipe) -> GRPOConfig:
    """Return TRL's training arguments, with `hub_token` moved into HF_TOKEN of this process.

    The hub's client reads the token there, because TRL passes none on for `log_completions_hub_repo`.
    """
    arguments = grpo_config(recipe)
    if arguments.hub_token:
        os.environ["HF_TOKEN"], arguments.hub_token = arguments.hub_token, None
    return arguments
