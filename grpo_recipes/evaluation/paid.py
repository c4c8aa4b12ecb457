"""What a recipe's own rewards pay for held-out completions, and which completions pass those that judge correctness.

Weights make no difference: each reward is measured by itself. A completion *passes* a correctness reward where it earns the
most of it, a number in another form counting as equal (`strict.passing`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo_recipes.evaluation import accuracy as strict
from grpo_recipes.evaluation.estimates import mean_share, mean_value, paired_difference, paired_mean, pass_at_k
from grpo_recipes.runs.files import BOOLEANS, NUMBERS, Kind
from grpo_rewards.completions import listed_scores
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.math.answers import answer_number
from grpo_rewards.registry import (
    BuiltReward,
    Spec,
    build_rewards,
    fields_of_rewards,
    is_composed,
    leaves,
    own_name,
    resolve,
    spec_parts,
)

PAY, PASSED = "reward/{}", "passed/{}"
"""The columns of `completions.parquet` for a reward."""

Prompt = str | Sequence[Mapping[str, Any]]
Columns = Mapping[str, Sequence[Any]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnReward:
    """A reward of the recipe: what it is called in logs, how it is called, and what a completion that passes it earns."""

    name: str
    function: Callable[..., Any]
    passing: Any | None

    def scores(self, prompts: Sequence[Prompt], completions: Sequence[str], columns: Columns) -> list[float | None]:
        """What each completion earns; None where the reward can't tell.

        Raises `UserError` if the reward raises, or returns something else.
        """
        # As TRL calls it: the completion of a conversation is a message.
        given = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        try:
            paid = self.function(prompts=list(prompts), completions=given, **columns)
            values = listed_scores(self.name, asyncio.run(paid) if inspect.iscoroutine(paid) else paid, len(given))
            return [None if value is None else _finite(value) for value in values]
        except Exception as error:  # a user's own may fail in any way
            reason = one_line(f"{type(error).__name__}: {error}")
            raise UserError(f"reward `{self.name}` can't score the held-out rows ({reason})") from error

    def passed(self, completions: Sequence[str], columns: Columns) -> list[bool] | None:
        """Whether each completion passes; None for a reward that does not judge correctness."""
        return None if self.passing is None else strict.is_right((self.passing,), completions, columns)


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    return float(value)


def own_rewards(
    specs: Sequence[Spec], row: Mapping[str, Any], samples: int, *, is_trusted: bool
) -> tuple[list[OwnReward], list[str]]:
    """The rewards of a recipe that can be asked here, and why each of the others can't.

    Args:
        specs: the recipe's `rewards`.
        row: a held-out row, by column; each reward is tried on it with an empty completion.
        samples: completions a problem, which is what a reward that compares them is given.
        is_trusted: whether the user named the recipe. Rewards of a run that may be somebody else's are neither imported
            by name nor allowed to reach another machine or model.

    Raises `grpo_rewards.registry.RewardSpecError` for a spec that can't be built.
    """
    usable: list[OwnReward] = []
    left_out: list[str] = []
    for spec in specs:
        if not is_trusted and not all(own_name(name) for name in _names(spec)):
            left_out.append(f"{_called(spec)} (code that the run names: give its recipe with --recipe)")
            continue
        (built,) = build_rewards([spec], num_generations=samples)
        reason = _unusable(built, samples, is_trusted=is_trusted)
        reward = OwnReward(built.name, built.function, strict.passing(spec))
        if reason is None:
            reason = _fails(reward, row, samples)
        if reason is None:
            usable.append(reward)
        else:
            left_out.append(f"{built.name} ({reason})")
    return usable, left_out


def _names(spec: Spec) -> Iterable[str]:
    """The names in a spec of what is called: its own, or those that it is made of, and those that it takes as an argument."""
    mapping = spec if isinstance(spec, Mapping) else {"name": spec}
    name = str(mapping.get("name"))
    if not is_composed(mapping):
        yield name
    taken = fields_of_rewards(resolve(own)) if (own := own_name(name)) else ()
    kwargs: Any = mapping.get("kwargs") or {}
    for part in [*spec_parts(mapping), *(kwargs[key] for key in taken if key in kwargs)]:
        yield from _names(part)


def _called(spec: Spec) -> str:
    return spec if isinstance(spec, str) else str(spec.get("alias") or spec.get("name"))


def _unusable(built: BuiltReward, samples: int, *, is_trusted: bool) -> str | None:
    asks_a_model = any(leaf.kind == "judge" for leaf in leaves([built]))
    if asks_a_model and not is_trusted:
        return "it asks a model that the run names: give its recipe with --recipe"
    # A judge needs whole groups only so that it can leave out all of one.
    if samples == 1 and built.needs_whole_groups and not asks_a_model:
        return "it compares completions of one prompt: ask for several with --samples"
    return None


def _fails(reward: OwnReward, row: Mapping[str, Any], samples: int) -> str | None:
    """Why a reward can't score a held-out row: it needs a column that is not there, or what only a training has."""
    columns = {name: [value] * samples for name, value in row.items() if name != "prompt"}
    try:
        reward.scores([row["prompt"]] * samples, [""] * samples, columns)
    except UserError as error:
        return str(error).partition(" (")[2].removesuffix(")")
    return None


def say_left_out(left_out: Sequence[str]) -> None:
    """Say once which rewards of the recipe are not evaluated."""
    if left_out:
        logger.warning("not evaluated: %s", "; ".join(left_out))


def columns_of(rewards: Iterable[OwnReward]) -> dict[str, Kind]:
    """The columns that `completions.parquet` has for some rewards."""
    pays = {PAY.format(reward.name): NUMBERS for reward in rewards}
    return pays | {PASSED.format(reward.name): BOOLEANS for reward in rewards if reward.passing is not None}


def judged(
    rewards: Iterable[OwnReward], prompts: Sequence[Prompt], completions: Sequence[str], columns: Columns
) -> dict[str, Any]:
    """These columns for a batch of completions."""
    table: dict[str, Any] = {}
    for reward in rewards:
        paid = reward.scores(prompts, completions, columns)
        table[PAY.format(reward.name)] = pd.array([math.nan if pay is None else pay for pay in paid], dtype="float64")
        if (passed := reward.passed(completions, columns)) is not None:
            table[PASSED.format(reward.name)] = passed
    return table


def summarised(table: pd.DataFrame) -> dict[str, Any]:
    """For every reward of a table: the mean of its pay over problems, and the share of completions that pass it.

    Each with its 95 % interval; `pass_at` as of strict accuracy, and how many completions could not be scored.
    """
    summary: dict[str, Any] = {}
    groups = table.groupby("problem", sort=True)
    samples = int(groups.size().iloc[0])
    for name in names_in(table):
        pays = groups[PAY.format(name)].mean().dropna()
        entry: dict[str, Any] = {"unscored": int(table[PAY.format(name)].isna().sum())}
        if len(pays) > 1:
            entry["mean"] = mean_value(pays.tolist()).as_dict()
        if PASSED.format(name) in table:
            right = groups[PASSED.format(name)].sum().astype(int)
            entry["passed"] = mean_share([count / samples for count in right]).as_dict()
            if samples > 1 and "answer" in table:
                votes = [majority(rows["answer"], rows[PASSED.format(name)]) for _, rows in groups]
                entry["majority"] = mean_share([float(vote) for vote in votes]).as_dict()
            if samples > 1:
                entry["pass_at"] = {
                    str(k): mean_share([pass_at_k(samples, count, k) for count in right]).as_dict()
                    for k in powers(samples)
                }
        summary[name] = entry
    return summary


def majority(answers: Iterable[Any], right: Iterable[Any]) -> bool:
    """Whether the commonest stated answer is right, the first stated winning a tie; numbers are equal whatever their form."""
    stated = [(_canonical(answer), bool(is_right)) for answer, is_right in zip(answers, right, strict=True)]
    votes = Counter(answer for answer, _ in stated if answer is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(is_right for answer, is_right in stated if answer == winner)


def _canonical(answer: Any) -> Any:
    if answer is None or pd.isna(answer):
        return None
    number = answer_number(answer)
    return answer.strip().casefold() if number is None else number


def powers(samples: int) -> list[int]:
    """The numbers of completions that pass@k is given for: 1, 2, 4, ..., and all."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def names_in(table: pd.DataFrame) -> list[str]:
    """The rewards that a table has columns for."""
    prefix = PAY.format("")
    return [name.removeprefix(prefix) for name in table.columns if name.startswith(prefix)]


def compared(first: pd.DataFrame, second: pd.DataFrame) -> dict[str, Any]:
    """For every reward of both tables, on the same problems: both values and the paired difference second - first."""
    result: dict[str, Any] = {}
    for name in names_in(first):
        if name not in names_in(second):
            continue
        pay = PAY.format(name)
        both = pd.concat([table.groupby("problem")[pay].mean() for table in (first, second)], axis=1).dropna()
        if len(both) < 2:
            continue
        left, right = both.iloc[:, 0].tolist(), both.iloc[:, 1].tolist()
        result[name] = {
            "mean": {
                "first": mean_value(left).as_dict(),
                "second": mean_value(right).as_dict(),
                "difference": paired_mean(left, right).as_dict(),
            }
        }
        passed = PASSED.format(name)
        if passed in first and passed in second:
            shares = [table.groupby("problem")[passed].mean().tolist() for table in (first, second)]
            result[name]["passed"] = {
                "first": mean_share(shares[0]).as_dict(),
                "second": mean_share(shares[1]).as_dict(),
                "difference": paired_difference(*shares).as_dict(),
            }
    return result
