"""What the rewards share that hold a completion's answer against a gold: columns, tags, pay, logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from grpo_rewards.completions import check_rows, completion_text, outside_thinking
from grpo_rewards.math.answers import LAYOUTS, answer_extractor
from grpo_rewards.reward import BaseReward, Kind, LogColumn, LogMetric, TaggedReward, check_choice, checked_number


class Judgement(NamedTuple):
    """One row: the answer found, the gold held against it, why it earns what it does, and that pay.

    `pay` is None where the gold can't be read.
    """

    extracted: str | None
    gold: str | None
    verdict: str
    pay: float | None


class Judgements(NamedTuple):
    """The columns of a batch of `Judgement`s: a row costs less as an entry of each than as an object of its own."""

    extracted: list[str | None]
    gold: list[str | None]
    verdict: list[str]
    pay: list[float | None]

    @classmethod
    def of(cls, rows: Sequence[Judgement]) -> Judgements:
        """The columns of these rows."""
        return cls(
            [row.extracted for row in rows],
            [row.gold for row in rows],
            [row.verdict for row in rows],
            [row.pay for row in rows],
        )


@dataclass(frozen=True, kw_only=True)
class GoldReward(TaggedReward):
    """A reward that holds a completion's answer against a gold; what a row earns, a subclass says in `_judged`."""

    kind: ClassVar[Kind] = "correctness"
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS
    payments: ClassVar[tuple[str, ...]]  # the fields that say what is paid

    extract: str = "answer_tag"
    gold_column: str = "answer"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in self.payments:
            object.__setattr__(self, key, checked_number(getattr(self, key), key))
        check_choice(self.extract, "extract", self.layouts)

    @property
    def highest_pay(self) -> float:
        """Largest of the amounts that the reward pays."""
        return max(getattr(self, key) for key in self.payments)

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Name of the gold's column."""
        return (self.gold_column,)

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_extra: LogColumn = None,
        log_metric: LogMetric = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score each completion against the gold in its row of `columns[gold_column]`.

        Raises:
            ValueError: the batch lacks a column that the reward reads, or one is not a list with an entry per completion.
        """
        check_rows(self.name, completions=completions)
        texts = [row if type(row) is str else completion_text(row) for row in completions]
        judged = self._judged(texts, columns, log_metric)
        self.log_column(log_extra, "extracted", judged.extracted)
        self.log_column(log_extra, "gold", judged.gold)
        self.log_column(log_extra, "verdict", judged.verdict)
        if log_metric is not None and texts:
            parsed = sum(answer is not None for answer in judged.extracted)
            log_metric(f"rewards/{self.name}/parsed", parsed / len(texts))
        return judged.pay

    def _judged(self, texts: Sequence[str], columns: Mapping[str, Any], log_metric: LogMetric) -> Judgements:
        raise NotImplementedError

    def _answer(self, text: str, layout: str) -> str | None:
        """Return the answer that a completion states in a layout, as written, or None."""
        return self._answers([text], layout)[0]

    def _answers(self, texts: Sequence[str], layout: str) -> list[str | None]:
        if layout == "whole":
            return [self._outside(text).strip() or None for text in texts]
        return list(map(answer_extractor(layout, self.tags, self.prefilled is not None), texts))

    def _outside(self, text: str) -> str:
        return outside_thinking(text, self.tags[0], self.prefilled is not None)


@dataclass(frozen=True, kw_only=True)
class AgainstGold(GoldReward):
    """A reward that pays `pay_wrong + share * (pay - pay_wrong)` for a share in [0, 1]."""

    layouts: ClassVar[tuple[str, ...]] = (*LAYOUTS, "whole")  # "whole" is everything outside the thinking
    payments: ClassVar[tuple[str, ...]] = ("pay", "pay_wrong")

    pay: float = 1.0
    pay_wrong: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pay <= self.pay_wrong:
            raise ValueError(f"pay must be more than pay_wrong, {self.pay_wrong:g}, not {self.pay:g}")

    def with_unit_pay(self) -> BaseReward | None:
        """Return this reward paying 1 or 0, without its name and prefix, or None if no completion earns anything."""
        return replace(self, pay=1.0, pay_wrong=0.0, prefix="", name=type(self).name) if self.highest_pay > 0 else None

    def _pay(self, share: float) -> float:
        return self.pay if share == 1 else self.pay_wrong + share * (self.pay - self.pay_wrong)
