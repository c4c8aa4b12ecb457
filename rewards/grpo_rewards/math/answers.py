r"""Final answers of completions, in three steps that can be used alone: extract, normalise, compare.

`extract_answer` finds the final answer in a completion, and `gold_answer` the one in a dataset's gold. `parse_number`
reads a number in any surface form as an exact rational, and `answer_number` reads one in a sentence too. `compare`, or
a `Judge` for many comparisons, compares answer and gold. No step evaluates text as code. Only the comparison of
formulas, in `grpo_rewards.math.symbolic`, could take unbounded time, and it has a deadline.

Where several readings are defensible, these rules decide (docs/rewards.md has the whole table, and each row is a test):

- Thinking is everything up to the last `</think>`, and everything after a `<think>` that is never closed. An answer
  counts outside the thinking only.
- Of several answers in one layout the last counts. A box, or a sentence, that is denied or taken back is no answer,
  nor is a tag, or a `\boxed{`, that is never closed.
- A number may carry a sign, a currency, a unit or a label (`x = 18`), or be the only number of an English sentence
  ("She has 18 left."; see `grpo_rewards.math.prose`). With a second number, an alternative or a hedge ("17 or 18", "18,
  19", "about 18") an answer states no number. An expression (`17 + 1`) is not evaluated.
- A percent sign is a unit: 18% equals 18, not 0.18.
- Equality is exact: 1/2 = 0.5, but 33.33 is not 33.333.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal as PlainDecimal
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

from grpo_rewards import languages
from grpo_rewards.claims import is_bound, is_denied, is_unclaimed
from grpo_rewards.completions import thinking_remover
from grpo_rewards.math import prose
from grpo_rewards.math.arithmetic import value_of
from grpo_rewards.math.decimals import Decimal, with_point
from grpo_rewards.math.formulas import TooComplex, comparisons, is_name, is_same_formula, names_differ, split_outside
from grpo_rewards.math.kinds import kind_of
from grpo_rewards.math.phrases import UNIT_LETTERS, is_label, is_measure
from grpo_rewards.math.spellings import without_runs
from grpo_rewards.math.symbolic import equivalent
from grpo_rewards.math.units import are_opposed, currency_of, is_unit, units_differ
from grpo_rewards.reward import check_choice

Number = int | Fraction

MAX_ANSWER_CHARS = 1000
"""Number of characters of the longest answer that is parsed. A longer one can only equal the gold as a string."""

MAX_GOLDS = 64
"""Largest number of accepted answers of a row, each of which may need a symbolic comparison. A row with more can't be
scored, whatever the reward."""

RIGHT_VERDICTS = frozenset({"exact", "equal", "symbolic"})
"""Verdicts of a `Judge` on a right answer."""

_MAX_EXPONENT = 1000

_MAX_DENIED = 20
"""Number of denied claims of a completion that are skipped, from its end."""


def _last_hashes(text: str) -> str | None:
    start = text.rfind("####")
    return None if start < 0 else _line(text, start + 4)


def _last_boxed(text: str) -> str | None:
    if "box" not in text:
        return None
    text = _with_braces(text)
    span = _last_box(text)
    return span and _with_boxes_before(text, span)


def _last_claimed_box(text: str) -> str | None:
    """Return the text of the last box that the words before it don't deny; None if those behind it take it back."""
    if "box" not in text:
        return None
    text = _with_braces(text)
    end = len(text)
    for _ in range(_MAX_DENIED):
        span = _last_box(text[:end])
        if span is None or is_denied("", text[span[1] + 1 :]):
            return None
        before = span[0] - len(_BOXED)
        if not is_denied(text[:before], ""):
            return _with_boxes_before(text, span)
        end = before
    return None


def _with_braces(text: str) -> str:
    r"""Return a text with `\boxed{5}` for `\boxed 5`, `\boxed {5}` and `\fbox{5}`."""
    if "\\fbox" in text or ("\\boxed" in text and _BOXED not in text):
        text = _BOX_TOKEN.sub(r"\\boxed{\1}", _BOX.sub(r"\\boxed{", text))
    return text


def _with_boxes_before(text: str, span: tuple[int, int]) -> str:
    """Return the content of a box, behind those of the boxes that a comma or "and" joins to it."""
    content = text[slice(*span)].strip()
    for _ in range(_MAX_JOINED):
        start = span[0] - len(_BOXED)
        joint = _JOINT.search(text, max(0, start - 40), start)
        previous = _last_box(text[: joint.start() + 1]) if joint else None
        if previous is None or not joint or previous[1] != joint.start():
            break
        span, content = previous, f"{text[slice(*previous)].strip()}, {content}"
    return content


def _last_box(text: str) -> tuple[int, int] | None:
    """Return where the content of the last box starts and ends; an empty span if that box is never closed."""
    start = text.find(_BOXED)
    if start < 0:
        return None
    span, depth = None, 0
    for brace in _BRACE.finditer(text, start):
        token = brace.group()
        if depth == 0 and token == _BOXED:
            span, depth, start = (brace.end(), brace.end()), 1, brace.end()  # empty until the box is closed
        elif depth:
            depth += (token in ("{", _BOXED)) - (token == "}")
            if depth == 0:
                span = start, brace.start()
    return span


def _last_a_line(text: str) -> str | None:
    start = text.rfind("\nA:")
    if start >= 0:
        return _line(text, start + 3)
    return _line(text, 2) if text.startswith("A:") else None


def _last_sentence(text: str) -> str | None:
    if "</" in text:
        text = _HTML_BOLD.sub("**", text)
    lower = text.lower()
    if len(lower) != len(text):  # a few characters change their length, and positions in `lower` would be wrong
        lower = text
    position, denied = len(text), 0
    while (position := lower.rfind("answer", 0, position)) >= 0:
        if not (claim := _ANSWER_IS.match(text, position)):
            continue
        if is_unclaimed(text[:position]):
            denied += 1
            if denied > _MAX_DENIED:
                return None
            continue
        return _claimed(text, claim.end())
    labels = languages.find_labels(text)
    return _claimed(text, labels[-1][1]) if labels else None


def _claimed(text: str, start: int) -> str | None:
    """Return what a claim states behind its label, or None if the text behind it takes it back."""
    stated, after = _stated(text, start)
    return None if is_denied("", text[after:]) else _without_reason(stated)


def _stated(text: str, start: int) -> tuple[str, int]:
    """Return what a claim states, up to the end of its sentence or of the block that follows it, and where it ends."""
    if block := _BLOCK.match(text, start):
        closing = _BLOCK_ENDS[block[1][:2]]
        if (close := text.find(closing, block.end())) > 0:
            return text[block.end() : close].strip(), close + len(closing)
    line = _line(text, start)
    after = text.find(line, start)
    for mark in _UNPAIRED.findall(line):  # the mark that remains of "**Answer: 12**"
        if line.count(mark) % 2:
            line = line.replace(mark, " " * len(mark), 1)
    if end := _SENTENCE_END.search(line):
        line = line[: end.start()]
    return line.strip(), after + len(line)


def _without_reason(stated: str) -> str:
    """Return a claim without the reason behind it, as in "72, which is the total", unless the reason may be a doubt."""
    reason = _REASON.search(stated)
    if reason is None or not _REASON_WORDS.fullmatch(rest := stated[reason.start() :]):
        return stated
    words = [word.lower() for word in _LETTERS.findall(rest)]
    return stated if any(map(prose.is_doubt, words)) else stated[: reason.start()]


def _line(text: str, start: int) -> str:
    end = text.find("\n", start)
    return text[start : end if end >= 0 else len(text)].strip()


_BOXED = "\\boxed{"
_BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BOX_TOKEN = re.compile(r"\\boxed\s+(\w+(?:[./]\d+)?)(?=[\s$.,]|\Z)")
_MAX_JOINED = 8
_JOINT = re.compile(r"\}[\s$]*(?:,|,?\s*(?:and|\\text\{\s*and\s*\}))[\s$]*\Z")
_ANSWER_IS = re.compile(
    r"answer[*_]{0,3}(?:\s+(?:to|for|of)\s+(?:the|this)\s+(?:problem|question|exercise))?"
    r"(?:\s+(?:is|equals)\b\s*[:=]?|\s*[:=](?:[*_]{1,3}(?=\s))?)\s*",
    re.IGNORECASE,
)
_BLOCK = re.compile(r"(\$\$|\\\[|```\w*\n)\s*")
_BLOCK_ENDS = {"$$": "$$", "\\[": "\\]", "``": "```"}
_UNPAIRED = re.compile(r"\*\*|__|\*(?=\.?\Z)")
_REASON = re.compile(
    r",?\s+(?:because|since)\b|,\s+(?:which|so|as|in\s+total|and\s+(?:so|thus|hence|therefore))\b|;\s", re.IGNORECASE
)
_REASON_WORDS = re.compile(r"[^\d?=<>\\$]*")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[。！।]")

_LAYOUTS: dict[str, Callable[[str], str | None]] = {
    "hashes": _last_hashes, "boxed": _last_claimed_box, "a_line": _last_a_line, "sentence": _last_sentence
}  # fmt: skip
LAYOUTS = ("answer_tag", *_LAYOUTS, "auto")


def extract_answer(
    text: str, layout: str = "answer_tag", *, tags: tuple[str, str] = ("think", "answer"), prefilled: bool = False
) -> str | None:
    r"""Return the final answer that a completion states outside its thinking, as written, or None.

    Args:
        text: text of the completion.
        layout: `answer_tag` (`<answer>N</answer>`), `hashes` (`#### N`), `boxed` (`\boxed{N}`), `a_line` (a line
            `A: N`), `sentence` ("The answer is N."), or `auto`, the first of these, in this order, that the completion
            uses. In `auto`, a `####` or `A:` line that is not a number (a heading, a dialogue) gives way to the later
            layouts.
        tags: names of the reasoning tag and the answer tag.
        prefilled: True if the prompt already opens the reasoning block, so that the completion starts inside it.

    Raises:
        ValueError: `layout` is not one of LAYOUTS.
    """
    return answer_extractor(layout, tags, prefilled)(text)


@lru_cache(maxsize=64)
def answer_extractor(layout: str, tags: tuple[str, str], prefilled: bool = False) -> Callable[[str], str | None]:
    """Return `extract_answer` for one layout and its tags. Checking and building them costs as much as an answer."""
    check_choice(layout, "extract", LAYOUTS)
    opening, closing = f"<{tags[1]}>", f"</{tags[1]}>"
    outside = thinking_remover(tags[0], prefilled)
    uses_tag = layout in ("answer_tag", "auto")
    find_otherwise = _first_layout if layout == "auto" else _LAYOUTS.get(layout)

    def extract(text: str) -> str | None:
        text = outside(text)
        answer = None
        if uses_tag and (start := text.rfind(opening)) >= 0:
            stated, closed, _ = text[start + len(opening) :].partition(closing)
            answer = stated.strip() if closed else None
        elif find_otherwise is not None:
            answer = find_otherwise(text)
        return answer or None

    return extract


def _first_layout(text: str) -> str | None:
    doubtful = None
    for layout, find in _LAYOUTS.items():
        answer = find(text)
        if answer is None:
            continue
        if layout not in ("hashes", "a_line") or parse_number(answer) is not None:
            return answer
        doubtful = doubtful or answer
    return doubtful


def gold_answer(gold: object) -> str | None:
    r"""Return the final answer of a dataset's gold, or None if it has none.

    A gold is a GSM8K solution (`... #### N`), a solution that ends in an `A: N` line or holds a `\boxed{N}`, or a bare
    answer. Prose of more than five words without such a mark is a final answer if it states one number, and if it has
    mathematics or, in at most 15 words, no digit. Then only the same text equals it. Other prose has no final answer.
    """
    if isinstance(gold, Real) and not isinstance(gold, bool) and gold == gold:  # not NaN
        gold = number_text(gold)
    if not isinstance(gold, str):
        return None
    if gold.isdecimal():
        return gold
    for find in (_last_hashes, _last_boxed, _last_a_line):
        answer = find(gold)
        if answer is not None:
            return answer or None
    bare = gold.strip()
    if not bare or (is_prose(bare) and (len(bare) > MAX_ANSWER_CHARS or not _is_final(bare))):
        return None
    return bare


def is_prose(text: str) -> bool:
    """Return True if a text has more than five words outside its mathematics."""
    return text.count(" ") > 4 and len(_WORD.findall(_MATHS.sub(" ", text))) > _MAX_WORDS


def _is_final(text: str) -> bool:
    is_short = len(text.split()) <= _MAX_WORDS_OF_TEXT and not any(map(str.isdigit, text))
    return is_short or not {"$", "\\"}.isdisjoint(text) or _number_of_sentence(text) is not None


def number_text(number: Real | float) -> str:
    """Return the shortest usual text of a number: 18 for 18.0, and 0.00001 for 1e-05."""
    text = str(number)
    if not isinstance(number, float) or not 1e-9 <= abs(number) < 1e16:
        return "0" if number == 0 else text
    if number.is_integer():
        return str(int(number))
    return format(PlainDecimal(text), "f") if "e" in text else text


_MATHS = re.compile(
    r"\$[^$]*\$|\\\(.*?\\\)|\\(?:begin|end|text\w*|mbox|math\w+)\s*\{[^{}]*\}|\\[a-zA-Z]+|[_^{}]", re.DOTALL
)
_MAX_WORDS, _MAX_WORDS_OF_TEXT = 5, 15
_WORD = re.compile(r"(?<![^\W\d_\\])[^\W\d_]{2,}")


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
_HTML_BOLD = re.compile(r"</?(?:b|strong|em|i)>", re.IGNORECASE)
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("*", "*"),
             ("_", "_"), ("```", "```"), ("`", "`"), ('"', '"'), ("'", "'"), ("\\boxed{", "}"))  # fmt: skip
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
# A letter behind the number of a formula, or behind a negative number, is a variable and no unit: `$2s$`, `-3 m`.
_TIMES_A_LETTER = re.compile(r"\s*\$\s*-?[\d.,/]+\s*[a-zA-Z]\s*\$\s*|\s*-\s*[\d.,/]+\s+[a-zA-Z]\s*")
_LATEX = (
    (re.compile(r"\\!\s*|\\left\b|\\right\b|\\displaystyle\b"), ""),
    (re.compile(r"\\[,;: ]|\\quad|(?<=[\w{}.])~"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree"), "°"),
    (re.compile(r"\\times|\\cdot"), "×"),
    (re.compile(r"\\\$"), "¤"),
    (re.compile(r"\\([%_#&])"), r"\1"),
    (re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|operatorname|emph|underline|fbox)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\\frac\s*\{\s*([a-zA-Z]+)\s*\}\s*\{\s*([a-zA-Z]+(?:\s*\^\s*\{?\d\}?)?)\s*\}"), r" \1/\2"),
)
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True))
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")


def fold_unicode(text: str) -> str:
    """Return `text` with characters that only look different in ASCII, so that the rules need one form of each.

    Spaces, digits of any script, full-width forms, minus signs, quotes, currencies, superscripts and vulgar fractions
    are folded. Zero-width and other format characters vanish.
    """
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + "".join(_SUPERSCRIPTS[c] for c in run.group()) + "}", text)
    return "".join(map(_fold_character, text))


@lru_cache(maxsize=4096)
def _fold_character(character: str) -> str:
    if character.isascii():
        return character
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    category = unicodedata.category(character)
    if category in _FOLDED_CATEGORIES:
        return _FOLDED_CATEGORIES[category]
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "No" and "⁄" in (fraction := unicodedata.normalize("NFKC", character)):
        return " " + fraction.replace("⁄", "/")
    return _FOLDED.get(character, character)


_FOLDED_CATEGORIES = {"Cf": "", "Zs": " ", "Sc": "¤"}
_FOLDED = {**dict.fromkeys("−‐‑–﹣", "-"), **dict.fromkeys("‘’‚", "'"), **dict.fromkeys("“”„«»", '"'),
           **dict.fromkeys("✅✓✔☑🎉👍💯😀😊🙂️", ""),
           "⁄": "/", "∕": "/", "·": "×", "⋅": "×", "∙": "×", "٬": ",", "٫": ".", "。": "."}  # fmt: skip


def undress(
    text: str, wrappers: Sequence[tuple[str, str]] = _WRAPPERS, end_of_label: Callable[[str], int] = lambda text: 0
) -> str:
    r"""Return an answer without its formatting: Markdown, quotes, math delimiters, `\boxed`, a final period.

    Args:
        text: answer.
        wrappers: pairs of marks to remove around it.
        end_of_label: function that returns where a label in front of the answer ends; 0 for no label.
    """
    before = None
    while before != text:
        before = text = text.strip()
        if text.endswith((".", ",", ";")) and not text.endswith(".."):
            text = text[:-1].rstrip()
        for left, right in wrappers:
            inner = text[len(left) : -len(right)]
            if text.startswith(left) and text.endswith(right) and inner and (left != right or right not in inner):
                text = inner
                break
        else:
            text = text[end_of_label(text) :]
    return text


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


def _plain_latex(text: str) -> str:
    if not {"\\", "{", "~"}.isdisjoint(text):
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    return text


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
    text = _plain_latex(fold_unicode(" ".join(text.split()) if "  " in text else text))
    brackets = () if "," in text else _BRACKETS  # "(2,100)" is a pair
    text = undress(text, (*_WRAPPERS, *_BRACES, *brackets), _end_of_any_label if trusted else _end_of_label)
    if set_off := _SET_OFF.match(text):
        text = (set_off[2] or set_off[3]).strip() + text[set_off.end() :]
    text = _plain_digits(text)
    if (
        text.endswith(")")
        and (twice := _SPELLED_TWICE.fullmatch(text))
        and parse_number(twice[1]) == _parse_words(twice[2], trusted)
    ):
        text = twice[1]  # "7 (seven)"
    negative = text.lower().startswith(("minus ", "negative "))
    if negative:
        text = text.partition(" ")[2]
    value = _parse_digits(text.strip(), trusted)
    if value is None:
        value = _parse_words(text, trusted)
    if value is None:
        return None
    return -value if negative else value


def answer_number(text: str) -> Number | None:
    """Return the number that an answer states, alone (as by `parse_number`), by an equation or in a sentence, or None.

    An equation such as `12 + 1 = 13` states its right side if its arithmetic holds.
    """
    number = parse_number(text)
    if number is not None or len(text) > MAX_ANSWER_CHARS:
        return number
    if "=" in text and (number := _right_side(text)) is not None:
        return number
    return _number_of_sentence(text)


def _number_of_sentence(text: str) -> Number | None:
    text = _plain_latex(fold_unicode(text))
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
        number = _number_of_sentence(result)
    if number is None:
        return None
    for calculation in calculations:
        if value_of(_UNIT_OF_NUMBER.sub(_without_harmless_unit, _plain_latex(calculation))) != number:
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
    if taken and part in _PARTS and (part == rest) == (total + group == 1):  # "twenty-fifth" is no fraction
        return Fraction(total + group, _PARTS[part])
    if taken == 0 or _unit_scale(f" {rest}" if rest else "", trusted) != 1:
        return None
    return total + group


_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7,
          "eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100}  # fmt: skip


class Gold(NamedTuple):
    """A gold, read once.

    Attributes:
        text: final answer as written.
        number: number that the answer states; None for any other answer.
    """

    text: str
    number: Number | None


def read_gold(gold: object, decimal: Decimal = "point") -> Gold | None:
    """Return the gold's final answer, or None if it has none. `decimal` is the decimal mark of a gold that is text."""
    text = gold_answer(gold)
    if text is None:
        return None
    is_comma = decimal == "comma" and isinstance(gold, str)  # Python writes a number with a point
    return Gold(text, _number_of_gold(with_point(text) if is_comma else text))


@lru_cache(maxsize=4096)
def _number_of_gold(text: str) -> Number | None:
    """Return the number that a gold states, alone or behind a name as in `f(2) = 5`, or None."""
    if is_prose(text):
        return _number_of_sentence(text)
    number = parse_number(text, trusted=True)
    if number is not None and not text.isdecimal() and _TIMES_A_LETTER.fullmatch(text):
        return None
    if number is None and ("=" in text or r"\approx" in text):
        name, *values = split_outside(undress(text).replace(r"\approx", "="), "=")
        return parse_number(values[0], trusted=True) if len(values) == 1 and is_name(name) else None
    return number


def accepted_golds(value: object) -> list[Any]:
    """Return the accepted answers of a row: of a list, an array or SQuAD's `{"text": [...]}`, or the one value.

    A row with more than `MAX_GOLDS` has none, because it can't be scored.
    """
    if isinstance(value, str):  # the usual case first: asking for a mapping costs as much as reading an answer
        return [value]
    if isinstance(value, Mapping):
        value = value.get("text")
    if hasattr(value, "tolist"):  # an array of numpy or pyarrow
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return [value]
    return list(value) if len(value) <= MAX_GOLDS else []


def read_golds(value: object, decimal: Decimal = "point") -> tuple[Gold, ...]:
    """Return the final answers that a row accepts. Entries without a final answer are skipped.

    Returns:
        The golds, or () if no gold can be read, or if the row has more than `MAX_GOLDS`.
    """
    if isinstance(value, str) and value.startswith('["') and value.endswith('"]'):
        with contextlib.suppress(ValueError, RecursionError):  # as in Skywork-OR1
            value = json.loads(value)
    golds = [gold for entry in accepted_golds(value) if (gold := read_gold(entry, decimal)) is not None]
    for gold in golds.copy():
        if gold.text.startswith("\\text") and (choice := _CHOICE.fullmatch(gold.text)):
            golds += [read for part in choice.groups() if (read := read_gold(part, decimal)) is not None]
    return tuple(golds)


# The letter of a choice and its value, as AMC's solutions end: `\textbf{(C)}\ 5`.
_CHOICE = re.compile(r"\\text(?:bf|rm)?\s*\{\s*\(([A-E])\)\s*\}\s*(?:\\[ ,;:!]|\\q?quad|~|\s)*(\S.*)")


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
            same = (
                number is None
                and not answer.endswith("\\")
                and "~" not in answer
                and is_same_formula(gold_text, answer)
            )
            return "equal" if same else "wrong"
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
        rows = sorted(range(len(answers)), key=lambda row: _effort(answers[row] or ""))
        verdicts: dict[int, tuple[str, Gold | None]] = {}
        for row in rows:
            verdicts[row] = self.best_verdict(golds[row], answers[row])
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


def _effort(answer: str) -> int:
    """Return a rough measure of the time that comparing an answer takes."""
    return len(answer) + 40 * sum(map(answer.count, "^!{(\\"))


def compare(gold: object, answer: str | None, deadline: float = 2.0) -> str:
    """Return the verdict of a `Judge` on one extracted answer and a row's gold or golds as written in a dataset."""
    return Judge(deadline).best_verdict(read_golds(gold), answer)[0]


def _units_differ(gold: str, answer: str) -> bool:
    """Return True if two answers state known units that differ. A gold without a unit agrees with each."""
    if gold.isdecimal():
        return False
    currencies = {currency_of(gold), currency_of(answer)} - {""}
    gold, answer = _plain_latex(fold_unicode(gold)), _plain_latex(fold_unicode(answer))
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
    text = " ".join(text.split() if _PRODUCT.search(text) else _plain_latex(text).split())
    text = _LETTER.sub(r"\1\2", text)
    return text.casefold() if len(text) > 1 and text.replace(" ", "").isalpha() else text
