"""Regular expressions in linear time: google-re2 (the extra `grpo-rewards[patterns]`) behind two functions.

Python's `re` backtracks, so that a pattern from a dataset and a text from a model can take for ever together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from grpo_rewards.errors import UserError


class PatternError(UserError):
    """A pattern that RE2 does not take."""


@lru_cache(maxsize=1024)
def linear_search(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether `pattern` matches somewhere in a text, in time linear in the text.

    The syntax is RE2's: no lookaround, no backreferences, and classes such as `\\d` are ASCII.

    Raises:
        PatternError: the pattern is not one of RE2's.
        UserError: google-re2 is not installed.
    """
    search = _compiled(pattern).search

    def matches(text: str) -> bool:
        try:
            return search(str(text)) is not None
        except UnicodeEncodeError:  # a lone surrogate is no text
            return False

    return matches


@lru_cache(maxsize=64)
def linear_capture(pattern: str) -> Callable[[str], str | None]:
    """Return a function that gives what the group of `pattern` holds where it matches a whole text, else None.

    Raises:
        PatternError: the pattern is not one of RE2's, or does not have exactly one group.
        UserError: google-re2 is not installed.
    """
    compiled = _compiled(pattern)
    if compiled.groups != 1:
        raise PatternError(f"the pattern {pattern!r} must have exactly one group, and has {compiled.groups}")

    def capture(text: str) -> str | None:
        try:
            match = compiled.fullmatch(text)
        except UnicodeEncodeError:
            return None
        return match.group(1) if match else None

    return capture


def _compiled(pattern: str) -> Any:
    try:
        import re2
    except ImportError as error:
        raise UserError(f"the pattern {pattern!r} needs google-re2: pip install 'grpo-rewards[patterns]'") from error
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else error
        raise PatternError(f"the pattern {pattern!r} is not one for RE2 ({reason})") from error
    except UnicodeEncodeError as error:
        raise PatternError(f"the pattern {pattern!r} is not valid Unicode") from error
