r"""Golds: the final answers that a row of a dataset accepts.

A gold is a GSM8K solution (`... #### N`), a solution that ends in an `A: N` line or holds a `\boxed{N}`, or a bare
answer: a number, a formula or a few words. A row accepts one gold, a list of them, or SQuAD's `{"text": [...]}`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

from grpo_rewards.math.answers import last_a_line, last_boxed, last_hashes
from grpo_rewards.math.decimals import Decimal, with_point
from grpo_rewards.math.formatting import undress
from grpo_rewards.math.formulas import is_name, split_outside
from grpo_rewards.math.numbers import MAX_ANSWER_CHARS, Number, number_of_sentence, number_text, parse_number

MAX_GOLDS = 64
"""Largest number of accepted answers of a row, each of which may need a symbolic comparison. A row with more can't be
scored by any reward."""

_MATHS = re.compile(
    r"\$[^$]*\$|\\\(.*?\\\)|\\(?:begin|end|text\w*|mbox|math\w+)\s*\{[^{}]*\}|\\[a-zA-Z]+|[_^{}]", re.DOTALL
)
_MAX_WORDS, _MAX_WORDS_OF_TEXT = 5, 15
_WORD = re.compile(r"(?<![^\W\d_\\])[^\W\d_]{2,}")
# A letter behind the number of a formula, or behind a negative number, is a variable and no unit: `$2s$`, `-3 m`.
_TIMES_A_LETTER = re.compile(r"\s*\$\s*-?[\d.,/]+\s*[a-zA-Z]\s*\$\s*|\s*-\s*[\d.,/]+\s+[a-zA-Z]\s*")
# The letter of a choice and its value, as AMC's solutions end: `\textbf{(C)}\ 5`.
_CHOICE = re.compile(r"\\text(?:bf|rm)?\s*\{\s*\(([A-E])\)\s*\}\s*(?:\\[ ,;:!]|\\q?quad|~|\s)*(\S.*)")


def gold_answer(gold: object) -> str | None:
    r"""Return the final answer of a dataset's gold, or None for a gold without one.

    A gold is a GSM8K solution (`... #### N`), a solution that ends in an `A: N` line or holds a `\boxed{N}`, or a bare
    answer. Prose of more than five words without such a mark is a final answer if it states one number, and if it has
    mathematics or, in at most 15 words, no digit. Then only the same text equals it. Other prose has no final answer.
    """
    if isinstance(gold, Real) and not isinstance(gold, bool) and gold == gold:  # not NaN
        gold = number_text(gold)
    if not isinstance(gold, str):
        return None
    if gold.isdecimal():
        return gold
    for find in (last_hashes, last_boxed, last_a_line):
        answer = find(gold)
        if answer is not None:
            return answer or None
    bare = gold.strip()
    if not bare or not is_prose(bare):
        return bare or None
    if len(bare) > MAX_ANSWER_CHARS:
        return None
    is_short = len(bare.split()) <= _MAX_WORDS_OF_TEXT and not any(map(str.isdigit, bare))
    is_final = is_short or not {"$", "\\"}.isdisjoint(bare) or number_of_sentence(bare) is not None
    return bare if is_final else None


def is_prose(text: str) -> bool:
    """Return True if a text has more than five words outside its mathematics."""
    return text.count(" ") > 4 and len(_WORD.findall(_MATHS.sub(" ", text))) > _MAX_WORDS


class Gold(NamedTuple):
    """Gold that was read once.

    Attributes:
        text: final answer as written.
        number: number that the answer states; None for any other answer.
    """

    text: str
    number: Number | None


def read_gold(gold: object, decimal: Decimal = "point") -> Gold | None:
    """Return the gold's final answer, or None without one. `decimal` is the decimal mark of a gold that is text."""
    text = gold_answer(gold)
    if text is None:
        return None
    is_comma = decimal == "comma" and isinstance(gold, str)  # Python writes a number with a point
    return Gold(text, _number_of_gold(with_point(text) if is_comma else text))


@lru_cache(maxsize=4096)
def _number_of_gold(text: str) -> Number | None:
    """Return the number that a gold states, alone or behind a name as in `f(2) = 5`, or None."""
    if is_prose(text):
        return number_of_sentence(text)
    number = parse_number(text, trusted=True)
    if number is not None and not text.isdecimal() and _TIMES_A_LETTER.fullmatch(text):
        return None
    if number is None and ("=" in text or r"\approx" in text):
        name, *values = split_outside(undress(text).replace(r"\approx", "="), "=")
        return parse_number(values[0], trusted=True) if len(values) == 1 and is_name(name) else None
    return number


def accepted_golds(value: object) -> list[Any]:
    """Return the accepted answers of a row: of a list, an array or SQuAD's `{"text": [...]}`, or the one value.

    A row with more than `MAX_GOLDS` can't be scored, so its list is empty.
    """
    if isinstance(value, str):  # the usual case first: asking for a mapping costs as much as reading an answer
        return [value]
    if isinstance(value, Mapping):
        value = value.get("text")
    if hasattr(value, "tolist"):  # an array of numpy or pyarrow
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return [value]
    return list(value) if len(value) <= MAX_GOLDS else []


def read_golds(value: object, decimal: Decimal = "point") -> tuple[Gold, ...]:
    """Return the final answers that a row accepts. Entries without a final answer are skipped.

    Returns:
        The golds, or () if no gold can be read, or if the row has more than `MAX_GOLDS`.
    """
    if isinstance(value, str) and value.startswith('["') and value.endswith('"]'):
        with contextlib.suppress(ValueError, RecursionError):  # as in Skywork-OR1
            value = json.loads(value)
    golds = [gold for entry in accepted_golds(value) if (gold := read_gold(entry, decimal)) is not None]
    for gold in golds.copy():
        if gold.text.startswith("\\text") and (choice := _CHOICE.fullmatch(gold.text)):
            golds += [read for part in choice.groups() if (read := read_gold(part, decimal)) is not None]
    return tuple(golds)
