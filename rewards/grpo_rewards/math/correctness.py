"""Correctness rewards: base classes that compare a completion's answer with a gold, and the rewards for mathematics.

`gsm8k_correctness` pays 2 for the gold's string, 1.5 for an equal number and 0 otherwise; `math_correctness` pays 1 for
an equal number or formula. The tables in the docstrings of `GSM8KCorrectness` and `MathCorrectness` are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar

from grpo_rewards.completions import check_rows, completion_text, needed_column, outside_thinking
from grpo_rewards.math.answers import LAYOUTS, Gold, Judge, answer_extractor, read_gold
from grpo_rewards.reward import BaseReward, Kind, LogColumn, LogMetric, TaggedReward, check_choice, checked_number


@dataclass
class Judgements:
    """Columns of a scored batch, each with one entry per completion.

    Attributes:
        extracted: answers found in the completions; None for a completion without one.
        gold: golds that the answers were compared with; None for a gold that can't be read.
        verdict: names of the outcomes, such as "equal".
        pay: scores; None for a gold that can't be read.
    """

    extracted: list[str | None] = field(default_factory=list)
    gold: list[str | None] = field(default_factory=list)
    verdict: list[str] = field(default_factory=list)
    pay: list[float | None] = field(default_factory=list)

    def add(self, extracted: str | None, gold: str | None, verdict: str, pay: float | None) -> None:
        """Append one completion."""
        self.extracted.append(extracted)
        self.gold.append(gold)
        self.verdict.append(verdict)
        self.pay.append(pay)


@dataclass(frozen=True, kw_only=True)
class GoldReward(TaggedReward):
    """Base class of rewards that compare a completion's answer with a gold. Subclasses implement `_judged`."""

    kind: ClassVar[Kind] = "correctness"
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS
    payments: ClassVar[tuple[str, ...]]
    """Names of the fields that hold an amount to pay."""

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
        """Name of the dataset column with the gold."""
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
            ValueError: a column that the reward reads is missing, or is not a list with one entry per completion.
        """
        check_rows(self.name, completions=completions)
        judged = self._judged(list(map(completion_text, completions)), columns, log_metric)
        self.log_column(log_extra, "extracted", judged.extracted)
        self.log_column(log_extra, "gold", judged.gold)
        self.log_column(log_extra, "verdict", judged.verdict)
        if log_metric is not None and judged.extracted:
            rows = len(judged.extracted)
            log_metric(f"rewards/{self.name}/parsed", (rows - judged.extracted.count(None)) / rows)
        return judged.pay

    def _judged(self, texts: Sequence[str], columns: Mapping[str, Any], log_metric: LogMetric) -> Judgements:
        raise NotImplementedError

    def _answers(self, texts: Sequence[str], layout: str) -> list[str | None]:
        """Return the answer that each completion states in a layout, as written, or None."""
        if layout == "whole":
            return [self._outside(text).strip() or None for text in texts]
        return list(map(answer_extractor(layout, self.tags, self.prefilled is not None), texts))

    def _outside(self, text: str) -> str:
        return outside_thinking(text, self.tags[0], self.prefilled is not None)


@dataclass(frozen=True, kw_only=True)
class AgainstGold(GoldReward):
    """Base class of rewards that pay `pay_wrong + share * (pay - pay_wrong)` for a share from 0 to 1.

    The layout `whole` is all text outside the thinking.
    """

    layouts: ClassVar[tuple[str, ...]] = (*LAYOUTS, "whole")
    payments: ClassVar[tuple[str, ...]] = ("pay", "pay_wrong")

    pay: float = 1.0
    pay_wrong: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pay <= self.pay_wrong:
            raise ValueError(f"pay must be more than pay_wrong, {self.pay_wrong:g}, not {self.pay:g}")

    def with_unit_pay(self) -> BaseReward | None:
        """Return this reward paying 1 or 0, without its name and prefix, or None if no completion earns anything."""
        if self.highest_pay <= 0:
            return None
        return replace(self, pay=1.0, pay_wrong=0.0, prefix="", name=type(self).name)

    def _pay(self, share: float) -> float:
        # Full pay exactly: the formula may round.
        return self.pay if share == 1 else self.pay_wrong + share * (self.pay - self.pay_wrong)


@dataclass(frozen=True, kw_only=True)
class GSM8KCorrectness(GoldReward):
    """The correctness pay of "GRPO from scratch" on GSM8K, on an exact comparison.

    | the completion's final answer | pay |
    |---|---|
    | is the gold's, character for character | 2 (`pay_exact`) |
    | equals the gold's (`65960` for `65,960`, `$18.00` for `18`, "She has 18 left.") | 1.5 (`pay_equal`) |
    | is something else, or is missing | 0 (`pay_wrong`) |
    | the gold has no final answer | None |

    Args:
        extract: layout of the final answer; see `answers.extract_answer`.
        tags: names of the reasoning tag and the answer tag.
        prefilled: name of the reasoning tag if the prompt already opens it.
        gold_column: name of the dataset column with the gold, a GSM8K solution or a bare answer.
        deadline: seconds for one symbolic comparison, which only a gold that is not a number needs.
        prefix: prefix of the logged columns `extracted`, `gold` and `verdict`, for runs in which two rewards log them.
        name: name of the reward in logs.
    """

    payments: ClassVar[tuple[str, ...]] = ("pay_exact", "pay_equal", "pay_wrong")
    gold_forms: ClassVar[str] = (
        "a gold is a number, a formula or a few words, or a solution that marks its final answer by `####`, "
        "`\\boxed{}` or a line `A:`"
    )

    pay_exact: float = 2.0
    pay_equal: float = 1.5
    pay_wrong: float = 0.0
    deadline: float = 2.0
    name: str = "gsm8k_correctness"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "deadline", checked_number(self.deadline, "deadline"))
        if self.deadline <= 0:
            raise ValueError(f"deadline must be a positive number of seconds, not {self.deadline!r}")

    def _judged(self, texts: Sequence[str], columns: Mapping[str, Any], log_metric: LogMetric) -> Judgements:
        golds = _read_golds(needed_column(self, "gold_column", columns, texts))
        answers = self._answers(texts, self.extract)
        judge = Judge(self.deadline)
        verdicts = list(map(judge.verdict, golds, answers))
        if log_metric is not None and verdicts:
            log_metric(f"rewards/{self.name}/symbolic", judge.symbolic_rows / len(verdicts))
            log_metric(f"rewards/{self.name}/timeouts", float(verdicts.count("timeout")))
        pays = {"exact": self.pay_exact, "equal": self.pay_equal, "symbolic": self.pay_equal, "no gold": None}
        return Judgements(
            answers,
            [gold and gold.text for gold in golds],
            verdicts,
            [pays.get(verdict, self.pay_wrong) for verdict in verdicts],
        )

    def with_unit_pay(self) -> BaseReward | None:
        """Return a `GSM8KCorrectness` that pays 1 for what earns the most here, or None if no answer earns more."""
        if self.pay_exact <= self.pay_wrong:
            return None
        return GSM8KCorrectness(
            extract=self.extract,
            tags=self.tags,
            prefilled=self.prefilled,
            gold_column=self.gold_column,
            deadline=self.deadline,
            pay_exact=1.0,
            pay_equal=float(self.pay_equal > self.pay_wrong),
        )

    @property
    def looks_at(self) -> str:
        """Clause that names the layout."""
        return f"where `extract: {self.extract}` looks"

    def unparsed_note(self, completions: Sequence[Any]) -> str | None:
        """Return a sentence with the layout that finds most answers if this layout finds none; else None."""
        texts = list(map(completion_text, completions))
        if any(self._answers(texts, self.extract)):
            return None
        note = f"no completion states an answer {self.looks_at}"
        best, most = "", 0
        for layout in LAYOUTS:  # `auto` is the last, so that a single layout that finds as many is named instead
            found = sum(map(bool, map(answer_extractor(layout, self.tags), texts)))
            if layout != self.extract and found > most:
                best, most = layout, found
        return f"{note}; `extract: {best}` finds one in {most} of {len(texts)}" if most else note


def _read_golds(golds: Sequence[Any]) -> list[Gold | None]:
    """Read the gold of every row, each distinct one once."""
    keys = [gold if isinstance(gold, (str, Real)) else None for gold in golds]  # anything else is no gold
    known = {key: read_gold(key) for key in dict.fromkeys(keys)}
    return list(map(known.__getitem__, keys))


@dataclass(frozen=True, kw_only=True)
class MathCorrectness(GSM8KCorrectness):
    r"""Correctness of a final answer that may be a formula, compared by math-verify with a deadline.

    | the completion's final answer | pay |
    |---|---|
    | is the gold's or equals it, as a number or as a formula | 1 (`pay_exact`, `pay_equal`) |
    | is something else, is missing, or could not be compared within the deadline | 0 (`pay_wrong`) |
    | the gold has no final answer | None |

    Arguments as of `GSM8KCorrectness`, but `extract` is `auto` by default.
    """

    extract: str = "auto"
    pay_exact: float = 1.0
    pay_equal: float = 1.0
    name: str = "math_correctness"


gsm8k_correctness = GSM8KCorrectness()
math_correctness = MathCorrectness()
