"""JSON that a model wrote, read strictly and within bounds.

What RFC 8259 leaves open is decided here: a key that occurs twice, NaN, Infinity and a number beyond double precision's
range, at either end, are refused, as is nesting beyond a limit, which is counted before anything is parsed.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_CHARS = 100_000
MAX_DEPTH = 32
MAX_NUMBER_CHARS = 300

_NONZERO = re.compile(r"-?[0.]*[1-9]")
_STRUCTURE = re.compile(r'["\[\]{}]|\\.', re.DOTALL)


def parse_json(text: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Return the one JSON value that `text` is, white space around it aside.

    Args:
        text: at most MAX_CHARS characters; a number has at most MAX_NUMBER_CHARS.
        max_depth: how many arrays and objects may be open at once.

    Raises:
        ValueError: the text is no such value; the message says why.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    _check_depth(text, max_depth)
    return json.loads(
        text, object_pairs_hook=_object, parse_int=_integer, parse_float=_decimal, parse_constant=_refuse_constant
    )


def _check_depth(text: str, max_depth: int) -> None:
    """Count open brackets outside strings. The parser itself is recursive."""
    depth, in_string = 0, False
    for match in _STRUCTURE.finditer(text):
        token = match.group()
        if token == '"':
            in_string = not in_string
        elif not in_string:
            depth += (token in "[{") - (token in "]}")
            if depth > max_depth:
                raise ValueError(f"nested deeper than {max_depth}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise ValueError("a key occurs twice")
    return read


def _integer(literal: str) -> int:
    return int(_short(literal))


def _decimal(literal: str) -> float:
    number = float(_short(literal))
    # 1e-400 would be 0.0, and with it an integer.
    if math.isinf(number) or (number == 0 and _NONZERO.match(literal)):
        raise ValueError("a number beyond the range of double precision")
    return number


def _short(literal: str) -> str:
    if len(literal) > MAX_NUMBER_CHARS:
        raise ValueError(f"a number of more than {MAX_NUMBER_CHARS} characters")
    return literal


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not JSON")
