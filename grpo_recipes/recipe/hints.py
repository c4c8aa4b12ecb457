"""The nearest name to a misspelt one, for a sentence that refuses it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6
# How alike a word and a name are that begins with it: `--model` means `model_name_or_path`.
_BEGINNING = 0.75
# What a name of ours is ahead of one that is only known: `lora_rank` means `lora_r` and not the trainer's `local_rank`.
_PREFERENCE = 0.1


def nearest(word: str, ours: Iterable[str], others: Iterable[str] = ()) -> str | None:
    """The name that `word` most likely means, those of `ours` preferred; None if all are too far from it.

    Hyphens and underscores are one, and an option's leading hyphens count for nothing.
    """
    preferred = [(name, _likeness(word, name), _PREFERENCE) for name in ours]
    known = [(name, _likeness(word, name), 0.0) for name in others]
    alike = [(likeness + bonus, name) for name, likeness, bonus in preferred + known if likeness >= _CUTOFF]
    return max(alike, key=lambda pair: pair[0])[1] if alike else None


def did_you_mean(word: str, ours: Iterable[str], others: Iterable[str] = (), otherwise: str = ": remove it") -> str:
    """The end of a sentence that refuses `word`: the nearest name, or `otherwise`."""
    name = nearest(word, ours, others)
    return f": did you mean `{name}`?" if name else otherwise


def _likeness(word: str, name: str) -> float:
    """How alike two names are, in [0, 1]."""
    word, name = (text.lstrip("-").replace("-", "_").lower() for text in (word, name))
    ratio = difflib.SequenceMatcher(None, word, name).ratio()
    return max(ratio, _BEGINNING) if name.startswith(f"{word}_") else ratio
