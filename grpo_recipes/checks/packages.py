"""Checks of what a recipe uses besides TRL: trackers, optimizers, quantization and vLLM.

TRL finds these mistakes when the model is loaded, at the first generation, or not at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from datasets import Dataset
from transformers.integrations import integration_utils as trackers
from trl.import_utils import is_vllm_available

from grpo_recipes.data.rendering import PromptTools, token_lengths
from grpo_recipes.recipe.specs import not_a_choice
from grpo_recipes.runs.weights import adapter_config, adapter_kind, holds_adapter
from grpo_rewards.errors import UserError

# Packages whose name differs from the tracker's. transformers has one function `is_<package>_available` for each.
TRACKER_PACKAGES = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}

OPTIMIZER_PACKAGES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb", "ademamix", "lion_", "paged_", "rmsprop_bnb"), ("bitsandbytes",) * 2),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), ("torchao",) * 2),
    **dict.fromkeys(("lomo", "adalomo"), ("lomo_optim", "lomo-optim")),
    "adamw_anyprecision": ("torchdistx", "torchdistx"),
    "apollo_": ("apollo_torch", "apollo-torch"),
    "galore_": ("galore_torch", "galore-torch"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "schedule_free_": ("schedulefree", "schedulefree"),
    "stable_adamw": ("optimi", "torch-optimi"),
}
"""Module and package of an optimizer, by the beginning of its name. transformers imports it after loading the model."""


def missing(config: Any) -> list[UserError]:
    """Return one error for each package that a recipe needs and this machine lacks.

    Args:
        config: Configuration with the attributes of `GRPOConfig`.
    """
    errors = [*_missing_trackers(config.report_to), *missing_optimizer(config)]
    return [*errors, *_missing_vllm()] if config.use_vllm else errors


def _lacking(key: str, package: str, fix: str) -> UserError:
    return UserError(key, f"it needs the package {package}, which is not installed here", fix)


def _missing_trackers(report_to: str | list[str] | None) -> list[UserError]:
    names = [report_to] if isinstance(report_to, str) else report_to or []
    errors = []
    for name in names:
        if name in ("all", "none"):
            continue
        if name not in trackers.INTEGRATION_TO_CALLBACK:
            errors.append(not_a_choice("report_to", name, [*trackers.INTEGRATION_TO_CALLBACK, "all", "none"]))
            continue
        package = TRACKER_PACKAGES.get(name, name)
        if not getattr(trackers, f"is_{package}_available")():
            errors.append(_lacking(f"`report_to: {name}`", package, "install it, or set `report_to: none`"))
    return errors


def missing_optimizer(config: Any) -> list[UserError]:
    """Return an error if the optimizer of a recipe is in a package that this machine lacks, else []."""
    name = str(getattr(config.optim, "value", config.optim))
    for beginning, (module, package) in OPTIMIZER_PACKAGES.items():
        if name.startswith(beginning) and find_spec(module) is None:
            fix = "install it, or set another optimizer, such as `optim: adamw_torch_fused`"
            return [_lacking(f"`optim: {name}`", package, fix)]
    return []


def missing_quantization(model: Mapping[str, Any]) -> list[UserError]:
    """Return an error if a recipe quantizes its base and this machine lacks the package for it, else [].

    Args:
        model: Keys of `ModelConfig`.
    """
    for key in ("load_in_4bit", "load_in_8bit"):
        if model.get(key) and find_spec("bitsandbytes") is None:
            return [_lacking(f"`{key}`", "bitsandbytes", "`pip install 'grpo-recipes[qlora]'`")]
    return []


def _missing_vllm() -> list[UserError]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        is_available = is_vllm_available()
    if not is_available:
        return [_lacking("`use_vllm`", "vLLM", "`pip install 'grpo-recipes[vllm]'`, or set `use_vllm: false`")]
    # Only TRL knows the versions that it supports, and it warns about others: "TRL currently supports vLLM versions
    # from A to B. You have version C installed. We recommend ..."
    errors = []
    for warning in caught:
        text = str(warning.message).partition(". We recommend")[0].replace(". You have", ", and you have")
        errors.append(UserError("`use_vllm`", text, "install one of those"))
    return errors


def check_vllm(config: Any, num_processes: int, model: Mapping[str, Any]) -> None:
    """Raise `UserError` for engines that the processes can't share, or a policy that can't become vLLM's weights.

    Args:
        config: Configuration with the attributes of `GRPOConfig`.
        num_processes: Number of processes of the run.
        model: Keys of `ModelConfig`. The policy is examined only if it is a folder.
    """
    if not config.use_vllm:
        return
    size, name = config.vllm_tensor_parallel_size, model["model_name_or_path"]
    if config.vllm_mode == "colocate" and num_processes % size:
        problem = (
            f"{size} does not divide the {num_processes} process(es) of the run, which share engines in such groups"
        )
        raise UserError("`vllm_tensor_parallel_size`", problem, "set a size that does")
    adapter = adapter_config(name) if holds_adapter(name) else None
    if adapter is not None and adapter.is_prompt_learning:
        kind = adapter_kind(adapter)
        problem = f"it is an adapter of the kind {kind}, which can't be merged into the weights that vLLM gets"
        raise UserError(f"`model_name_or_path`: {name}", problem, "set `use_vllm: false`")
    if model.get("load_in_8bit"):
        fix = "set `use_vllm: false`, or `load_in_8bit: false`"
        raise UserError("`load_in_8bit`", "it loads a base that vLLM can't hold", fix)


def check_vllm_prompts(
    config: Any, tables: Iterable[Dataset | None], tokenizer: Any, tools: PromptTools | None = None
) -> None:
    """Raise `UserError` if a prompt of `tables` is too long for vLLM's context. Without a limit nothing is measured."""
    if _vllm_context(config) is None:
        return
    longest = 0
    for table in tables:
        if table is not None:
            longest = max(longest, int(token_lengths(table, tokenizer, config.chat_template_kwargs or {}, tools).max()))
    check_vllm_lengths(config, longest)


def check_vllm_lengths(config: Any, longest: int) -> None:
    """Raise `UserError` if a prompt of `longest` tokens leaves less than `max_completion_length` of vLLM's context.

    vLLM fails on a prompt that is longer than its context, and silently ends a completion where the context is full.
    """
    limit = _vllm_context(config)
    needed = longest + config.max_completion_length
    if limit is not None and needed > limit:
        problem = (
            f"it is {limit}, and the longest prompt of {longest} tokens with `max_completion_length` "
            f"{config.max_completion_length} needs {needed}"
        )
        raise UserError("`vllm_max_model_length`", problem, "raise it, or set `dataset.max_prompt_tokens`")


def _vllm_context(config: Any) -> int | None:
    """Return the tokens of vLLM's context, or None if the recipe does not set them or a server has its own limit."""
    return config.vllm_max_model_length if config.use_vllm and config.vllm_mode == "colocate" else None
