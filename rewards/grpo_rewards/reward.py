"""Base classes of the rewards, which declare what callers need to know beside the scores.

A plain function is a valid reward too. `FunctionReward` gives it the interface of the base class.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

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


def checked_number(value: Any, key: str) -> float:
    """Return `value` as a finite float, or raise ValueError with the name of the key.

    A string is read as a number, because YAML reads 5e-1 as a string.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{key} must be a finite number, not {value!r}")
    return number


def check_count(value: Any, key: str, least: int = 1) -> None:
    """Raise ValueError with the name of the key unless `value` is an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, not {value!r}")


def check_choice(value: Any, key: str, choices: Sequence[str]) -> None:
    """Raise ValueError with the name of the key unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}, not {value!r}")


class BaseReward:
    """Base class of this package's rewards: frozen dataclasses that a trainer logs under their field `name`."""

    kind: ClassVar[Kind] = "other"
    needs_whole_groups: ClassVar[bool] = False
    """True if the reward compares the completions of a group, so that no group may be split over calls."""
    gold_forms: ClassVar[str] = ""
    """Clause for error messages that describes a valid gold."""
    reward_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that may hold the spec of another reward."""

    name: str
    gold_column: str | None = None
    """Name of the dataset column with the gold; None for a reward that compares with no single gold."""

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def highest_pay(self) -> float | None:
        """Largest score of one completion, before the weight; None if it is not known."""
        return None

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Names of the dataset columns that the reward needs."""
        return ()

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

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """Return one score for each completion, None for a row that cannot be scored."""
        raise NotImplementedError

    def passed(self, scores: Sequence[float | None]) -> list[bool]:
        """Return, for each score, True if it is the largest score of this reward."""
        highest = self.highest_pay
        return [score is not None and score == highest for score in scores]

    def validate(self, rows: int, columns: Mapping[str, Sequence[Any]]) -> list[bool]:
        """Return, for each row of the dataset, True if the reward can score it.

        An empty completion shows this: a reward returns None for a row that it cannot score, whatever the completion.

        Args:
            rows: number of rows.
            columns: dataset columns, each with one entry per row.

        Raises:
            ValueError: a column that the reward needs is missing.
        """
        return [score is not None for score in self(completions=[""] * rows, **columns)]

    @property
    def looks_at(self) -> str:
        """Clause for messages that says where in a completion the reward looks for an answer."""
        return "where it looks"

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
    """Base class of rewards that read a completion around its tags and log columns for each completion."""

    tags: tuple[str, str] = ("think", "answer")
    prefilled: str | None = None
    prefix: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", checked_tags(self.tags, self.prefilled))

    def log_column(self, log_extra: LogColumn, column: str, values: list) -> None:
        """Log a column with one value for each completion, under the reward's prefix."""
        if log_extra is not None:
            log_extra(f"{self.prefix}{column}", values)

    def with_tags(self, tags: tuple[str, str]) -> BaseReward:
        """Return this reward for other tags."""
        return replace(self, tags=tags, prefilled=tags[0] if self.prefilled else None)


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
