"""Known units of measurement, and a comparison of the units that two answers state: 5 meters are not 5 feet.

An unknown unit ("18 frobs") is never compared. A missing unit agrees with each.
"""

from __future__ import annotations

import re
from functools import lru_cache

from grpo_rewards.vocabulary import section

_CANONICAL: dict[str, str] = {}
for _group in re.split(r"[|\n]", section("units.aliases")):
    for _alias in _group.split():
        _CANONICAL[_alias] = _group.split()[0]

_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cu": "^3", "cubed": "^3"}
_AFTER_NUMBER = re.compile(r"(?:\d|\})[\d.,/]*\s*[-*]{0,2}\s*(?P<tail>[^\d]*(?:\^\{?-?\d\}?[^\d]*)*)\Z")
_MONEY = ("dollar", "euro", "gbp", "pound", "yen", "rupee", "cad", "aud", "chf", "cny", "krw", "baht", "rand")
_CURRENCY = re.compile(r"\\\$|[€£¥₹]|\A\s*\$(?=\s*\d[^$]*\Z)")
_CURRENCIES = {"\\$": "dollar", "$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_SAME_CURRENCY = {"gbp": "pound", "cny": "yen"}  # ¥ is the sign of both the yen and the yuan
_COMPOUND = {"mph": ("mi", "h"), "kph": ("km", "h")}
_SIDE_OF_PAIR: dict[str, tuple[int, int]] = {}
for _pair, _text in enumerate(re.split(r"[;\n]", section("units.opposites"))):
    for _side, _words in enumerate(_text.split("|")):
        _SIDE_OF_PAIR.update((_word, (_pair, _side)) for _word in _words.split())
_PART = re.compile(r"°\s*[CF](?![a-zA-Z])|[^\W\d_]+|[°%¢]|\^\{?-?\d\}?")


def is_unit(word: str) -> bool:
    """Return True if a word of lower-case letters is the name or the symbol of a known unit, or of its power."""
    return word in _CANONICAL or word in _POWERS


def units_differ(gold: str, answer: str) -> bool:
    """Return True if both state known units, and the answer's are not the gold's or their beginning.

    "5 dollars" may leave "per hour" out, but "5 m/s" are not 5 m.
    """
    wanted, stated = stated_units(gold), stated_units(answer)
    if not wanted:
        return "¤" in gold and bool(stated) and stated[0] not in _MONEY
    return stated != wanted[: len(stated)]


def currency_of(text: str) -> str:
    """Return the name of the currency that an answer states by a sign or a word, or "". `text` is as written."""
    if sign := _CURRENCY.search(text):
        return _CURRENCIES[sign.group().strip()]
    names = [_CANONICAL[word] for word in re.findall(r"[a-z]+", text.lower()) if word in _CANONICAL]
    return next((_SAME_CURRENCY.get(name, name) for name in names if name in _MONEY), "")


def are_opposed(gold: str, answer: str) -> bool:
    """Return True if an answer holds the opposite of a word of the gold, such as a gain instead of a loss."""
    wanted, stated = (_sides_of_pairs(text) for text in (gold, answer))
    return any((pair, 1 - side) in wanted and (pair, side) not in wanted for pair, side in stated)


def _sides_of_pairs(text: str) -> set[tuple[int, int]]:
    words = re.findall(r"[a-z]+", text.lower().replace(".m.", "m"))
    return {_SIDE_OF_PAIR[word] for word in words if word in _SIDE_OF_PAIR}


@lru_cache(maxsize=4096)
def stated_units(text: str) -> tuple[str, ...]:
    """Return the canonical names of the known units behind the last number of a text, up to the first other word.

    Args:
        text: answer with Unicode folded and LaTeX's text commands removed.
    """
    match = _AFTER_NUMBER.search(text[-200:])
    if match is None:
        return ()
    units: list[str] = []
    power = ""
    for part in _PART.findall(match["tail"]):
        word = part.lower().replace(" ", "")
        if word.startswith("^"):
            if not units or "^" in units[-1]:
                break
            units[-1] += "^" + word.strip("^{}")
        elif word in ("squared", "cubed") and units:
            units[-1] += _POWERS[word]
        elif word in _POWERS:
            power = _POWERS[word]
        elif word in ("per", "a", "an", "each"):
            continue
        elif word in _CANONICAL:
            units.append(_CANONICAL[word] + power)
            power = ""
        else:
            break
    units = [part for unit in units for part in _COMPOUND.get(unit, (unit,))]
    return tuple(unit for unit in units if not unit.startswith("unit"))
