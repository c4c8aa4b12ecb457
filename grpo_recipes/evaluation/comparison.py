"""Comparison of two finished evaluations, from their files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_recipes.evaluation.accuracy import PASSED, PAY
from grpo_recipes.evaluation.summary import compare_tables
from grpo_recipes.runs import files
from grpo_rewards.errors import UserError
from grpo_rewards.files import relative_to
from grpo_rewards.registry import attribute_name


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return the paired differences second - first of two finished evaluations of the same problems.

    The differences are of the problems' shares of right completions, so that the numbers of samples may differ. Rewards
    are compared if both recipes have them with equal specs.

    Raises:
        UserError: A folder has no finished evaluation, the problems or the rewards of strict accuracy differ, or a file
            is damaged.
    """
    records = []
    for folder in (first, second):
        try:
            records.append(files.read_object(folder / files.RESULT, files.EVALUATION))
        except FileNotFoundError as error:
            raise _no_evaluation(folder) from error
    if records[0]["settings"].get("strict") != records[1]["settings"].get("strict"):
        problem = "they define strict accuracy differently (`settings.strict` of their evaluation.json)"
        raise UserError(f"{first} and {second}", problem, "evaluate both with the same --recipe")
    shared = [spec for spec in records[0].get("paid_by", []) if spec in records[1].get("paid_by", [])]
    tables = [_read_completions(folder, shared) for folder in (first, second)]
    prompts = [table.groupby("problem")["prompt"].first() for table in tables]
    if not prompts[0].equals(prompts[1]):
        problem = "they are not on the same problems"
        raise UserError(f"{first} and {second}", problem, "evaluate both with the same options")
    highest = {name: entry.get("highest_pay") for name, entry in records[0].get("rewards", {}).items()}
    differences = compare_tables(tables[0], tables[1], highest)
    return {"problems": len(prompts[0]), "warnings": _warnings(*records), **differences}


def _warnings(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return a sentence if two evaluations were sampled at different temperatures, or by different engines or versions.

    A difference of greedy and sampled completions is not a difference of two models.
    """
    made = []
    for record in (first, second):
        engine = {"temperature": record["settings"].get("temperature"), "engine": record.get("engine")}
        made.append({**engine, **record.get("made_with", {})})
    differences = []
    for key in {**made[0], **made[1]}:
        texts = ["not recorded" if one.get(key) is None else str(one[key]) for one in made]
        if texts[0] != texts[1]:
            differences.append(f"{key} {texts[0]} and {texts[1]}")
    if not differences:
        return []
    return [f"A and B were not generated alike ({'; '.join(differences)}), which may explain a part of the difference"]


def _no_evaluation(folder: Path) -> UserError:
    """Return the error about a folder without a finished evaluation, which may be the folder of a run."""
    if not folder.exists():
        return UserError(folder, f"there is no such folder{relative_to(folder)}", "correct the path")
    if inside := sorted(folder.glob(f"evaluations/*/{files.RESULT}")):
        return UserError(folder, "it is a run", f"name one of its evaluations, such as {inside[0].parent}")
    if (folder / files.RECORD).is_file():
        return UserError(folder, "it is a run without evaluations", f"run `grpo-recipes evaluate {folder}` first")
    return UserError(folder, "it has no finished evaluation", "run `grpo-recipes evaluate` with it as --output")


def _read_completions(folder: Path, specs: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the completions of an evaluation, with the scores of the rewards that some specs describe."""
    columns: dict[str, files.Condition] = dict(files.EVALUATED)
    for spec in specs:
        name = str(spec.get("alias") or attribute_name(str(spec.get("name"))))
        columns[f"{PAY.format(name)}?"] = files.NUMBERS
        columns[f"{PASSED.format(name)}?"] = files.BOOLEANS
    table = files.read_table(folder / files.RESULT_TABLE, columns, "evaluate anew, into another --output")
    if not len(table):
        raise UserError(folder / files.RESULT_TABLE, "it holds no completions", "evaluate anew")
    return table
