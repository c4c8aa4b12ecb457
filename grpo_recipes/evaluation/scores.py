"""Scores of completions: strict and lenient accuracy by the golds, and the rewards of the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from datasets import Dataset

from grpo_recipes.data.places import Places
from grpo_recipes.evaluation import accuracy
from grpo_recipes.evaluation.accuracy import MeasuredReward
from grpo_recipes.evaluation.policy import Completions
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.runs import files
from grpo_rewards.errors import UserError
from grpo_rewards.math.comparison import RIGHT_VERDICTS, Judge
from grpo_rewards.math.golds import accepted_golds, read_golds
from grpo_rewards.reward import BaseReward


class Scoring:
    """Judges of the completions of a dataset.

    Args:
        dataset: Rows with a column `prompt` and the columns that the rewards read.
        settings: Settings of the evaluation.
        rewards: Rewards of the recipe to measure.
        places: Positions of the rows in the user's files.

    Attributes:
        golds: Gold of each row as text, or None if no accuracy is measured.
        columns: Columns of `completions.parquet`.
        highest: Largest score of each reward, or None if it is not known.

    Raises:
        UserError: The dataset is empty, or has an answer that can't be read as a gold.
    """

    def __init__(self, dataset: Dataset, settings: Settings, rewards: Sequence[MeasuredReward], places: Places) -> None:
        if len(dataset) == 0:
            raise UserError("the held-out rows", "there are none", "name others with --path or --split")
        self.settings, self.rewards = settings, rewards
        self.golds = None if settings.strict is None else _golds(dataset, settings.strict, places)
        self.columns = {**files.EVALUATED, **accuracy.reward_columns(rewards)}
        self.highest = {reward.name: reward.highest_pay for reward in rewards}

    def table(
        self, problems: Sequence[int], rows: Sequence[Mapping[str, Any]], completions: Completions
    ) -> pd.DataFrame:
        """Return one row for each completion, with its verdicts and scores.

        Args:
            problems: Number of the problem of each completion.
            rows: Row of the dataset of each completion.
            completions: Completions.
        """
        prompts = [row["prompt"] for row in rows]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        if completions.environments:
            columns["environments"] = list(completions.environments)
        table: dict[str, Any] = {
            "problem": problems,
            "sample": [number % self.settings.samples for number in range(len(rows))],
            "prompt": [text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for text in prompts],
            "completion": completions.texts,
            **completions.columns,
            **accuracy.reward_values(self.rewards, completions.prompts, completions.given, columns),
        }
        strict, texts = self.settings.strict, completions.texts
        if self.golds is None or strict is None:
            return pd.DataFrame(table)
        table["gold"] = [self.golds[problem] for problem in problems]
        table["answer"] = accuracy.stated_answers(strict, texts, columns, self.settings.tags)
        table["strict"] = accuracy.is_right(strict, texts, columns)
        decimal = accuracy.decimal(strict)
        judge = Judge(decimal=decimal)
        table["lenient"] = []
        # The golds of the rows, and not their texts: a number has a decimal point, even if texts have a comma.
        written = columns.get(accuracy.gold_column(strict), table["gold"])
        for gold, answer, is_strict in zip(written, table["answer"], table["strict"], strict=True):
            verdict, _ = judge.best_verdict(read_golds(gold, decimal), answer)
            table["lenient"].append(is_strict or verdict in RIGHT_VERDICTS)
        return pd.DataFrame(table).astype({"answer": "string"})


def _golds(dataset: Dataset, strict: Sequence[BaseReward], places: Places) -> list[str]:
    """Return the golds as text. Raises `UserError` for one that can't be read."""
    columns = {name: list(dataset[name]) for name in dataset.column_names if name != "prompt"}
    valid = accuracy.can_score(strict, len(dataset), columns)
    if not all(valid):
        required = accuracy.describe([vars(reward) for reward in strict])
        (first,) = places([valid.index(False)])
        problem = f"the rewards of strict accuracy, {required}, can't score it"
        raise UserError(first, problem, "correct the row, or leave it out")
    golds = columns.get(accuracy.gold_column(strict), [None] * len(dataset))
    return [" or ".join(str(entry) for entry in accepted_golds(gold) if entry is not None) for gold in golds]
