"""What a user can fix: the base of the error classes, and the nearest name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6
# How alike a word and a name are that begins with it: `--model` means `model_name_or_path`.
_BEGINNING = 0.75


class UserError(ValueError):
    """What a user can fix; the message is one sentence that names file, key and fix."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a sentence that refuses `word`: its nearest known name, or `otherwise`.

    Case, an option's leading hyphens, and hyphens instead of underscores make no difference.
    """
    alike = [(likeness, name) for name in known if (likeness := _likeness(word, name)) >= _CUTOFF]
    return f": did you mean `{max(alike, key=lambda pair: pair[0])[1]}`?" if alike else otherwise


def _likeness(word: str, name: str) -> float:
    """How alike two names are, in [0, 1]."""
    word, name = (text.lstrip("-").replace("-", "_").lower() for text in (word, name))
    ratio = difflib.SequenceMatcher(None, word, name).ratio()
    return max(ratio, _BEGINNING) if name.startswith(f"{word}_") else ratio
