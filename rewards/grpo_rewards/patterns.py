"""Regular expressions in linear time: google-re2 (the extra `grpo-rewards[patterns]`) behind one function.

Python's `re` backtracks, so that a pattern from a dataset and a text from a model can take for ever together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from grpo_rewards.errors import UserError


class PatternError(UserError):
    """A pattern that RE2 does not take."""


@lru_cache(maxsize=1024)
def linear_search(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether `pattern` matches somewhere in a text, in time linear in the text.

    The syntax is RE2's: no lookaround, no backreferences, and classes such as `\\d` are ASCII.

    Raises:
        PatternError: the pattern is not one of RE2's.
        ValueError: google-re2 is not installed.
    """
    try:
        import re2
    except ImportError as error:
        raise ValueError(f"the pattern {pattern!r} needs google-re2: pip install 'grpo-rewards[patterns]'") from error
    options = re2.Options()
    options.log_errors = False
    try:
        search = re2.compile(pattern, options).search
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else error
        raise PatternError(f"the pattern {pattern!r} is not one for RE2 ({reason})") from error
    except UnicodeEncodeError as error:
        raise PatternError(f"the pattern {pattern!r} is not valid Unicode") from error

    def matches(text: str) -> bool:
        try:
            return search(str(text)) is not None
        except UnicodeEncodeError:  # a lone surrogate is no text
            return False

    return matches
