"""Strict, bounded readers for text from models and strangers: JSON, YAML and regular expressions.

Python's `re` backtracks, so a pattern from a dataset runs on google-re2 instead (the extra `grpo-rewards[patterns]`),
in time linear in the text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import yaml

from grpo_rewards.errors import UserError

MAX_CHARS = 100_000
"""Number of characters that a JSON text written by a model may have."""

MAX_DEPTH = 32
"""Number of arrays and objects of such a text that may be open at once."""

MAX_NUMBER_CHARS = 300
"""Number of characters that a number in such a text may have."""

_NONZERO = re.compile(r"-?[0.]*[1-9]")


def parse_json(text: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Return the JSON value of a text that a model wrote.

    RFC 8259 leaves some cases open. Here a key that occurs twice, NaN, Infinity and a number beyond the range of double
    precision (at either end) are errors.

    Args:
        text: the text, with nothing but white space around the value.
        max_depth: number of arrays and objects that may be open at once.

    Raises:
        ValueError: the text is not one JSON value, or exceeds a bound. The message gives the reason.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_decimal, parse_constant=_constant
        )
        depth = _depth(value)
    except RecursionError:
        depth = max_depth + 1
    if depth > max_depth:
        raise ValueError(f"nested deeper than {max_depth}")
    return value


def _depth(value: Any) -> int:
    """Return the number of arrays and objects of a JSON value that are open at once."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise ValueError("a key occurs twice")
    return read


def _integer(literal: str) -> int:
    _check_number(literal)
    return int(literal)


def _decimal(literal: str) -> float:
    _check_number(literal)
    number = float(literal)
    # 1e-400 would become 0.0, which JSON Schema takes for an integer.
    if math.isinf(number) or (number == 0 and _NONZERO.match(literal)):
        raise ValueError("a number beyond the range of double precision")
    return number


def _check_number(literal: str) -> None:
    if len(literal) > MAX_NUMBER_CHARS:
        raise ValueError(f"a number of more than {MAX_NUMBER_CHARS} characters")


def _constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not JSON")


class DuplicateKey(UserError, yaml.YAMLError):
    """Mapping with one key given twice. The place is the key, and the problem names both lines."""


class _Loader(yaml.SafeLoader):
    """Safe loader that rejects a key given twice, where PyYAML silently keeps the last. `<<` may be overridden."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line, written = key.start_mark.line + 1, (key.tag, key.value)
            if written in lines:
                problem = f"it is given twice, in line {lines[written]} and in line {line}"
                raise DuplicateKey(f"`{key.value}`", problem, "keep one")
            lines[written] = line
        return node


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text of plain data.

    Raises:
        DuplicateKey: a mapping gives one key twice.
        yaml.YAMLError: the text is not YAML, or asks for a Python object.
    """
    return yaml.load(text, Loader=_Loader)


class PatternError(UserError):
    """Pattern that RE2 does not support."""


@lru_cache(maxsize=1024)
def linear_search(pattern: str) -> Callable[[str], bool]:
    r"""Return a function that returns True if `pattern` matches somewhere in a text, in time linear in the text.

    The syntax is RE2's: no lookaround, no backreferences, and classes such as `\d` are ASCII.

    Raises:
        PatternError: RE2 does not support the pattern.
        UserError: google-re2 is not installed.
    """
    search = _compiled(pattern).search

    def matches(text: str) -> bool:
        try:
            return search(str(text)) is not None
        except UnicodeEncodeError:  # a lone surrogate is not text
            return False

    return matches


@lru_cache(maxsize=64)
def linear_capture(pattern: str) -> Callable[[str], str | None]:
    """Return a function that returns the group of `pattern` if it matches a whole text, else None.

    Raises:
        PatternError: RE2 does not support the pattern, or it does not have exactly one group.
        UserError: google-re2 is not installed.
    """
    compiled = _compiled(pattern)
    if compiled.groups != 1:
        raise PatternError(f"the pattern {pattern!r}", f"it has {compiled.groups} groups, not 1", "write one group")

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
        raise UserError(
            f"the pattern {pattern!r}", "it needs google-re2", "pip install 'grpo-rewards[patterns]'"
        ) from error
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else error
        raise PatternError(f"the pattern {pattern!r}", f"it is not one for RE2 ({reason})", "correct it") from error
    except UnicodeEncodeError as error:
        raise PatternError(f"the pattern {pattern!r}", "it is not valid Unicode", "correct it") from error
