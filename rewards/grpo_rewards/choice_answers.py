"""The one choice that an answer, or a gold, names: a small grammar of letters, texts, introductions and remarks.

An answer is a letter, a choice's text, or both in agreement. A phrase may introduce it ("the correct option is", "I
think it's"), and a reason ("because ...") or a claim ("is correct") may follow. Behind a label in another language ("La
respuesta es", "正解は") only the choice, its text and a reason may stand, because the hedges of all languages can't be
listed. Anything else names no choice, so that "A cat", "I don't know", "A or B" and "not B" earn nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any

from grpo_rewards import languages
from grpo_rewards.choice_questions import ARTICLE, Choices, cleaned_text, end_of, key_of, listed
from grpo_rewards.claims import is_denied
from grpo_rewards.vocabulary import words_of

_INTRODUCTION = re.compile(
    r"""(?: (?:so|thus|hence|therefore|then|ok|okay|well|finally|clearly|in\ conclusion|overall) \b,?\ )*
    (?: (?:choose|pick|select|let's\ go\ with)\ )?
    (?: (?:i|we)(?:'m|'re|\ am|\ are)\ (?:confident|sure|certain)\ (?:that\ )? )?
    (?: (?:i|we)(?:\ would|\ will|\ can|'d|'ll)?[ ]
        (?:think|believe|choose|chose|pick|picked|select|selected|conclude|say|go\ with|am\ going\ with|answer)
        \ (?:that\ )?
      | my\ (?:final\ )?(?:answer|choice)\ (?:is|:)\ )?
    (?: (?:it|this|that)(?:\ is|'s|\ must\ be|\ has\ to\ be|\ should\ be)\ )?
    (?: (?:the\ )? (?:(?:correct|right|best|final|most\ likely|most\ appropriate|only\ correct)\ )*
        (?:answer|option|choice|letter|alternative|response|solution|statement)
        \ ?(?:is|'s|was|would\ be|must\ be|should\ be|has\ to\ be|:|=|-)\ ?:?\ ? )?
    (?: (?:clearly|therefore|thus|hence|indeed|definitely|certainly|simply|obviously)\b,?\ )?
    (?:only\ )? :?\ ?""",
    re.VERBOSE | re.IGNORECASE,
)
_ASKS_FOR_LETTER = re.compile(r"answer|option|choice|letter|alternative", re.IGNORECASE)
_REASON = re.compile(r"(?<!\w)(?:because|since|due to|given that|as it is|which is why)(?!\w)", re.IGNORECASE)
_IS_RIGHT = re.compile(
    r"""(?:is|was|seems|seems\ to\ be|must\ be|would\ be|has\ to\ be)\ (?:clearly|definitely|indeed|therefore|thus)?
    \ ?(?:the\ )?(?:most\ |most\ likely\ )?
    (?: (?:correct|right|best|true|appropriate|proper|final)\b (?:\ (?:answer|option|choice|one|letter)\b)?
      | (?:answer|choice)\b )""",
    re.VERBOSE | re.IGNORECASE,
)
_IS_RULED_OUT = re.compile(
    r"""(?:is|was)\ (?:clearly\ )?(?:impossible|unlikely)\b
    | (?: (?:is|was|has\ been|can\ be|must\ be|should\ be|gets|got)\ )? (?:already\ |clearly\ )?
      (?:excluded|eliminated|ruled\ out|crossed\ out|discarded|dismissed|rejected|refuted|fails|failed)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_IS = re.compile(r"(?:is|was|seems|looks|would be|could be|may be|might be)\b", re.IGNORECASE)
_CONTRAST = re.compile(r"(?:and )?(?:not|rather than|instead of|over|as opposed to) ", re.IGNORECASE)
_BUT = re.compile(r"not (?P<others>.{1,300}?),? but (?:rather |instead )?(?P<rest>.+)", re.IGNORECASE)
# Characters between a choice's letter and its text.
_SEPARATORS = " .,;:!=-\u2705\u2713\u2714"
# Characters of a key that may follow a choice's text: "5!" and "5/2" are not 5.
_AFTER_TEXT = ("", " ", ",", ".", ";", ":", "(", ")", "[", "]")
_KEYWORD = re.compile(
    r"(?:(?:which|that) is |i\.?e\.?,? |namely,? )?(?:(?:the )?(?:option|choice|answer|letter|alternative) )?",
    re.IGNORECASE,
)
_SEPARATOR = re.compile(r"(?:,|\bor\b|\bnor\b|\band\b|\s)+", re.IGNORECASE)
# Words that make a letter beside them an alternative, a negation, a guess or a question.
_DOUBT = re.compile(
    r"""(?<!\w)(?:or|nor|either|neither|not|cannot|\w{2,8}n't|never|isnt|wrong|incorrect|false|except|unless|if
    |no|nope|wait|maybe|perhaps|probably|possibly|unsure|guess|versus|vs|lied|lie
    |(?:he|she|they|some|others)\ (?:say|says|said|think|thinks|claim|claims))(?!\w) | \?""",
    re.VERBOSE | re.IGNORECASE,
)
_CORRECTION = re.compile(
    r"""\W*(?:or|and|no|nope|wait|actually|maybe|perhaps|alternatively|also|hmm|sorry|correction|but|however|oops|rather
    |edit|update|then\ again|hold\ on|hang\ on|on\ (?:second|further)\ thoughts?|on\ reflection|(?:just\ )?kidding
    |never\ ?mind|i\ mean|i\ meant|i\ also|make\ that|scratch\ that)(?!\w)""",
    re.VERBOSE | re.IGNORECASE,
)
# Words before which "A" or "I" is a letter. Before any other word it is an article or a pronoun.
_AFTER_LETTER = words_of("choices.after_letter")


def read_gold(gold: Any, choices: Choices, form: str = "auto") -> str | None:
    """Return the letter of the right choice, or None if the gold can't be read.

    Args:
        gold: letter of the choice, its text, or its position from 0. A position is a number, or digits that are neither
            a letter nor a text of the question.
        choices: choices of the question.
        form: "letter", "text" or "index", for golds that could be read as several; "auto" tries them in that order.
    """
    gold = listed(gold)
    if isinstance(gold, Real) and not isinstance(gold, bool) and form in ("auto", "index"):
        return _at(gold, choices)
    if not isinstance(gold, str) or not gold.strip() or len(gold) > choices.max_chars:
        return None
    cleaned = cleaned_text(gold)
    if form in ("auto", "letter") and (label := choices.named_by_label(cleaned)):
        return label
    if form in ("auto", "text") and (label := _of_text(cleaned, choices)):
        return label
    if form in ("auto", "index") and cleaned.isdecimal() and len(cleaned) < 4:
        return _at(int(cleaned), choices)
    return named_choice(gold, choices) if form == "auto" else None


def _of_text(cleaned: str, choices: Choices) -> str | None:
    """Return the letter of the one choice with this text, even if the text looks like another choice's letter."""
    texts = list(map(cleaned_text, choices.texts))
    if cleaned not in texts:
        texts, cleaned = list(map(key_of, texts)), key_of(cleaned)
    return choices.labels[texts.index(cleaned)] if texts.count(cleaned) == 1 else None


def _at(index: Any, choices: Choices) -> str | None:
    return dict(enumerate(choices.labels)).get(index)


def named_choice(answer: str, choices: Choices) -> str | None:
    """Return the letter of the one choice that an answer names, or None if it names none or several."""
    if len(answer) > choices.max_chars:
        return None
    first, _, below = answer.strip().partition("\n")
    if below:  # an answer in the first line, and an explanation below
        label = _parsed(cleaned_text(first), choices)
        if label and _agrees(cleaned_text(below), label, True, choices):
            return label
    cleaned = cleaned_text(answer)
    if label := _parsed(cleaned, choices):
        return label
    rest = cleaned[end_of(_INTRODUCTION, cleaned) :]
    if rest in ("a", "i") and not _ASKS_FOR_LETTER.search(cleaned):
        return None  # "It is a", cut off
    if label := _parsed(rest, choices):
        return label
    end = 0
    for start, label_end in languages.find_labels(cleaned, of_choices=True):
        if start != end:  # not "Respuesta: La respuesta es C", but two sentences
            return None
        end = label_end
    return named_alone(cleaned[end:], choices) if end else None


def _parsed(text: str, choices: Choices) -> str | None:
    """Parse "B", "Paris", "B) Paris", "Paris (B)", "B, not C", "not C but B", each perhaps with a reason after it."""
    if label := choices.named_exactly(text):
        return label
    if (but := _BUT.match(text)) and not _BUT.match(but["rest"]):  # "not C but B"
        named = _parsed(but["rest"], choices)
        return named if _names_only_others(but["others"], named, choices) else None
    head = choices.head.match(text)
    if head and not _is_word(head, text):  # a letter first: "B) Paris"
        label = choices.by_label[head["label"].casefold()]
        sure = bool(head["word"] or head["open"] or head["close"])
        rest = text[head.end() :]
        # "A.Paris", but "A.M."; "(A)-5", but "(A)-(B)"
        if (head["close"].endswith(".") and rest[:1].isalpha()) or rest[:1] == "-" or rest[:1].isdecimal():
            return label if choices.named_by_text(rest) == label else None
        if head["close"].endswith("-") and choices.named_by_text(f"-{rest}") == label:  # "A - 19" for the text "-19"
            return label
        return label if _agrees(rest, label, sure, choices) else None
    # A text first: "Paris (B)". The longest texts come first, so that "New York" is not read as "New".
    known, label = leading(text, choices.keys)
    return label if label and _agrees(after_text(text, known), label, False, choices) else None


def leading(text: str, keys: Sequence[tuple[str, str]]) -> tuple[str, str | None]:
    """Return the first of the keys with which a text starts as a whole, and its label, or None for no such key."""
    start = key_of(text)
    for known, label in keys:
        if start.startswith(known) and start[len(known) : len(known) + 1] in _AFTER_TEXT:
            return known, label
    return "", None


def _is_word(head: re.Match[str], text: str) -> bool:
    """Return True if "A" or "I" is the word: before another word, without any punctuation."""
    if head["label"].upper() not in ("A", "I") or head["word"] or head["open"] or head["close"]:
        return False
    following = text[head.end() :].split()
    return bool(following) and following[0][0].isalpha() and following[0].strip(".,").casefold() not in _AFTER_LETTER


def after_text(text: str, known: str) -> str:
    """Return the rest of `text` behind the words whose key is `known`."""
    wanted = len(known.replace(" ", ""))
    text = text[end_of(ARTICLE, text.casefold()) :]
    seen = 0
    for position, character in enumerate(text):
        if seen >= wanted:
            return text[position:]
        seen += len(character.casefold()) * (not character.isspace())
    return ""


def _agrees(rest: str, label: str, sure: bool, choices: Choices) -> bool:
    """Return True if the text behind a choice leaves it the one that is named.

    Args:
        rest: text behind the choice's letter or text.
        label: letter of the choice.
        sure: True to allow any other remark that names no other choice, as behind "B." or "B)".
        choices: choices of the question.
    """
    is_first = True
    while True:
        rest = _without_separators(rest, choices)
        if named := choices.named_by_text(rest):  # before "5!" loses its mark
            return named == label
        rest = rest.rstrip(_SEPARATORS)
        inner = rest[1:-1] if rest[:1] + rest[-1:] in ("()", "[]") else rest
        inner = inner[end_of(_KEYWORD, inner) :]
        if not inner:
            return True
        if named := choices.named_exactly(inner):  # "B) Paris": the letter and the text must agree
            return named == label
        # A choice's text, which goes on: "B) Paris, the capital". It may be "False" or "No", so denials are read later.
        opened = rest.lstrip("([")
        known, named = leading(opened, choices.keys)
        if named == label:
            rest, sure, is_first = after_text(opened, known).lstrip(")]"), True, False
            continue
        if named or (opened[:1] == "-" and leading(opened[1:], choices.keys)[1] == label):  # "(B) -5" for the text "5"
            return False
        if _IS_RULED_OUT.match(rest) or is_denied("", rest):  # "A is impossible", "A. I lied"
            return False
        if _REASON.match(inner):  # "(because ...)": a reason may mention any other choice
            return True
        if contrast := _CONTRAST.match(rest):  # "rather than C"
            return _names_only_others(rest[contrast.end() :], label, choices)
        if end := end_of(_IS_RIGHT, rest):  # "is correct": whatever follows is a remark
            rest, sure = rest[end:], True
            continue
        if is_first and _IS.match(rest):  # "A is what a fool would pick"
            return False
        is_first = False
        if reason := _REASON.search(rest):  # only the remark before a reason can contradict
            rest = rest[: reason.start()]
            continue
        return sure and not _DOUBT.search(rest) and not mentioned(rest, choices) - {label}


def _without_separators(rest: str, choices: Choices) -> str:
    """Return a text without the separators at its start, but with a sign, or a point, that starts a choice's text."""
    start = len(rest) - len(rest.lstrip(_SEPARATORS))
    signed = [pair for pair in choices.keys if pair[0][0] in _SEPARATORS]
    for position in range(max(0, start - 3), start if signed else 0):
        if rest[position] != " " and leading(rest[position:], signed)[1]:
            return rest[position:].rstrip()
    if rest[start : start + 1].isdecimal() and rest[:start].endswith("-"):  # no separator: "(A) -5"
        start -= 1
    return rest[start:].rstrip()


def _names_only_others(text: str, label: str | None, choices: Choices) -> bool:
    """Return True if a text is a list of other choices' letters and texts, and nothing else."""
    if named := choices.named_exactly(text):
        return named != label
    names = [choices.named_exactly(item) for item in _SEPARATOR.split(text) if item]
    return bool(names) and not {None, label} & set(names)


def mentioned(text: str, choices: Choices) -> set[str]:
    """Return the choices that a cleaned text mentions anywhere, by a letter that is not a word or by their text."""
    found = set()
    for left, letter, right, following in choices.mention.findall(text):
        is_word = letter.upper() in ("A", "I") and following.strip() and following.strip() not in _AFTER_LETTER
        if left or right or not (is_word or letter in ("a", "i")):
            found.add(choices.by_label[letter.casefold()])
    key = key_of(text)
    for known, label in choices.keys:
        position = key.find(known)
        while position >= 0:
            end = position + len(known)
            if not key[position - 1 : position].isalnum() and not key[end : end + 1].isalnum():
                found.add(label)
                key = key[:position] + "\x00" + key[end:]  # so that a shorter text is not found within
                break
            position = key.find(known, end)
    return found


def named_alone(sentence: str, choices: Choices) -> str | None:
    """Return the choice of a sentence in any language that holds its letter, its text or both, and perhaps a reason.

    Hedges and alternatives of all languages can't be listed, so any other word leaves the choice unnamed.
    """
    frame, reason = _frame_of_choice(), re.search(languages.any_word("because"), sentence, re.IGNORECASE)
    for said in (sentence, sentence[: reason.start()] if reason else ""):
        bare = frame.sub("", said.strip(" .,;:!"))
        for text in (said, bare):
            label = _parsed(text, choices)
            if label is None:
                continue
            letter = _squashed(label)
            own = _squashed(cleaned_text(dict(zip(choices.labels, choices.texts, strict=False)).get(label, "")))
            if _squashed(text) in (letter, own, letter + own, own + letter):
                return label
    return None


def _squashed(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


@lru_cache(maxsize=1)
def _frame_of_choice() -> re.Pattern[str]:
    """Return the pattern of the words that may surround a choice, as in "la opción C" and "Cです"."""
    nouns, ends = languages.any_word("choice"), languages.any_word("end")
    article = r"(?:(?:la|el|die|a|o)\s|l['\u2019])?"
    return re.compile(rf"\A{article}{nouns}\s?(?=\W|[A-Z]\b|\d)|\s?{ends}\Z", re.IGNORECASE)


def letters_in(text: str, choices: Choices) -> set[str]:
    """Return the letters, as written, that no other ASCII letter or digit touches, as C in "CかD"."""
    return {label for label in choices.labels if re.search(rf"(?<![A-Za-z\d]){re.escape(label)}(?![A-Za-z\d])", text)}
