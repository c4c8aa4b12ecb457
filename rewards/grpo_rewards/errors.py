"""Errors that a user can fix, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6
# Likeness of two names where one begins with the other: `model` means `model_name_or_path`, `lora_rank` means `lora_r`.
_BEGINNING = 0.9
_SHORTEST_BEGINNING = 4


class UserError(ValueError):
    """Error that a user can fix.

    Attributes:
        place: File, key, row or command that the error is about, from outer to inner: "r.yaml: `dataset.path`".
        problem: Clause on what is wrong there.
        fix: A command to the user: "set a number above 0".
    """

    def __init__(self, place: object, problem: str, fix: str) -> None:
        self.place, self.problem, self.fix = str(place), problem, fix
        super().__init__(self.place, self.problem, self.fix)

    def __str__(self) -> str:
        """Return the sentence that is printed."""
        return sentence(self.place, self.problem, self.fix)

    def within(self, place: object) -> UserError:
        """Return the same error with the file, row or command that its place is in."""
        return type(self)(f"{place}: {self.place}", self.problem, self.fix)


def sentence(place: str, problem: str, fix: str) -> str:
    """Return the message of an error that a user can fix, from its parts that are not empty."""
    return ": ".join(part for part in (place, problem, fix) if part)


def one_line(text: object) -> str:
    """Return `str(text)`, usually of an error, with one space in place of every line break and run of spaces."""
    return " ".join(str(text).split())


def shortened(text: str, most: int = 40) -> str:
    """Return `text`, cut to at most `most` characters that end in "..."."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the fix of an error about the unknown name `word`.

    Hyphens count as underscores, and the leading hyphens of an option are ignored.

    Returns:
        A question with the most similar of the `known` names (the first of equals), or `otherwise` if none is similar.
    """
    best, nearest = 0.0, ""
    for name in known:
        likeness = _likeness(word, name)
        if likeness > best:
            best, nearest = likeness, name
    return f"did you mean `{nearest}`?" if best >= _CUTOFF else otherwise


def _likeness(word: str, name: str) -> float:
    """Return the likeness of two names, in [0, 1]."""
    word = word.lstrip("-").replace("-", "_").lower()
    name = name.lstrip("-").replace("-", "_").lower()
    ratio = difflib.SequenceMatcher(None, word, name).ratio()
    if name.startswith(f"{word}_") or (len(name) >= _SHORTEST_BEGINNING and word.startswith(name)):
        return max(ratio, _BEGINNING)
    return ratio
