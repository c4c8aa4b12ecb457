"""Base classes of the rewards, which declare what callers need to know in addition to the scores.

A plain function is a valid reward too. `FunctionReward` gives it the interface of the base class.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args

from grpo_rewards.completions import check_rows, outside_thinking

Kind = Literal["correctness", "format", "length", "judge", "other"]
"""Kind of quality that a reward scores. The diagnosis of a run distinguishes format from correctness by it."""

LogColumn = Callable[[str, list], None] | None
"""Callable that takes a column's name and its values, one per completion. TRL passes one as `log_extra`. The command
`grpo-rewards score --explain` passes another as `log_reason`, for text that the log of a training run does not need."""

LogMetric = Callable[[str, float], None] | None
"""Callable that takes a metric's name and its value. TRL passes one as `log_metric`."""

_TAG_NAME = re.compile(r"\w[\w.-]*\Z")


def checked_tags(tags: Any, prefilled: Any = None) -> tuple[str, str]:
    """Return `tags` as (reasoning tag, answer tag), or raise ValueError with the name of the key."""
    names = tuple(tags) if isinstance(tags, Sequence) and not isinstance(tags, str) else ()
    valid = len(names) == 2 and all(isinstance(name, str) and _TAG_NAME.match(name) for name in names)
    if not valid or names[0] == names[1]:
        raise ValueError(f"tags must be two different tag names such as [think, answer], not {tags!r}")
    if prefilled not in (None, names[0]):
        raise ValueError(f"prefilled must be null or the first tag, {names[0]!r}, not {prefilled!r}")
    return names


def checked_number(value: Any, key: str, least: float = -math.inf, most: float = math.inf) -> float:
    """Return `value` as a finite float from `least` to `most`, or raise ValueError with the name of the key.

    A string is read as a number, because YAML reads 5e-1 as a string.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and least <= number <= most):
        bounds = "" if least == -math.inf and most == math.inf else f" from {least:g} to {most:g}"
        raise ValueError(f"{key} must be a finite number{bounds}, not {value!r}")
    return number


def checked_positive(value: Any, key: str) -> float:
    """Return `value` as a finite float above 0, or raise ValueError with the name of the key."""
    number = checked_number(value, key)
    if number <= 0:
        raise ValueError(f"{key} must be a positive number, not {value!r}")
    return number


def reaches(score: Any, pay: float) -> Any:
    """Return True if a score is at least `pay`, up to rounding: trainers keep scores in float32.

    `score` may also be an array or a pandas object, which is compared by element.
    """
    return score >= pay - 1e-6 * abs(pay)


def is_passing(score: Any, passes_at: float | None) -> Any:
    """Return True if a correctness reward gives this score to right completions. Without `passes_at`, any positive one.

    Args:
        score: score, or scores as in `reaches`.
        passes_at: smallest score of a right completion; None if it is not known.
    """
    return score > 0 if passes_at is None else reaches(score, passes_at)


def check_count(value: Any, key: str, least: int = 1, most: float = math.inf) -> None:
    """Raise ValueError with the name of the key unless `value` is an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        limit = f" and at most {most}" if most < math.inf else ""
        raise ValueError(f"{key} must be a whole number of at least {least}{limit}, not {value!r}")


def check_less(reward: Any, lower: str, upper: str) -> None:
    """Raise ValueError with both names unless the field `lower` of a reward is less than its field `upper`."""
    low, high = getattr(reward, lower), getattr(reward, upper)
    if low >= high:
        raise ValueError(f"{lower} must be less than {upper}, {high:g}, not {low:g}")


def check_choice(value: Any, key: str, choices: Sequence[str]) -> None:
    """Raise ValueError with the name of the key unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}, not {value!r}")


@dataclass
class Scored:
    """Scores of a batch and the values that are logged with them. A list has one entry per completion.

    Attributes:
        pay: scores; None for a row that cannot be scored.
        columns: values for the table of completions, by column.
        metrics: one value per batch, by name.
        reasons: reason for each score; None if the columns give it.
    """

    pay: list[float | None]
    columns: Mapping[str, list] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    reasons: list[str] | None = None


class BaseReward:
    """Base class of this package's rewards. They are frozen dataclasses, logged under their field `name`."""

    kind: ClassVar[Kind] = "other"
    needs_whole_groups: ClassVar[bool] = False
    """True if the reward compares the completions of a group. A group must not be split over calls then."""
    gold_forms: ClassVar[str] = ""
    """Clause for error messages that describes a valid gold."""
    reward_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that may hold the spec of another reward."""
    payments: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that hold an amount to pay."""

    name: str
    prefix: str = ""
    """Prefix of the logged columns."""
    gold_column: str | None = None
    """Name of the dataset column with the gold; None for a reward that compares with no single gold."""
    parts: tuple[Any, ...] = ()
    """Rewards that a sum or a gate is made of, as `BuiltReward`."""
    solution_column: str | None = None
    """Name of the optional dataset column with an answer that earns full pay; None if the gold itself is the answer."""

    def __post_init__(self) -> None:
        for key in self.payments:
            object.__setattr__(self, key, checked_number(getattr(self, key), key))

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def highest_pay(self) -> float | None:
        """Largest score of one completion, before the weight; None if it is not known."""
        return None

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Names of the dataset columns that the reward needs: that with the gold, if it has one."""
        return () if self.gold_column is None else (self.gold_column,)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Names of further dataset columns that the reward reads if the batch has them."""
        return ()

    @property
    def consulted(self) -> tuple[Callable[..., Any], ...]:
        """Rewards that this reward calls without adding their scores to its own."""
        return ()

    @property
    def model_source(self) -> str | None:
        """Hub name or folder of the model that `prepare` loads; None if the reward loads none."""
        return None

    @property
    def model_revision(self) -> str | None:
        """Branch, tag or commit of that model on the hub; None for the default branch."""
        return None

    def prepare(self) -> str | None:
        """Load the model or query the endpoint that the reward depends on, before training.

        Returns:
            One line about it, or None if the reward depends on nothing.

        Raises:
            ValueError: a model cannot be loaded, or an endpoint gives no score.
        """
        return None

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_extra: LogColumn = None,
        log_metric: LogMetric = None,
        log_reason: LogColumn = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score for each completion, None for a row that cannot be scored.

        Raises:
            ValueError: a column that the reward reads is missing, or is not a list with one entry per completion, or a
                reward that compares the completions of a group was not called with whole groups.
        """
        check_rows(self.name, completions=completions)
        scored = self._scored(prompts, completions, columns)
        if log_extra is not None:
            for column, values in scored.columns.items():
                log_extra(f"{self.prefix}{column}", values)
        if log_metric is not None and scored.pay:
            for metric, value in scored.metrics.items():
                log_metric(f"rewards/{self.name}/{metric}", value)
        if log_reason is not None and scored.reasons is not None:
            log_reason("reason", scored.reasons)
        return scored.pay

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        raise NotImplementedError

    def passed(self, scores: Sequence[float | None]) -> list[bool]:
        """Return, for each score, True if it is the largest score of this reward."""
        highest = self.highest_pay
        return [score is not None and score == highest for score in scores]

    def validate(self, rows: int, columns: Mapping[str, Any]) -> list[bool]:
        """Return, for each row of the dataset, True if the reward can score it.

        Each row is scored with an empty prompt and completion. None means that its gold cannot be used.

        Args:
            rows: number of rows.
            columns: dataset columns, each with one entry per row.

        Raises:
            ValueError: a column that the reward needs is missing.
        """
        return [score is not None for score in self(prompts=[""] * rows, completions=[""] * rows, **columns)]

    @property
    def looks_at(self) -> str:
        """Clause for messages: where in a completion the reward looks for an answer."""
        return "where it looks"

    def gold_note(self, golds: Iterable[tuple[object, Any]]) -> str | None:
        """Return a sentence if golds, each with the name of its row, may mean something else; else None."""
        return None

    def unparsed_note(self, completions: Sequence[Any]) -> str | None:
        """Return a sentence if no completion states an answer where this reward looks for it; else None."""
        return None

    def with_unit_pay(self) -> BaseReward | None:
        """Return this reward with standard scores and name, so that rewards with the same condition are equal.

        Returns None if no completion scores more than another.
        """
        return self if self.highest_pay is not None and self.highest_pay > 0 else None

    def with_tags(self, tags: tuple[str, str]) -> BaseReward:
        """Return this reward for other tags (reasoning, answer). A reward without tags returns itself."""
        return self


@dataclass(frozen=True, kw_only=True)
class TaggedReward(BaseReward):
    """Base class of rewards that read a completion around its tags."""

    tags: tuple[str, str] = ("think", "answer")
    prefilled: str | None = None
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tags", checked_tags(self.tags, self.prefilled))

    @property
    def highest_pay(self) -> float:
        """Largest amount that the reward pays. A reward with a single amount also pays 0."""
        amounts = [getattr(self, key) for key in self.payments]
        return max(amounts) if len(amounts) > 1 else max(*amounts, 0.0)

    def with_unit_pay(self) -> BaseReward | None:
        """Return this reward with its class's amounts, name and prefix, or None if no completion earns anything."""
        if self.highest_pay <= 0:
            return None
        standard = (*self.payments, "name", "prefix")
        reset: dict[str, Any] = {item.name: item.default for item in fields(self) if item.name in standard}
        return replace(self, **reset)

    def with_tags(self, tags: tuple[str, str]) -> BaseReward:
        """Return this reward for other tags."""
        return replace(self, tags=tags, prefilled=tags[0] if self.prefilled else None)

    def _outside_thinking(self, text: str) -> str:
        return outside_thinking(text, self.tags[0], self.prefilled is not None)


class FunctionReward(BaseReward):
    """Interface of the base class for a plain function, from the attributes that the function may have.

    Args:
        function: function as a trainer calls it, with bound arguments.
        source: function itself, or a class that was not instantiated. It may have the attributes `kind`, `highest_pay`,
            `needs_whole_groups`, `columns_read` and `gold_column`.
    """

    def __init__(self, function: Callable[..., Any], source: Any) -> None:
        self.function = function
        self.name = callable_name(function)
        kind = getattr(source, "kind", None)
        self.declared_kind: Kind | None = kind if kind in get_args(Kind) else None
        self.needs_whole_groups = getattr(source, "needs_whole_groups", False) is True  # type: ignore[misc]
        self.gold_column = getattr(source, "gold_column", None)
        self.declared_columns: Sequence[str] | None = getattr(source, "columns_read", None)
        """Names of the dataset columns that the function declares; None if it declares none and may read any."""
        # A function that declares no kind may use the name `highest_pay` in another sense.
        self._highest_pay = getattr(source, "highest_pay", None) if self.declared_kind else None

    @property
    def highest_pay(self) -> float | None:
        """Largest score that the function declares; None if it declares none."""
        return self._highest_pay

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Names of the dataset columns that the function declares."""
        return tuple(self.declared_columns or ())

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """Call the function."""
        return self.function(*args, **columns)


def callable_name(function: Callable[..., Any]) -> str:
    """Return the name that TRL gives a callable (`trl.trainer.utils.get_callable_name`)."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
