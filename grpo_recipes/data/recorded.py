"""Recorded responses with their rewards, the dataset `scored`, for `grpo_recipes.training.offline`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import datasets

from grpo_recipes.recipe.specs import OfflineSpec
from grpo_rewards.errors import UserError

# What is recorded of a prompt: its responses, their rewards, and their log-probabilities (none, or a list for each response).
_RECORDED = ("responses", "rewards", "logprobs")


def grouped(rows: Iterable[tuple[Callable[[], str], Mapping[str, Any]]], path: str) -> datasets.Dataset:
    """One row for each distinct prompt, in the order of the lines, each of which comes with its place for errors.

    Columns: `prompt` (text), `responses` (texts), `rewards` (finite numbers) and, if the lines have them, `logprobs` (for
    each response one log-probability a token, the end-of-sequence token's last). Raises `UserError` for a line that is
    neither `{prompt, response, reward}` nor `{prompt, responses, rewards}`.
    """
    prompts: dict[str, dict[str, Any]] = {}
    for place, line in rows:
        try:
            recorded = _scored_row({key: value for key, value in line.items() if value is not None})
        except UserError as error:
            raise UserError(f"`dataset`: {place()} {error}") from None
        row = prompts.setdefault(recorded["prompt"], {"prompt": recorded["prompt"], **{key: [] for key in _RECORDED}})
        for key in _RECORDED:
            row[key].extend(recorded[key])
    lines = list(prompts.values())
    if any(row["logprobs"] for row in lines):
        if any(len(row["logprobs"]) < len(row["responses"]) for row in lines):
            raise UserError(f"`dataset`: some responses of {path} have logprobs and some have none: give all or none")
        return datasets.Dataset.from_list(lines)
    return datasets.Dataset.from_list([{key: row[key] for key in ("prompt", "responses", "rewards")} for row in lines])


def check_responses(dataset: datasets.Dataset, spec: OfflineSpec, num_generations: int) -> None:
    """Raise `UserError` if prompts have fewer recorded responses than a group has members."""
    if spec.compares_whole_batch:
        return
    short = sum(len(responses) < num_generations for responses in dataset["responses"])
    if short:
        raise UserError(
            f"`offline.baseline: group` compares {num_generations} responses to one prompt (`num_generations`), and {short} of "
            f"{len(dataset)} prompts have fewer: lower `num_generations`, leave those prompts out, or set `offline.baseline: "
            "batch`"
        )


def _scored_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One line of recorded responses: `{prompt, response, reward}`, or `{prompt, responses, rewards}` with lists."""
    if ("response" in row) == ("responses" in row):
        raise UserError("must have either response and reward, or responses and rewards")
    if "response" in row:
        given = {"responses": row["response"], "rewards": row.get("reward"), "logprobs": row.get("logprobs")}
        row = {"prompt": row.get("prompt"), **{key: None if value is None else [value] for key, value in given.items()}}
    prompt, responses, rewards, log_probs = (row.get(column) for column in ("prompt", *_RECORDED))
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f"has the prompt {prompt!r}: it must be text that is not empty")
    if not responses or not _is_list_of(responses, lambda text: isinstance(text, str)):
        raise UserError("has a response that is no text: correct or remove the line")
    if not _is_list_of(rewards, _is_finite) or len(rewards) != len(responses):
        raise UserError(f"has the reward {rewards!r}: every response needs one finite number as its reward")
    if log_probs is not None and (
        not _is_list_of(log_probs, lambda values: _is_list_of(values, _is_finite) and max(values, default=0) <= 0)
        or len(log_probs) != len(responses)
    ):
        raise UserError("has logprobs that are not one list of numbers of at most 0 for each response: correct them")
    rewards = [float(reward) for reward in rewards]
    return {"prompt": prompt, "responses": responses, "rewards": rewards, "logprobs": log_probs or []}


def _is_list_of(values: Any, is_right: Callable[[Any], bool]) -> TypeGuard[list]:
    return isinstance(values, list) and all(is_right(value) for value in values)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
