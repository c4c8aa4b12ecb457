"""Helpers of all rewards: the text of a completion in either of TRL's two shapes, checks of columns, and groups.

No reward is defined here, so there is no pay table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from grpo_rewards.errors import shortened


def completion_text(completion: Any) -> str:
    """Return the text that a reward scores: the completion itself, or its last assistant message.

    Args:
        completion: string, or list of messages `{"role", "content"}`. A message without a role counts as the
            assistant's. Content may be a string, None (a pure tool call), or a list of parts, whose texts are joined.

    Returns:
        The text, or "" if there is none. A malformed row scores as an empty completion instead of raising.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, (list, tuple)):
        return ""
    for message in reversed(completion):
        if isinstance(message, dict) and message.get("role", "assistant") == "assistant":
            content = message.get("content")
            if isinstance(content, str):
                return content
            parts = content if isinstance(content, (list, tuple)) else ()
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            return "".join(text for text in texts if isinstance(text, str))
    return ""


def check_rows(reward: str, **columns: Any) -> None:
    """Raise unless each column of a reward call is a list, and all have one length.

    A bare string would pass as a list of its characters, and a short column would silently drop rows.

    Args:
        reward: name of the reward, for the message.
        **columns: columns by name.

    Raises:
        ValueError: a column is not a list, or the lengths differ; the message names the reward and the column.
    """
    for name, values in columns.items():
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
            shown = shortened(repr(values))
            raise ValueError(f"reward `{reward}`: `{name}` must be a list with one entry per row, not {shown}")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} in `{name}`" for name, count in lengths.items())
        raise ValueError(f"reward `{reward}`: each row has one entry in every column, but there are {counts}")


def listed_scores(reward: str, scores: Any, completions: int) -> list[Any]:
    """Return the scores that a reward returned as a list. The entries are not checked.

    Args:
        reward: name of the reward, for the message.
        scores: value that the reward returned.
        completions: number of completions.

    Raises:
        ValueError: `scores` is None, a single value, a mapping or a set, or has another number of entries.
    """
    one_each = "it must return one for each, None where it has none"
    try:
        if isinstance(scores, (str, bytes, Mapping, Set)):
            raise TypeError
        listed = list(scores)
    except TypeError as error:
        kind = "None" if scores is None else f"a {type(scores).__name__}"
        raise ValueError(
            f"reward `{reward}` returned {kind}, not a list of scores for {completions} completions: {one_each}"
        ) from error
    if len(listed) != completions:
        raise ValueError(f"reward `{reward}` returned {len(listed)} scores for {completions} completions: {one_each}")
    return listed


def score_value(score: Any) -> float | None:
    """Return one of `listed_scores` as a float, NaN if it is not a number, or None for a row without a score."""
    if score is None:
        return None
    try:
        return math.nan if isinstance(score, (str, bytes)) else float(score)
    except (TypeError, ValueError):
        return math.nan


def copied(value: Any, levels: int = 50) -> Any:
    """Return a copy of nested lists and dictionaries, whose other entries (images, environments) are shared.

    What is nested deeper than `levels` is shared too: arguments that a policy writes can have any depth.
    """
    if levels and type(value) is dict:
        return {key: copied(entry, levels - 1) for key, entry in value.items()}
    if levels and type(value) is list:
        return [copied(entry, levels - 1) if isinstance(entry, (dict, list)) else entry for entry in value]
    return value


def needed_column(reward: Any, key: str, columns: Mapping[str, Any], completions: Sequence[Any]) -> Sequence[Any]:
    """Return the column of a batch that a field of a reward names.

    Args:
        reward: reward with a `name`.
        key: name of the field that holds the column's name.
        columns: columns of the batch by name.
        completions: completions of the batch.

    Raises:
        ValueError: the batch lacks the column, or the column is not a list with one entry per completion.
    """
    column = getattr(reward, key)
    if columns.get(column) is None:
        raise ValueError(
            f"reward `{reward.name}` needs the dataset column `{column}` (its kwarg {key}); "
            f"the batch has {', '.join(columns) or 'none'}"
        )
    check_rows(reward.name, **{"completions": completions, column: columns[column]})
    return columns[column]


def outside_thinking(text: str, tag: str = "think", prefilled: bool = False) -> str:
    """Return the text behind the last `</think>`, up to a `<think>` that is never closed.

    Args:
        text: text of the completion.
        tag: name of the reasoning tag.
        prefilled: True if the prompt already opens the block, so that the completion starts inside it.
    """
    return thinking_remover(tag, prefilled)(text)


def thinking_remover(tag: str, prefilled: bool) -> Callable[[str], str]:
    """Return `outside_thinking` for one tag, for many texts. Building the tags costs more than finding them."""
    opening, closing = f"<{tag}>", f"</{tag}>"

    def outside(text: str) -> str:
        # From the right, so that a long chain of thought costs nothing: it is neither read nor copied.
        end = text.rfind(closing)
        if end >= 0:
            text = text[end + len(closing) :]
        elif prefilled:
            return ""
        return text[: text.index(opening)] if opening in text else text

    return outside


_FENCE = re.compile(r"( {0,3})(`{3,})[ \t]*([^\s`]*)[^`]*\Z")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the label, in lower case, and the content of every closed Markdown fence of backticks.

    The content of an indented fence, as in a list, loses as many spaces at the start of each line.
    """
    blocks: list[tuple[str, str]] = []
    indent, marker, label, start = "", "", "", 0
    position = 0
    for line in text.split("\n"):
        end = position + len(line)
        fence = _FENCE.match(line)
        if fence and not marker:
            indent, marker, label, start = fence[1], fence[2], fence[3].lower(), end + 1
        elif fence and not fence[3] and len(fence[2]) >= len(marker):
            content = text[start:position]
            blocks.append((label, re.sub(f"^ {{1,{len(indent)}}}", "", content, flags=re.M) if indent else content))
            marker = ""
        position = end + 1
    return blocks


def group_slices(rows: int, num_generations: int) -> list[slice]:
    """Return one slice per group of a reward call, from the layout of the batch alone.

    TRL's sampler puts the `num_generations` completions of one prompt next to each other. The layout, unlike the
    prompts, also separates two draws of the same prompt.

    Args:
        rows: number of completions in the call.
        num_generations: number of completions per prompt (G), at least 1.

    Raises:
        ValueError: the rows are not a whole number of groups, for example because a group is split over ranks.
    """
    if rows % num_generations:
        raise ValueError(
            f"{rows} completions are not a whole number of groups of {num_generations}, so a group is split over "
            "ranks or calls: choose per_device_train_batch_size * steps_per_generation as a multiple of "
            "num_generations (and per_device_eval_batch_size too)"
        )
    return [slice(start, start + num_generations) for start in range(0, rows, num_generations)]


def prompt_groups(reward: str, prompts: Sequence[Any], num_generations: int | None) -> list[slice]:
    """Return `group_slices` for a reward that compares the completions of a prompt, checked against the prompts.

    Args:
        reward: name of the reward, for the message.
        prompts: prompts of the call, one per completion.
        num_generations: number of completions per prompt; None if unknown.

    Raises:
        ValueError: `num_generations` is unknown, the rows are not whole groups, or a group holds different prompts.
    """
    if not num_generations:
        raise ValueError(f"reward `{reward}` needs num_generations, the trainer's completions per prompt")
    groups = group_slices(len(prompts), num_generations)
    for group in groups:
        if any(prompt != prompts[group.start] for prompt in prompts[group]):
            raise ValueError(
                f"reward `{reward}`: rows {group.start} to {group.stop - 1} hold different prompts, so groups "
                f"are not {num_generations} neighbouring rows: set num_generations to the trainer's "
                "(num_generations_eval included), with no group split over ranks"
            )
    return groups
