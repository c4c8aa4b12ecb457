r"""Sets of numbers in their several notations, read as lists and intervals.

| notation | read as |
|---|---|
| `1 \pm \sqrt{2}`, `\{\pm 1, 3\}` | `1+\sqrt{2}, 1-\sqrt{2}`, `\{1, -1, 3\}` |
| `x \in [1, 2]`, `\{x \mid 1 \le x \le 2\}` | `[1,2]`, `1 \le x \le 2` |
| `1 < x \le 2`, `x > 1`, `x < 1 or x > 2`, beside an interval | `(1,2]`, `(1,\infty)`, `(-\infty,1)\cup(2,\infty)` |
"""

from __future__ import annotations

import re

_NAME = r"(?:[a-zA-Z](?:_\{?\w\}?)?|\\(?:alpha|beta|gamma|theta|lambda|mu|omega|phi)\s*)"
_SIGN = re.compile(r"\\(pm|mp)(?![a-zA-Z])\s*")
_IN = re.compile(rf"\A\s*{_NAME}\s*\\in(?![a-zA-Z])\s*")
_BUILDER = re.compile(
    rf"\s*\\\{{\s*{_NAME}\s*(?:\\in\s*(?:\\mathbb\s*\{{?R\}}?|\\R)\s*)?(?:\||:|\\(?:mid|vert)(?![a-zA-Z]))(.+)\\\}}\s*"
)
RELATION = re.compile(r"<=?|>=?|\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt|neq|ne)(?![a-zA-Z])")
"""Pattern of a sign of order, or of two values that differ."""

INTERVAL = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]|\\mathbb\s*\{?R")
"""Pattern of an interval, or of the real numbers."""

_STRICT = ("<", ">", "\\lt", "\\gt")
_MAX_SIGNS = 2


def condition_of(text: str) -> str:
    r"""Return the set of `x \in [1, 2]`, the condition of `\{x \mid x > 2\}`, and any other text as it is."""
    if builder := _BUILDER.fullmatch(text):
        return builder[1].strip()
    return text[found.end() :] if (found := _IN.match(text)) else text


def with_both_signs(item: str) -> list[str]:
    r"""Return the two values of an item with one `\pm`, or with a `\pm` and a `\mp`, and any other item as it is."""
    signs = _SIGN.findall(item)
    if not signs or len(signs) > _MAX_SIGNS or (len(signs) == _MAX_SIGNS and len(set(signs)) == 1):
        return [item]
    upper = _SIGN.sub(lambda match: "+" if match[1] == "pm" else "-", item)
    lower = _SIGN.sub(lambda match: "-" if match[1] == "pm" else "+", item)
    return [re.sub(r"\A\s*\+|(?<=[=(,{])\s*\+", "", value).strip() for value in (upper, lower)]


def interval_of(condition: str) -> str | None:
    """Return an inequality of one letter, or several joined by "or", as intervals, or None for any other text."""
    parts = re.split(r"\\text\w*\s*\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\cup|\\lor", condition)
    intervals = [_interval(part.strip()) for part in parts]
    return None if None in intervals else "\\cup".join(filter(None, intervals))


def _interval(text: str) -> str | None:
    relations = [match.group() for match in RELATION.finditer(text)]
    sides = [side.strip() for side in RELATION.split(text)]
    is_above = [relation[:2] in (">", ">=", "\\g") for relation in relations]
    if len(sides) not in (2, 3) or len(set(is_above)) > 1 or any(relation[:2] == "\\n" for relation in relations):
        return None
    if is_above[0]:
        sides.reverse()
        relations.reverse()
    left, right = ("(" if relations[0] in _STRICT else "["), (")" if relations[-1] in _STRICT else "]")
    if len(sides) == 3:
        return f"{left}{sides[0]},{sides[2]}{right}" if re.fullmatch(_NAME, sides[1]) else None
    lower, upper = sides
    rays = {lower: (upper, f"(-\\infty,{upper}{right}"), upper: (lower, f"{left}{lower},\\infty)")}
    for name, (end, ray) in rays.items():
        if re.fullmatch(_NAME, name) and not re.search(rf"(?<![a-zA-Z\\]){re.escape(name)}(?![a-zA-Z])", end):
            return ray
    return None
