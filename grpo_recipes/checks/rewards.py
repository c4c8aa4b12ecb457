"""Checks of the rewards: their columns, golds and weights before a run, and the scores of each call during it."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from trl.trainer.utils import is_async_callable

from grpo_recipes.data.places import NAMED_ROWS, Place, Places, RowName, by_table, listed_places, row_numbers
from grpo_recipes.data.presets import is_missing
from grpo_recipes.data.prompts import GOLDS, TRL_ARGUMENTS
from grpo_recipes.data.tables import sample_of_rows
from grpo_recipes.process.faults import FaultyRow, RewardFault
from grpo_rewards.built import BoundReward, Reward
from grpo_rewards.completions import completion_text, listed_scores
from grpo_rewards.composed import leaves
from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.registry import BuiltReward
from grpo_rewards.reward import BaseReward, TaggedReward

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
EXCERPT = 60
ERROR_CHARS = 300

SEARCH_SECONDS = 10.0
"""Time after which no further row is scored alone to find the one that a reward raises on. The other ranks wait."""


@dataclass(frozen=True)
class GoldCheck:
    """Golds of a dataset that the correctness rewards can't score.

    Attributes:
        count: Number of these golds.
        total: Number of golds that were checked.
        places: Positions of the first `NAMED_ROWS` of their rows.
        rewards: Names of the correctness rewards.
        forms: Clause that describes a valid gold of the first of them, or "".
        missing: Number of golds that are empty cells, whose rows `drop_missing` drops.
        dataset_rows: Number of rows if only a random sample of them was checked (`tables.sample_of_rows`), or None.
    """

    count: int
    total: int
    places: tuple[Place, ...]
    rewards: tuple[str, ...]
    forms: str = ""
    missing: int = 0
    dataset_rows: int | None = None

    def describe(self) -> str:
        """Return a sentence that names the rows."""
        rows = listed_places(self.places, self.count - len(self.places))
        sampled = "" if self.dataset_rows is None else f" (a random sample of {self.dataset_rows:,} rows)"
        total = f"{self.total:,}" if sampled else str(self.total)
        fix = ""
        if self.missing:
            fix = f"; {self.missing} of them are empty: set `dataset.drop_missing: true` to leave these rows out"
        return (
            f"{self.count} of {total} golds{sampled} can't be scored by {' or '.join(self.rewards)}: no completion "
            f"earns anything from it on {rows}"
            f"{f': {self.forms}' if self.forms else ''}{fix}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for `run.json`."""
        sampled = {} if self.dataset_rows is None else {"dataset_rows": self.dataset_rows}
        return {"count": self.count, "total": self.total, "rows": by_table(self.places), **sampled}


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
        raise UserError("`rewards`", "all weights are 0, so that nothing is learned", "give one reward a weight")


def check_columns(rewards: Iterable[BuiltReward], columns: Sequence[str]) -> None:
    """Raise `UserError` if a reward needs a column that is missing, or can't take all the arguments that TRL passes."""
    # A missing column would otherwise end the run at its first reward, after the model is loaded.
    given = [column for column in columns if column != "prompt"]  # TRL passes it as `prompts`
    for reward in leaves(rewards):
        needed, takes_all = _parameters(reward.function)
        for column in (*reward.declared.columns_read, *needed):
            if column not in (*TRL_ARGUMENTS, *given):
                problem = f"it needs the column `{column}`, and gets the columns {', '.join(given) or 'none'}"
                raise UserError(f"`rewards`: {reward.name}", problem, "name the table's column in `dataset.columns`")
        if not takes_all:
            problem = "it must take every column by name, as TRL hands them over"
            raise UserError(f"`rewards`: {reward.name}", problem, "end its parameters in `**columns`")


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

    def score(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        call = _RewardCall(name, prompts, completions, columns)
        try:
            scores = reward(prompts=prompts, completions=completions, **columns)
        except (Exception, SystemExit) as error:
            raise call.fault_of(error, call.row_that_raises(error, reward)) from error
        return _finite_scores(call, scores)

    async def score_async(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        call = _RewardCall(name, prompts, completions, columns)
        try:
            scores = await reward(prompts=prompts, completions=completions, **columns)
        except (Exception, SystemExit) as error:  # an exit that leaves a task would end the event loop
            raise call.fault_of(error, None) from error
        return _finite_scores(call, scores)

    checked: Reward = score_async if is_async_callable(reward) else score
    checked.__name__ = name  # TRL logs a reward under this name
    return checked


@dataclass(frozen=True)
class _RewardCall:
    """Arguments of one call of a reward: one prompt and one completion per row of this rank's generation."""

    reward: str
    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Any]

    def row_that_raises(self, error: BaseException, reward: Reward) -> int | None:
        """Return the row that raises the same error when it is scored alone, after at most `SEARCH_SECONDS`.

        The search ends once a row differs from the others. None is returned if all rows agree, because an error of all
        rows, such as that of a server that is down, is not the fault of one.
        """
        until = time.monotonic() + SEARCH_SECONDS
        raised: list[bool] = []
        for row in range(len(self.completions)):
            if time.monotonic() > until or len(set(raised)) > 1:
                break
            try:
                reward(**self._row_alone(row))
                raised.append(False)
            except (Exception, SystemExit) as other:
                # A reward that compares the completions of a group may raise another error for a single row.
                raised.append(type(other) is type(error) and str(other) == str(error))
        is_found = len(set(raised)) > 1 or (len(self.completions) == 1 and raised == [True])
        return raised.index(True) if is_found else None

    def _row_alone(self, row: int) -> dict[str, Any]:
        """Return the arguments for a call that scores one row and logs nothing."""
        alone: dict[str, Any] = {"prompts": [self.prompts[row]], "completions": [self.completions[row]]}
        for key, column in self.columns.items():
            is_column = isinstance(column, list) and len(column) == len(self.completions)
            alone[key] = [column[row]] if is_column else column
        for key in ("log_extra", "log_metric"):
            if key in self.columns:
                alone[key] = lambda *values: None
        return alone

    def row(self, row: int) -> FaultyRow:
        """Return the description of a row for the error."""
        prompt = self.prompts[row]
        if not isinstance(prompt, str):
            prompt = completion_text([{"content": prompt[-1].get("content")}])
        return FaultyRow(self.reward, row, prompt, completion_text(self.completions[row]), self._step())

    def _step(self) -> int | None:
        return getattr(self.columns.get("trainer_state"), "global_step", None)

    def place(self, row: int) -> str:
        """Return a clause on the place and the text of a row."""
        excerpt = shortened(one_line(completion_text(self.completions[row])), EXCERPT)
        return f"row {row} {self._generation()} (completion {excerpt!r})"

    def _generation(self) -> str:
        step = self._step()
        return "of this rank's generation" + ("" if step is None else f" after step {step}")

    def fault_of(self, error: BaseException, row: int | None) -> RewardFault:
        """Return the error to raise for an error of the reward, and for the row that it was found to raise on."""
        what = f"reward `{self.reward}` raised {type(error).__name__}: {shortened(one_line(error), ERROR_CHARS)}"
        if row is None:
            return RewardFault(f"{what}, for the {len(self.completions)} completions {self._generation()}")
        return RewardFault(f"{what}, for {self.place(row)}", self.row(row))


def _finite_scores(call: _RewardCall, scores: Any) -> list[float | None]:
    """Return `scores` as a list. Raise `RewardFault` unless it has one finite number or None for each completion.

    TRL writes the scores into a tensor: a list that is too short, or a single score, would silently be spread over
    rows.
    """
    try:
        scores = listed_scores(call.reward, scores, len(call.completions))
    except ValueError as error:
        raise RewardFault(str(error)) from error
    for row, score in enumerate(scores):
        if score is not None and not _is_finite(score):
            problem = f"reward `{call.reward}` returned {score!r} for {call.place(row)}"
            fix = "return a finite number, or None for a row that can't be scored"
            raise RewardFault(f"{problem}: {fix}", call.row(row))
    return scores


def _is_finite(score: Any) -> bool:
    if isinstance(score, np.ndarray) and score.ndim:
        return False  # a row of a 2-d array, of which torch would make a second dimension
    try:
        # Compared in float32, to which TRL converts rewards.
        return math.isfinite(score) and abs(float(score)) <= LARGEST_FLOAT32
    except (TypeError, ValueError, OverflowError):  # ValueError: a tensor of several elements
        return False


def check_golds(rewards: Iterable[BuiltReward], dataset: Dataset, places: Places = row_numbers) -> GoldCheck | None:
    """Return the golds that no correctness reward can score, or None if there are none.

    A reward returns None for a gold that it can't score with any completion. Each gold is therefore scored once with an
    empty completion, so that nothing is compared symbolically. Only a sample of a large dataset is checked
    (`tables.sample_of_rows`).

    Raises:
        UserError: No gold can be scored.
    """
    judges = {reward.name: found for reward in rewards if (found := _correctness_rewards(reward))}
    if not judges:
        return None
    checked, all_rows = sample_of_rows(len(dataset)), len(dataset)
    dataset = dataset.select(checked)
    is_scorable = np.zeros(len(dataset), bool)
    for parts in judges.values():
        # A sum or gate scores a row only if all its parts do.
        is_scorable |= np.all([_can_score(part, dataset) for part in parts], axis=0)
    if not len(rows := checked[~is_scorable]):
        return None
    names = tuple(judges)
    judge = next(iter(judges.values()))[0]
    if len(rows) == len(dataset):
        column = judge.columns_read[0]
        excerpt = shortened(one_line(dataset[0][column]), EXCERPT)
        problem = f"none of the {len(dataset)} golds in the column `{column}` can be scored (the first is {excerpt!r})"
        raise UserError(f"`rewards`: {' and '.join(names)}", problem, judge.gold_forms or "correct the column")
    dataset_rows = all_rows if len(dataset) < all_rows else None
    named = tuple(places(rows[:NAMED_ROWS].tolist()))
    missing = 0
    if (column := judge.columns_read[0]) in GOLDS:
        missing = sum(map(is_missing, dataset.select(np.flatnonzero(~is_scorable))[column]))
    return GoldCheck(len(rows), len(dataset), named, names, judge.gold_forms, missing, dataset_rows)


def gold_notes(rewards: Iterable[BuiltReward], dataset: Dataset, places: Places = row_numbers) -> list[str]:
    """Return a sentence for each correctness reward whose golds may mean something else than it reads."""
    sample = sample_of_rows(len(dataset))
    notes = []
    for reward in rewards:
        for judge in _correctness_rewards(reward):
            if judge.gold_column in dataset.column_names:
                golds = dataset.select(sample)[judge.gold_column]
                named = ((RowName(int(row), places), gold) for row, gold in zip(sample, golds, strict=True))
                if (note := judge.gold_note(named)) is not None:
                    notes.append(f"{reward.name}: {note}")
    return notes


def prefilled_notes(rewards: Iterable[BuiltReward], prompt: str) -> list[str]:
    """Return a sentence if the `prefilled` of some rewards is not the reasoning tag that the prompt opens, else [].

    Args:
        rewards: Rewards with their weights.
        prompt: First prompt, as the model receives it.
    """
    tagged, prompt = _tagged_rewards(rewards), prompt.rstrip()
    for tag, answer in (*(reward.tags for reward in tagged.values()), TaggedReward.tags):
        if not prompt.endswith(f"<{tag}>"):
            continue
        unset = {name: reward.tags for name, reward in tagged.items() if reward.prefilled != tag}
        fix = f"set `prefilled: {tag}` in"
        if any(first != tag for first, _ in unset.values()):
            fix = f"set `tags: [{tag}, {answer}]` and `prefilled: {tag}` in"
        problem = f"ends in `<{tag}>`, so completions start inside the thinking, and an unfinished thought may be paid"
        return _prompt_note(problem, fix, unset)
    # A template may write some words behind the tag, and a message above may mention it.
    end = "\n".join(prompt.splitlines()[-2:])
    needless = []
    for name, reward in tagged.items():
        if reward.prefilled and end.rfind(f"<{reward.prefilled}>") <= end.rfind(f"</{reward.prefilled}>"):
            needless.append(name)
    problem = "opens no reasoning tag, so a completion without a closing tag is read as an unfinished thought"
    return _prompt_note(problem, "remove `prefilled` from", needless)


def _tagged_rewards(rewards: Iterable[BuiltReward]) -> dict[str, TaggedReward]:
    """Return the rewards that read tags, also those inside other rewards, by name and place."""
    found: dict[str, TaggedReward] = {}
    for reward in rewards:
        for leaf in leaves([reward]):
            if isinstance(leaf.unbound, TaggedReward):
                name = leaf.name if leaf.name == reward.name else f"{leaf.name} in {reward.name}"
                found[name] = leaf.unbound
    return found


def _prompt_note(problem: str, fix: str, names: Iterable[str]) -> list[str]:
    """Return a sentence on a prompt that does not fit the rewards `names`, or [] without any."""
    named = " and ".join(names)
    return [f"`rewards`: the prompt {problem}: {fix} the `kwargs` of {named}"] if named else []


def _correctness_rewards(reward: BuiltReward) -> list[BaseReward]:
    """Return the correctness rewards in `reward` that read the dataset."""
    found = [leaf.declared for leaf in leaves([reward]) if leaf.kind == "correctness"]
    return [judge for judge in found if judge.columns_read]


def _can_score(judge: BaseReward, dataset: Dataset) -> list[bool]:
    read = (*judge.columns_read, *judge.optional_columns)
    columns = {column: list(dataset[column]) for column in dataset.column_names if column in read}
    return judge.validate(len(dataset), columns)
