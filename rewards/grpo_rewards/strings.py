r"""A reward for answers that are strings, compared with one gold or several.

| the completion's answer | pay |
|---|---|
| is a gold by `match` | 1 (`pay`) |
| with `match: f1`, shares words with a gold | `pay_wrong + F1 * (pay - pay_wrong)`, for the nearest gold |
| is something else, or is missing | 0 (`pay_wrong`) |
| the row has no gold that can be read | None |
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from grpo_rewards.completions import completion_text, needed_column
from grpo_rewards.errors import UserError
from grpo_rewards.math.correctness import AgainstGold, Judgement
from grpo_rewards.math.golds import MAX_GOLDS, accepted_golds
from grpo_rewards.math.numbers import number_text
from grpo_rewards.reward import Scored, check_choice
from grpo_rewards.strict import linear_search

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# A sign, a decimal mark, a fraction, a time, a power, or the end of `C++`, `C#` and `A-`. A comma between groups of
# three digits is not part of the number's value.
_MARK = re.compile(
    r"(?<![\w)])-\s?(?=\.?\d)|(?<!\w)\.(?=\d)|(?<=\d)[./:^*-](?=\d)|(?<=\d),(?!\d{3}(?!\d))(?=\d)"
    r"|(?<=[a-z])(?<![a-z]{2})[+#-](?!\w)",
    re.ASCII | re.IGNORECASE,
)
_OPERATOR = re.compile(rf"{_MARK.pattern}|[-+/^<>=]|(?<=\w)(?:!|\*(?=\w))", re.ASCII | re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]{2}")
_PRIVATE_USE = 0xE000


def squad_normalised(text: str) -> str:
    """Return `text` as SQuAD's script normalises it: no case, ASCII punctuation, articles and runs of white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _normalised(text: str, gold: str) -> str:
    """Return `text` as SQuAD's script normalises it, with the marks of its numbers.

    Operators and signs stay too if the gold consists of them, digits and single letters: `<=`, `C++`, `A-`, `5!`.
    """
    marks = _OPERATOR if _OPERATOR.search(gold) and not _WORD.search(gold) else _MARK
    return squad_normalised(marks.sub(lambda mark: chr(_PRIVATE_USE + ord(mark[0][0])), text))


def folded(text: str) -> str:
    """Return `text` without case and runs of white space, and with one spelling of each accented letter."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _casefold(answer: str, gold: str) -> float:
    return float(folded(answer) == folded(gold))


def _squad(answer: str, gold: str) -> float:
    normalised = _normalised(gold, gold)
    if not normalised:  # a gold such as "The" or "?", which would equal any answer that normalises to nothing
        return _casefold(answer, gold)
    return float(_normalised(answer, gold) == normalised)


def _f1(answer: str, gold: str) -> float:
    """Return SQuAD's F1: the harmonic mean of the shares of the answer's and of the gold's words that are in both."""
    words, wanted = _normalised(answer, gold).split(), _normalised(gold, gold).split()
    if not wanted:
        return _casefold(answer, gold)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))


def _whole_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that returns True if `pattern` matches a whole text, in linear time.

    Raises:
        ValueError: RE2 does not support the pattern, or google-re2 is not installed.
    """
    linear_search(pattern)  # by itself: "a)|(b" is not a pattern, though it is one inside a group
    return linear_search(rf"\A(?:{pattern})\z")


_COMPARISONS: Mapping[str, Callable[[str, str], float]] = {
    "exact": lambda answer, gold: float(answer == gold),
    "casefold": _casefold,
    "squad": _squad,
    "f1": _f1,
    "pattern": lambda answer, gold: float(_whole_pattern(gold)(answer)),
}
"""Functions from (answer, gold) to the share of full pay, by the value of `match`."""


@dataclass(frozen=True, kw_only=True)
class StringMatch(AgainstGold):
    r"""Correctness of an answer that is a string.

    | the completion's answer | pay |
    |---|---|
    | is a gold by `match` | 1 (`pay`) |
    | with `match: f1`, shares words with a gold | `pay_wrong + F1 * (pay - pay_wrong)`, for the nearest gold |
    | is something else, or is missing | 0 (`pay_wrong`) |
    | the row has no gold that can be read | None |

    | `match` | the answer is the gold if |
    |---|---|
    | `exact` | they are the same, character for character, except for surrounding white space |
    | `casefold` | they are the same except for case, runs of white space and the encoding of accents |
    | `squad` (default) | they are the same without case, ASCII punctuation, `a`, `an` and `the`, as in SQuAD's script |
    | `f1` | as `squad`; pays in part for words in common, each as often as both have it |
    | `pattern` | the regular expression (RE2's syntax) matches the whole answer |

    Unlike in SQuAD's script, signs, decimal points and operators of numbers stay, and of golds that consist of them.

    Args:
        match: comparison, as above. `pattern` needs google-re2: `pip install 'grpo-rewards[patterns]'`.
        pattern: with `match: pattern`, one pattern for every row. Without it each gold is a pattern, and a gold that
            RE2 does not support makes its row None.
        extract: layout of the answer, as in `answers.extract_answer`, or `whole` for all text outside the thinking.
        pay: score for the gold.
        pay_wrong: score for anything else.
        tags: names of the reasoning tag and the answer tag.
        prefilled: name of the reasoning tag if the prompt already opens it.
        gold_column: name of the dataset column with the gold: a string, a list of strings, or SQuAD's
            `{"text": [...]}`. A row with more than 64 golds (`MAX_GOLDS`) can't be scored.
        prefix: prefix of the logged columns `extracted`, `gold` and `verdict`, for runs in which two rewards log them.
        name: name of the reward in logs.
    """

    gold_forms: ClassVar[str] = (
        f"a gold is a string or a list of at most {MAX_GOLDS} strings; with `match: pattern` one that RE2 takes"
    )

    match: str = "squad"
    pattern: str | None = None
    name: str = "string_match"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.match, "match", tuple(_COMPARISONS))
        if self.pattern is not None and self.match != "pattern":
            raise UserError("`pattern`", f"it has no effect with `match: {self.match}`", "set `match: pattern`")
        if self.pattern is not None and not isinstance(self.pattern, str):
            raise UserError("`pattern`", f"it is {self.pattern!r}", "set a string")
        if self.match == "pattern":
            _whole_pattern(self.pattern or "")

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Name of the dataset column with the gold; none if one pattern serves every row."""
        return () if self.pattern is not None else super().columns_read

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        given: Sequence[Any] = [self.pattern] * len(completions)
        if self.pattern is None:
            given = needed_column(self, "gold_column", columns, completions)
        judged: list[Judgement] = []
        answers = self._answers(list(map(completion_text, completions)), self.extract)
        for answer, row in zip(answers, given, strict=True):
            golds = [row] if self.pattern is not None else self._golds(row)
            if not golds:
                judged.append((answer, None, "no gold", None))
            elif answer is None:
                judged.append((None, golds[0], "missing", self.pay_wrong))
            else:
                shares = [_COMPARISONS[self.match](answer, gold) for gold in golds]
                share = max(shares)
                verdict = "exact" if answer in golds else "equal"
                if share < 1:
                    verdict = "partial" if share else "wrong"
                judged.append((answer, golds[shares.index(share)], verdict, self._pay(share)))
        return self._with_columns(judged)

    def _golds(self, row: Any) -> list[str]:
        """Return the golds of a row, stripped: of a string, a number, a list of them, or SQuAD's `{"text": [...]}`."""
        golds = []
        for item in accepted_golds(row):
            gold = item.strip() if isinstance(item, str) else ""
            if isinstance(item, Real) and not isinstance(item, bool) and item == item:  # not NaN
                gold = number_text(item)
            if gold and (self.match != "pattern" or _is_pattern(gold)):
                golds.append(gold)
        return golds


def _is_pattern(text: str) -> bool:
    try:
        _whole_pattern(text)
    except ValueError:
        return False
    return True


string_match = StringMatch()
