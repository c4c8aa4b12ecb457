"""Sets of words, those that take more than a line from `vocabulary.txt`.

`languages.yaml` holds the words of other languages that label an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text, split at white space."""
    return frozenset(text.split())


def words_of(name: str) -> frozenset[str]:
    """Return the words of a section, such as "prose.months"."""
    return word_set(section(name))


def section(name: str) -> str:
    """Return the text of a section. Raise KeyError if the file has no such section."""
    return _sections()[name]


@cache
def _sections() -> Mapping[str, str]:
    text = Path(__file__).with_name("vocabulary.txt").read_text(encoding="utf-8")
    _, *parts = re.split(r"^\[([\w.]+)\]\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))
