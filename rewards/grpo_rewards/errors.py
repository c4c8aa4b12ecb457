"""The one error of both packages that a user can fix, and the nearest name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6
# How alike a word and a name count where one begins with the other: `model` means `model_name_or_path`, `lora_rank` `lora_r`.
_BEGINNING = 0.9
_SHORTEST_BEGINNING = 4


class UserError(ValueError):
    """What a user can fix; the message is one sentence that names file, key and fix."""


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
