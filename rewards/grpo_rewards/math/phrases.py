"""Grammar of the words next to a number: what is counted or measured, and what the number is called.

Inside an answer slot, anything but a number with a known unit, a noun in the plural or a harmless addition is doubt:
"18 nope", "page 18" and "18th of March" state no number. Units, prepositions and harmless additions can be listed.
Nouns can't, but English marks the plural. Words that deny or doubt a number are found by `prose.is_doubt` before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_rewards import languages
from grpo_rewards.math.units import is_unit
from grpo_rewards.vocabulary import word_set, words_of

UNIT_LETTERS = frozenset("mghslLKCFAVWJN")
"""Letters that are units. Any other single letter is a variable, or a constant such as pi."""

# Plurals without an "s". Those of other languages are in `languages.yaml`.
_NOUNS = words_of("phrases.nouns")
_PLURAL = re.compile(r"[^\W\d_]{2,}(?<!s)(?<!u)(?<!i)s", re.ASCII)
_NO_PLURALS = words_of("phrases.no_plurals")
# Words that may follow a number or a unit, alone or with others, and add nothing to it.
_ADDITIONS = words_of("phrases.additions")
# Words between a unit and a phrase that may hold any words: "18 pounds of flour", "18 students who walk to school".
_LINKS = words_of("phrases.links")
# Links that may follow a bare number, and the words that they may lead to: "18 per day", "18 of them", "18 in total".
_REFERENTS = _ADDITIONS | word_set("them these those all the her his its their average a an each every")
_MOST_MODIFIERS = 3
_NO_MODIFIERS = word_set("i you he she it we they my your our mine me us them")
# Words that make an answer another one than the final one: "old answer: 18".
_OTHER_ANSWERS = words_of("phrases.other_answers")

# Names of quantities and of answers, in front of a colon: "Total cost: 18".
_QUANTITIES = words_of("phrases.quantities")


def is_plural(word: str) -> bool:
    """Return True if a word in lower case has the form of an English noun in the plural."""
    return (
        word in _NOUNS
        or word in languages.words("unit")
        or (_PLURAL.fullmatch(word) is not None and word not in _NO_PLURALS)
    )


def is_noun(word: str) -> bool:
    """Return True if a word in lower case is a known unit or has the form of a plural."""
    return is_unit(word) or is_plural(word)


def is_quantity(word: str) -> bool:
    """Return True if a word in lower case names a quantity or an answer."""
    return word in _QUANTITIES or word in languages.words("answer")


def is_measure(words: Sequence[str], has_noun: bool = False) -> bool:
    """Return True if the words behind a number, in lower case, are a unit, a plural noun or a harmless addition.

    A noun may have a few words before it ("18 different red books") and any words behind a link ("18 cups of tea").

    Args:
        words: words behind the number.
        has_noun: True if the number has a unit already, such as a currency sign.
    """
    for position, word in enumerate(words):
        if word in _LINKS:
            return _is_complement(word, words[position + 1 :], has_noun)
        if is_noun(word) or word.upper() in UNIT_LETTERS:
            has_noun = True
        elif word not in _ADDITIONS and not (has_noun and word.endswith("ed")):
            following = words[position + 1 : position + 1 + _MOST_MODIFIERS]
            if has_noun or word in _NO_MODIFIERS or not any(map(is_noun, following)):
                return False
    return True


def _is_complement(link: str, rest: Sequence[str], has_noun: bool) -> bool:
    """Return True if a link and the words behind it leave the number before them as it is."""
    if not rest:
        return link == "each"
    if link == "as":  # "18, as required"
        return len(rest) == 1 and rest[0].endswith("ed")
    if has_noun or link in ("per", "each", "every"):
        return True
    if link in ("a", "an"):
        return _is_known(rest[0])
    return rest[0] in _REFERENTS and all(map(_is_known, rest))


def _is_known(word: str) -> bool:
    return is_noun(word) or word in _REFERENTS or word in _LINKS or is_quantity(word) or len(word) == 1


def is_label(words: Sequence[str], mark: str) -> bool:
    """Return True if words in lower case before a number and a mark name a quantity, as in "Total cost: 18".

    An equation gives a value to any name ("Tom = 18"). A colon does not: "Hint: 18" and "Nicht: 18" name no quantity.
    """
    if not _OTHER_ANSWERS.isdisjoint(words):
        return False
    if mark != ":":
        return True
    return any(is_quantity(word) or is_noun(word) for word in words) or all(len(word) == 1 for word in words)
