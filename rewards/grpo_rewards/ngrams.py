"""A penalty on text that repeats itself: the share of n-grams that occurred before in the completion.

| the completion | pay |
|---|---|
| repeats no n-gram | 0 (`pay`) |
| repeats a share s of its n-grams | `pay + s * (pay_repeated - pay)`, from `pay` towards -1 (`pay_repeated`) |
| has no n-gram: fewer than `ngram` words | 0 |
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_rewards.completions import completion_text
from grpo_rewards.reward import BaseReward, Kind, Scored, check_count, check_less

# Scripts written without spaces, and emoji. Each of these characters is a word.
_ALONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2600-\u27bf\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\U0001f000-\U0001faff\U00020000-\U0003ffff"
)
_MARKS = r"(?<!\S)(?:[^\w\s]|_)+(?!\S)|(?:[^\w\s]|_){8,}"
_ASCII_WORD = re.compile(rf"[a-z0-9]+|{_MARKS}", re.ASCII)
_WORD = re.compile(rf"[{_ALONE}]|(?:(?![{_ALONE}])[^\W_])+|{_MARKS}")
# Soft hyphen, zero-width characters, joiners, direction marks, fillers, variation selectors and tags.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u115f\u1160\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\u2800\ufeff\ufe00-\ufe0f"
    "\U000e0000-\U000e0fff]"
)
# A longer word is cut into pieces, so that a loop without spaces ("hahaha...") counts as a repetition too.
_MAX_WORD_CHARS = 24
_MAX_MARK_CHARS = 7
_PIECE_CHARS = 4
_MAX_NGRAM = 100
_COUNTER = "#"
_NUMBERED = re.compile(r"([^\W\d_]*)([0-9]{1,18})", re.ASCII)


def words(text: str) -> list[str]:
    """Return the words that n-grams are made of, in order.

    Case, width, invisible characters and the punctuation around words do not count. A character of Chinese, Japanese or
    Thai, an emoji, and a mark that stands alone ("- - -") are words. A run of more than 24 characters, or of 8 marks,
    is cut into words of 4.
    """
    # NFKC makes full-width and mathematical letters ordinary ones, and a letter with its accent one character.
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    text = text.casefold()
    found = _ASCII_WORD.findall(text) if text.isascii() else _WORD.findall(_INVISIBLE.sub("", text))
    if max(map(len, found), default=0) <= _MAX_MARK_CHARS:
        return found
    pieces = []
    for word in found:
        if len(word) <= _MAX_MARK_CHARS or (len(word) <= _MAX_WORD_CHARS and word[0].isalnum()):
            pieces.append(word)
        else:
            pieces += [word[start : start + _PIECE_CHARS] for start in range(0, len(word), _PIECE_CHARS)]
    return pieces


def without_counters(found: Sequence[str]) -> list[str]:
    """Return words with `#` for the numbers of a counter, so that numbering a loop does not hide it.

    A number belongs to a counter if it continues an arithmetic progression of the numbers at the same place: attached
    to the same letters (`wait7 wait8 wait9`), or between the same two words, of which one has at least two letters
    (`wait 7 wait 8 wait 9`). A plain list of numbers has no such words and is not a counter.
    """
    masked = list(found)
    previous: dict[Any, tuple[int | None, int | None]] = {}
    for position, word in enumerate(found):
        number = _NUMBERED.fullmatch(word)
        if number is None:
            continue
        stem, value = number[1], int(number[2])
        place: Any = stem
        if not stem:
            place = (found[position - 1] if position else "", found[position + 1] if position + 1 < len(found) else "")
            # A word of letters that is not a variable such as `x`. One Chinese character is a word.
            if not any(side.isalpha() and (len(side) > 1 or not side.isascii()) for side in place):
                continue
        last, step = previous.get(place, (None, None))
        previous[place] = value, None if last is None else value - last
        if step and last is not None and value - last == step:
            masked[position] = stem + _COUNTER
    return masked


def repeated_share(units: Sequence[Any], ngram: int) -> float | None:
    """Return the share of n-grams that occurred before, in [0, 1).

    Args:
        units: words.
        ngram: number of words in an n-gram.

    Returns:
        The share, or None if there are fewer than `ngram` words.
    """
    total = len(units) - ngram + 1
    if total < 1:
        return None
    different = set(zip(*(units[start : start + total] for start in range(ngram)), strict=True))
    return 1 - len(different) / total


@dataclass(frozen=True)
class Repetition(BaseReward):
    """Penalty that grows with the share of n-grams that occurred before in the completion.

    | the completion | pay |
    |---|---|
    | repeats no n-gram | 0 (`pay`) |
    | repeats a share s of its n-grams | `pay + s * (pay_repeated - pay)`, from `pay` towards -1 (`pay_repeated`) |
    | has no n-gram: fewer than `ngram` words | 0 |

    This is the penalty of TRL's `get_repetition_penalty_reward` (and open-r1's), on words that evasion does not change:
    other case or punctuation, invisible characters, missing spaces and counters do not hide a loop. The
    thinking counts.

    Args:
        ngram: number of words in an n-gram, 1 to 100.
        pay: score without any repetition. `pay: 1, pay_repeated: 0` pays for variety instead of penalising its absence.
        pay_repeated: score that a completion of nothing but repetition approaches; less than `pay`.
        name: name of the reward in logs.
    """

    kind: ClassVar[Kind] = "other"
    payments: ClassVar[tuple[str, ...]] = ("pay", "pay_repeated")

    ngram: int = 3
    pay: float = 0.0
    pay_repeated: float = -1.0
    name: str = "repetition"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.ngram, "ngram", most=_MAX_NGRAM)
        check_less(self, "pay_repeated", "pay")

    @property
    def highest_pay(self) -> float:
        """Larger of `pay` and 0, the pay of a completion that is too short for an n-gram."""
        return max(self.pay, 0.0)

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        pay: list[float | None] = []
        reasons: list[str] = []
        shares: list[float] = []
        for completion in completions:
            share = repeated_share(without_counters(words(completion_text(completion))), self.ngram)
            if share is None:
                pay.append(0.0)
                reasons.append(f"fewer than {self.ngram} words")
                continue
            shares.append(share)
            pay.append(self.pay + share * (self.pay_repeated - self.pay))
            reasons.append(f"{share:.1%} of its {self.ngram}-grams of words occurred before")
        return Scored(pay, metrics={"repeated": sum(shares) / max(len(pay), 1)}, reasons=reasons)


repetition = Repetition()
