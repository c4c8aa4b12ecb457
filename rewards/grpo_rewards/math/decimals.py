"""Decimal marks: numbers written with a decimal comma (`6.403,64`) and with a decimal point (`6,403.64`).

One mark before exactly three digits is ambiguous: `1.200` is 1.2 with a decimal point, and 1200 with a decimal comma.
Every other form has one reading. `with_point` therefore rewrites the ambiguous forms and those with a decimal comma,
and leaves the forms that can only have a decimal point.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from grpo_rewards.errors import shortened

Decimal = Literal["point", "comma"]
DECIMALS: tuple[Decimal, ...] = ("point", "comma")

# A run of digits and marks. Spaces and apostrophes separate groups of thousands in both notations.
_NUMBER = re.compile(r"(?<![\d.,])\d+(?:[.,]\d+)+", re.ASCII)
_GROUPED_BY_POINTS = re.compile(r"[1-9]\d{0,2}(?:\.\d{3})+(?:,\d+)?", re.ASCII)
_GROUPED_BY_COMMAS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_AMBIGUOUS = re.compile(r"[1-9]\d{0,2}[.,]\d{3}", re.ASCII)
# A pair or an interval: (1,2), [1,2], ]1,2[, \{1,2\}, or the beginning of a longer one, (1,2,x).
_PAIRED = re.compile(r"(?:[(\[\]]|\\\{)\s*[-+−]?(?P<numbers>\d+,\d+)(?=\s*(?:\\right\s*)?(?:[)\[\],]|\\\}))", re.ASCII)
_ONE_COMMA = re.compile(r"\d+,\d+", re.ASCII)
_ONE_POINT = re.compile(r"\d+\.\d+", re.ASCII)


def with_point(text: str) -> str:
    """Return `text` with its decimal commas as points, and without points between groups of thousands.

    A number that cannot have a decimal comma (`3.5`, `1,234.50`) stays as it is, and so does a pair or an interval
    (`(1,2)`), which is not a number.
    """
    text = _without_latex(text)
    pairs = {match.start("numbers") for match in _PAIRED.finditer(text)}

    def rewritten(match: re.Match[str]) -> str:
        number = match.group()
        if match.start() in pairs:
            return number
        if _GROUPED_BY_POINTS.fullmatch(number):
            return number.replace(".", "").replace(",", ".")
        return number.replace(",", ".") if _ONE_COMMA.fullmatch(number) else number

    return _NUMBER.sub(rewritten, text)


def _without_latex(text: str) -> str:
    r"""Return `text` with bare marks for `{,}` and `{.}`, and `\ ` for the thin space `\,` as in `1\,200{,}50`.

    LaTeX puts a bare comma in braces, because it sets a space behind one.
    """
    return text.replace("\\,", "\\ ").replace("{,}", ",").replace("{.}", ".")


def decimal_of(text: str) -> Decimal | Literal["ambiguous"] | None:
    """Return the decimal mark of a text with one number, "ambiguous" for forms such as `1.200`, or None.

    None means that the text has no number with a mark, several of them, a list of numbers (`1,2,3`), or a pair or an
    interval (`(1,2)`).
    """
    text = _without_latex(text)
    numbers = _NUMBER.findall(text)
    if len(numbers) != 1 or _PAIRED.search(text):
        return None
    (number,) = numbers
    if _AMBIGUOUS.fullmatch(number):
        return "ambiguous"
    if _GROUPED_BY_POINTS.fullmatch(number) or _ONE_COMMA.fullmatch(number):
        return "comma"
    if _GROUPED_BY_COMMAS.fullmatch(number) or _ONE_POINT.fullmatch(number):
        return "point"
    return None


@dataclass(frozen=True)
class DecimalMarks:
    """Count of the decimal marks of a column.

    Attributes:
        comma: number of texts that can only have a decimal comma.
        point: number of texts that can only have a decimal point.
        ambiguous: number of texts such as `1.200` or `1,200`.
        with_ambiguous_point: number of the ambiguous texts whose mark is a point.
        first_comma: first text with a decimal comma and the name of its row, or None.
        first_ambiguous: first ambiguous text and the name of its row, or None.
    """

    comma: int = 0
    point: int = 0
    ambiguous: int = 0
    with_ambiguous_point: int = 0
    first_comma: tuple[object, str] | None = None
    first_ambiguous: tuple[object, str] | None = None

    @property
    def certain(self) -> Decimal | None:
        """Decimal mark of the column: a point if no text has another mark, None if the mark is not certain."""
        if self.comma:
            return None if self.point else "comma"
        # `1,200` alone is the usual way to write thousands in English. `1.200` alone may be either.
        return "point" if self.point or not self.with_ambiguous_point else None

    def note(self, decimal: Decimal | None) -> str | None:
        """Return a sentence if these golds may be misread with `decimal` (None: not set, which reads a point)."""
        verb = "is" if self.ambiguous == 1 else "are"
        ambiguous = f"{self.ambiguous} {verb} ambiguous{_example(self.first_ambiguous)}"
        found, read, count, first = "comma", "point", self.comma, self.first_comma
        if decimal == "comma":
            found, read, count, first = "point", "comma", self.point, None
        if count:
            golds = "1 gold has" if count == 1 else f"{count} golds have"
            others = f", {ambiguous}" if self.ambiguous else ""
            problem = f"{golds} a decimal {found}{_example(first)}{others}"
            return f"{problem}, and the reward reads a decimal {read}: set its `decimal` to {found}"
        if decimal is None and self.certain is None:
            return f"{ambiguous}: set the reward's `decimal` to point or comma"
        return None


def _example(example: tuple[object, str] | None) -> str:
    return "" if example is None else f" ({example[0]}: `{shortened(example[1])}`)"


def decimal_marks(golds: Iterable[tuple[object, str]]) -> DecimalMarks:
    """Count the decimal marks of golds, each given with the name of its row, an object whose text is shown."""
    counts = {"comma": 0, "point": 0, "ambiguous": 0}
    ambiguous_points = 0
    first: dict[str, tuple[object, str]] = {}
    for row, text in golds:
        if found := decimal_of(text):
            counts[found] += 1
            first.setdefault(found, (row, text))
            ambiguous_points += found == "ambiguous" and "." in text
    return DecimalMarks(
        **counts,
        with_ambiguous_point=ambiguous_points,
        first_comma=first.get("comma"),
        first_ambiguous=first.get("ambiguous"),
    )
