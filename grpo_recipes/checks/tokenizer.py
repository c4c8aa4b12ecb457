"""The policy's tokenizer, and a check that its chat template ends each turn where generation stops."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_parsing.response_templates import load_response_template

from grpo_recipes.data.hub import hub_answers, is_missing
from grpo_recipes.recipe.recipe import Recipe, RecipeError
from grpo_recipes.runs.files import read_object
from grpo_recipes.runs.weights import adapter_config, tokenizer_source
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import expanded, read_text, relative_to

CHAT_TEMPLATE_PATH = "chat_template_path"

_MARK = "grpo-recipes"


class TokenizerUnavailable(RecipeError):
    """Error for a tokenizer that is missing or can't be read."""


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a recipe (`chat_template_path`), which replaces that of the model.

    Attributes:
        file: File of the template.
        text: Template in Jinja.
        response_template: Description of how to read calls back (transformers' chat response parsing), or None.
    """

    file: Path
    text: str
    response_template: Mapping[str, Any] | None

    @classmethod
    def read(cls, path: str | None) -> ChatTemplate | None:
        """Return the chat template in a folder, or None without a folder.

        Raises:
            UserError: The folder or its chat_template.jinja is missing, or a file can't be read.
        """
        if path is None:
            return None
        folder, place = expanded(path), f"`{CHAT_TEMPLATE_PATH}`"
        file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        if not file.is_file():
            raise UserError(place, f"there is no file {file}{relative_to(path)}", "name a folder that holds one")
        response = None
        try:
            text = read_text(file)
            if config.is_file():
                response = read_object(config, {}, "write an object").get("response_template")
        except UserError as error:
            raise UserError(f"{place}: {error.place}", one_line(error.problem), error.fix) from error
        if response is not None:
            try:
                load_response_template(response)
            except Exception as error:  # transformers checks only a part of what it reads
                place += f": {config}: `response_template`"
                raise UserError(place, f"it is not a valid one ({one_line(error)})", "correct it") from error
        return cls(file, text, response)

    @property
    def digest(self) -> str:
        """Checksum by which an evaluation with this template is recognised."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self.text, self.response_template], sort_keys=True).encode())

    def replace_in(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Return `tokenizer` with this template in place of its own."""
        tokenizer.chat_template = self.text
        # Those of the model, if any, describe its own template.
        tokenizer.response_template = self.response_template
        tokenizer.response_schema = None
        return tokenizer


def read_tokenizer(name: str, chat_template: ChatTemplate | None = None, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, with a recipe's chat template if there is one.

    Args:
        name: Folder, or name on the hub.
        chat_template: Chat template that replaces the model's.
        **options: Options of `from_pretrained`.

    Raises:
        UserError: The tokenizer can't be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # transformers and tokenizers raise any class for a damaged file
        reason = one_line(error) or type(error).__name__
        fix = "name another model, or download it again"
        raise UserError(name, f"its tokenizer can't be loaded ({reason})", fix) from error
    # For a folder without a vocabulary, transformers makes a tokenizer of special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(name, "its tokenizer has no vocabulary", "copy or download the folder again")
    return tokenizer if chat_template is None else chat_template.replace_in(tokenizer)


def load_tokenizer(recipe: Recipe, *, local_only: bool = False) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer, which pads on the left.

    Args:
        recipe: Recipe that names the model.
        local_only: True to use only files on this machine.

    Raises:
        TokenizerUnavailable: The tokenizer can't be loaded.
        RecipeError: The recipe's chat template can't be read, or no token can be used for padding.
    """
    name = tokenizer_source(recipe.model["model_name_or_path"])
    place = f"{recipe.source}: `model_name_or_path`"
    if is_missing(name):
        problem = f"there is no such folder{relative_to(name)}"
        raise TokenizerUnavailable(f"{place}: {name}", problem, "correct the path")
    with recipe.naming_this_file():
        chat_template = ChatTemplate.read(recipe.chat_template_path)
    try:
        tokenizer = read_tokenizer(
            name,
            chat_template,
            revision=recipe.model.get("model_revision", "main"),
            trust_remote_code=recipe.config.trust_remote_code,
            padding_side="left",
            truncation_side="left",
            local_files_only=local_only,
        )
    except UserError as error:
        raise TokenizerUnavailable(f"{place}: {error.place}", error.problem, error.fix) from error
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        problem = "its tokenizer has neither a `pad_token` nor an `eos_token`"
        raise recipe.error(f"`model_name_or_path`: {name}", problem, "set one in its tokenizer_config.json")
    return tokenizer


def check_chat_template(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, prompt: Any) -> None:
    """Raise `RecipeError` if prompts like `prompt` need a chat template and the tokenizer has no usable one."""
    if isinstance(prompt, str):
        return
    place = f"`model_name_or_path`: {tokenizer_source(recipe.model['model_name_or_path'])}"
    if not tokenizer.chat_template:  # an empty one would leave nothing of a prompt
        fix = f"set `dataset.prompt_format: text`, use a model that has one, or give one with `{CHAT_TEMPLATE_PATH}`"
        raise recipe.error(place, "its tokenizer has no chat template", fix)
    ends = end_of_turn(tokenizer, recipe.config.chat_template_kwargs or {})
    if ends is None or recipe.offline is not None or "stop" in (recipe.config.generation_kwargs or {}):
        return
    stops = stop_ids(recipe, tokenizer)
    if stops is not None and ends not in stops:
        names = " and ".join(f"`{tokenizer.convert_ids_to_tokens(stop)}`" for stop in stops)
        problem = (
            f"its chat template ends a turn with `{tokenizer.convert_ids_to_tokens(ends)}`, and generation stops only "
            f"at {names or 'nothing'}, so that every completion would be cut off"
        )
        fix = "make it the `eos_token` in tokenizer_config.json, or set `dataset.prompt_format: text`"
        raise recipe.error(place, problem, fix)


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> int | None:
    """Return the special token that follows an assistant's message in the chat template, or None if none does."""
    turns = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
    try:
        text = cast(str, tokenizer.apply_chat_template(turns, tokenize=False, **template_kwargs))
    except Exception:  # a template is a program, and may raise any class
        return None
    ids = tokenizer(text.rpartition(_MARK)[2].strip(), add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return ids[0] if ids and ids[0] in special else None


def stop_ids(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Return the token IDs at which TRL stops a completion, or None if the generation configuration is not at hand.

    TRL stops at the tokenizer's end of sequence and at those of the model's generation configuration
    (`GRPOTrainer.__init__`).
    """
    name, revision = str(recipe.model["model_name_or_path"]), recipe.model.get("model_revision", "main")
    if (adapter := adapter_config(name, revision)) is not None:
        name, revision = str(adapter.base_model_name_or_path), adapter.revision or "main"
    options: dict[str, Any] = {"revision": revision, "local_files_only": Path(name).exists() or not hub_answers()}
    try:
        declared = GenerationConfig.from_pretrained(name, **options).eos_token_id
    except (OSError, ValueError):  # without the file, transformers derives it from the model's configuration
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=recipe.config.trust_remote_code, **options)
        except Exception:  # loading the model reports what is wrong
            return None
        declared = GenerationConfig.from_model_config(config).eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    own = tokenizer.eos_token_id
    return [int(own), *ids] if own is not None and own not in ids else ids
