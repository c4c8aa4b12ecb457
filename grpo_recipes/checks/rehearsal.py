"""A tokenizer and its chat template, tried on some prompts in a bounded child before this process uses them.

Both come with a model, perhaps from a stranger: a template is a program with loops, and a tokenizer's regular
expressions may backtrack for hours. The child renders and encodes the first prompts and the longest ones. A tokenizer
that passes is trusted from then on, on all prompts. docs/security.md says what remains unbounded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_recipes.data.prompts import rendered
from grpo_recipes.data.tables import BATCH
from grpo_recipes.process.bounded_child import Announce, CallStopped, Limits, bounded_call
from grpo_rewards.errors import UserError

LIMITS = Limits(cpu_seconds=8, wall_seconds=15, memory_bytes=1 << 30)
"""Bounds of the child. Of them, a tokenizer of 262,000 tokens and 500,000 merges takes 3 s and less than 0.5 GiB."""

FIRST, LONGEST = 8, 8
"""Number of prompts from the head of the dataset, and of the longest ones, that are tried."""

CHARACTERS = 100_000
"""Number of characters of a message, or of a prompt that is text, that are tried."""

# A template or tokenizer that stays under the limits, and is this slow, would still take hours for a whole dataset.
SECONDS_PER_PROMPT = 0.05
CHARACTERS_PER_SECOND = 20_000

_LOADING, _RENDERING, _ENCODING = "loading", "rendering", "encoding"


class TokenizerRefused(UserError):
    """A tokenizer or chat template that is too slow or too large, or fails; the message names the model."""


def rehearsed(
    name: str, load: Callable[[], Any], prompts: Sequence[Any], template_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Return the tokenizer that `load` returns, once a bounded child has loaded it and tried it on `prompts`.

    Only a folder's own tokenizer.json is loaded in the child: a download, or the conversion of a SentencePiece model,
    may take its time. What loading raises, it raises in this process.

    Args:
        name: the tokenizer's folder, or its name on the hub.
        load: loads the tokenizer.
        prompts: see `chosen`.
        template_kwargs: TRL's `chat_template_kwargs`.

    Raises:
        TokenizerRefused: loading, rendering or encoding reaches a limit, or rendering or encoding fails.
    """
    tokenizer = None if (Path(name) / "tokenizer.json").is_file() else load()
    try:
        bounded_call(lambda announce: _try(announce, tokenizer or load, prompts, template_kwargs or {}), LIMITS)
    except CallStopped as stopped:
        raise TokenizerRefused(_refusal(name, stopped, len(prompts))) from stopped
    return tokenizer or load()


def chosen(dataset: datasets.Dataset) -> list[Any]:
    """Return the prompts to try: the first ones and the longest ones, each cut to `CHARACTERS`."""
    lengths = _character_lengths(dataset)
    longest = np.argsort(lengths, kind="stable")[-LONGEST:]
    rows = sorted({*range(min(FIRST, len(lengths))), *longest.tolist()})
    return [_cut(prompt) for prompt in dataset.select(rows)["prompt"]]


def _character_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """Return the number of characters of each prompt, (N,): for messages the sum over their contents."""
    lengths = [np.empty(0, np.int64)]
    for batch in dataset.select_columns(["prompt"]).with_format("arrow").iter(BATCH):
        column = batch["prompt"].combine_chunks()
        lengths.append(_text_lengths(column) if _is_text(column.type) else _message_lengths(column))
    return np.concatenate(lengths)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


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


def _try(announce: Announce, source: Any, prompts: Sequence[Any], template_kwargs: Mapping[str, Any]) -> None:
    """Load a tokenizer, unless `source` is one, and render and encode the prompts, in the child."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not outlive a fork
    announce(_LOADING)
    tokenizer = source
    if not hasattr(source, "apply_chat_template"):
        try:
            tokenizer = source()
        except Exception as error:  # whatever it is, loading raises it again in the parent, which has the words for it
            if _is_out_of_memory(error):  # the parent has no limit
                raise MemoryError from error
            return
    texts, is_text = list(prompts), not prompts or isinstance(prompts[0], str)
    if not is_text:
        if tokenizer.chat_template is None:  # said by `check_chat_template`
            return
        announce(_RENDERING)
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            tokenizer.apply_chat_template(turns, tokenize=False, **template_kwargs)
        except MemoryError:  # `end_of_turn` renders these turns without a limit
            raise
        except Exception:  # as `end_of_turn`
            pass
        texts = _tried(lambda prompt: rendered(prompt, tokenizer, template_kwargs), prompts)
    announce(_ENCODING)
    _tried(lambda text: len(tokenizer(text, add_special_tokens=is_text)["input_ids"]), texts)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one that it was raised from, is a MemoryError: loaders wrap all that they meet."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _tried(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Return the results of `function`. Raise `CallStopped` if it is too slow for a dataset of such values."""
    results = [function(value) for value in values]
    started = time.process_time()  # what is compiled or imported on first use does not count
    for value in values:
        function(value)
    seconds = time.process_time() - started
    characters = sum(len(str(value)) for value in values)
    if seconds > SECONDS_PER_PROMPT * len(values) + characters / CHARACTERS_PER_SECOND:
        raise CallStopped("", f"takes {seconds / len(values):.2g} s for each")
    return results


def _refusal(name: str, stopped: CallStopped, count: int) -> str:
    """Return the sentence for a rehearsal that was stopped."""
    is_folder = Path(name).is_dir()
    tokenizer_file = str(Path(name) / "tokenizer.json") if is_folder else name
    template = next(
        (path for path in (Path(name) / "chat_template.jinja", Path(name) / "tokenizer_config.json") if path.is_file()),
        name,
    )
    stages = {
        _LOADING: f"loading its tokenizer ({tokenizer_file})",
        _RENDERING: f"rendering {count} prompts with its chat template ({template})",
        _ENCODING: f"encoding {count} prompts with its tokenizer ({tokenizer_file})",
    }
    what = stages.get(stopped.stage, stages[_LOADING])
    fix = "correct the template" if stopped.stage == _RENDERING else "correct the file"
    return f"{name}: {what} {stopped.reason}: {fix}, or name another model"
