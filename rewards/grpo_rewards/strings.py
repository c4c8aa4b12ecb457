"""Answers that are strings: equal to a gold exactly, but for case, as SQuAD's script reads them, in part, or by a pattern."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from grpo_rewards.completions import needed_column
from grpo_rewards.golds import AgainstGold, Judgement, Judgements
from grpo_rewards.patterns import linear_search
from grpo_rewards.reward import LogMetric, check_choice

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def squad_normalised(text: str) -> str:
    """Return `text` as SQuAD's evaluation script compares it: no case, ASCII punctuation, articles or runs of spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _folded(text: str) -> str:
    """Return `text` without case and runs of white space, and with one spelling of each accented letter."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _exact(answer: str, gold: str) -> float:
    return float(answer == gold)


def _casefold(answer: str, gold: str) -> float:
    return float(_folded(answer) == _folded(gold))


def _squad(answer: str, gold: str) -> float:
    normalised = squad_normalised(gold)
    # A gold such as "The" or "+" normalises to nothing, and would equal any other nothing.
    return float(squad_normalised(answer) == normalised) if normalised else _casefold(answer, gold)


def _f1(answer: str, gold: str) -> float:
    """Return SQuAD's F1: the harmonic mean of the shares of the answer's and of the gold's words that are in both."""
    words, wanted = squad_normalised(answer).split(), squad_normalised(gold).split()
    if not wanted:
        return _casefold(answer, gold)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))


def whole_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether `pattern` matches the whole of a text, in time linear in the text.

    Raises:
        ValueError: RE2 does not take the pattern, or google-re2 is not installed.
    """
    linear_search(pattern)  # alone: "a)|(b" is no pattern, though it is one within a group
    return linear_search(rf"\A(?:{pattern})\z")


def _pattern(answer: str, gold: str) -> float:
    return float(whole_pattern(gold)(answer))


# By the value of `match`: (answer, gold) -> share of full pay.
_COMPARISONS = {"exact": _exact, "casefold": _casefold, "squad": _squad, "f1": _f1, "pattern": _pattern}
MATCHES = tuple(_COMPARISONS)


def read_golds(gold: Any) -> list[str]:
    """Return the golds of a row, stripped: of a string, a number, a list of them, or SQuAD's `{"text": [...]}`."""
    gold = gold.get("text") if isinstance(gold, Mapping) else gold
    gold = gold.tolist() if hasattr(gold, "tolist") else gold  # an array of numpy or pyarrow
    listed = gold if isinstance(gold, (list, tuple)) else [gold]
    read = (_gold_text(item) for item in listed)
    return [text for text in read if text]


def _gold_text(gold: Any) -> str:
    is_text = isinstance(gold, (str, Real)) and not isinstance(gold, bool) and gold == gold
    return str(gold).strip() if is_text else ""


@dataclass(frozen=True, kw_only=True)
class StringMatch(AgainstGold):
    r"""Whether the answer is the gold string, or one of several.

    | the completion's answer | pay |
    |---|---|
    | is a gold by `match` (below) | 1 (`pay`) |
    | with `match: f1`, shares words with a gold | `pay_wrong + F1 * (pay - pay_wrong)`, for the gold it is nearest to |
    | is something else, or is missing | 0 (`pay_wrong`) |
    | the row has no gold that can be read | None |

    | `match` | the answer is the gold if |
    |---|---|
    | `exact` | they are the same, character for character, but for white space around them |
    | `casefold` | they are but for case, runs of white space and the encoding of accents |
    | `squad` (default) | they are after SQuAD's normalisation: case, ASCII punctuation, `a`, `an` and `the` do not count |
    | `f1` | the same; pays in part for words in common, each as often as both have it |
    | `pattern` | the regular expression (RE2's syntax) matches the whole answer |

    Args:
        match: as above. `pattern` needs google-re2: `pip install 'grpo-rewards[patterns]'`.
        pattern: with `match: pattern`, one pattern for every row; without it the gold is the pattern, and one that RE2
            does not take makes its row None.
        extract: where the answer stands, as in `answers.extract_answer`, or `whole`: all that is outside the thinking.
        pay: for the gold.
        pay_wrong: for anything else.
        tags: the reasoning and the answer tag.
        prefilled: the reasoning tag, if the prompt already opens it.
        gold_column: the dataset column with the gold: a string, a list of them, or SQuAD's `{"text": [...]}`.
        prefix: put before the logged columns `extracted`, `gold` and `verdict`, where two rewards log them.
        name: the reward's name in logs.
    """

    gold_forms: ClassVar[str] = "a gold is a string or a list of strings; with `match: pattern` one that RE2 takes"

    match: str = "squad"
    pattern: str | None = None
    name: str = "string_match"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.match, "match", MATCHES)
        if self.pattern is not None and self.match != "pattern":
            raise ValueError(f"pattern has no effect with match {self.match!r}: set match to pattern")
        if self.pattern is not None and not isinstance(self.pattern, str):
            raise ValueError(f"pattern must be a string, not {self.pattern!r}")
        if self.match == "pattern":
            whole_pattern(self.pattern or "")

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The dataset columns that the reward needs: none where one pattern serves every row."""
        return () if self.pattern is not None else super().columns_read

    def _judged(self, texts: Sequence[str], columns: Mapping[str, Any], log_metric: LogMetric) -> Judgements:
        answers = self._answers(texts, self.extract)
        if self.pattern is not None:
            golds = [[self.pattern]] * len(answers)
        else:
            golds = [self._golds(gold) for gold in needed_column(self, "gold_column", columns, texts)]
        return Judgements.of(list(map(self._judgement, answers, golds)))

    def _golds(self, gold: Any) -> list[str]:
        golds = read_golds(gold)
        return [pattern for pattern in golds if _is_pattern(pattern)] if self.match == "pattern" else golds

    def _judgement(self, answer: str | None, golds: Sequence[str]) -> Judgement:
        if not golds:
            return Judgement(answer, None, "no gold", None)
        if answer is None:
            return Judgement(None, golds[0], "missing", self.pay_wrong)
        shares = [_COMPARISONS[self.match](answer, gold) for gold in golds]
        share = max(shares)
        verdict = "wrong" if share == 0 else "partial" if share < 1 else "exact" if answer in golds else "equal"
        return Judgement(answer, golds[shares.index(share)], verdict, self._pay(share))


def _is_pattern(pattern: str) -> bool:
    try:
        whole_pattern(pattern)
    except ValueError:
        return False
    return True


string_match = StringMatch()
