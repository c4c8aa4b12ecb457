"""Reasons for scores: what rewards log about each completion, for `grpo-rewards score --explain` and a preview."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from grpo_rewards.built import BuiltReward, with_arguments
from grpo_rewards.errors import UserError, shortened
from grpo_rewards.terminal import visible

_LOGGED_CHARS = 200


class Reasons:
    """Values that a reward logs by `log_extra` and `log_reason`, one mapping from column to value per completion.

    Args:
        reward: Reward to listen to.
    """

    def __init__(self, reward: BuiltReward) -> None:
        self.reward = reward
        self.rows: list[dict[str, Any]] = []
        """Values of the current call."""

    def begin(self, count: int) -> None:
        """Forget the values of the last call, and expect a call with `count` completions."""
        self.rows = [{} for _ in range(count)]

    def loggers(self) -> dict[str, Callable[[str, list], None]]:
        """Return the logging callables that the reward takes, by the name of the argument."""
        return {key: self.log for key in ("log_extra", "log_reason") if _takes(self.reward.unbound, key)}

    def explained(self) -> BuiltReward:
        """Return the reward with these callables in place of those that a trainer passes."""
        return replace(self.reward, function=with_arguments(self.reward.function, self.loggers()))

    def log(self, column: str, values: list) -> None:
        """Keep a column with one value per completion. Raise `UserError` for another number of values."""
        if len(values) != len(self.rows):
            problem = f"it logged {len(values)} values of `{column}` for {len(self.rows)} completions"
            raise UserError(f"reward `{self.reward.name}`", problem, "log one value per completion")
        for row, value in zip(self.rows, values, strict=True):
            row[column] = value


def score_line(name: str, score: float | None, logged: Mapping[str, Any]) -> str:
    """Return the score of a reward and its reasons as one line: `well_formed 0: reason `no <answer> block``."""
    terms = []
    for key, value in logged.items():
        if value == "":
            continue
        text = f"`{visible(shortened(str(value), _LOGGED_CHARS))}`"
        if value is None or isinstance(value, float):
            text = "none" if value is None else f"{value:g}"
        terms.append(f"{key.removeprefix(f'{name}/')} {text}")
    shown = "no score" if score is None else f"{score:g}"
    return f"{name} {shown}: {', '.join(terms) or 'it gives no reason'}"


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    try:
        inspect.signature(function).bind_partial(**{keyword: None})
    except (TypeError, ValueError):  # a ValueError: a builtin without a signature
        return False
    return True
