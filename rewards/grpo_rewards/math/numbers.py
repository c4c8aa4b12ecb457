r"""The one number that an answer states, as an exact rational, in any surface form.

| form | examples |
|---|---|
| digits | `18`, `1,234.50`, `1.2e3`, `3 \times 10^5`, `1/2`, `2 1/2`, `\frac{1}{2}`, `0.\overline{36}` |
| words | two thousand and five, two thirds |
| with a sign, a currency, a unit or a label | `-$18.00`, `18 apples`, `18%` (18, not 0.18), `Total cost: 18` |
| behind arithmetic that holds | `12 + 1 = 13` |
| the only number of an English sentence (`prose`) | She has 18 left. |

With a second number, an alternative or a hedge ("17 or 18", "18, 19", "about 18") an answer states no number. An
expression (`17 + 1`) is not evaluated.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal as PlainDecimal
from fractions import Fraction
from numbers import Real

from grpo_rewards import languages
from grpo_rewards.claims import is_bound
from grpo_rewards.math import prose
from grpo_rewards.math.arithmetic import value_of
from grpo_rewards.math.formatting import WRAPPERS, fold_unicode, plain_latex, undress
from grpo_rewards.math.formulas import is_name, split_outside
from grpo_rewards.math.phrases import UNIT_LETTERS, is_label, is_measure
from grpo_rewards.math.units import is_unit

Number = int | Fraction

MAX_ANSWER_CHARS = 1000
"""Number of characters of the longest answer that is parsed. A longer one can only equal the gold as a string."""

_MAX_EXPONENT = 1000
_PLAIN_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_DIGITS = r"\d+(?:\.\d*)?|\.\d+"
# "¤" stands for every currency sign but "$", which may also delimit mathematics.
_CURRENCY = r"(?:[A-Z]{0,3}[$¤]|USD|EUR|GBP|INR|JPY|CHF|CAD|AUD|Rs\.?)"
# `1,234` `1 234` `1_234` `1'234`: groups of three with one kind of separator, not part of a longer run.
_THOUSANDS = re.compile(r"(?<![\d.,_'])\d{1,3}([,_' ])\d{3}(?:\1\d{3})*(?!\d|\s*/)")
_QUANTITY = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<currency>{_CURRENCY}\s*)?(?P<inner_sign>[-+]?)\s*
    (?: (?:(?P<whole>\d+)\s+)? (?P<numerator>\d+)\s*/\s*(?P<denominator>\d+)
      | (?P<decimal>{_DIGITS}) (?: [eE](?P<e>[-+]?\d+) | \s*[x×*]\s*10\s*\^\s*\{{?\s*(?P<power>[-+]?\d+)\s*\}}? )?
    ) (?P<unit>.*)""",
    re.VERBOSE | re.DOTALL,
)
_UNIT_EXPONENT = re.compile(r"(?<=[^\W\d_])\^(?:-?\d|\{-?\d\})")
_UNIT = re.compile(r"[^\W\d_]|,(?= as )|[ %°$¤/.×()-]|(?<=[^\W\d_])['\"]|['\"](?=[^\W\d_])")
_UNIT_SIGN = re.compile(r"\s*[%°$¤]")
_LETTERS = re.compile(r"[^\W\d_]+")
_UNIT_OF_NUMBER = re.compile(r"(?<=\d) ?[^\W\d_]{2,}(?: [^\W\d_]{2,})?")
_MAX_SIDES = 6
_GLUED = re.compile(r"(?!st|nd|rd|th|USD|pm|am)[a-zA-Z]{2,3}(?![a-zA-Z])")
_BRACES = (("{", "}"),)
_BRACKETS = (("(", ")"), ("[", "]"))
# "x = ", "Total: ", "**Answer:** ", "So the final answer is ". No label has a digit: "17 = 18" stays two alternatives.
_LABEL = re.compile(
    r"""\#{1,6}\ |\*{0,2} (?:
        (?:(?:so|thus|hence|therefore|finally),?\ )? (?:the\ )? (?:(?:final|correct|right|total)\ )?
        (?:answer|result|solution|total) \ (?:is|equals)\b:?
      | [^\W\d_]+ (?:\ [^\W\d_]+){0,3} (?:_\{?\w+\}?)? \ ?[=:]
      | [=:]
    ) \*{0,2}\s*""",
    re.VERBOSE | re.IGNORECASE,
)
# A number that is set off from its unit, as in "**18** apples".
_SET_OFF = re.compile(r"(?:(\*\*|__|\*|`|\")([^*_`\"]+)\1|\\boxed\{([^{}]+)\})(?=\s)")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(?P<sign>-?)\s*(\d+)\s*\}|(\d))")
_REPEATING = re.compile(r"(\d+)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))(?!\s*[\d\\(])")
_SPELLED_TWICE = re.compile(r"(.*\d)\s*\(([a-zA-Z -]+)\)")


def _end_of_label(text: str) -> int:
    """Return where a label that names a quantity ends, such as "Total cost: "; 0 for none."""
    end = _end_of_any_label(text)
    words = [word.lower() for word in _LETTERS.findall(text[:end])]
    return end if is_label(words, text[:end].rstrip(" *")[-1:]) else 0


def _end_of_any_label(text: str) -> int:
    """Return where a label ends that may be a name ("Tom: ") and is neither a number nor a doubt; 0 for none."""
    match = _LABEL.match(text)
    if match is None:
        if (text.isascii() and not text[:3].isalpha()) or not languages.may_label(text):
            return 0
        label = languages.answer_labels().match(text)
        return label.end() if label else 0
    for word in map(str.lower, _LETTERS.findall(match.group())):
        if prose.is_doubt(word) or is_bound(word) or prose.is_numeral(word) or prose.is_vague_number(word):
            return 0
    return match.end()


def parse_number(text: str, *, trusted: bool = False) -> Number | None:
    """Return the one number that an answer states, exactly, or None if it states none, several, or a formula.

    Args:
        text: answer.
        trusted: True for a gold, behind whose number any word is a unit. In an answer, "18 nope" states no number.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    if text.isdecimal():
        return int(text)
    if _PLAIN_DECIMAL.fullmatch(text):
        whole, _, digits = text.partition(".")
        return Fraction(int(whole + digits), 10 ** len(digits))
    text = plain_latex(fold_unicode(" ".join(text.split()) if "  " in text else text))
    brackets = () if "," in text else _BRACKETS  # "(2,100)" is a pair
    text = undress(text, (*WRAPPERS, *_BRACES, *brackets), _end_of_any_label if trusted else _end_of_label)
    if set_off := _SET_OFF.match(text):
        text = (set_off[2] or set_off[3]).strip() + text[set_off.end() :]
    text = _plain_digits(text)
    twice = _SPELLED_TWICE.fullmatch(text) if text.endswith(")") else None
    if twice and parse_number(twice[1]) == _parse_words(twice[2], trusted):
        text = twice[1]  # "7 (seven)"
    negative = text.lower().startswith(("minus ", "negative "))
    if negative:
        text = text.partition(" ")[2]
    value = _parse_digits(text.strip(), trusted)
    if value is None:
        value = _parse_words(text, trusted)
    return value if value is None or not negative else -value


def answer_number(text: str) -> Number | None:
    """Return the number that an answer states, alone (as by `parse_number`), by an equation or in a sentence, or None.

    An equation such as `12 + 1 = 13` states its right side if its arithmetic holds.
    """
    number = parse_number(text)
    if number is not None or len(text) > MAX_ANSWER_CHARS:
        return number
    if "=" in text and (number := _right_side(text)) is not None:
        return number
    return number_of_sentence(text)


def number_of_sentence(text: str) -> Number | None:
    """Return the one number that an English sentence states, or None; see `prose`."""
    text = plain_latex(fold_unicode(text))
    quantity = prose.stated_quantity(_UNIT_EXPONENT.sub("", _plain_digits(text)))
    return parse_number(quantity) if quantity else None


def _right_side(text: str) -> Number | None:
    """Return the number on the right of an equation whose other sides are arithmetic with its value, or None."""
    text = undress(fold_unicode(text), end_of_label=_end_of_any_label)
    *calculations, result = split_outside(text, "=")
    if not 1 <= len(calculations) < _MAX_SIDES:
        return None
    if is_name(calculations[0]):
        calculations = calculations[1:]
    number = parse_number(result)
    if number is None:
        number = number_of_sentence(result)
    if number is None:
        return None
    for calculation in calculations:
        if value_of(_UNIT_OF_NUMBER.sub(_without_harmless_unit, plain_latex(calculation))) != number:
            return None
    return number


def _without_harmless_unit(match: re.Match[str]) -> str:
    return "" if _unit_scale(match.group(), trusted=True) == 1 else match.group()


def _plain_digits(text: str) -> str:
    """Return `text` with fractions as `1/2` and without separators of thousands."""
    if "." in text and ("\\" in text or "(" in text):
        text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _FRACTION.sub(lambda m: f" {m['sign'] or ''}{m[1] or m[2]}/{m[4] or m[5]}".replace("--", ""), text)
    return _THOUSANDS.sub(lambda m: m.group().replace(m[1], ""), text)


def _fraction_of_repeating(match: re.Match[str]) -> str:
    r"""Return `36/99` for `0.\overline{36}`."""
    period = match[3] or match[4] or match[5]
    start = match[1] + match[2]
    return f" {int(start + period) - int(start)}/{(10 ** len(period) - 1) * 10 ** len(match[2])}"


def _parse_digits(text: str, trusted: bool) -> Number | None:
    match = _QUANTITY.match(text)
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    if match["decimal"]:
        exponent = int(match["e"] or match["power"] or 0)
        if abs(exponent) > _MAX_EXPONENT:
            return None
        value = Fraction(match["decimal"]) * Fraction(10) ** exponent
    else:
        whole, numerator, denominator = (int(match[key] or 0) for key in ("whole", "numerator", "denominator"))
        if denominator == 0 or (match["whole"] and numerator >= denominator):
            return None
        value = whole + Fraction(numerator, denominator)
    scale = _unit_scale(match["unit"], trusted, has_unit=bool(match["currency"]))
    if scale is None:
        return None
    return -value * scale if "-" in (match["sign"], match["inner_sign"]) else value * scale


def _unit_scale(unit: str, trusted: bool, has_unit: bool = False) -> int | None:
    """Return the factor of a unit: 1, or the scale of "18 thousand dollars". Return None if the text is not a unit.

    Args:
        unit: text behind a number.
        trusted: True to take any words for a unit, as behind a gold.
        has_unit: True if the number has a unit in front, such as a currency sign.
    """
    if unit == "th" or (not unit.isascii() and prose.is_foreign_measure(unit)):
        return 1
    words = _LETTERS.findall(unit)
    if len(words) > 6 or _UNIT.sub("", _UNIT_EXPONENT.sub("", unit)) or unit.endswith(("..", "-", "/", "(")):
        return None
    if (glued := _GLUED.match(unit)) and not is_unit(glued.group().lower()):
        return None  # "2xy" is a product
    if unit.strip(" .^{23}").lower() in ("min", "in"):
        return 1  # minutes and inches, alone behind a number
    scale = 1
    if words and words[0].lower() in prose.SCALES:
        scale = prose.SCALES[words.pop(0).lower()]
    if any(map(_is_no_unit, words)):
        return None
    has_unit = has_unit or bool(_UNIT_SIGN.match(unit))
    return scale if trusted or is_measure([word.lower() for word in words], has_unit) else None


def _is_no_unit(word: str) -> bool:
    lower = word.lower()
    if len(word) == 1 and lower != word.upper() and word not in UNIT_LETTERS:
        return True  # a variable, or a constant such as pi
    if lower in prose.NO_UNITS or lower in prose.SCALES or lower in prose.SMALL or prose.is_doubt(lower):
        return True
    if prose.is_vague_number(lower) and lower not in ("dozen", "dozens"):
        return True
    return not word.isalpha() or not prose.CJK_NUMERALS.isdisjoint(word)


def _parse_words(text: str, trusted: bool) -> Number | None:
    """Return the number of "two thousand and five apples" or "two thirds", or None if the words spell no number."""
    words = text.lower().replace("-", " ").replace(",", " ").split()
    if not words or (words[0] not in prose.SMALL and words[0] not in ("a", "an")):
        return None
    total, group, taken = 0, 0, 0
    limit: float = math.inf  # bound of the next scale
    room: float = math.inf  # bound of the next summand: after "twenty" only 1..9 may follow, after "five" only a scale
    for taken, word in enumerate(words):
        if word == "and" and taken + 1 < len(words) and words[taken + 1] in prose.SMALL:
            continue
        if word in ("a", "an") and taken == 0 and len(words) > 1 and words[1] in prose.SCALES:
            group = 1
        elif word in prose.SMALL and (value := prose.SMALL[word]) < room and (value or taken == 0):
            group, room = group + value, 10 if value >= 20 else 0
        elif word == "hundred" and 0 < group < 20:
            group, room = group * 100, math.inf
        elif word in prose.SCALES and word not in ("hundred", "k") and group and prose.SCALES[word] < limit:
            limit = prose.SCALES[word]
            total, group, room = total + group * prose.SCALES[word], 0, math.inf
        else:
            break
    else:
        taken = len(words)
    rest = " ".join(words[taken:])
    part = rest.removesuffix("s")
    if taken and part in _PARTS and (part == rest) == (total + group == 1):  # "twenty-fifth" is not a fraction
        return Fraction(total + group, _PARTS[part])
    if taken == 0 or _unit_scale(f" {rest}" if rest else "", trusted) != 1:
        return None
    return total + group


_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7,
          "eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100}  # fmt: skip


def number_text(number: Real | float) -> str:
    """Return the shortest usual text of a number: 18 for 18.0, and 0.00001 for 1e-05."""
    text = str(number)
    if not isinstance(number, float) or not 1e-9 <= abs(number) < 1e16:
        return "0" if number == 0 else text
    if number.is_integer():
        return str(int(number))
    return format(PlainDecimal(text), "f") if "e" in text else text
