"""Correctness rewards: the final answer of a completion against the gold's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from grpo_rewards.answers import LAYOUTS, Gold, Judge, answer_extractor, read_gold
from grpo_rewards.completions import Kind, check_rows, completion_text, needed_column
from grpo_rewards.format_tags import checked_number, checked_tags

LogExtra = Callable[[str, list], None]
LogMetric = Callable[[str, float], None]


@dataclass(frozen=True)
class GSM8KCorrectness:
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

    kind: ClassVar[Kind] = "correctness"
    gold_forms: ClassVar[str] = (
        "a gold is a number, a formula or a few words, or a solution that marks its final answer by `####`, `\\boxed{}` or a "
        "line `A:`"
    )

    extract: str = "answer_tag"
    pay_exact: float = 2.0
    pay_equal: float = 1.5
    pay_wrong: float = 0.0
    tags: tuple[str, str] = ("think", "answer")
    prefilled: str | None = None
    gold_column: str = "answer"
    deadline: float = 2.0
    prefix: str = ""
    name: str = "gsm8k_correctness"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", checked_tags(self.tags, self.prefilled))
        for key in ("pay_exact", "pay_equal", "pay_wrong", "deadline"):
            object.__setattr__(self, key, checked_number(getattr(self, key), key))
        if self.deadline <= 0:
            raise ValueError(f"deadline must be a positive number of seconds, not {self.deadline!r}")
        if self.extract not in LAYOUTS:
            raise ValueError(f"extract must be one of {', '.join(LAYOUTS)}, not {self.extract!r}")

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def highest_pay(self) -> float:
        """The most that a completion can earn."""
        return max(self.pay_exact, self.pay_equal, self.pay_wrong)

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The dataset columns that the reward needs."""
        return (self.gold_column,)

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_extra: LogExtra | None = None,
        log_metric: LogMetric | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score each completion against the gold in its row of `columns[gold_column]`.

        Raises:
            ValueError: that column is missing, or is not a list with one gold per completion.
        """
        check_rows(self.name, completions=completions)
        golds = needed_column(self, "gold_column", columns, completions)
        judge = Judge(self.deadline)
        extract = answer_extractor(self.extract, self.tags, self.prefilled is not None)
        extracted = [extract(row if type(row) is str else completion_text(row)) for row in completions]
        read = _read_golds(golds)
        verdicts = list(map(judge.verdict, read, extracted))
        if log_extra is not None:
            log_extra(f"{self.prefix}extracted", extracted)
            log_extra(f"{self.prefix}gold", [None if gold is None else gold.text for gold in read])
            log_extra(f"{self.prefix}verdict", verdicts)
        if log_metric is not None and verdicts:
            rows = len(verdicts)
            log_metric(f"rewards/{self.name}/parsed", sum(answer is not None for answer in extracted) / rows)
            log_metric(f"rewards/{self.name}/symbolic", judge.symbolic_rows / rows)
            log_metric(f"rewards/{self.name}/timeouts", float(verdicts.count("timeout")))
        pay = {"exact": self.pay_exact, "equal": self.pay_equal, "symbolic": self.pay_equal, "no gold": None}
        return [pay.get(verdict, self.pay_wrong) for verdict in verdicts]

    def unparsed_note(self, completions: Sequence[Any]) -> str | None:
        """Say that no completion states an answer where this reward looks, and where they do; None if any has one."""
        texts = list(map(completion_text, completions))
        if any(map(answer_extractor(self.extract, self.tags, self.prefilled is not None), texts)):
            return None
        others = [name for name in LAYOUTS if name != self.extract]
        note = f"no completion states an answer where `extract: {self.extract}` looks"
        counts = {layout: sum(map(bool, map(answer_extractor(layout, self.tags), texts))) for layout in others}
        best = max(others, key=lambda layout: (counts[layout], layout != "auto"))
        return f"{note}; `extract: {best}` finds one in {counts[best]} of {len(texts)}" if counts[best] else note


def _read_golds(golds: Sequence[Any]) -> list[Gold | None]:
    """Read the gold of every row, each distinct one once."""
    known: dict[Any, Gold | None] = {}
    read = []
    for gold in golds:
        key = gold if isinstance(gold, (str, Real)) else None  # anything else, hashable or not, is no gold
        if key not in known:
            known[key] = read_gold(key)
        read.append(known[key])
    return read


@dataclass(frozen=True)
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
