"""What is printed: text of models, datasets and other people's files can't steer the terminal that shows it.

An escape sequence can clear a screen, rename its window or write to its clipboard; a bidirectional override shows text in
another order than it has. Everything that either command prints goes through `say` or `say_error`.
"""

from __future__ import annotations

import logging
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Controls, formats (bidirectional overrides among them), lone surrogates, unassigned and private characters, and the two
# separators that some programs take for a line's end.
_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # formats too, but Persian is spelled with one and emoji with the other


def visible(text: object) -> str:
    r"""Return `str(text)` on one line, each character that shows nothing or steers a terminal as its escape (`\x1b`)."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def visible_lines(text: object) -> str:
    """The same with line feeds left as they are: for text whose layout is ours."""
    return "\n".join(map(visible, str(text).split("\n")))


def say(text: object = "", *, to_stderr: bool = False) -> None:
    """Print text, its line feeds as they are and every other control character made visible."""
    print(visible_lines(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def say_error(sentence: object, kind: str = "error") -> None:
    """Print one sentence to standard error, on one line."""
    print(f"{kind}: {visible(sentence)}", file=sys.stderr, flush=True)


@contextmanager
def visible_messages() -> Iterator[None]:
    """Inside this block what libraries log, and what they warn of, is made visible too: they quote the files they read."""
    make_record, show = logging.getLogRecordFactory(), warnings.showwarning

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make_record(*args, **kwargs)
        made.msg, made.args = visible_lines(made.getMessage()), None
        return made

    def warning(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        show(visible_lines(message), category, *args, **kwargs)

    logging.setLogRecordFactory(record)
    warnings.showwarning = warning
    try:
        yield
    finally:
        logging.setLogRecordFactory(make_record)
        warnings.showwarning = show


def _escaped(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) not in _CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")
