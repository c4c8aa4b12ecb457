r"""Exact values of arithmetic: `12 + 1`, `2^{10}`, `\frac{6!}{3!}`, `\sqrt{16}`.

Only numbers and operators are read, by a parser with bounds on depth and size; a letter, a unit or an irrational value
gives None. Nothing is evaluated as code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 200
"""Number of characters of the longest text that is read."""

_MAX_DEPTH = 30
_MAX_BITS = 4096
_MAX_EXPONENT = 1024
_MAX_FACTORIAL = 300

_DROPPED = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|\\quad|\\?\$|¤|\s")
_TOKEN = re.compile(
    r"(?P<number>\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<frac>\\[dtc]?frac)(?![a-zA-Z])|(?P<sqrt>\\sqrt)(?![a-zA-Z])|(?P<binom>\\[dt]?binom)(?![a-zA-Z])"
    r"|(?P<log>\\log)_(?![a-zA-Z])"
    r"|(?P<times>\\(?:cdot|times)(?![a-zA-Z])|×|\*(?!\*)|(?<=[\d)])[xX](?=[\d(]))|(?P<div>\\div(?![a-zA-Z])|÷|/)"
    r"|(?P<plus>\+)|(?P<minus>-)|(?P<power>\^|\*\*)|(?P<bang>!)|(?P<open>[({\[])|(?P<close>[)}\]])|(?P<bar>\|)"
)
_LOG_BASE = re.compile(r"\\log_(\d)")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class _NoValue(Exception):
    """Text that is not arithmetic, or whose value is not rational or too large."""


def value_of(text: str) -> Fraction | None:
    """Return the exact value of an arithmetic expression, or None for another text or a value that is too large."""
    if len(text) > MAX_CHARS:
        return None
    try:
        parser = _ArithmeticParser(text)
        value = parser.sum()
        return None if parser.next_kind() else value
    except (_NoValue, ZeroDivisionError):
        return None


class _ArithmeticParser:
    """Recursive descent over the tokens of an expression. Each method reads one part and returns its value."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        text = _LOG_BASE.sub(r"\\log_{\1}", text)
        if re.search(r"[\d.]\s+[\d.]", text):  # "1 8" is not 18
            raise _NoValue
        text = _DROPPED.sub("", text)
        if "," in text and re.search(r"[(\[]", text):  # "(2,100)" is a pair, but "(2)\,(3)" has a thin space
            raise _NoValue
        position = 0
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None:
                raise _NoValue
            self.tokens.append((str(token.lastgroup), token.group()))
            position = token.end()
        self.position = 0
        self.depth = 0

    def next_kind(self) -> str:
        return self.tokens[self.position][0] if self.position < len(self.tokens) else ""

    def take(self, *kinds: str) -> str | None:
        """Consume and return the next token if it is of one of these kinds; else return None."""
        if self.next_kind() not in kinds:
            return None
        self.position += 1
        return self.tokens[self.position - 1][1]

    def sum(self) -> Fraction:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _NoValue
        value = self.product()
        while sign := self.take("plus", "minus"):
            term = self.product()
            value = _bounded(value - term if sign == "-" else value + term)
        self.depth -= 1
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while True:
            if self.take("times"):
                value = _bounded(value * self.signed())
            elif self.take("div"):
                value = _bounded(value / self.signed())
            elif self.next_kind() in ("open", "sqrt", "binom") and self.tokens[self.position][1] != "{":
                value = _bounded(value * self.power())
            else:
                return value

    def signed(self) -> Fraction:
        sign = -1 if self.take("plus", "minus") == "-" else 1
        return sign * self.power()

    def power(self) -> Fraction:
        base = self.factorial()
        if not self.take("power"):
            return base
        # "2^10" is typeset as 20, but written for 1024.
        whole = self.take("number")
        if whole is not None and not whole.isdecimal():
            raise _NoValue
        exponent = self.argument() if whole is None else Fraction(whole)
        return _power(base, exponent)  # a tower, "2^2^2", leaves a token

    def factorial(self) -> Fraction:
        value = self.atom()
        if self.take("bang"):
            if value.denominator != 1 or not 0 <= value <= _MAX_FACTORIAL:
                raise _NoValue
            value = Fraction(math.factorial(value.numerator))
        return value

    def atom(self) -> Fraction:
        if number := self.take("number"):
            whole = Fraction(number.replace("{,}", "").replace(",", ""))
            if self.next_kind() == "frac":  # a mixed number
                self.position += 1
                part = self.fraction()
                if whole.denominator != 1 or not 0 < part < 1:
                    raise _NoValue
                return whole + part
            return whole
        if self.take("frac"):
            return self.fraction()
        if self.take("sqrt"):
            has_degree = self.tokens[self.position : self.position + 1] == [("open", "[")]
            degree = self.argument() if has_degree else Fraction(2)
            return _root(self.argument(), degree)
        if self.take("binom"):
            upper, lower = self.argument(), self.argument()
            if upper.denominator != 1 or lower.denominator != 1 or not 0 <= lower <= upper <= _MAX_FACTORIAL:
                raise _NoValue
            return Fraction(math.comb(upper.numerator, lower.numerator))
        if self.take("log"):
            return _logarithm(self.argument(), self.power())
        if self.take("bar"):
            value = self.sum()
            if not self.take("bar"):
                raise _NoValue
            return abs(value)
        return self.group()

    def fraction(self) -> Fraction:
        upper, lower = self.argument(), self.argument()
        return upper / lower

    def group(self) -> Fraction:
        opening = self.take("open")
        if opening is None:
            raise _NoValue
        value = self.sum()
        if self.take("close") != _CLOSING[opening]:
            raise _NoValue
        return value

    def argument(self) -> Fraction:
        r"""Read `{...}`, `[...]`, `(...)`, or one digit as in `\frac12`; a number of several digits is split."""
        if self.next_kind() == "open":
            return self.group()
        sign = -1 if self.take("minus") else 1
        number = self.take("number")
        if number is None or not number.isdecimal():
            raise _NoValue
        if len(number) > 1:
            self.position -= 1
            self.tokens[self.position] = ("number", number[1:])
        return Fraction(sign * int(number[0]))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise _NoValue
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return _root(_power(base, Fraction(exponent.numerator)), Fraction(exponent.denominator))
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > _MAX_EXPONENT or size * abs(exponent) > _MAX_BITS or base == exponent == 0:
        raise _NoValue
    return base**exponent.numerator


def _root(value: Fraction, degree: Fraction) -> Fraction:
    if degree.denominator != 1 or not 2 <= degree <= 20 or value < 0:
        raise _NoValue
    upper, lower = (_nearest(number, lambda n: n ** (1 / degree)) for number in value.as_integer_ratio())
    if Fraction(upper**degree.numerator, lower**degree.numerator) != value:
        raise _NoValue
    return Fraction(upper, lower)


def _nearest(number: int, function: Callable[[float], float]) -> int:
    """Return the integer nearest to the value of a function; a caller proves that it is the value."""
    try:
        return round(function(float(number)))
    except OverflowError:
        raise _NoValue from None


def _logarithm(base: Fraction, value: Fraction) -> Fraction:
    if base.denominator != 1 or base < 2 or value.denominator != 1 or value < 1:
        raise _NoValue
    exponent = _nearest(value.numerator, lambda n: math.log(n, base.numerator))
    if base.numerator**exponent != value:
        raise _NoValue
    return Fraction(exponent)
