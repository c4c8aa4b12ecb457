"""What the rewards share that hold a completion's answer against a gold that is no number: columns, tags, pay, logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from grpo_rewards.answers import LAYOUTS, answer_extractor
from grpo_rewards.completions import Kind, check_rows, completion_text, outside_thinking
from grpo_rewards.format_tags import checked_number, checked_tags

# "whole" is everything outside the thinking.
ANSWER_LAYOUTS = (*LAYOUTS, "whole")


class Judgement(NamedTuple):
    """One row: the answer found, the gold held against it, why it earns what it does, and its share of full pay.

    `share` is in [0, 1], or None where the gold can't be read.
    """

    extracted: str | None
    gold: str | None
    verdict: str
    share: float | None


@dataclass(frozen=True)
class AgainstGold:
    """A reward that pays `pay_wrong + share * (pay - pay_wrong)`; what the share is, a subclass says in `_judged`."""

    kind: ClassVar[Kind] = "correctness"
    gold_forms: ClassVar[str]

    extract: str = "answer_tag"
    pay: float = 1.0
    pay_wrong: float = 0.0
    tags: tuple[str, str] = ("think", "answer")
    prefilled: str | None = None
    gold_column: str = "answer"
    prefix: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", checked_tags(self.tags, self.prefilled))
        for key in ("pay", "pay_wrong"):
            object.__setattr__(self, key, checked_number(getattr(self, key), key))
        if self.pay <= self.pay_wrong:
            raise ValueError(f"pay must be more than pay_wrong, {self.pay_wrong:g}, not {self.pay:g}")
        if self.extract not in ANSWER_LAYOUTS:
            raise ValueError(f"extract must be one of {', '.join(ANSWER_LAYOUTS)}, not {self.extract!r}")

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def highest_pay(self) -> float:
        """The most that a completion can earn."""
        return self.pay

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The dataset columns that the reward needs."""
        return (self.gold_column,)

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score each completion against the gold in its row.

        Raises:
            ValueError: the batch lacks a column that the reward reads, or one is not a list with an entry per completion.
        """
        check_rows(self.name, completions=completions)
        rows = self._judged([completion_text(completion) for completion in completions], columns)
        if log_extra is not None:
            log_extra(f"{self.prefix}extracted", [row.extracted for row in rows])
            log_extra(f"{self.prefix}gold", [row.gold for row in rows])
            log_extra(f"{self.prefix}verdict", [row.verdict for row in rows])
        if log_metric is not None and rows:
            parsed = sum(row.extracted is not None for row in rows)
            log_metric(f"rewards/{self.name}/parsed", parsed / len(rows))
        return [self._pay(row.share) for row in rows]

    def _judged(self, texts: Sequence[str], columns: Mapping[str, Any]) -> list[Judgement]:
        raise NotImplementedError

    def _answer(self, text: str, layout: str) -> str | None:
        """Return the answer that a completion states in a layout, as written, or None."""
        if layout == "whole":
            return self._outside(text).strip() or None
        return answer_extractor(layout, self.tags, self.prefilled is not None)(text)

    def _outside(self, text: str) -> str:
        return outside_thinking(text, self.tags[0], self.prefilled is not None)

    def _pay(self, share: float | None) -> float | None:
        if share is None:
            return None
        return self.pay if share == 1 else self.pay_wrong + share * (self.pay - self.pay_wrong)
