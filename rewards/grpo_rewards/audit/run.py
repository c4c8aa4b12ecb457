"""Audit of rewards on the rows of a file, from their specs to the result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_rewards.audit.audit import Audit, Auditor, different_rewards, subjects
from grpo_rewards.audit.calls import GROUP, check_columns
from grpo_rewards.audit.questions import GOLD_COLUMNS, Question, question_of
from grpo_rewards.audit.wrong_completions import shuffled
from grpo_rewards.errors import UserError
from grpo_rewards.registry import BuiltReward, Spec, build_rewards

Row = tuple[int, Mapping[str, Any]]
"""Number of a row in its file, and its columns."""


def audit_rows(
    specs: Sequence[Spec],
    rows: Sequence[Row],
    file: object,
    *,
    gold_column: str | None = None,
    right: str | None = None,
    layout: str | None = None,
    most: int = 24,
    seed: int = 0,
) -> Audit:
    """Return the audit of rewards on rows.

    Args:
        specs: specs of the rewards, as in a recipe.
        rows: rows of a dataset.
        file: name of the dataset, for messages.
        gold_column: name of the column with the gold; None for the one that the rewards read.
        right: name of the column with a right completion of each row, for a reward that compares with no gold.
        layout: completion with `{answer}` in it; None to search for the layout that pays best.
        most: largest number of audited rows.
        seed: seed of the choice of rows and of wrong answers.

    Raises:
        UserError: a reward can't be built or needs a column that the rows lack, or no gold can be read.
    """
    auditor, pool = _auditor(specs, rows, file, gold_column, layout, most, seed, right)
    return auditor.audit(unreadable=len(rows) - len(pool))


@dataclass(frozen=True)
class GoldPay:
    """Score of a row's own gold; None if the reward does not score it."""

    row: int
    gold: str
    score: float | None


def pays_of_golds(spec: Spec, rows: Sequence[Row], file: object, gold_column: str | None = None) -> list[GoldPay]:
    """Return the score of every readable gold as an answer to its own row, in the layout that a reward pays best."""
    auditor, pool = _auditor([spec], rows, file, gold_column)
    (subject, *_), _, _ = subjects(auditor.rewards)
    setting = auditor.setting_of(subject)
    items = [
        (question, setting.layouts[0].render(question.answers().get(setting.way, question.gold))) for question in pool
    ]
    pays = []
    for question, score in zip(pool, auditor.scores(subject, setting, items), strict=True):
        pays.append(GoldPay(question.number, question.gold, score if isinstance(score, float) else None))
    return pays


def _auditor(
    specs: Sequence[Spec],
    rows: Sequence[Row],
    file: object,
    gold_column: str | None = None,
    layout: str | None = None,
    most: int = 24,
    seed: int = 0,
    right: str | None = None,
) -> tuple[Auditor, list[Question]]:
    """Return the auditor of rewards on rows, and every question whose gold can be read."""
    rewards = build_rewards(specs, num_generations=GROUP)
    singles = different_rewards(rewards)
    columns = sorted({name for _, row in rows for name in row})
    if right is not None and right not in columns:
        listed = ", ".join(f"`{name}`" for name in columns)
        raise UserError(f"{file} has no column `{right}` (--right): it has {listed}")
    gold = gold_column or right or _gold_column(singles, columns, file)
    names = [gold] if gold_column in (None, "answer") else [gold, "answer"]
    for reward in singles:
        check_columns(reward, [*columns, *names], file)
    solution = _solution_column(singles, columns) if right is None else None
    pool: list[Question] = []
    for number, row in rows:
        question = question_of(number, row, gold, solution, right)
        if question is not None:
            pool.append(question)
    if not pool:
        option = "--gold_column" if right is None else "--right"
        raise UserError(f"{file}: no gold in `{solution or gold}` can be read: name the column by {option}")
    by_number = {str(question.number): question for question in pool}
    chosen = sorted(
        (by_number[number] for number in shuffled(list(by_number), seed)[:most]), key=lambda one: one.number
    )
    auditor = Auditor(rewards, chosen, pool, names, layout, seed)
    return auditor, pool


def _gold_column(rewards: Sequence[BuiltReward], columns: Sequence[str], file: object) -> str:
    """Return the name of the column with the gold: one that a reward declares or takes by name, else a usual one."""
    for reward in rewards:
        declared = reward.declared.gold_column
        if declared is not None and declared in columns:
            return declared
    for reward in rewards:
        try:
            taken = set(inspect.signature(reward.unbound).parameters)
        except (TypeError, ValueError):  # a builtin without a signature
            continue
        for name in GOLD_COLUMNS:
            if name in taken and name in columns:
                return name
    for name in GOLD_COLUMNS:
        if name in columns:
            return name
    listed = ", ".join(f"`{name}`" for name in columns)
    raise UserError(f"{file} has no column with the gold, such as `answer`: name it by --gold_column ({listed})")


def _solution_column(rewards: Sequence[BuiltReward], columns: Sequence[str]) -> str | None:
    for reward in rewards:
        name = reward.declared.solution_column
        if name is not None and name in columns:
            return name
    return None
