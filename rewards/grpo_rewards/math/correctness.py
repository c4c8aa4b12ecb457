"""Correctness rewards: the final answer of a completion against the gold's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from grpo_rewards.completions import completion_text, needed_column
from grpo_rewards.golds import GoldReward, Judgements
from grpo_rewards.math.answers import LAYOUTS, Gold, Judge, answer_extractor, read_gold
from grpo_rewards.reward import BaseReward, LogMetric, checked_number


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
        extract: where the final answer stands; see `answers.extract_answer`.
        tags: the reasoning and the answer tag.
        prefilled: the reasoning tag, if the prompt already opens it.
        gold_column: the dataset column with the gold, a GSM8K solution or a bare answer.
        deadline: seconds for one symbolic comparison, which only a gold that is no number needs.
        prefix: put before the logged columns `extracted`, `gold` and `verdict`, where two rewards log them.
        name: the reward's name in logs.
    """

    payments: ClassVar[tuple[str, ...]] = ("pay_exact", "pay_equal", "pay_wrong")
    gold_forms: ClassVar[str] = (
        "a gold is a number, a formula or a few words, or a solution that marks its final answer by `####`, `\\boxed{}` or a "
        "line `A:`"
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
        paid = [pays.get(verdict, self.pay_wrong) for verdict in verdicts]
        return Judgements(answers, [gold and gold.text for gold in golds], verdicts, paid)

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
        """Say that no completion states an answer where this reward looks, and where they do; None if any has one."""
        texts = list(map(completion_text, completions))
        if any(self._answers(texts, self.extract)):
            return None
        others = [name for name in LAYOUTS if name != self.extract]
        note = f"no completion states an answer {self.looks_at}"
        counts = {layout: sum(map(bool, map(answer_extractor(layout, self.tags), texts))) for layout in others}
        best = max(others, key=lambda layout: (counts[layout], layout != "auto"))
        return f"{note}; `extract: {best}` finds one in {counts[best]} of {len(texts)}" if counts[best] else note


def _read_golds(golds: Sequence[Any]) -> list[Gold | None]:
    """Read the gold of every row, each distinct one once."""
    keys = [gold if isinstance(gold, (str, Real)) else None for gold in golds]  # anything else is no gold
    known = {key: read_gold(key) for key in dict.fromkeys(keys)}
    return [known[key] for key in keys]


@dataclass(frozen=True, kw_only=True)
class MathCorrectness(GSM8KCorrectness):
    r"""Whether the final answer is the gold's, formulas included (math-verify, with a deadline).

    | the completion's final answer | pay |
    |---|---|
    | is the gold's or equals it, as a number or as a formula | 1 (`pay_exact`, `pay_equal`) |
    | is something else, is missing, or could not be compared within the deadline | 0 (`pay_wrong`) |
    | the gold has no final answer | None |

    Arguments as of `GSM8KCorrectness`; `extract` is `auto` unless said otherwise.
    """

    extract: str = "auto"
    pay_exact: float = 1.0
    pay_equal: float = 1.0
    name: str = "math_correctness"


gsm8k_correctness = GSM8KCorrectness()
math_correctness = MathCorrectness()
