r"""Answers without their formatting: look-alikes of Unicode, LaTeX commands, Markdown, quotes and math delimiters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache

WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("*", "*"),
             ("_", "_"), ("```", "```"), ("`", "`"), ('"', '"'), ("'", "'"), ("\\boxed{", "}"))  # fmt: skip
"""Pairs of marks around an answer that do not change it."""

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
    text: str, wrappers: Sequence[tuple[str, str]] = WRAPPERS, end_of_label: Callable[[str], int] = lambda text: 0
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


def plain_latex(text: str) -> str:
    """Return a text without LaTeX's text and spacing commands, with plain signs for degrees and currencies."""
    if not {"\\", "{", "~"}.isdisjoint(text):
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    return text
