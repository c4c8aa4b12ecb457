"""Calls of a reward by an audit: as a trainer calls it, with every failure recorded instead of raised."""

from __future__ import annotations

import asyncio
import inspect
import io
import math
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, Literal

from grpo_rewards.audit.questions import Question
from grpo_rewards.completions import listed_scores
from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.registry import BuiltReward

BATCH = 128
"""Number of completions of one call."""

GROUP = 4
"""Number of completions per prompt for rewards that compare them."""

Shape = Literal["text", "messages"]
"""Shape of prompts and completions: strings, or lists of messages."""


_ADDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Arguments that TRL adds to the columns.


@dataclass(frozen=True)
class Failure:
    """Failure of a reward on a completion.

    Attributes:
        check: name of the contract check that it breaks: `raises`, `count` or `finite`.
        reason: clause that describes it.
    """

    check: str
    reason: str


Outcome = float | None | Failure
Item = tuple[Question, str]
"""Question and completion."""


class Caller:
    """Reward that is called with questions and texts.

    Args:
        reward: reward to call.
        columns: names of the columns that every call passes.
        shape: shape of prompts and completions.
        answers: texts that replace the column with the gold, by the number of the row.
        gold_columns: names of that column, the dataset's own first.

    Attributes:
        printed: first text that the reward printed.
        returned: name of the type that the reward returns, unless it is a list.
        seconds: shortest time per completion of a call.
    """

    def __init__(
        self,
        reward: BuiltReward,
        columns: Sequence[str],
        shape: Shape = "text",
        gold_columns: Sequence[str] = ("answer",),
        answers: Mapping[int, str] | None = None,
    ) -> None:
        self.reward, self.columns, self.shape = reward, columns, shape
        self.gold_columns, self.answers = gold_columns, answers
        self.printed, self.returned, self.seconds = "", "", math.inf
        self.takes = _parameters(reward)
        self._known: dict[tuple[int, str], Outcome] = {}
        self._questions: dict[int, Question] = {}

    def scores(self, items: Sequence[Item]) -> list[Outcome]:
        """Return the outcome of each completion. One that was seen before is not scored again."""
        new = list(dict.fromkeys(item for item in items if (item[0].number, item[1]) not in self._known))
        step = BATCH // self.group
        for start in range(0, len(new), step):
            batch = new[start : start + step]
            padded = [item for item in batch for _ in range(self.group)]
            for (question, text), outcome in zip(batch, self.fresh(padded)[:: self.group], strict=True):
                self._known[question.number, text] = outcome
                self._questions[question.number] = question
        return [self._known[question.number, text] for question, text in items]

    def known(self) -> list[tuple[Item, Outcome]]:
        """Return every completion that was scored, with its outcome."""
        return [((self._questions[number], text), outcome) for (number, text), outcome in self._known.items()]

    def passed(self) -> list[str]:
        """Return the names of the arguments that a trainer passes."""
        return [*self.columns, *_ADDED]

    @property
    def group(self) -> int:
        """Number of completions of one prompt that a call must hold: 1 unless the reward compares them."""
        return GROUP if self.reward.needs_whole_groups else 1

    def fresh(self, items: Sequence[Item]) -> list[Outcome]:
        """Return the outcome of each completion of one call, and of calls with one completion if that fails."""
        outcomes = self.call(self.batch(items), len(items))
        if not isinstance(outcomes, Failure):
            return outcomes
        if len(items) <= self.group:
            return [outcomes] * len(items)
        single: list[Outcome] = []
        for start in range(0, len(items), self.group):
            single += self.fresh(items[start : start + self.group])
        # A failure that no completion causes alone is one of the whole batch.
        return single if any(isinstance(outcome, Failure) for outcome in single) else [outcomes] * len(items)

    def batch(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the arguments of a call."""
        batch: dict[str, Any] = {}
        for name in self.columns:
            batch[name] = [question.columns.get(name) for question, _ in items]
        golds = batch.get(self.gold_columns[0])
        if self.answers is not None:
            golds = [self.answers.get(question.number) for question, _ in items]
        batch.update(dict.fromkeys(self.gold_columns, golds))
        batch["prompts"] = [self._prompt(question) for question, _ in items]
        batch["completions"] = [_shaped(text, "assistant", self.shape) for _, text in items]
        batch["completion_ids"] = [list(range(len(text.split()))) for _, text in items]
        batch["trainer_state"] = types.SimpleNamespace(global_step=0, max_steps=1, epoch=0.0)
        batch["log_extra"] = batch["log_metric"] = _ignored
        return batch if self.takes is None else {key: value for key, value in batch.items() if key in self.takes}

    def _prompt(self, question: Question) -> Any:
        own = question.columns.get("prompt")
        is_conversation = self.shape == "messages" and isinstance(own, list)
        return own if is_conversation else _shaped(question.prompt, "user", self.shape)

    def call(self, batch: Mapping[str, Any], count: int) -> list[Outcome] | Failure:
        """Return the outcomes of one call, or the failure of the whole call."""
        output = io.StringIO()
        start = time.perf_counter()
        try:
            with redirect_stdout(output), redirect_stderr(output):
                scores = self.reward.function(**batch)
                scores = asyncio.run(_awaited(scores)) if inspect.isawaitable(scores) else scores
        except (Exception, SystemExit) as error:
            name = type(error).__name__
            return Failure("raises", shortened(f"{name}: {one_line(error) or '(no message)'}", 160))
        finally:
            self.printed = self.printed or output.getvalue()
        self.seconds = min(self.seconds, (time.perf_counter() - start) / count)
        if not isinstance(scores, (list, tuple)):
            self.returned = type(scores).__name__
        try:
            return [_outcome(score) for score in listed_scores(self.reward.name, scores, count)]
        except ValueError as error:
            return Failure("count", str(error))


def _parameters(reward: BuiltReward) -> frozenset[str] | None:
    """Return the names of the arguments that a reward takes; None if it takes any."""
    try:
        parameters = inspect.signature(reward.unbound).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else frozenset(parameters)


def missing_columns(reward: BuiltReward, columns: Sequence[str]) -> list[str]:
    """Return the names of the columns that a reward needs and that `columns` lack."""
    offered = {*columns, *_ADDED}
    try:
        parameters = inspect.signature(reward.unbound).parameters.values()
    except (TypeError, ValueError):
        return []
    missing = []
    for parameter in parameters:
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and parameter.name not in offered:
            missing.append(parameter.name)
    return missing


def check_columns(reward: BuiltReward, columns: Sequence[str], file: object) -> None:
    """Raise UserError if a reward needs a column that the file lacks."""
    if missing := missing_columns(reward, columns):
        listed = ", ".join(f"`{name}`" for name in columns)
        raise UserError(
            f"{file} has no column `{missing[0]}`, which reward `{reward.name}` needs: it has {listed}. "
            "Rename a column, or name the one with the gold by --gold_column"
        )


def _outcome(score: Any) -> Outcome:
    if score is None:
        return None
    try:
        value = math.nan if isinstance(score, (str, bytes)) else float(score)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        return Failure("finite", f"returned {shortened(repr(score))}")
    return value


async def _awaited(scores: Any) -> Any:
    return await scores


def _shaped(text: str, role: str, shape: Shape) -> Any:
    return text if shape == "text" else [{"role": role, "content": text}]


def _ignored(*args: Any) -> None:
    """Ignore what a reward logs."""
