"""What rewards need before they can pay: columns that the dataset has, golds that can be read, a weight that counts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from trl.trainer.utils import is_async_callable

from grpo_recipes.data.prompts import hash_sample
from grpo_recipes.process.faults import RewardFault
from grpo_rewards.completions import completion_text, listed_scores
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.registry import BoundReward, BuiltReward, leaves
from grpo_rewards.reward import BaseReward

# What TRL hands to every reward beside the dataset's columns (`GRPOTrainer._calculate_rewards`), which hold no `prompt`.
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

Reward = Callable[..., Any]

# How many rows are named where rows are named; the others are counted.
NAMED_ROWS = 20


@dataclass(frozen=True)
class GoldCheck:
    """How many golds the correctness rewards can't score, of how many, and the first `NAMED_ROWS` rows, counted from 1.

    Of more than `prompts.SAMPLE` rows a hash sample is looked at; `total` is then its size, and `dataset_rows` theirs.
    """

    count: int
    total: int
    rows: tuple[int, ...]
    rewards: tuple[str, ...]
    dataset_rows: int | None = None

    def describe(self) -> str:
        """A sentence that names the rows."""
        more = f" and {self.count - len(self.rows)} more" if self.count > len(self.rows) else ""
        rows = ", ".join(map(str, self.rows))
        sampled = "" if self.dataset_rows is None else f" (a hash sample of {self.dataset_rows:,} rows)"
        total = f"{self.total:,}" if sampled else str(self.total)
        return (
            f"{self.count} of {total} golds{sampled} can't be scored by {' or '.join(self.rewards)}: no completion earns "
            f"anything from it on row{'s' * (self.count > 1)} {rows}{more} (counted from 1)"
        )

    def as_dict(self) -> dict[str, Any]:
        """What `run.json` keeps."""
        sampled = {} if self.dataset_rows is None else {"dataset_rows": self.dataset_rows}
        return {"count": self.count, "total": self.total, "rows": list(self.rows), **sampled}


def describe_rewards(rewards: Iterable[BuiltReward]) -> str:
    """Each reward with its weight; one of weight 0 is logged and steers nothing."""
    return ", ".join(
        f"{reward.name} × {reward.weight:g}" + ("" if reward.weight else " (logged only)") for reward in rewards
    )


def check_weights(rewards: Sequence[BuiltReward]) -> None:
    """Raise `UserError` if no reward can change the total."""
    if not any(reward.weight for reward in leaves(rewards)):
        raise UserError("`rewards`: all weights are 0, so that nothing is learned: give one reward a weight")


def check_punished_lengths(rewards: Sequence[BuiltReward], max_completion_length: int) -> None:
    """Raise `UserError` if TRL's overlong punishment would begin beyond the length at which every completion ends."""
    for reward in leaves(rewards):
        longest, cache = (getattr(reward.unbound, key, None) for key in ("max_completion_len", "soft_punish_cache"))
        if isinstance(longest, int) and isinstance(cache, int) and longest - cache >= max_completion_length:
            raise UserError(
                f"`rewards`: {reward.name} punishes completions of more than {longest - cache} tokens, and "
                f"`max_completion_length` ends them at {max_completion_length}: set its `max_completion_len` to "
                f"{max_completion_length}, and `soft_punish_cache` below that"
            )


def check_columns(rewards: Iterable[BuiltReward], columns: Sequence[str]) -> None:
    """Raise `UserError` for a reward that needs a column not among `columns`, or that can't take what TRL hands over."""
    given = [column for column in columns if column != "prompt"]  # TRL keeps it back: rewards get `prompts`
    for reward in leaves(rewards):
        needed, takes_all = _parameters(reward.function)
        needed = [*reward.declared.columns_read, *needed]
        for column in needed:
            if column not in (*TRL_ARGUMENTS, *given):
                raise UserError(
                    f"`rewards`: {reward.name} needs the column `{column}`, and the columns that it gets are "
                    f"{', '.join(given) or 'none'}"
                )
        if not takes_all:
            raise UserError(
                f"`rewards`: {reward.name} must take every column by name, as TRL hands them over: end its parameters in "
                "`**columns`"
            )


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the arguments that a reward needs, and True if it takes any other by name."""
    if isinstance(function, BoundReward):
        needed, takes_all = _parameters(function.function)
        return [name for name in needed if name not in function.arguments], takes_all
    parameters = inspect.signature(function).parameters
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return needed, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def checked_reward(reward: Reward) -> Reward:
    """Return `reward` with a check of each call: `RewardFault` if it raises or returns an infinity or NaN.

    TRL 1.16 does not check. With an infinite reward the gradients are NaN or zero, while the logged loss is 0.0.
    """
    name = getattr(reward, "__name__", type(reward).__name__)

    def call(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        with _naming_reward(name):
            scores = reward(prompts=prompts, completions=completions, **columns)
        return _finite_scores(name, scores, completions)

    async def call_async(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        with _naming_reward(name):
            scores = await reward(prompts=prompts, completions=completions, **columns)
        return _finite_scores(name, scores, completions)

    checked: Reward = call_async if is_async_callable(reward) else call
    checked.__name__ = name  # TRL logs a reward under this name
    return checked


@contextmanager
def _naming_reward(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RewardFault(f"reward `{name}` raised {type(error).__name__}: {error}") from error


def _finite_scores(name: str, scores: Any, completions: Sequence[Any]) -> list[float | None]:
    """Return `scores` as a list. Raise `RewardFault` unless it has one finite number or None for each completion.

    TRL writes the scores into a tensor: a list that is too short, or a single score, would silently be spread over rows.
    """
    try:
        scores = listed_scores(name, scores, len(completions))
    except ValueError as error:
        raise RewardFault(str(error)) from error
    for row, (score, completion) in enumerate(zip(scores, completions, strict=True)):
        if score is not None and not _is_finite(score):
            text = one_line(completion_text(completion))[:60]
            raise RewardFault(
                f"reward `{name}` returned {score!r} for row {row} of this rank's generation (completion {text!r}): return a "
                "finite number, or None for a row that can't be scored"
            )
    return scores


def _is_finite(score: Any) -> bool:
    try:
        # Compared in float32, to which TRL converts rewards.
        return math.isfinite(score) and abs(float(score)) <= LARGEST_FLOAT32
    except (TypeError, OverflowError):
        return False


def check_golds(rewards: Iterable[BuiltReward], dataset: Dataset) -> GoldCheck | None:
    """Hold every gold against the correctness rewards; None if there are none, or they can score all.

    A reward says by None that it can't score a gold, whatever the completion, so each gold is asked about once with an
    empty one: nothing is compared symbolically. A row counts where no reward can score it. Of many rows a sample is
    held: `prompts.hash_sample`.

    Raises:
        UserError: not one gold can be scored.
    """
    judges = [(reward.name, judges) for reward in rewards if (judges := _judges(reward))]
    if not judges:
        return None
    looked_at, all_rows = hash_sample(len(dataset)), len(dataset)
    dataset = dataset.select(looked_at) if len(looked_at) < all_rows else dataset
    scorable = [False] * len(dataset)
    for _, parts in judges:
        by_part = [_can_score(part, dataset) for part in parts]
        scorable = [known or all(row) for known, row in zip(scorable, zip(*by_part, strict=True), strict=True)]
    rows = [int(index) + 1 for index, is_scorable in zip(looked_at, scorable, strict=True) if not is_scorable]
    names = tuple(name for name, _ in judges)
    if len(rows) == len(dataset):
        judge = judges[0][1][0]
        column = judge.columns_read[0]
        raise UserError(
            f"`rewards`: {' and '.join(names)} can score none of the {len(dataset)} golds in the column `{column}` (the first is "
            f"{_excerpt(dataset[0][column])}): {judge.gold_forms}"
        )
    sampled_from = all_rows if len(dataset) < all_rows else None
    return GoldCheck(len(rows), len(dataset), tuple(rows[:NAMED_ROWS]), names, sampled_from) if rows else None


def _judges(reward: BuiltReward) -> list[BaseReward]:
    """Return the correctness rewards in `reward` that read the dataset."""
    found = [leaf.declared for leaf in leaves([reward]) if leaf.kind == "correctness"]
    return [judge for judge in found if judge.columns_read]


def _can_score(judge: BaseReward, dataset: Dataset) -> list[bool]:
    read = (*judge.columns_read, *judge.optional_columns)
    columns = {column: list(dataset[column]) for column in dataset.column_names if column in read}
    return judge.validate(len(dataset), columns)


def _excerpt(gold: Any, length: int = 60) -> str:
    text = one_line(gold)
    return repr(text if len(text) <= length else f"{text[: length - 1]}…")
