r"""Words of languages other than English, read once from `languages.yaml`, and the labels of answers made from them.

    for start, end in languages.find_labels(text):
        answer = text[end:]  # behind "La respuesta correcta es", "**Ответ:" or "したがって答えは"

English rewards find English labels with patterns of their own.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

_UNSPACED = frozenset({"ja", "ko", "th", "zh"})
"""Codes of languages whose words, or particles, join without a space."""

_MAX_PREFIX = 100
"""Number of characters between the start of a clause and the noun of its label."""

_MARKS = r"[\n.,;:!?)\]}>*_。，、；：！？।॥،؛؟…」】【]"
_LAST_MARK = re.compile(rf".*{_MARKS}", re.DOTALL)
_CLAUSE_START = rf"(?:\A|(?<={_MARKS}))"
_EMPHASIS = r"[*_]{0,3}"
_OPENING = r"[\s*_#>\"'«„“”¡(\[【「•–—-]{0,8}"
_COLON = r"[^\S\n]{0,3}[:：=】」]"
_ANSWER_AHEAD = r"(?-i:(?=\s{0,3}[*_(（$\\\"]{0,4}[A-Z\d]))"


@lru_cache(maxsize=1)
def _tables() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    from grpo_rewards.strict import load_yaml

    text = Path(__file__).with_name("languages.yaml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, languages in load_yaml(unicodedata.normalize("NFC", text)).items():
        tables[name] = {code: _longest_first(found) for code, found in languages.items()}
    return tables


def table(name: str) -> Mapping[str, tuple[str, ...]]:
    """Return the words of a table by language code, each language's longest first, in lower case and NFC.

    Args:
        name: name of a table of `languages.yaml`, such as "answer".

    Raises:
        KeyError: the file has no such table.
    """
    return _tables()[name]


@lru_cache(maxsize=64)
def words(name: str) -> frozenset[str]:
    """Return the words of a table in all its languages."""
    return frozenset(word for of_language in table(name).values() for word in of_language)


def pattern_of(of_language: tuple[str, ...]) -> str:
    """Return the source of a pattern of any of the words, in which a space stands for any white space."""
    return "|".join(re.escape(word).replace(r"\ ", r"\s{1,3}") for word in of_language)


@lru_cache(maxsize=64)
def any_word(name: str) -> str:
    """Return the source of a pattern of any word of a table, as a whole word in languages that separate words."""
    spaced: list[str] = []
    joined: list[str] = []
    for code, of_language in table(name).items():
        (joined if code in _UNSPACED else spaced).extend(of_language)
    parts = [rf"(?<!\w)(?:{pattern_of(_longest_first(spaced))})(?!\w)"] if spaced else []
    if joined:
        parts.append(pattern_of(_longest_first(joined)))
    return f"(?:{'|'.join(parts)})"


def _longest_first(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(found), key=lambda word: (-len(word), word)))


@lru_cache(maxsize=4)
def _needles(of_choices: bool, in_ascii: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the nouns to search for, each with the codes of its languages.

    A noun that holds another one of its language, as "最終回答" holds "答", is found with that one.
    """
    languages: dict[str, list[str]] = {}
    for code in table("answer"):
        nouns: list[str] = []
        for name in ("answer", "choice", "choose") if of_choices else ("answer",):
            nouns += table(name).get(code, ())
        for noun in nouns:
            is_shortest = not any(other in noun for other in nouns if other != noun)
            if is_shortest and (noun.isascii() or not in_ascii):
                languages.setdefault(noun, []).append(code)
    return tuple((noun, tuple(dict.fromkeys(codes))) for noun, codes in languages.items())


def find_labels(text: str, of_choices: bool = False) -> list[tuple[int, int]]:
    r"""Return where the labels of answers in a text start and end, in order.

    A label starts a clause: at the start of the text or of a line, or behind a punctuation mark or emphasis. It is read
    as "<so>? <determiner>? <final>* <answer> <final>* <to the question>?", and then "<is> <article>? <colon>?", a colon
    or the end of the line. Behind a connective or an adjective the copula may be missing ("Правильный ответ C"). A
    label with any other word, as in "Die falsche Antwort ist" or "La respuesta no es", is not returned.

    The start is the end of the clause before. The answer follows the end, perhaps behind spaces and emphasis. Two
    labels may follow each other directly: "Respuesta: La respuesta es C".

    A thousand characters of English take about ten microseconds, and some fifty with choices.

    Args:
        text: text of a completion, in NFC.
        of_choices: True to read labels of choices too: "la opción correcta es" and "故选".
    """
    lower = text.lower()
    if len(lower) != len(text):  # a few characters change their length, and positions in `lower` would be wrong
        lower = text
    found = set()
    for noun, codes in _needles(of_choices, text.isascii()):
        position = lower.find(noun)
        while position >= 0:
            start = _clause_start(text, position)
            for code in codes if start >= 0 else ():
                if label := _label(code, of_choices).match(text, start):
                    found.add(label.span())
            position = lower.find(noun, position + len(noun))
    return sorted(found)


def _clause_start(text: str, position: int) -> int:
    """Return where the clause around a position starts, or -1 if that is too far before it."""
    first = max(0, position - _MAX_PREFIX)
    if mark := _LAST_MARK.match(text, first, position):
        return mark.end()
    return -1 if first else 0


def may_label(text: str) -> bool:
    """Return True if a text holds a noun that names the answer in another language than English."""
    lower = text.lower()
    return any(noun in lower for noun, _ in _needles(of_choices=False, in_ascii=text.isascii()))


@lru_cache(maxsize=1)
def answer_labels() -> re.Pattern[str]:
    """Return the pattern of the labels that `find_labels` finds, in any language, without those of choices.

    It matches at the start of a clause, and `match.end()` is where the answer starts. It serves to match one answer.
    To search a completion, `find_labels` is many times faster.
    """
    languages = "|".join(f"(?:{_label_source(code, of_choices=False)})" for code in table("answer"))
    return re.compile(rf"{_CLAUSE_START}{_OPENING}(?:{languages})", re.IGNORECASE)


@lru_cache(maxsize=64)
def _label(code: str, of_choices: bool) -> re.Pattern[str]:
    return re.compile(rf"{_OPENING}(?:{_label_source(code, of_choices)})", re.IGNORECASE)


def _label_source(code: str, of_choices: bool) -> str:
    """Return the source of the pattern of one language's labels."""

    def any_of(name: str) -> str:
        return pattern_of(table(name).get(code, ())) or "(?!)"

    joined = code in _UNSPACED
    gap, end = (r"\s{0,3}", "") if joined else (r"\s{1,3}", r"(?!\w)")
    final = any_of("final")
    before, after = rf"(?:(?:{final}){gap})", rf"(?:{gap}(?:{final}){end})"
    noun = rf"(?P<before_{code}>{before}{{1,2}})?(?:{any_of('answer')}){end}(?P<after_{code}>{after}{{1,2}})?"
    if of_choices:
        choice = any_of("choice")
        noun = rf"(?:{noun}|{before}{{1,2}}(?:{choice}){end}|(?:{choice}){end}{after}{{1,2}})"
    # A comma may follow a connective, and the verb in German: "Daher ist die Antwort".
    so = rf"(?P<so_{code}>(?:(?:{any_of('so')}){end}[,，、:：]?{gap}){{1,3}}(?:(?:{any_of('is')}){end}{gap})?)?"
    determiners = table("determiner").get(code, ())
    elided = pattern_of(tuple(word for word in determiners if word[-1] in "'’")) or "(?!)"
    whole = pattern_of(tuple(word for word in determiners if word[-1] not in "'’")) or "(?!)"
    determiner = rf"(?:(?:{whole}){gap}|(?:{elided})\s?)?"
    # Behind the copula only in lower case, and before the answer: "é a C", but "é A".
    article = "" if joined else rf"(?-i:\s{{1,3}}(?:(?:{whole})(?=\s{{1,3}}[\w(*$\\])|(?:{elided})))?"
    copula = rf"{_EMPHASIS}{gap}(?:{any_of('is')}){end}{article}(?:{_COLON})?"
    heading = rf"{_EMPHASIS}[^\S\n]{{0,3}}(?=\n)"
    bare = rf"(?:(?(before_{code})|(?(after_{code})|(?(so_{code})|(?!)))){_ANSWER_AHEAD})"
    label = (
        rf"{so}{determiner}{noun}(?:{gap}(?:{any_of('question')}))?(?:{copula}|{_EMPHASIS}{_COLON}|{heading}|{bare})"
    )
    if of_choices and code in table("choose"):
        choose = rf"(?:{any_of('so')})[,，]?{gap}(?:{any_of('choose')})(?:{_COLON})?{_ANSWER_AHEAD}"
        label = rf"{choose}|{label}"
    return label
