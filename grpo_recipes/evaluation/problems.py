"""Problems of an evaluation: held-out rows, and the tags in which an answer is requested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from grpo_recipes.data.load import load_prompts
from grpo_recipes.data.prompts import Prompts
from grpo_recipes.data.sources import has_one_split, unread_notation
from grpo_recipes.evaluation.accuracy import Tags, single_specs
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_rewards.errors import UserError

DATASET_OPTIONS = ("dataset", "path", "split", "system_prompt", "prompt_format")
"""Options of an evaluation about its rows."""


def held_out_spec(trained: Mapping[str, Any], dataset: str | None = None, **options: str | None) -> DatasetSpec:
    """Return the dataset to evaluate on: the recipe's held-out rows, changed by the options.

    With a `path`, the recipe's `eval_path` and `eval_split` are ignored, because they belong to the file of its
    training.

    Args:
        trained: `dataset` of the recipe.
        dataset: Name of another dataset, or None.
        **options: Keys `path`, `split`, `system_prompt` and `prompt_format` that replace the recipe's, unless None.

    Raises:
        UserError: Only the rows of the training are known, the rows have no gold, or a key is wrong.
    """
    given = {key: value for key, value in options.items() if value is not None}
    raw = dict(trained) if dataset in (None, trained.get("name")) else {"name": dataset}
    raw.pop("pass_rate", None)  # it selects rows to train on
    if raw.get("eval_share") is not None and not (given.get("path") or given.get("split")):
        return DatasetSpec.parse({**raw, **given})
    raw.pop("eval_share", None)
    if raw.get("name") == "scored":
        fix = "name problems that have them, as in `--dataset gsm8k --path PROBLEMS.jsonl --prompt_format text`"
        raise UserError("the dataset scored", "it holds recorded responses and no final answers", fix)
    held_out = {"path": raw.pop("eval_path", None), "split": raw.pop("eval_split", None)}
    if "path" in given:
        held_out = {}
        for key in unread_notation(given["path"]):  # the keys describe the recipe's own files
            raw.pop(key, None)
    trained_path = raw.get("path")
    is_known = given.get("split") or any(held_out.values()) or given.get("path") not in (None, trained_path)
    if not is_known and trained_path is not None and (isinstance(trained_path, list) or has_one_split(trained_path)):
        fix = "name the held-out problems with --path, or a --split of it"
        raise UserError("the held-out rows", f"the run trained on {trained_path}", fix)
    keys: dict[str, Any] = {} if raw else {"name": "gsm8k"}
    test = {} if isinstance(held_out.get("path") or trained_path, list) else {"split": "test"}
    for layer in (raw, test, held_out, given):  # later ones win
        keys |= {key: value for key, value in layer.items() if value is not None}
    known = {field.name for field in fields(DatasetSpec)}
    return DatasetSpec.parse({key: value for key, value in keys.items() if key in known})


def load_problems(spec: DatasetSpec, limit: int | None) -> Prompts:
    """Return the rows of a dataset, or the first `limit` rows. Raises `UserError` if they can't be read."""
    if limit is not None and limit < 1:
        raise UserError("--limit", f"it is {limit}", "set it to at least 1, or leave it out for all problems")
    prompts = load_prompts(spec, evaluation=spec.eval_share is not None)
    return prompts if limit is None else prompts.select(np.arange(min(limit, len(prompts.dataset))))


def requested_tags(recipe: Mapping[str, Any], spec: DatasetSpec) -> Tags:
    """Return the tags of the recipe's rewards, or else those that the system prompt requests."""
    for reward in single_specs(recipe.get("rewards") or []):
        if tags := (reward.get("kwargs") or {}).get("tags"):
            return tags[0], tags[1]
    return ("reasoning", "answer") if spec.system_prompt in (None, "reasoning") else ("think", "answer")
