"""Prompts as the model receives them: rendered with the tools of their rows, measured in tokens, and limited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import datasets
import numpy as np
import pyarrow as pa

from grpo_recipes.data.presets import Conversation
from grpo_recipes.data.tables import BATCH
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_rewards.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENVIRONMENT = "environment"
"""Column that selects the environment of a row, if the recipe has several (`checks.tools.check_rows`)."""


@dataclass(frozen=True)
class PromptTools:
    """Tools that the chat template describes in each prompt, as TRL renders it.

    Attributes:
        schemas: JSON schemas of the tools: under None for all rows, or under the name of an environment for its rows.
        chat_template: TRL's variant of the tokenizer's chat template for training, or None for the tokenizer's own.
    """

    schemas: Mapping[str | None, Sequence[Mapping[str, Any]]]
    chat_template: str | None = None

    def template_kwargs(self, environment: str | None = None) -> dict[str, Any]:
        """Return the arguments of the chat template for the rows of an environment, or for all rows."""
        schemas = self.schemas[None] if None in self.schemas else self.schemas[environment]
        given = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {"tools": list(schemas) or None, **given}


def token_lengths(
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    tools: PromptTools | None = None,
) -> np.ndarray:
    """Return the length (N,) in tokens of every prompt, as the trainer feeds it to the model.

    Messages go through the chat template with the generation prompt and the tools, and text gets the tokenizer's
    special tokens. The text that an environment's `reset` adds to a prompt is unknown and not counted.

    Raises:
        UserError: the prompts are messages, and the tokenizer has no chat template.
    """
    if tools is None or None in tools.schemas:
        lengths: list[int] = []
        given = _arguments(template_kwargs, tools)
        for batch in dataset.select_columns(["prompt"]).iter(1_000):
            lengths += map(len, _token_ids(batch["prompt"], tokenizer, given))
        return np.asarray(lengths, np.int64)
    names = np.asarray(dataset[ENVIRONMENT], object)
    all_lengths = np.zeros(len(dataset), np.int64)
    for name in tools.schemas:
        rows = np.flatnonzero(names == name)
        if len(rows):
            given = _arguments(template_kwargs, tools, name)
            all_lengths[rows] = token_lengths(dataset.select(rows), tokenizer, given)
    return all_lengths


def _arguments(
    template_kwargs: Mapping[str, Any], tools: PromptTools | None, environment: str | None = None
) -> Mapping[str, Any]:
    """Return the arguments of the chat template, with the tools of an environment's rows, or of all rows."""
    return template_kwargs if tools is None else {**template_kwargs, **tools.template_kwargs(environment)}


def _token_ids(
    prompts: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> list[list[int]]:
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    if not tokenizer.chat_template:
        fix = "set it to text, or use an instruct model"
        raise UserError("`dataset.prompt_format`", "the tokenizer has no chat template", fix)
    return _templated(list(prompts), tokenizer, tokenize=True, return_dict=True, **template_kwargs)["input_ids"]


def rendered(prompt: Conversation, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> str:
    """Return a prompt as the model receives it: messages go through the chat template with the generation prompt."""
    if isinstance(prompt, str):
        return prompt
    return _templated(prompt, tokenizer, tokenize=False, **template_kwargs)


def _templated(prompts: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
    """Return what the chat template makes of one prompt or several. Raises `UserError` if the template fails."""
    try:
        return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, **options)
    except Exception as error:  # a template is a program, and may raise any class
        reason = f"{type(error).__name__}: {one_line(error)}"
        fix = "change `dataset.system_prompt` or the rows, or name another template with `chat_template_path`"
        raise UserError(tokenizer.name_or_path, f"its chat template fails on a prompt ({reason})", fix) from error


def first_prompt(
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    tools: PromptTools | None = None,
) -> str:
    """Return the first prompt of a dataset as the model receives it, with the tools of its row."""
    row = dataset[0]
    return rendered(row["prompt"], tokenizer, _arguments(template_kwargs, tools, row.get(ENVIRONMENT)))


def limit_prompts(
    dataset: datasets.Dataset,
    spec: DatasetSpec,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: PromptTools | None = None,
) -> tuple[datasets.Dataset, int]:
    """Apply `max_prompt_tokens`, which TRL 1.16 does not have, and count the prompts that are dropped or cut.

    `cut_left` drops the oldest turns of a conversation after its system prompt. If one user turn is left, it drops the
    leading tokens of this turn, or of the text.

    Args:
        dataset: table with the column `prompt`.
        spec: dataset with the limit and the treatment of longer prompts.
        tokenizer: tokenizer of the policy.
        template_kwargs: TRL's `chat_template_kwargs`.
        tools: tools that the prompts describe.

    Returns:
        The dataset and the number of prompts that were dropped or cut. Without a limit the dataset is the same object.

    Raises:
        UserError: every prompt is too long, or the text around the question alone exceeds the limit.
    """
    limit, given = spec.max_prompt_tokens, template_kwargs or {}
    if limit is None:
        return dataset, 0
    lengths = token_lengths(dataset, tokenizer, given, tools)
    is_overlong = lengths > limit
    if (count := int(is_overlong.sum())) == 0:
        return dataset, 0
    if spec.overlong_prompts == "cut_left":

        def cut(prompt: Conversation, environment: str | None) -> Conversation:
            return _cut_left(prompt, limit, tokenizer, _arguments(given, tools, environment))

        return _with_cut_prompts(dataset, is_overlong, cut), count
    check_one_fits(lengths, limit)
    return dataset.select(np.flatnonzero(~is_overlong)), count


def check_one_fits(lengths: np.ndarray, limit: int) -> None:
    """Raise `UserError` if all prompts, with `lengths` (N,), are longer than `limit` tokens."""
    if lengths.min() > limit:
        problem = f"all {len(lengths)} prompts are longer than {limit} tokens (the shortest has {lengths.min()})"
        raise UserError("`dataset.max_prompt_tokens`", problem, "raise the limit")


def _with_cut_prompts(
    dataset: datasets.Dataset, is_overlong: np.ndarray, cut: Callable[[Conversation, str | None], Conversation]
) -> datasets.Dataset:
    """Return the dataset with the prompts at `is_overlong` (N,) replaced by what `cut` makes of them.

    Args:
        dataset: table with the column `prompt`.
        is_overlong: mask of the prompts to cut.
        cut: function from a prompt, and the name of its row's environment or None, to the shorter prompt.
    """
    chunks, start = [], 0
    kind = dataset.features.arrow_schema.field("prompt").type
    columns = [name for name in ("prompt", ENVIRONMENT) if name in dataset.column_names]
    for batch in dataset.select_columns(columns).iter(BATCH):
        prompts = list(batch["prompt"])
        environments = batch.get(ENVIRONMENT, [None] * len(prompts))
        for row in np.flatnonzero(is_overlong[start : start + len(prompts)]):
            prompts[row] = cut(prompts[row], environments[row])
        start += len(prompts)
        chunks.append(pa.array(prompts, kind))
    features = datasets.Features({"prompt": dataset.features["prompt"]})
    column = datasets.Dataset(pa.table({"prompt": pa.chunked_array(chunks)}), fingerprint=None).cast(features)
    others = dataset.select_columns([name for name in dataset.column_names if name != "prompt"])
    return datasets.concatenate_datasets([column, others], axis=1).select_columns(dataset.column_names)


def _cut_left(
    prompt: Conversation, limit: int, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> Conversation:
    """Drop earlier turns, then leading tokens of the question, until the prompt has at most `limit` tokens."""
    # Cutting may merge tokens at the new beginning, so the length is measured again after each cut.
    while (excess := len(_token_ids([prompt], tokenizer, template_kwargs)[0]) - limit) > 0:
        if not isinstance(prompt, str) and (later := _without_oldest_turns(prompt)) is not None:
            prompt = later
            continue
        content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        kept = tokenizer(content, add_special_tokens=False)["input_ids"][excess:]
        if not kept:
            problem = f"{limit} leaves no room for the question"
            raise UserError("`dataset.max_prompt_tokens`", problem, "raise the limit")
        # A cut inside a character decodes to U+FFFD, which the model never meets otherwise.
        content = cast(str, tokenizer.decode(kept)).lstrip("\ufffd")
        prompt = content if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": content}]
    return prompt


def _without_oldest_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the system prompt and the conversation from its second user turn on, or None if there is no second one."""
    users = [index for index, turn in enumerate(messages) if turn["role"] == "user"]
    if len(users) < 2:
        return None
    system = messages[:1] if messages[0]["role"] == "system" else []
    return [*system, *messages[users[1] :]]
