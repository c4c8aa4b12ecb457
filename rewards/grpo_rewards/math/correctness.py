"""Correctness rewards: base classes that compare a completion's answer with a gold, and the rewards for mathematics.

`gsm8k_correctness` pays 2 for the gold's string, 1.5 for an equal number and 0 otherwise; `math_correctness` pays 1 for
an equal number or formula. The tables in the docstrings of `GSM8KCorrectness` and `MathCorrectness` are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from grpo_rewards.completions import completion_text, needed_column
from grpo_rewards.errors import shortened
from grpo_rewards.math.answers import LAYOUTS, answer_extractor
from grpo_rewards.math.comparison import Judge
from grpo_rewards.math.decimals import DECIMALS, Decimal, decimal_marks
from grpo_rewards.math.golds import MAX_GOLDS, accepted_golds, gold_answer, is_prose, read_golds
from grpo_rewards.reward import BaseReward, Kind, Scored, TaggedReward, check_choice, check_less, checked_positive

Judgement = tuple[str | None, str | None, str, float | None]
"""Answer found in a completion, gold that it was compared with, name of the outcome such as "equal", and score. None
stands for a completion without an answer, and for the gold and the score of a gold that can't be read."""


CALL_DEADLINES, ROW_SECONDS = 4, 0.03
"""Budget of one call for symbolic comparisons: 4 times the deadline of one comparison, plus 0.03 seconds per row."""


@dataclass(frozen=True, kw_only=True)
class GoldReward(TaggedReward):
    """Base class of rewards that compare a completion's answer with a gold.

    A subclass implements `_scored`, and passes its verdicts to `_with_columns`.
    """

    kind: ClassVar[Kind] = "correctness"
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS

    extract: str = "answer_tag"
    gold_column: str = "answer"
    prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.extract, "extract", self.layouts)

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Name of the dataset column with the gold."""
        return (self.gold_column,)

    def _with_columns(self, judged: Sequence[Judgement], metrics: Mapping[str, float] | None = None) -> Scored:
        """Return the scores of a batch with the columns and metrics that every such reward logs."""
        extracted = [answer for answer, _, _, _ in judged]
        logged: dict[str, list[Any]] = {
            "extracted": extracted,
            "gold": [gold for _, gold, _, _ in judged],
            "verdict": [verdict for _, _, verdict, _ in judged],
        }
        parsed = (len(judged) - extracted.count(None)) / max(len(judged), 1)
        return Scored([pay for _, _, _, pay in judged], logged, {"parsed": parsed, **(metrics or {})})

    def _answers(self, texts: Sequence[str], layout: str) -> list[str | None]:
        """Return the answer that each completion states in a layout, as written, or None."""
        if layout == "whole":
            return [self._outside_thinking(text).strip() or None for text in texts]
        return list(map(answer_extractor(layout, self.tags, self.prefilled is not None), texts))


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
        check_less(self, "pay_wrong", "pay")

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
        gold_column: name of the dataset column with the gold, a GSM8K solution or a bare answer. A list of at most 64
            of them (`MAX_GOLDS`) accepts each: the best pay counts.
        deadline: seconds for one symbolic comparison, which only a gold that is not a number needs. All comparisons of
            a call together get four times as long, and 0.03 seconds per row. Rows that run out have the verdict
            `timeout`.
        decimal: decimal mark of golds and answers, `point` or `comma`. With `comma`, `1.200,50` is 1200.5, and a number
            that cannot have a decimal comma, such as `3.5`, keeps its point. None reads a point, and the checks of a
            dataset then warn about golds that may have a comma.
        prefix: prefix of the logged columns `extracted`, `gold` and `verdict`, for runs in which two rewards log them.
        name: name of the reward in logs.
    """

    payments: ClassVar[tuple[str, ...]] = ("pay_exact", "pay_equal", "pay_wrong")
    gold_forms: ClassVar[str] = (
        "a gold is a number, a formula or a few words, or a solution that marks its final answer by `####`, "
        f"`\\boxed{{}}` or a line `A:`, and a row has at most {MAX_GOLDS} golds"
    )

    pay_exact: float = 2.0
    pay_equal: float = 1.5
    pay_wrong: float = 0.0
    deadline: float = 2.0
    decimal: Decimal | None = None
    name: str = "gsm8k_correctness"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "deadline", checked_positive(self.deadline, "deadline"))
        if self.decimal is not None:
            check_choice(self.decimal, "decimal", DECIMALS)

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        decimal = self.decimal or "point"
        keys = list(map(_key_of_golds, needed_column(self, "gold_column", columns, completions)))
        read = {key: read_golds(key, decimal) for key in dict.fromkeys(keys)}  # each distinct row once
        answers = self._answers(list(map(completion_text, completions)), self.extract)
        judge = Judge(self.deadline, decimal, CALL_DEADLINES * self.deadline + ROW_SECONDS * len(answers))
        pays = {"exact": self.pay_exact, "equal": self.pay_equal, "symbolic": self.pay_equal, "no gold": None}
        wrong = self.pay_wrong
        best = judge.best_verdicts([read[key] for key in keys], answers)
        judged: list[Judgement] = [
            (answer, gold and gold.text, verdict, pays.get(verdict, wrong))
            for answer, (verdict, gold) in zip(answers, best, strict=True)
        ]
        symbolic = judge.symbolic_rows / max(len(judged), 1)
        timeouts = [verdict for verdict, _ in best].count("timeout")
        return self._with_columns(judged, {"symbolic": symbolic, "timeouts": float(timeouts)})

    def with_unit_pay(self) -> BaseReward | None:
        """Return a `GSM8KCorrectness` that pays 1 for what earns the most here, or None if no answer earns more."""
        if self.pay_exact <= self.pay_wrong:
            return None
        standard = {"pay_exact": 1.0, "pay_equal": float(self.pay_equal > self.pay_wrong), "pay_wrong": 0.0}
        return GSM8KCorrectness(**{**vars(self), **standard, "prefix": "", "name": GSM8KCorrectness.name})

    @property
    def looks_at(self) -> str:
        """Clause that names the layout."""
        return f"where `extract: {self.extract}` looks"

    def gold_note(self, golds: Iterable[tuple[object, Any]]) -> str | None:
        """Return a sentence on golds with another decimal mark than this reward reads, and on golds that are prose."""
        texts: list[tuple[object, str]] = []
        for row, gold in golds:
            texts += [(row, gold_answer(text) or "") for text in accepted_golds(gold) if isinstance(text, str)]
        notes = [decimal_marks(texts).note(self.decimal)]
        if prose := [(row, text) for row, text in texts if is_prose(text)]:
            count = "1 gold is" if len(prose) == 1 else f"{len(prose)} golds are"
            shown = f"{prose[0][0]}: `{shortened(prose[0][1])}`"
            notes.append(f"{count} prose, which only its text or its one number equals ({shown})")
        return "; ".join(filter(None, notes)) or None

    def unparsed_note(self, completions: Sequence[Any]) -> str | None:
        """Return a sentence with the layout that finds most answers if this layout finds none; else None."""
        texts = list(map(completion_text, completions))
        if any(self._answers(texts, self.extract)):
            return None
        note = f"no completion states an answer {self.looks_at}"
        # `auto` is the last, so that a single layout that finds as many is named instead.
        found = {layout: sum(map(bool, self._answers(texts, layout))) for layout in LAYOUTS}
        best = max(found, key=found.__getitem__)
        return f"{note}; `extract: {best}` finds one in {found[best]} of {len(texts)}" if found[best] else note


def _key_of_golds(row: Any) -> Any:
    """Return the golds of a row as a key, with None for a value that is not a gold: True would be the key of 1."""
    if isinstance(row, str):
        return row
    golds = accepted_golds(row)
    return tuple(gold if isinstance(gold, (str, Real)) and not isinstance(gold, bool) else None for gold in golds)


@dataclass(frozen=True, kw_only=True)
class MathCorrectness(GSM8KCorrectness):
    r"""Correctness of a final answer that may be a formula, compared by math-verify with a deadline.

    | the completion's final answer | pay |
    |---|---|
    | is the gold's or equals it, as a number or as a formula | 1 (`pay_exact`, `pay_equal`) |
    | is something else, is missing, or could not be compared in time | 0 (`pay_wrong`) |
    | the gold has no final answer | None |

    Arguments as of `GSM8KCorrectness`, but `extract` is `auto` by default.
    """

    extract: str = "auto"
    pay_exact: float = 1.0
    pay_equal: float = 1.0
    name: str = "math_correctness"


gsm8k_correctness = GSM8KCorrectness()
math_correctness = MathCorrectness()
