"""What vLLM can't do with a recipe: TRL finds it when the model is loaded, at the first generation, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from grpo_recipes.data.prompts import token_lengths
from grpo_recipes.runs.weights import ADAPTER_CONFIG, adapter_config
from grpo_rewards.errors import UserError


def check(config: Any, num_processes: int, model: Mapping[str, Any]) -> None:
    """Raise `UserError` for an engine that the processes can't share, and a policy that can't become vLLM's weights.

    `config` holds the keys of `GRPOConfig`, `model` those of `ModelConfig`; of the policy only a folder is looked into.
    """
    if config.use_vllm:
        for mistake in (*_split(config, num_processes), *_adapter(model["model_name_or_path"]), *_quantised(model)):
            raise UserError(mistake)


def check_prompts(config: Any, tables: Sequence[Dataset | None], tokenizer: Any) -> None:
    """`check_lengths` of every prompt of some tables, measured only where vLLM's context has a limit."""
    if _limit(config) is None:
        return
    lengths = [
        token_lengths(table, tokenizer, config.chat_template_kwargs or {}) for table in tables if table is not None
    ]
    check_lengths(config, max(int(of_table.max()) for of_table in lengths))


def check_lengths(config: Any, longest: int) -> None:
    """Raise `UserError` if a prompt of `longest` tokens leaves less than `max_completion_length` of vLLM's context.

    vLLM fails at a prompt that is longer than its context, and ends a completion early, without a word, where it is full.
    """
    limit = _limit(config)
    if limit is None:
        return
    needed = longest + config.max_completion_length
    if needed > limit:
        raise UserError(
            f"`vllm_max_model_length` is {limit}, and the longest prompt of {longest} tokens with `max_completion_length` "
            f"{config.max_completion_length} needs {needed}: raise the first, or set `dataset.max_prompt_tokens`"
        )


def _limit(config: Any) -> int | None:
    """The tokens of vLLM's context, if the recipe sets them: a server has its own."""
    return config.vllm_max_model_length if config.use_vllm and config.vllm_mode == "colocate" else None


def _split(config: Any, num_processes: int) -> Iterator[str]:
    size = config.vllm_tensor_parallel_size
    if config.vllm_mode == "colocate" and num_processes % size:
        yield (
            f"`vllm_tensor_parallel_size` {size} does not divide the {num_processes} process(es) of the run, which share "
            "engines in groups of that size: set one that does"
        )


def _adapter(model: str) -> Iterator[str]:
    """An adapter that adds to the input, and so is no part of the weights that vLLM gets."""
    if not (Path(model) / ADAPTER_CONFIG).is_file():
        return
    config = adapter_config(model)
    if config is not None and config.is_prompt_learning:
        yield (
            f"`model_name_or_path` {model} is an adapter of the kind {config.peft_type.value}, which can't be merged into the "
            "weights that vLLM gets: set `use_vllm: false`"
        )


def _quantised(model: Mapping[str, Any]) -> Iterator[str]:
    if model.get("load_in_8bit"):
        yield "`load_in_8bit` loads a base that vLLM can't hold: set `use_vllm: false`, or `load_in_8bit: false`"
