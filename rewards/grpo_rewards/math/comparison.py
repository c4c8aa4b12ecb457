"""Verdicts on answers: by their strings, then by exact arithmetic, then by math-verify.

Equality is exact: 1/2 = 0.5, but 33.33 is not 33.333. The comparison of formulas, in `symbolic`, could take unbounded
time, and has a deadline.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from grpo_rewards.math.arithmetic import value_of
from grpo_rewards.math.decimals import Decimal, with_point
from grpo_rewards.math.formatting import fold_unicode, plain_latex, undress
from grpo_rewards.math.formulas import TooComplex, comparisons, is_same_formula, names_differ
from grpo_rewards.math.golds import Gold, is_prose, read_golds
from grpo_rewards.math.kinds import kind_of
from grpo_rewards.math.numbers import MAX_ANSWER_CHARS, answer_number, parse_number
from grpo_rewards.math.spellings import without_runs
from grpo_rewards.math.symbolic import equivalent
from grpo_rewards.math.units import are_opposed, currency_of, units_differ

RIGHT_VERDICTS = frozenset({"exact", "equal", "symbolic"})
"""Verdicts of a `Judge` on a right answer."""


class Judge:
    """Comparison of answers with golds, with each symbolic comparison done once.

    The verdicts are `exact` (the same string), `equal` (the same number), `symbolic` (equal by math-verify), `wrong`,
    `missing` (no answer), `timeout` (not compared: the formula is too large, or time or memory ran out; counts as not
    equal) and `no gold`.

    Args:
        deadline: seconds for one symbolic comparison.
        decimal: decimal mark of answers and golds; with "comma", `1.200,50` is 1200.5.
        budget: seconds for all symbolic comparisons together; None for no limit. The comparison that exceeds the budget
            is the last.

    Attributes:
        symbolic_rows: number of answers so far that neither strings nor numbers could decide.
    """

    def __init__(self, deadline: float = 2.0, decimal: Decimal = "point", budget: float | None = None) -> None:
        self.deadline, self.decimal = deadline, decimal
        self._seconds_left = math.inf if budget is None else budget
        self.symbolic_rows = 0
        self._symbolic: dict[tuple[str, str], str] = {}

    def verdict(self, gold: Gold | None, answer: str | None) -> str:
        """Return the verdict by string, then by exact arithmetic, then, if neither side is a number, by math-verify."""
        if gold is None or answer is None:
            return "no gold" if gold is None else "missing"
        if answer == gold.text:
            return "exact"
        gold_text = gold.text
        if self.decimal == "comma":
            gold_text, answer = with_point(gold_text), with_point(answer)
        if gold.number is not None:
            number = answer_number(answer)
            if number == gold.number and not _units_differ(gold_text, answer) and not names_differ(gold_text, answer):
                return "equal"
            if number is not None or answer.endswith("\\") or "~" in answer:
                return "wrong"
            return "equal" if is_same_formula(gold_text, answer) else "wrong"
        number = parse_number(answer)
        if number is not None:
            same = _value(gold_text) == number or is_same_formula(undress(gold_text), undress(answer))
            return "equal" if same else "wrong"
        self.symbolic_rows += 1
        key = (gold_text, answer)
        if key not in self._symbolic:
            self._symbolic[key] = self._symbolic_verdict(*key)
        return self._symbolic[key]

    def best_verdict(self, golds: Sequence[Gold], answer: str | None) -> tuple[str, Gold | None]:
        """Return the best verdict on an answer among the golds that its row accepts, and the gold of that verdict."""
        if not golds:
            return "no gold", None
        for gold in golds:
            if answer == gold.text:
                return "exact", gold
        counted = self.symbolic_rows
        best = "wrong", golds[0]
        # Numbers come first, because they are compared without math-verify.
        for gold in sorted(golds, key=lambda gold: gold.number is None):
            verdict = self.verdict(gold, answer)
            if verdict != "wrong":
                best = verdict, gold
            # An answer that runs out of time against one gold would do so against each: a row gets one deadline.
            if verdict in RIGHT_VERDICTS or verdict == "timeout":
                break
        self.symbolic_rows = min(self.symbolic_rows, counted + 1)
        return best

    def best_verdicts(
        self, golds: Sequence[Sequence[Gold]], answers: Sequence[str | None]
    ) -> list[tuple[str, Gold | None]]:
        """Return `best_verdict` of every row. Short and flat answers come first, so that they get their time."""
        efforts = [len(answer or "") + 40 * sum(map((answer or "").count, "^!{(\\")) for answer in answers]
        rows = sorted(range(len(answers)), key=efforts.__getitem__)
        verdicts = {row: self.best_verdict(golds[row], answers[row]) for row in rows}
        return [verdicts[row] for row in range(len(answers))]

    def _equivalent(self, gold: str, answer: str) -> bool | None:
        """Compare two formulas within the budget."""
        if self._seconds_left <= 0:
            return None
        start = time.monotonic()
        equal = equivalent(gold, answer, self.deadline)
        self._seconds_left -= time.monotonic() - start
        return equal

    def _symbolic_verdict(self, gold: str, answer: str) -> str:
        if max(len(gold), len(answer)) > MAX_ANSWER_CHARS:
            return "wrong"
        gold, answer = (undress(fold_unicode(without_runs(text))) for text in (gold, answer))
        if _spelling(gold) == _spelling(answer) or is_same_formula(gold, answer):
            return "equal"
        if (_spelling(gold).replace(" ", "").isalpha() and len(gold) > 2) or is_prose(gold):
            return "wrong"  # as formulas, words would be products of letters, and "dear" would equal "read"
        try:
            pairs = comparisons(gold, answer)
        except TooComplex:
            return "timeout"
        if pairs is None:
            return "wrong"
        for pair in pairs:
            equal = self._equivalent(*pair)
            if not equal:
                return "timeout" if equal is None else "wrong"
        return "symbolic"


def compare(gold: object, answer: str | None, deadline: float = 2.0) -> str:
    """Return the verdict of a `Judge` on one extracted answer and a row's gold or golds as written in a dataset."""
    return Judge(deadline).best_verdict(read_golds(gold), answer)[0]


def _units_differ(gold: str, answer: str) -> bool:
    """Return True if two answers state known units that differ. A gold without a unit agrees with each."""
    if gold.isdecimal():
        return False
    currencies = {currency_of(gold), currency_of(answer)} - {""}
    gold, answer = plain_latex(fold_unicode(gold)), plain_latex(fold_unicode(answer))
    return len(currencies) > 1 or units_differ(gold, answer) or are_opposed(gold, answer)


@lru_cache(maxsize=1024)
def _value(gold: str) -> Fraction | None:
    """Return the exact value of a gold that is arithmetic, such as `2^{10}`, or None."""
    text = undress(fold_unicode(gold))
    if kind_of(text) is not None:
        return None
    *calculations, result = text.split("=")
    # An equation between numbers states its right side.
    if any(re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", side)) for side in calculations):
        return None
    return value_of(result)


_PRODUCT = re.compile(r"\\(?:times|cdot)(?![a-zA-Z])")
_LETTER = re.compile(r"\A(?:\(\s*([A-J])\s*\)|([A-J])[).:])\Z")


def _spelling(text: str) -> str:
    """Return a form that two spellings of words, or of the letter of a choice, share."""
    text = undress(fold_unicode(text))
    text = " ".join(text.split() if _PRODUCT.search(text) else plain_latex(text).split())
    text = _LETTER.sub(r"\1\2", text)
    return text.casefold() if len(text) > 1 and text.replace(" ", "").isalpha() else text
