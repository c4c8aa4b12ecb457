"""Answers to score against a gold: other spellings, constants, other golds and small changes. Used by golds.py."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from grpo_rewards.math.golds import gold_answer

RIGHT = ("by itself", "respelled", "reversed")
WRONG = ("constants", "another", "digit", "sign")
CONSTANTS = {"1=1": "1", "0=1": "0=1", "0": "0", "1": "1", "x": "x", r"\emptyset": r"\emptyset", "42": "42", "": ""}
"""Constant answers, each with the gold for which it is right."""


@dataclass(frozen=True)
class Case:
    """Answer that is scored against a gold.

    Attributes:
        right: True if the answer is right by `is_equal` or because of its check (RIGHT).
    """

    check: str
    gold: str
    answer: str
    right: bool


_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}|[\u4e00-\u9fff]")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w+\}")
_THOUSANDS = r"(?<=\d),(?=(?:\\!\s*)?\d{3}(?!\d))"
_OPERATOR = re.compile(rf"{_THOUSANDS}|(?<![\\{{])\s*(?<!\d[eE])(<=|>=|!=|[-+=<>*/,])\s*")
_SET = re.compile(r"((?:\\left)?\\?\{)(.*?)((?:\\right)?\\?\})", re.DOTALL)
_PART = re.compile(r"\\[,;]|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<separator>[,;])")
_SIGNED = re.compile(r"(-\s*)?(?<![a-zA-Z_^.\d])(?<!_\{)\.?\d[\d.]*")


def final_answer(gold: str) -> str:
    """Return the final answer of a gold or of a solution, without the `$` around mathematics."""
    return re.sub(r"(?<!\\)\$", "", gold_answer(gold) or gold).strip()


def respelled(text: str) -> str:
    r"""Return a formula with spaces around operators and commas, and with `\dfrac`. Words keep their hyphens."""
    text = text.replace(r"\frac", r"\dfrac")
    if _WORD.search(_ENVIRONMENT.sub("", text)):
        return text
    return _OPERATOR.sub(lambda match: f" {match[1]} " if match[1] else match[0], text).strip()


def items(text: str) -> list[str]:
    """Return the parts of a text between commas or semicolons outside brackets; [] if the brackets do not match."""
    found, start, depth = [], 0, 0
    for match in _PART.finditer(text):
        depth += (match.lastgroup == "open") - (match.lastgroup == "close")
        if depth < 0:
            return []
        if depth == 0 and match.lastgroup == "separator":
            found.append(text[start : match.start()].strip())
            start = match.end()
    return [*found, text[start:].strip()] if depth == 0 else []


def reversed_items(text: str) -> str:
    """Return a set or a bare list in reverse order.

    Set builders, words, lists with dots and digits that may have thousands commas stay as they are.
    """
    bare = text.strip().removesuffix(".")
    whole = _SET.fullmatch(bare)
    opening, inner, closing = whole.groups() if whole else ("", bare, "")
    parts = items(inner)
    relations = {bool(re.search(r"[=<>]|\\(?:[lg]eq?|neq?)\b", part)) for part in parts}
    if len(relations) != 1 or "" in parts:  # "x, y > 0" is not a list
        return text
    if re.search(r"dots|\.\.\.|\\mid|[|:]|" + _THOUSANDS, text) or _WORD.search(text):
        return text
    separator = "; " if ";" in inner else ", "
    return opening + separator.join(reversed(parts)) + closing if parts != parts[::-1] else text


def changed_digit(text: str, rng: random.Random) -> str:
    """Return the text with one random digit changed; the text itself if it has no digit."""
    places = [place for place, character in enumerate(text) if character in "0123456789"]
    if not places:
        return text
    place = rng.choice(places)
    digit = rng.choice("0123456789".replace(text[place], ""))
    return text[:place] + digit + text[place + 1 :]


def toggled_sign(text: str) -> str:
    r"""Return the text with the other sign of its first number; the text itself for 0, for `\pm`, or without a number.

    A number with a letter, `_`, `_{` or `^` directly before it is not the first number.
    """
    match = _SIGNED.search(text)
    if match is None or not re.search(r"[1-9]", match[0]) or re.search(r"\\[pm]+\s*$", text[: match.start()]):
        return text
    before, minus = text[: match.start()], match[1] or ""
    if not minus:
        return f"{before}-{text[match.start() :]}"
    is_difference = re.search(r"[\w)}\]]\s*$", before) is not None
    return before + ("+" if is_difference else "") + text[match.start() + len(minus) :]


def normalised(text: str) -> str:
    r"""Return a text in one spelling, without white space, `$`, `\left`, `\right` and the spaces of LaTeX."""
    text = re.sub(r"\\(?:left|right|[,;!])|[\s$]", "", text)
    text = re.sub(r"\\d?frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    return text.replace(r"\dfrac", r"\frac").replace(r"\varnothing", r"\emptyset")


def value(text: str) -> Fraction | None:
    r"""Return the number that a text states, with a unit in words or a name before `=`; None for any other text."""
    text = re.sub(r"\\(?:text|mathrm)\{[^{}]*\}|(?<=\d)\s+(?:\([^()]*\)|[a-zA-Z]{3}[a-zA-Z ]*)$|\\[$%]", "", text)
    text = re.sub(r"^[a-zA-Z]\w*(?:\(\w\))?=", "", normalised(text))
    text = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text)
    if "_" in text:  # an index or a base, which Fraction skips
        return None
    try:
        return Fraction(re.sub(_THOUSANDS, "", text))
    except (ValueError, ZeroDivisionError):
        return None


def is_equal(first: str, second: str) -> bool:
    """Return True if two texts have the same normalised text or the same value."""
    found = value(first)
    return normalised(first) == normalised(second) or (found is not None and found == value(second))


def cases(golds: Sequence[str], rng: random.Random) -> list[Case]:
    """Return the answers that are scored for the golds of a set."""
    shuffled = rng.sample(golds, len(golds))
    found = []
    for place, gold in enumerate(shuffled):
        answer = final_answer(gold)
        found.append(Case("by itself", gold, answer, right=True))
        found += [Case("constants", gold, text, is_equal(answer, right)) for text, right in CONSTANTS.items()]
        others = map(final_answer, shuffled[place + 1 :] + shuffled[:place])
        other = next((other for other in others if normalised(other) != normalised(answer)), answer)
        mutations = {
            "respelled": respelled(answer),
            "reversed": reversed_items(answer),
            "another": other,
            "digit": changed_digit(answer, rng),
            "sign": toggled_sign(answer),
        }
        for check, text in mutations.items():
            if text != answer:
                found.append(Case(check, gold, text, check in RIGHT or is_equal(answer, text)))
    return found
