r"""Spellings of formulas: Unicode, plain text as in Python, and the several names of one LaTeX sign, read as one LaTeX.

| spelling | read as |
|---|---|
| `\dfrac`, `\tfrac`, `\left(`, `\,`, `^\prime`, `\lbrace`, `\varnothing`, `≤`, `π` | `\frac`, `(`, a space, `'`, ... |
| `x**2`, `x^(n+1)`, `sqrt(2)`, `exp(2)`, `abs(x)`, `sin(x)`, `2pi`, `infinity` | `x^2`, `x^{n+1}`, `\sqrt{2}`, ... |
| `14.0 + -1.0i`, `+6` | `14 - 1i`, `6` |
"""

from __future__ import annotations

import re
from collections.abc import Callable

from grpo_rewards.vocabulary import word_set

FUNCTIONS = word_set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi max min gcd lcm")
"""Names of functions and constants that are LaTeX commands, or are read as such."""

_SPACE = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|quad|qquad|thinspace|enspace|allowbreak)(?![a-zA-Z])"
    r"|(?<!\\)\\[,;:!> ]|~|\$|(?<!\\)\\\Z"
)
_BRACKETS = {"lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]"}
_SIGNS = str.maketrans({"π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "±": "\\pm ", "∪": "\\cup ",
                        "∈": "\\in ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}"})  # fmt: skip
_LINES = re.compile(r"\\(?:begin|end)\s*\{(?:align|gather|split)[a-z]*\*?\}")
_TABLE = re.compile(r"\\begin\s*\{(?!align|gather|split)")
_GREEK = "alpha|beta|gamma|delta|theta|lambda|sigma|phi|omega"
_SAME: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\(?:d|t|c)frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\^\s*(?:\{\s*)?(?:\\prime|')\s*\}?|\\prime(?![a-zA-Z])"), "'"),
    (re.compile(r"''|\""), "''"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])"), "°"),
    (re.compile(r"\\(?:[lcvdi]?dots[cbmio]?)(?![a-zA-Z])|\.\.+|…|⋯"), r"\\ldots "),
    (re.compile(r"\\([lr]brac[ek])(?![a-zA-Z])"), lambda match: _BRACKETS[match[1]]),
    (re.compile(r"\\\{\s*\\\}|\\varnothing(?![a-zA-Z])"), r"\\emptyset "),
    (re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"√\s*(\d+|[a-zA-Z]|(?=\())"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![a-zA-Z\\])(?:infinity|infty|inf|oo)(?![a-zA-Z])"), r"\\infty "),
    (re.compile(rf"(?<![a-zA-Z\\])({_GREEK})(?![a-zA-Z])"), r"\\\1 "),
    (
        re.compile(
            r"(?<![a-zA-Z\\])(arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|sec|csc|ln|log)(?=\s*[(\\\d_]|\s+[a-z](?![a-z]))"
        ),
        r"\\\1",
    ),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\^\s*\(([^()]*)\)"), r"^{\1}"),
    (re.compile(r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![a-zA-Z\\])exp\s*\(([^()]*)\)"), r"e^{\1}"),
    (re.compile(r"(?<![a-zA-Z\\])abs\s*\(([^()]*)\)"), r"|\1|"),
    (re.compile(r"(?<![a-zA-Z\\])floor\s*\(([^()]*)\)"), r"\\lfloor \1\\rfloor "),
    (re.compile(r"\A\s*\{([^{}\\]*,[^{}\\]*)\}\s*\Z"), r"\\{\1\\}"),
    (re.compile(r"\+\s*-"), "-"),
    (re.compile(r"(?<=\d)\.0+(?![\d.])"), ""),
    (re.compile(r"(?<![\d.^_{/])1i(?![a-zA-Z])"), "i"),
)


def without_runs(text: str) -> str:
    """Return a text without runs of white space, in whose length other patterns take quadratic time."""
    return re.sub(r"[^\S\n]{2,}", " ", re.sub(r"\s*\n\s*", "\n", text))


def respelled(text: str) -> str:
    """Return a formula in one spelling of each sign, without the commands that only change its layout."""
    if r"\\" in text and not _TABLE.search(text):
        text = _LINES.sub("", text).replace("&", "").replace(r"\\", "\n")
    text = without_runs(_SPACE.sub(" ", text.translate(_SIGNS)))
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    return text


def squeezed(text: str) -> str:
    """Return a form that two spellings of a formula share: no spaces, no braces around one character."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"\s", "", text))
