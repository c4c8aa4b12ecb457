"""Checks of the rewards: their columns, golds and weights before a run, and the scores of each call during it."""

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

# Arguments that TRL passes to every reward beside the dataset's columns (`GRPOTrainer._calculate_rewards`).
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

Reward = Callable[..., Any]

# Number of rows that a message names. The others are counted.
NAMED_ROWS = 20
EXCERPT = 60


@dataclass(frozen=True)
class GoldCheck:
    """Golds of a dataset that the correctness rewards can't score.

    Attributes:
        count: Number of these golds.
        total: Number of golds that were checked.
        rows: First `NAMED_ROWS` of their rows, counted from 1.
        rewards: Names of the correctness rewards.
        dataset_rows: Number of rows if only a hash sample of them was checked (`prompts.hash_sample`), or None.
    """

    count: int
    total: int
    rows: tuple[int, ...]
    rewards: tuple[str, ...]
    dataset_rows: int | None = None

    def describe(self) -> str:
        """Return a sentence that names the rows."""
        more = f" and {self.count - len(self.rows)} more" if self.count > len(self.rows) else ""
        rows = ", ".join(map(str, self.rows))
        sampled = "" if self.dataset_rows is None else f" (a hash sample of {self.dataset_rows:,} rows)"
        total = f"{self.total:,}" if sampled else str(self.total)
        return (
            f"{self.count} of {total} golds{sampled} can't be scored by {' or '.join(self.rewards)}: no completion "
            f"earns anything from it on row{'s' * (self.count > 1)} {rows}{more} (counted from 1)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for `run.json`."""
        sampled = {} if self.dataset_rows is None else {"dataset_rows": self.dataset_rows}
        return {"count": self.count, "total": self.total, "rows": list(self.rows), **sampled}


def describe_rewards(rewards: Iterable[BuiltReward]) -> str:
    """Return each reward with its weight. A reward of weight 0 is only logged."""
    texts = []
    for reward in rewards:
        text = f"{reward.name} × {reward.weight:g}"
        texts.append(text if reward.weight else f"{text} (logged only)")
    return ", ".join(texts)


def check_weights(rewards: Sequence[BuiltReward]) -> None:
    """Raise `UserError` if no reward can change the total."""
    if not any(reward.weight for reward in leaves(rewards)):
        raise UserError("`rewards`: all weights are 0, so that nothing is learned: give one reward a weight")


def check_punished_lengths(rewards: Sequence[BuiltReward], max_completion_length: int) -> None:
    """Raise `UserError` if TRL's overlong punishment begins at a length that no completion reaches."""
    for reward in leaves(rewards):
        longest, cache = (getattr(reward.unbound, key, None) for key in ("max_completion_len", "soft_punish_cache"))
        if isinstance(longest, int) and isinstance(cache, int) and longest - cache >= max_completion_length:
            raise UserError(
                f"`rewards`: {reward.name} punishes completions of more than {longest - cache} tokens, and "
                f"`max_completion_length` ends them at {max_completion_length}: set its `max_completion_len` to "
                f"{max_completion_length}, and `soft_punish_cache` below that"
            )


def check_columns(rewards: Iterable[BuiltReward], columns: Sequence[str]) -> None:
    """Raise `UserError` if a reward needs a column that is missing, or can't take all the arguments that TRL passes."""
    # A missing column would otherwise end the run at its first reward, after the model is loaded.
    given = [column for column in columns if column != "prompt"]  # TRL passes it as `prompts`
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
                f"`rewards`: {reward.name} must take every column by name, as TRL hands them over: end its parameters "
                "in `**columns`"
            )


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of the arguments that a reward needs, and True if it takes any other argument by name."""
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

    TRL writes the scores into a tensor: a list that is too short, or a single score, would silently be spread over
    rows.
    """
    try:
        scores = listed_scores(name, scores, len(completions))
    except ValueError as error:
        raise RewardFault(str(error)) from error
    for row, (score, completion) in enumerate(zip(scores, completions, strict=True)):
        if score is not None and not _is_finite(score):
            text = one_line(completion_text(completion))[:60]
            raise RewardFault(
                f"reward `{name}` returned {score!r} for row {row} of this rank's generation (completion {text!r}): "
                "return a finite number, or None for a row that can't be scored"
            )
    return scores


def _is_finite(score: Any) -> bool:
    try:
        # Compared in float32, to which TRL converts rewards.
        return math.isfinite(score) and abs(float(score)) <= LARGEST_FLOAT32
    except (TypeError, OverflowError):
        return False


def check_golds(rewards: Iterable[BuiltReward], dataset: Dataset) -> GoldCheck | None:
    """Return the golds that no correctness reward can score, or None if there are none.

    A reward returns None for a gold that it cannot score, whatever the completion. Each gold is therefore scored once
    with an empty completion, so that nothing is compared symbolically. Of a large dataset a sample is checked:
    `prompts.hash_sample`.

    Raises:
        UserError: No gold can be scored.
    """
    judges = {reward.name: found for reward in rewards if (found := _correctness_rewards(reward))}
    if not judges:
        return None
    checked, all_rows = hash_sample(len(dataset)), len(dataset)
    if len(checked) < all_rows:
        dataset = dataset.select(checked)
    is_scorable = np.zeros(len(dataset), bool)
    for parts in judges.values():
        # A sum or gate scores a row only if all its parts do.
        is_scorable |= np.all([_can_score(part, dataset) for part in parts], axis=0)
    rows = [int(index) + 1 for index, known in zip(checked, is_scorable, strict=True) if not known]
    if not rows:
        return None
    names = tuple(judges)
    if len(rows) == len(dataset):
        judge = next(iter(judges.values()))[0]
        column = judge.columns_read[0]
        first = one_line(dataset[0][column])
        excerpt = first if len(first) <= EXCERPT else f"{first[: EXCERPT - 1]}…"
        raise UserError(
            f"`rewards`: {' and '.join(names)} can score none of the {len(dataset)} golds in the column `{column}` "
            f"(the first is {excerpt!r}): {judge.gold_forms}"
        )
    dataset_rows = all_rows if len(dataset) < all_rows else None
    return GoldCheck(len(rows), len(dataset), tuple(rows[:NAMED_ROWS]), names, dataset_rows)


def _correctness_rewards(reward: BuiltReward) -> list[BaseReward]:
    """Return the correctness rewards in `reward` that read the dataset."""
    found = [leaf.declared for leaf in leaves([reward]) if leaf.kind == "correctness"]
    return [judge for judge in found if judge.columns_read]


def _can_score(judge: BaseReward, dataset: Dataset) -> list[bool]:
    read = (*judge.columns_read, *judge.optional_columns)
    columns = {column: list(dataset[column]) for column in dataset.column_names if column in read}
    return judge.validate(len(dataset), columns)
