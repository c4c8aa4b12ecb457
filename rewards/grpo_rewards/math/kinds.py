r"""Answers that are not one formula. math-verify would multiply, subtract or drop their parts.

| kind | examples | equal to |
|---|---|---|
| ratio | `1:2:3` | a ratio of as many parts, part by part |
| range | `5-7`, `1914-1918`, `2020-05-07` | a range, number by number |
| sizes | `2 \times 3, 4 \times 2` | as many sizes, number by number |
| quantities | `3 hours 20 minutes`, `(a) 5 (b) 4`, `5' 10"` | as many quantities of the same names |
| time | `5:30 \text{ p.m.}`, `10 am` | a time of the same half of the day, number by number |
| cycles | `(1 2)(3 4)` | the same text |
| marked | `A^T`, `n \equiv 1 \mod 4`, `\angle ABC`, `f^{-1}(x)`, `b > a > c`, `IV` | the same text |

Spaces, braces around one character and the spelling of a fraction do not count. A ratio of two parts is a fraction.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from grpo_rewards.math.units import stated_units

_TEXT = re.compile(r"\\(?:text\w*|mbox|hbox|mathrm|operatorname\*?)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"(?<!\\)\\[,;:!> ]|~|\$|\\(?:left|right|quad|qquad)(?![a-zA-Z])")
_RANGE = re.compile(r"\d+(?:\.\d+)?(?:\s*[-–—]\s*\d+(?:\.\d+)?)+")
_SIZE = re.compile(r"(\d+)\s*(?:\\times|×)\s*(\d+)")
_TIME = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*([ap])\.?\s*m\.?", re.IGNORECASE)
_CYCLES = re.compile(r"(?:\(\d+(?:\s+\d+)+\)\s*)+")
_MARK = re.compile(
    r"\\(?:[bp]?mod|partial|angle|Gamma)(?![a-zA-Z])"
    r"|\\operatorname|[a-zA-Z)]\s*\^\s*(?:\{\s*T\s*\}|T)(?![a-zA-Z])"
    r"|(?<![a-zA-Z\\])[a-zA-Z]\s*\^\s*\{\s*-1\s*\}\s*\([a-z]"
    r"|\\mathbf\s*\{?[a-z]\}?\s*\\(?:times|cdot)"
    r"|\A\s*[a-zA-Z](?:\s*[<>]\s*[a-zA-Z]){2,}\s*\Z|\A[IVXLCDM]{2,}\Z"
)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_NAMES = re.compile(r"(?:\([a-z]\)|[a-zA-Z]|['\"]|[\s,;.])*")
_NAME = re.compile(r"\([a-z]\)|[a-zA-Z]+|['\"]")


class AnswerKind(NamedTuple):
    """Kind of an answer, the names of its parts, and the parts."""

    name: str
    names: tuple[str, ...]
    parts: tuple[str, ...]


def kind_of(text: str) -> AnswerKind | None:
    """Return the kind of an answer that is not one formula, or None for a formula."""
    plain = _SPACING.sub(" ", text).strip().rstrip(".")
    if _MARK.search(plain):
        return AnswerKind("marked", (), ())
    plain = _TEXT.sub(r" \1 ", plain).strip()
    if time := _TIME.fullmatch(" ".join(plain.split())):
        return AnswerKind("time", (time[3].lower(),), (time[1], time[2] or "00"))
    ratio = [part.strip() for part in plain.split(":")]
    if len(ratio) > 2 and all(ratio):
        return AnswerKind("ratio", (), tuple(ratio))
    if _RANGE.fullmatch(plain):
        return AnswerKind("range", (), tuple(re.findall(r"\d+(?:\.\d+)?", plain)))
    sizes = [_SIZE.fullmatch(item.strip()) for item in plain.split(",")]
    if len(sizes) > 1 and all(sizes):
        return AnswerKind("sizes", (), tuple(number for size in sizes if size for number in size.groups()))
    if _CYCLES.fullmatch(plain):
        return AnswerKind("cycles", (), ())
    return _quantities(plain)


def _quantities(text: str) -> AnswerKind | None:
    """Return several numbers with names, by name, or None for any other text."""
    numbers, between = _NUMBER.findall(text), _NUMBER.split(text)
    names = [[word for word in _NAME.findall(part) if word.lower() != "and"] for part in between]
    words = {word.lower() for name in names for word in name}
    if len(numbers) < 2 or not all(map(_NAMES.fullmatch, between)) or "or" in words or not all(names[1:-1]):
        return None
    if names[0] and names[-1]:
        return None
    named = zip(map(_name, names[:-1] if names[0] else names[1:]), numbers, strict=True)
    pairs = sorted(named, key=lambda pair: pair[0])
    return AnswerKind("quantities", tuple(name for name, _ in pairs), tuple(number for _, number in pairs))


def _name(words: list[str]) -> str:
    """Return one name for all spellings of a unit."""
    name = " ".join(words).lower()
    return "*".join(stated_units(f"1 {name}")) or name


def pairs_of(gold: AnswerKind, answer: AnswerKind | None) -> list[tuple[str, str]] | None:
    """Return the pairs of parts that must be equal for an answer to be the gold, or None if it can't be."""
    if answer is None or not gold.parts or gold[:2] != answer[:2] or len(gold.parts) != len(answer.parts):
        return None
    return list(zip(gold.parts, answer.parts, strict=True))
