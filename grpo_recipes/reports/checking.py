"""Parts that the checks of the modules `*_checks.py` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_recipes.reports.run import Run, RunReward, Series
from grpo_rewards.registry import BuiltReward

NEAR_BEST = 0.9
"""Share of the highest pay from which on a reward has no room to rise."""
MOVING_PROMPTS = "`sampling` draws harder prompts as the policy learns; `eval_strategy: steps` shows whether it does"
"""Reason why the training reward says nothing about progress."""


@dataclass(frozen=True)
class Finding:
    """Problem in a run."""

    step: int
    """Optimizer step at which the problem begins, or up to which it was seen."""
    threshold: float | None
    """Limit that the check compares a figure with, or None if it compares two intervals or counts."""
    figures: Mapping[str, Any]
    """Numbers, and names of rewards and tools, by name."""
    sentence: str = ""
    """Text for a reader, made of all that is above."""
    check: str = ""
    """Name of the check."""

    def saying(self, words: str) -> Finding:
        """Return the finding with a sentence. `words` has names of figures, `step` or `threshold` in braces."""
        return replace(self, sentence=words.format(step=self.step, threshold=self.threshold, **self.figures))


Check = Callable[[Run], Finding | str]
"""Function that returns a problem, or a clause with the figure that is fine."""


class NoData(Exception):
    """Reason why a check could not be made."""


class DoesNotApply(Exception):
    """Reason why a check means nothing for a run, whatever the run logs."""


def logged(run: Run, key: str) -> Series:
    """Return a logged metric, or raise `NoData`."""
    series = run.series(key)
    if not len(series):
        raise NoData(f"`{key}` was not logged")
    return series


def trending(run: Run, key: str) -> Series:
    """Return a metric with enough points for a trend, or raise `NoData`."""
    series = logged(run, key)
    if not series.has_trend:
        raise too_few(key)
    return series


def too_few(metric: str, least: str = "four") -> NoData:
    """Return the reason for a metric with too few points."""
    return NoData(f"`{metric}` was logged fewer than {least} times")


def judges_correctness(rewards: Iterable[RunReward]) -> bool:
    """Return True if one of the rewards, or a part of one, judges correctness."""
    return any(reward.kind == "correctness" or judges_correctness(reward.parts) for reward in rewards)


def highest_total(rewards: Iterable[RunReward | BuiltReward]) -> float | None:
    """Return the highest weighted sum of the rewards for one completion, or None if it is unknown."""
    total = 0.0
    for reward in rewards:
        if reward.highest_pay is None or reward.weight < 0:
            return None
        total += reward.weight * reward.highest_pay
    return total if total > 0 else None


def is_solved(run: Run, share: float = NEAR_BEST) -> bool:
    """Return True if there are rewards that judge correctness, and all end at a share of their highest pay."""
    judges = [
        (reward.highest_pay, means.end) for reward, means in run.parts() if reward.kind == "correctness" and len(means)
    ]
    return bool(judges) and all(highest and end >= share * highest for highest, end in judges)


def is_near_best(run: Run, share: float = NEAR_BEST) -> bool:
    """Return True if correctness, or the sum of all rewards, ends at a share of its highest pay."""
    highest, reward = highest_total(run.rewards), run.series("reward")
    return is_solved(run, share) or (highest is not None and reward.end >= share * highest)


def strict_accuracy_rises(run: Run) -> bool:
    """Return True if the interval of strict accuracy after training lies above the one before."""
    strict = [share for _, share in run.strict_accuracy()]
    return len(strict) == 2 and strict[1].low > strict[0].high


# ---- The cost of a problem


def cost(run: Run, shares: Series) -> dict[str, Any]:
    """Return the share of the run's tokens, or of its steps if tokens were not logged, that is `lost`, and its `unit`.

    Each value of `shares` is the share that is lost since the point before.
    """
    steps = np.array([0, *shares.steps])
    spent, unit = _spent(run)
    lost = float((np.diff(spent(steps)) * np.clip(shares.values, 0, 1)).sum())
    return {"lost": lost / float(spent(np.array([run.log.last_step]))[0]), "unit": unit}


def cost_after(run: Run, step: int) -> dict[str, Any]:
    """Return the share of the run's tokens, or of its steps if tokens were not logged, after the step `since`."""
    spent, unit = _spent(run)
    before, total = spent(np.array([step, run.log.last_step]))
    return {"lost": float(1 - before / total), "unit": unit, "since": step}


def _spent(run: Run) -> tuple[Callable[[np.ndarray], np.ndarray], str]:
    """Return a function of steps that gives the tokens, or the steps, that the run had spent by then, and the unit."""
    tokens = run.series("num_tokens")
    if not len(tokens) or max(tokens.values) <= 0:
        return lambda steps: np.maximum(steps, 1e-9), "steps"
    # A launch without a checkpoint's count may begin at 0 again.
    counts = np.maximum.accumulate([0.0, *tokens.values])
    return lambda steps: np.interp(steps, [0, *tokens.steps], counts), "tokens"
