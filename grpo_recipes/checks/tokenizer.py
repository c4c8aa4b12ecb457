"""The policy's tokenizer, and whether its chat template ends a turn where generation stops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from grpo_recipes.checks import model_sizes, rehearsal
from grpo_recipes.data.hub import hub_answers, is_missing
from grpo_recipes.recipe.recipe import Recipe, RecipeError
from grpo_recipes.runs.weights import adapter_config, tokenizer_source
from grpo_rewards.errors import one_line

_MARK = "grpo-recipes"


class TokenizerUnavailable(RecipeError):
    """A tokenizer that is not there, or can't be read."""


def load_tokenizer(
    recipe: Recipe, dataset: datasets.Dataset | None = None, *, local_only: bool = False
) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer, padding on the left, after a bounded child has tried it on some prompts of
    `dataset`.

    Args:
        recipe: names the model.
        dataset: has the column `prompt`; None trusts the tokenizer.
        local_only: asks no hub.

    Raises:
        TokenizerUnavailable: it can't be loaded.
        RecipeError: it, or its chat template, is too slow or too large, or fails on a prompt; or the configuration,
            which transformers reads to find the tokenizer's class, has a size that no model has.
    """
    name = tokenizer_source(recipe.model["model_name_or_path"])
    if is_missing(name):
        raise TokenizerUnavailable(f"{recipe.source}: `model_name_or_path` {name}: there is no such folder")
    revision = recipe.model.get("model_revision", "main")

    def load() -> PreTrainedTokenizerBase:
        try:
            return AutoTokenizer.from_pretrained(
                name,
                revision=revision,
                trust_remote_code=recipe.config.trust_remote_code,
                padding_side="left",
                truncation_side="left",
                local_files_only=local_only,
            )
        except Exception as error:  # transformers and tokenizers raise whatever a stranger's values lead to
            reason = f"no tokenizer could be loaded: {one_line(error) or type(error).__name__}"
            raise TokenizerUnavailable(f"{recipe.source}: `model_name_or_path` {name}: {reason}") from error

    with recipe.naming_this_file((model_sizes.SizeError, rehearsal.TokenizerRefused)):
        model_sizes.check_model_sizes(name, revision, local_only=local_only)
        if dataset is None:
            tokenizer = load()
        else:
            template_kwargs = recipe.config.chat_template_kwargs
            tokenizer = rehearsal.rehearsed(name, load, rehearsal.chosen(dataset), template_kwargs)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise recipe.error(
            f"`model_name_or_path` {name}: its tokenizer has neither a `pad_token` nor an `eos_token`: set one in its "
            "tokenizer_config.json"
        )
    return tokenizer


def check_chat_template(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, prompt: Any) -> None:
    """Raise `RecipeError` for prompts, `prompt` the first of them, that the tokenizer has no usable chat template for."""
    if isinstance(prompt, str):
        return
    name = tokenizer_source(recipe.model["model_name_or_path"])
    if tokenizer.chat_template is None:
        raise recipe.error(
            f"the tokenizer of {name} has no chat template: set `dataset.prompt_format: text`, or use a model "
            "that has one"
        )
    ends = end_of_turn(tokenizer, recipe.config.chat_template_kwargs or {})
    if ends is None or recipe.offline is not None or "stop" in (recipe.config.generation_kwargs or {}):
        return
    stops = stop_ids(recipe, tokenizer)
    if stops is not None and ends not in stops:
        names = " and ".join(f"`{tokenizer.convert_ids_to_tokens(stop)}`" for stop in stops if stop is not None)
        raise recipe.error(
            f"`model_name_or_path` {name}: its chat template ends a turn with `{tokenizer.convert_ids_to_tokens(ends)}`, and "
            f"generation stops only at {names or 'nothing'}, so that every completion would be cut off: make it the "
            "`eos_token` in tokenizer_config.json, or set `dataset.prompt_format: text`"
        )


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> int | None:
    """The special token that follows an assistant's message in the chat template; None if none does."""
    turns = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, **template_kwargs)
    except Exception:  # a template is a program, and may raise anything
        return None
    ids = tokenizer(text.rpartition(_MARK)[2].strip(), add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return ids[0] if ids and ids[0] in special else None


def stop_ids(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The ids at which TRL stops a completion: the tokenizer's end of sequence and those of the model's generation
    configuration (`GRPOTrainer.__init__`); None where that configuration is not at hand.
    """
    name, revision = str(recipe.model["model_name_or_path"]), recipe.model.get("model_revision", "main")
    if (adapter := adapter_config(name, revision)) is not None:
        name, revision = str(adapter.base_model_name_or_path), adapter.revision or "main"
    local_only = Path(name).exists() or not hub_answers()
    given: dict[str, Any] = {"revision": revision, "local_files_only": local_only}
    try:
        declared = GenerationConfig.from_pretrained(name, **given).eos_token_id
    except (OSError, ValueError):  # as for the model itself, its configuration says it then
        try:
            model_sizes.check_model_sizes(name, revision, local_only=local_only)
            config = AutoConfig.from_pretrained(name, trust_remote_code=recipe.config.trust_remote_code, **given)
        except Exception:  # whatever the values of a stranger's file lead to: loading the model says it
            return None
        declared = GenerationConfig.from_model_config(config).eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    own = tokenizer.eos_token_id
    return [int(own), *ids] if own is not None and own not in ids else ids
