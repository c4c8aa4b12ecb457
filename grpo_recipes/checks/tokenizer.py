"""The policy's tokenizer: loaded after a trial within limits, and checked for a chat template that ends each turn.

Tokenizer and chat template come with a model, perhaps from a stranger. A template is a program with loops, and a
tokenizer's regular expressions may backtrack for hours. A bounded child process therefore renders and encodes the first
prompts and the longest ones. A tokenizer that passes is trusted on all prompts. docs/security.md lists what remains
unbounded.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_parsing.response_templates import load_response_template

from grpo_recipes.checks.model_sizes import check_model_sizes
from grpo_recipes.checks.tools import Toolset
from grpo_recipes.data.hub import hub_answers, is_missing
from grpo_recipes.data.prompts import rendered
from grpo_recipes.data.tables import BATCH
from grpo_recipes.process.bounded_child import Announce, CallStopped, Limits, bounded_call
from grpo_recipes.recipe.recipe import Recipe, RecipeError
from grpo_recipes.runs.files import read_object
from grpo_recipes.runs.weights import adapter_config, tokenizer_source
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import UnreadableFile, expanded, read_text, relative_to

Load = Callable[[], PreTrainedTokenizerBase]

LIMITS = Limits(cpu_seconds=8, wall_seconds=15, memory_bytes=1 << 30)
"""Limits of the child. A tokenizer of 262,000 tokens and 500,000 merges takes 3 s and less than 0.5 GiB."""

FIRST, LONGEST = 8, 8
"""Number of prompts from the head of the dataset, and of the longest ones, that are tried."""

CHARACTERS = 100_000
"""Number of characters of a message, or of a prompt that is text, that are tried."""

# A template or tokenizer within the limits that is slower than this would still take hours for a whole dataset.
SECONDS_PER_PROMPT = 0.05
CHARACTERS_PER_SECOND = 20_000

CHAT_TEMPLATE_PATH = "chat_template_path"

_MARK = "grpo-recipes"

_CALL = {"type": "function", "function": {"name": _MARK, "arguments": {_MARK: _MARK}}}
_TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": _MARK},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": _MARK, "content": _MARK},
]
"""Conversation with a call and its result, which a template for tools renders by other statements."""


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
        folder = expanded(path)
        file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        if not file.is_file():
            raise UserError(
                f"`{CHAT_TEMPLATE_PATH}`: there is no file {file}{relative_to(path)}: name a folder that holds one"
            )
        response = None
        try:
            text = read_text(file)
            if config.is_file():
                response = read_object(config, {}, "correct the file").get("response_template")
        except UnreadableFile as error:
            raise UserError(f"`{CHAT_TEMPLATE_PATH}`: {error}; correct the file") from error
        except (OSError, UserError) as error:
            raise UserError(f"`{CHAT_TEMPLATE_PATH}`: {one_line(error)}") from error
        if response is not None:
            try:
                load_response_template(response)
            except Exception as error:  # transformers checks only a part of what it reads
                raise UserError(
                    f"`{CHAT_TEMPLATE_PATH}`: {config}: `response_template` is no valid one ({one_line(error)}): "
                    "correct it"
                ) from error
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


def load_tokenizer(
    recipe: Recipe,
    dataset: datasets.Dataset | None = None,
    *,
    local_only: bool = False,
    toolset: Toolset | None = None,
) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer, which pads on the left, after a trial on prompts of `dataset`.

    Args:
        recipe: Recipe that names the model.
        dataset: Dataset with the column `prompt`, or None to skip the trial.
        local_only: True to use only files on this machine.
        toolset: Tools that the prompts describe.

    Raises:
        TokenizerUnavailable: The tokenizer can't be loaded.
        RecipeError: The tokenizer or its chat template is too slow or too large, or fails on a prompt. Or the model's
            configuration, which transformers reads to find the tokenizer's class, has an impossible size.
    """
    name = tokenizer_source(recipe.model["model_name_or_path"])
    place = f"{recipe.source}: `model_name_or_path` {name}"
    if is_missing(name):
        raise TokenizerUnavailable(f"{place}: there is no such folder{relative_to(name)}")
    revision = recipe.model.get("model_revision", "main")

    with recipe.naming_this_file():
        chat_template = ChatTemplate.read(recipe.chat_template_path)

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
        except Exception as error:  # transformers and tokenizers raise any class for a stranger's values
            reason = one_line(error) or type(error).__name__
            raise TokenizerUnavailable(f"{place}: no tokenizer could be loaded: {reason}") from error

    with recipe.naming_this_file():
        check_model_sizes(name, revision, local_only=local_only)
        if dataset is None:
            tokenizer = load() if chat_template is None else chat_template.replace_in(load())
        else:
            template_kwargs = dict(recipe.config.chat_template_kwargs or {})
            if toolset is not None:
                template_kwargs["tools"] = [tool.schema for tool in toolset.all_tools]
            tokenizer = load_after_trial(name, load, trial_prompts(dataset), template_kwargs, chat_template)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise recipe.error(
            f"`model_name_or_path` {name}: its tokenizer has neither a `pad_token` nor an `eos_token`: set one in its "
            "tokenizer_config.json"
        )
    return tokenizer


def check_chat_template(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, prompt: Any) -> None:
    """Raise `RecipeError` if prompts like `prompt` need a chat template and the tokenizer has no usable one."""
    if isinstance(prompt, str):
        return
    name = tokenizer_source(recipe.model["model_name_or_path"])
    if not tokenizer.chat_template:  # an empty one would leave nothing of a prompt
        raise recipe.error(
            f"the tokenizer of {name} has no chat template: set `dataset.prompt_format: text`, use a model that has "
            f"one, or give one with `{CHAT_TEMPLATE_PATH}`"
        )
    ends = end_of_turn(tokenizer, recipe.config.chat_template_kwargs or {})
    if ends is None or recipe.offline is not None or "stop" in (recipe.config.generation_kwargs or {}):
        return
    stops = stop_ids(recipe, tokenizer)
    if stops is not None and ends not in stops:
        names = " and ".join(f"`{tokenizer.convert_ids_to_tokens(stop)}`" for stop in stops)
        raise recipe.error(
            f"`model_name_or_path` {name}: its chat template ends a turn with "
            f"`{tokenizer.convert_ids_to_tokens(ends)}`, and generation stops only at {names or 'nothing'}, so that "
            "every completion would be cut off: make it the `eos_token` in tokenizer_config.json, or set "
            "`dataset.prompt_format: text`"
        )


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> int | None:
    """Return the special token that follows an assistant's message in the chat template, or None if none does."""
    turns = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
    try:
        text = cast(str, tokenizer.apply_chat_template(turns, tokenize=False, **template_kwargs))
    except MemoryError:  # a limit of the trial
        raise
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
    local_only = Path(name).exists() or not hub_answers()
    options: dict[str, Any] = {"revision": revision, "local_files_only": local_only}
    try:
        declared = GenerationConfig.from_pretrained(name, **options).eos_token_id
    except (OSError, ValueError):  # without the file, transformers derives it from the model's configuration
        try:
            check_model_sizes(name, revision, local_only=local_only)
            config = AutoConfig.from_pretrained(name, trust_remote_code=recipe.config.trust_remote_code, **options)
        except Exception:  # whatever is wrong with a stranger's file, loading the model reports it
            return None
        declared = GenerationConfig.from_model_config(config).eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    own = tokenizer.eos_token_id
    return [int(own), *ids] if own is not None and own not in ids else ids


def load_after_trial(
    name: str,
    load: Load,
    prompts: Sequence[Any],
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: ChatTemplate | None = None,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that `load` returns, after a bounded child has loaded it and tried it on `prompts`.

    Only a folder's own tokenizer.json is loaded in the child. A download, or the conversion of a SentencePiece model,
    has no time limit. An error of `load` is raised in this process.

    Args:
        name: Path of the tokenizer's folder, or its name on the hub.
        load: Function that loads the tokenizer.
        prompts: Prompts from `trial_prompts`.
        template_kwargs: TRL's `chat_template_kwargs`.
        chat_template: Chat template that replaces the tokenizer's own.

    Raises:
        UserError: Loading, rendering or encoding reaches a limit, or rendering or encoding fails.
    """
    file = None
    if chat_template is not None:
        file, load_own = chat_template.file, load

        def load() -> PreTrainedTokenizerBase:
            return chat_template.replace_in(load_own())

    tokenizer = None if (Path(name) / "tokenizer.json").is_file() else load()
    kwargs = template_kwargs or {}
    try:
        bounded_call(lambda announce: _try(announce, name, tokenizer, load, prompts, kwargs, file), LIMITS)
    except CallStopped as stopped:
        raise UserError(f"{name}: {stopped}: correct the file, or name another model") from stopped
    return load() if tokenizer is None else tokenizer


def trial_prompts(dataset: datasets.Dataset) -> list[Any]:
    """Return the prompts to try: the first ones and the longest ones, each cut to `CHARACTERS`."""
    lengths = _character_lengths(dataset)
    longest = np.argsort(lengths, kind="stable")[-LONGEST:]
    rows = sorted({*range(min(FIRST, len(lengths))), *longest.tolist()})
    return [_cut(prompt) for prompt in dataset.select(rows)["prompt"]]


def _character_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """Return the number of characters of each prompt, (N,). The length of messages is the sum over their contents."""
    lengths = [np.empty(0, np.int64)]
    # In arrow: a million prompts as Python objects would take gigabytes.
    for batch in dataset.select_columns(["prompt"]).with_format("arrow").iter(BATCH):
        column = batch["prompt"].combine_chunks()
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        lengths.append(_text_lengths(column) if is_text else _message_lengths(column))
    return np.concatenate(lengths)


def _text_lengths(texts: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.utf8_length(texts), 0), np.int64)


def _message_lengths(conversations: pa.Array) -> np.ndarray:
    contents = pc.struct_field(pc.list_flatten(conversations), "content")
    rows = np.asarray(pc.list_parent_indices(conversations), np.int64)
    return np.bincount(rows, _text_lengths(contents), len(conversations)).astype(np.int64)


def _cut(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt[:CHARACTERS]
    return [{**message, "content": message["content"][:CHARACTERS]} for message in prompt]


def _try(
    announce: Announce,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    load: Load,
    prompts: Sequence[Any],
    template_kwargs: Mapping[str, Any],
    chat_template: Path | None,
) -> None:
    """Load the tokenizer unless it is given, and render and encode the prompts. Runs in the child."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    folder = Path(name)
    file = folder / "tokenizer.json" if folder.is_dir() else name
    announce(f"loading its tokenizer ({file})")
    if tokenizer is None:
        try:
            tokenizer = load()
        except Exception as error:  # libraries raise any class; the parent loads again and reports it
            if _is_out_of_memory(error):  # the parent has no limit, so it would succeed there
                raise MemoryError from error
            return
    texts = list(prompts)
    is_text = not prompts or isinstance(prompts[0], str)
    if not is_text:
        if not tokenizer.chat_template:  # `check_chat_template` reports it
            return
        templates = [folder / "chat_template.jinja", folder / "tokenizer_config.json"]
        template = chat_template or next((path for path in templates if path.is_file()), name)
        announce(f"rendering {len(prompts)} prompts with its chat template ({template})")
        end_of_turn(tokenizer, template_kwargs)  # called again without a limit
        if template_kwargs.get("tools"):
            try:
                rendered(_TOOL_TURNS, tokenizer, template_kwargs)
            except MemoryError:  # a limit of the trial
                raise
            except Exception:  # `tools.check_template` reports it
                pass
        texts = _results(lambda prompt: rendered(prompt, tokenizer, template_kwargs), prompts)
    announce(f"encoding {len(prompts)} prompts with its tokenizer ({file})")
    lengths = _results(lambda text: len(tokenizer(text, add_special_tokens=is_text)["input_ids"]), texts)
    # Transformers makes a tokenizer without a vocabulary for a folder that has no files of one.
    if texts and not any(lengths) and len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise CallStopped("", "gives no token")


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error was raised from a MemoryError, since loaders wrap every error that they meet."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _results(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Return the results of `function`. Raise `CallStopped` if it is too slow for a dataset of such values."""
    results = [function(value) for value in values]
    if not results:
        return results
    # The second round is timed, because the first one compiles and imports.
    started = time.process_time()
    for value in values:
        function(value)
    seconds = time.process_time() - started
    characters = sum(len(str(value)) for value in values)
    if seconds > SECONDS_PER_PROMPT * len(values) + characters / CHARACTERS_PER_SECOND:
        raise CallStopped("", f"takes {seconds / len(values):.2g} s for each")
    return results
