"""`dataset.pass_rate`: the training rows that an evaluation solved neither too often nor too rarely."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from grpo_recipes.recipe.specs import PassRateSpec
from grpo_recipes.runs.files import BOOLEANS, EVALUATION, TEXTS, read_object, read_table
from grpo_rewards.errors import UserError

logger = logging.getLogger(__name__)


def rows_to_keep(dataset: datasets.Dataset, spec: PassRateSpec) -> np.ndarray:
    """The numbers of the rows whose pass rate lies in `spec.keep`, ends included, (N,) int64.

    A row is found by its prompt, as the policy is asked it; its pass rate is the share of the samples of that prompt that are
    strictly right. Rows with the same prompt have one rate.

    Raises:
        UserError: the folder has no finished evaluation with golds, a row is not in it, or none is left.
    """
    rates = _rates(spec.evaluation)
    found = np.array([rates.get(_text(prompt), np.nan) for prompt in dataset["prompt"]])
    if np.isnan(found).any():
        raise UserError(
            f"`dataset.pass_rate.evaluation` {spec.evaluation}: {np.isnan(found).sum()} of {len(found)} training prompts are not "
            f"in it (row {int(np.argmax(np.isnan(found))) + 1} is the first): {_fix(spec.evaluation)}"
        )
    low, high = spec.keep
    kept = np.flatnonzero((low <= found) & (found <= high))
    split = f"{(found < low).sum()} were solved less often, {(found > high).sum()} more often"
    if not len(kept):
        raise UserError(
            f"`dataset.pass_rate.keep`: none of {len(found)} rows is solved {low:g} to {high:g} of the time ({split}): widen it, "
            "or evaluate with more `--samples`"
        )
    if os.environ.get("RANK", "0") == "0":
        logger.info(
            "pass rate: %d of %d rows kept, solved %g to %g of the time; %s", len(kept), len(found), low, high, split
        )
    return kept


def _rates(evaluation: str) -> dict[str, float]:
    """The share of strictly right samples of each prompt."""
    folder = Path(evaluation)
    if not (folder / "evaluation.json").is_file():
        raise UserError(f"`dataset.pass_rate.evaluation` {folder} has no finished evaluation: {_fix(evaluation)}")
    if "strict" not in read_object(folder / "evaluation.json", EVALUATION):
        raise UserError(
            f"`dataset.pass_rate.evaluation` {folder} measured no accuracy, since its rows have no golds: name another"
        )
    table = read_table(folder / "completions.parquet", {"prompt": TEXTS, "strict": BOOLEANS}, _fix(evaluation))
    return table.groupby("prompt")["strict"].mean().to_dict()


def _text(prompt: Any) -> str:
    """A prompt as an evaluation's table has it."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _fix(evaluation: str) -> str:
    return f"run `grpo-recipes evaluate MODEL --recipe RECIPE --split train --samples 8 --output {evaluation}`"
