"""The error that a user can fix, in both packages, and the helpers that write its message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6
# How alike a word and a name count where one begins with the other: `model` means `model_name_or_path`, `lora_rank` `lora_r`.
_BEGINNING = 0.9
_SHORTEST_BEGINNING = 4


class UserError(ValueError):
    """Error that a user can fix. Its message names the file, the key and the fix."""


def one_line(text: object) -> str:
    """Return `str(text)`, usually of an error, with one space in place of every line break and run of spaces."""
    return " ".join(str(text).split())


def shortened(text: str, most: int = 40) -> str:
    """Return `text`, cut to at most `most` characters that end in "..."."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a sentence that refuses `word`: the nearest of the `known` names (the first of equals), or `otherwise`.

    Hyphens and underscores are equal, and an option's leading hyphens are ignored.
    """
    likeness, name = max(((_likeness(word, name), name) for name in known), key=lambda pair: pair[0], default=(0.0, ""))
    return f": did you mean `{name}`?" if likeness >= _CUTOFF else otherwise


def _likeness(word: str, name: str) -> float:
    """How alike two names are, in [0, 1]."""
    word, name = (text.lstrip("-").replace("-", "_").lower() for text in (word, name))
    begins = name.startswith(f"{word}_") or (len(name) >= _SHORTEST_BEGINNING and word.startswith(name))
    ratio = difflib.SequenceMatcher(None, word, name).ratio()
    return max(ratio, _BEGINNING) if begins else ratio
