r"""The one quantity that an English sentence states: "She has 18 apples left." states 18, as far as grammar can tell.

A sentence states a number if it holds no other number and nothing that puts the number in doubt: no hedge, negation,
alternative, comparison, condition or question, and no arithmetic. Of several numbers a sentence states one only if that
number alone is set off, as in "After 3 days she has **18** apples." Paying for a wrong answer does more harm than
missing a right one, so a sentence that this module does not understand states nothing.

The word lists are in lower case. Verbs, nouns and units are open-ended and not listed. The words that make a number
doubtful are mostly grammar and can be counted.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from grpo_rewards import languages
from grpo_rewards.claims import is_denial
from grpo_rewards.math.phrases import UNIT_LETTERS, is_label, is_measure, is_plural, is_quantity
from grpo_rewards.vocabulary import section, word_set, words_of

SMALL = dict(zip(section("prose.numerals").split(), [*range(20), *range(20, 100, 10)], strict=True))
SCALES = {"k": 10**3, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
CJK_NUMERALS = frozenset("〇一二三四五六七八九十百千万萬億亿兆")

# Words that, directly after a number, make it a bound, a guess or part of a larger number: "18 max", "18 squared".
TAIL_WORDS = word_set("ish odd something some tops below plus minus point squared cubed pi")
# Words that are not a unit after "18" but put nothing in doubt elsewhere in a sentence.
NO_UNITS = TAIL_WORDS | word_set("and to over is are was isn both am pm")

_DOUBTS = words_of("prose.doubts")
_DOUBTFUL_STEMS = tuple(words_of("prose.doubtful_stems"))
_CONTRACTED_NOT = re.compile(r"\w+n't|(?:is|are|was|were|do|does|did|has|have|had|ca|wo|could|should|would|must)nt")
_VAGUE_NUMBER = re.compile(
    r"half|halved?|halves|quarter|thirds?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred"
    r"|thousand|million)ths?|first|dozens?|twice|thrice|doubled?|tripled?|quadrupled?|(?:hundred|thousand"
    r"|million|billion)s"
)


def is_numeral(word: str) -> bool:
    """Return True if a word is part of a spelled-out cardinal number."""
    return word in SMALL or (word in SCALES and word != "k")


def is_vague_number(word: str) -> bool:
    """Return True if a word is a number that is not read as one: a fraction, a multiple, an ordinal, "dozens"."""
    return _VAGUE_NUMBER.fullmatch(word) is not None


def is_doubt(word: str) -> bool:
    """Return True if a word makes its sentence's number a guess, a bound, a denial, an alternative or a condition."""
    if word in _DOUBTS or word.startswith(_DOUBTFUL_STEMS) or is_denial(word):
        return True
    return _CONTRACTED_NOT.fullmatch(word) is not None


def is_foreign_measure(text: str) -> bool:
    """Return True if the text behind a number is one word or two beyond ASCII that may be what is counted."""
    words = text.lower().strip(" .").split()
    if not 0 < len(words) <= 2 or re.search(languages.any_word("no_unit"), text.lower()):
        return False
    for word in words:
        if word in languages.words("unit"):
            continue
        if word.isascii() or len(word) > _MAX_FOREIGN or _SYMBOL.search(word) or not CJK_NUMERALS.isdisjoint(word):
            return False
        if is_denial(word) or any(unicodedata.category(character)[0] not in "LM" for character in word):
            return False
    return True


_SYMBOL = re.compile(r"[\u0370-\u03ff\u2000-\u2bff\U0001d400-\U0001d7ff]|\A[\u0080-\u04ff]\Z")  # π is not a noun
_MAX_FOREIGN = 20
"""Number of characters of the longest word of another language that may be a counted noun."""

_MAX_NUMBERS = 8
"""Number of quantities of the longest sentence that is read."""

_OPEN, _CLOSE = "\x02", "\x03"
_SET_OFF = (
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"\\\(([^()\\]*)\\\)"),
    re.compile(r"\*\*([^*]+)\*\*"),
    re.compile(r"__([^_]+)__"),
)
_BULLET = re.compile(r"^[ \t]*(?:\* |- (?=[^\W\d]))", re.MULTILINE)
_PUNCTUATION = ",.;:!"
_DRESS = "\"'`*_()[]{}$¤%°" + _PUNCTUATION
_WORDS = re.compile(r"[^\W\d_]+(?:['./-][^\W\d_]+)*")
_INNER = re.compile(r"[./-]")
_ORDINAL = re.compile(r"\d(?:st|nd|rd|th)\b")
_FACTORIAL = re.compile(r"^[^$¤]*\d!")

# Doubts that no single word shows: retractions, inversions, guesses and bounds.
_DOUBTFUL_PHRASE = re.compile(
    r"""
      \bwait\b\s*[,.!:-] | (?:^|[,.!:-]\s*)wait\b
    | \bshould\s+(?:be|have)\b | \bwould\s+have\s+(?:been|had)\b
    | \band\s+(?:more|up|above|over|beyond|under|below|change|counting|rising|growing)\b
    | \band\s+(?:then\s+some|a\s+(?:bit|few|little))\b
    | \bup\s+to\b(?<!\badd\sup\sto)(?<!\badds\sup\sto)(?<!\badding\sup\sto)(?<!\badded\sup\sto)(?<!\bcomes\sup\sto)
    | \bclose\s+(?:to|on|by)\b | \bfar\s+(?:off|from)\b | \bused\s+to\b | \bis\s+(?:too|close|off|near)\b
    | \bat\s+the\s+(?:latest|earliest)\b | \b(?:upper|lower)\s+(?:bound|limit)\b | \bless\s+(?:the|those|what|any|tax)\b
    | \.\. | \?
    | ^\W*(?:is|are|was|were|am|do|does|did)\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Words that may stand between a number and its governor: "about a total of 18", "over the next 18 days".
_FILLERS = words_of("prose.fillers")
# Verbs that may stand directly before a number although they have no ending: "sold 18", "they have 18".
_PAST_VERBS = words_of("prose.past_verbs")
_VERBS = words_of("prose.verbs")
_BEFORE_VERB = words_of("prose.before_verb")
# Words that, without being a verb, may stand directly before the number of a sentence.
_BEFORE_NUMBER = words_of("prose.before_number")
_PARTICLES = word_set("up back away down together")
# Words that a statement about a number may start with: "18 is the total", "18 is what she paid".
_PREDICATES = words_of("prose.predicates")
_COPULAS = word_set("is are was were remain remains remained")
# Words that, governing a number, bound, approximate, calculate with or label it: "over 18", "times 18", "step 18".
_GOVERNORS = words_of("prose.governors")
# Words that make a number a date: "18 of March", "March 18".
_MONTHS = words_of("prose.months")
# Words X for which "the X of 18" is 18. For any other X it is something else, made of 18.
_TOTALS = word_set("total sum amount")
# Words X for which "X of 18" is something else, with or without "the".
_MADE_OF = words_of("prose.made_of")
_BOUND_TO = word_set("next prior similar compared relative added opposed contrary limited restricted close")
_BOUND_BY = word_set("divided multiplied off")
_ONE_AS_PRONOUN = (
    word_set("the this that each which any every another some"),
    word_set("of who that which can must should would needs another"),
)
# Words that, alone between two numbers, make a list or a range of them.
_JOINERS = word_set("and to through till until a an the then also another by times")
# Words before a number that is not the answer but its circumstance, in one clause: "**18** apples after eating 3".
_CIRCUMSTANCES = word_set("in after for from of at on per every with during across among over when while because since")
_NEW_CLAUSE = word_set("and so then but leaving now")


@dataclass(frozen=True, slots=True)
class _Token:
    """Word, or number in digits.

    Attributes:
        text: text as written; for a number, without what surrounds it.
        lower: `text` in lower case.
        numeric: True for a number, and for a word of a spelled-out number.
        span: number of the emphasised span around the token, counted from 1; 0 for none.
        pause: True if punctuation follows.
    """

    text: str
    lower: str
    numeric: bool
    span: int
    pause: bool


@dataclass(frozen=True, slots=True)
class _Quantity:
    """Run of tokens that is a number, or a word like "half".

    Attributes:
        start: index of the first token.
        end: index behind the last token.
        text: number as written; None for a word like "half".
    """

    start: int
    end: int
    text: str | None


def stated_quantity(text: str) -> str | None:
    """Return the number that a sentence states, as written, or None if it states none, several, or a doubtful one.

    Args:
        text: sentence of bounded length, with Unicode folded and LaTeX's text commands removed.
    """
    if not any(map(str.isalpha, text)) or _DOUBTFUL_PHRASE.search(text) or not CJK_NUMERALS.isdisjoint(text):
        return None
    tokens = _tokens(text)
    quantities = _quantities(tokens or ())
    if not tokens or len(quantities) > _MAX_NUMBERS:
        return None
    stated = quantities[0] if len(quantities) == 1 else _set_off(tokens, quantities)
    if stated is None or stated.text is None or _in_doubt(tokens, stated) or _governed(tokens, stated):
        return None
    return stated.text if _is_statement(tokens, stated) else None


def _tokens(text: str) -> list[_Token] | None:
    """Return the tokens of a sentence, or None if it holds something that is not prose, such as an operator."""
    if _OPEN in text or _CLOSE in text:  # the text could fake an emphasised span
        return None
    for pattern in _SET_OFF:
        text = pattern.sub(rf" {_OPEN} \1 {_CLOSE} ", text)
    text = _BULLET.sub("", text).replace("—", " , ").replace("\n", " , ").replace("\\[", " ").replace("\\]", " ")
    tokens: list[_Token] = []
    depth = spans = 0  # a span may hold another, as in **\boxed{18}**
    for chunk in text.split():
        if chunk in (_OPEN, _CLOSE):
            depth += 1 if chunk == _OPEN else -1
            spans += chunk == _OPEN and depth == 1
            continue
        new = _read_chunk(chunk, spans if depth else 0)
        if new is None:
            return None
        if not new and tokens and chunk[-1] in _PUNCTUATION:
            tokens[-1] = replace(tokens[-1], pause=True)
        tokens += new
    return tokens


def _read_chunk(chunk: str, span: int) -> list[_Token] | None:
    """Return the tokens between two spaces (a number, words, punctuation), or None for anything else."""
    pause = chunk.rstrip("\"'`*_)]}$").endswith(tuple(_PUNCTUATION))
    if any(map(str.isdigit, chunk)):
        if _FACTORIAL.match(chunk) or _ORDINAL.search(chunk):  # "18!", but not "$18!"
            return None
        number = chunk.lstrip("\"'`*_([{").rstrip("\"'`*_)]}" + _PUNCTUATION)
        return [_Token(number, number.lower(), True, span, pause)]
    core = chunk.strip(_DRESS)
    if not core:
        return None if chunk == "*" else []  # a multiplication
    if core in ("=", "-") and "!" not in chunk:
        return [_Token(core, core, False, span, pause)]
    if not _WORDS.fullmatch(core := core.strip("-")):
        return None
    pause = pause and not (chunk.endswith(".") and len(core) <= 3)  # "ca.", "fig."
    parts = _INNER.split(core)
    return [
        _Token(part, part.lower(), is_numeral(part.lower()), span, pause and i == len(parts) - 1)
        for i, part in enumerate(parts)
    ]


def _quantities(tokens: Sequence[_Token]) -> list[_Quantity]:
    """Return every number. Neighbouring tokens such as `18 thousand` or `two hundred and five` are one number."""
    quantities: list[_Quantity] = []
    position = 0
    while position < len(tokens):
        end = _end_of_number(tokens, position)
        if end > position:
            start = position
            # "a hundred" and "minus 18" start before their number.
            if start and tokens[start].lower in SCALES and tokens[start - 1].lower in ("a", "an"):
                start -= 1
            if start and tokens[start - 1].lower in ("minus", "negative"):
                start -= 1
            quantities.append(_Quantity(start, end, " ".join(token.text for token in tokens[start:end])))
        elif _is_vague(tokens, position, quantities):
            quantities.append(_Quantity(position, position + 1, None))
        position = max(end, position + 1)
    return quantities


def _end_of_number(tokens: Sequence[_Token], start: int) -> int:
    end = start
    while end < len(tokens) and tokens[end].numeric:
        end += 1
        if tokens[end - 1].pause or end == len(tokens) or tokens[end].span != tokens[start].span:
            break
        following = [token.lower for token in tokens[end : end + 2]]
        if is_numeral(tokens[end - 1].lower) and following[0] == "and" and following[-1] in SMALL:
            end += 1
    return end


def _is_vague(tokens: Sequence[_Token], position: int, quantities: Sequence[_Quantity]) -> bool:
    word = tokens[position].lower
    if word == "second":
        return position > 0 and tokens[position - 1].lower in ("the", "her", "his", "their", "its")
    if word in ("dozen", "dozens") and quantities and quantities[-1].end == position:
        return False  # a unit
    return is_vague_number(word)


def _set_off(tokens: Sequence[_Token], quantities: Sequence[_Quantity]) -> _Quantity | None:
    """Return the only quantity that opens an emphasised span, or None if another number may be the answer."""
    emphasised = [quantity for quantity in quantities if tokens[quantity.start].span]
    if len(emphasised) != 1:
        return None
    (answer,) = emphasised
    # In "**In 3 days she has 18**" the emphasis is not about the number.
    if tokens[answer.start - 1].span == tokens[answer.start].span:
        return None
    for left, right in pairwise(quantities):  # "17 or **18**" is a list, emphasis or not
        if {token.lower for token in tokens[left.end : right.start]} <= _JOINERS:
            return None
    for other in quantities:
        between = tokens[answer.end : other.start]
        words = {token.lower for token in between}
        pause = any(token.pause for token in (tokens[answer.end - 1], *between))
        if other.start > answer.start and (pause or words.isdisjoint(_CIRCUMSTANCES) or words & _NEW_CLAUSE):
            return None
    # In "17 + 1 = **18**" the number is the result of a calculation that may be wrong.
    return None if any(token.lower == "=" for token in tokens) else answer


def _in_doubt(tokens: Sequence[_Token], stated: _Quantity) -> bool:
    """Return True if any word outside the number puts it in doubt."""
    for position, token in enumerate(tokens):
        if stated.start <= position < stated.end:
            continue
        if token.text == "Max" or (token.text == "May" and position):
            continue  # a name, and the month
        if is_doubt(token.lower) or token.lower == "minus":
            return True
        if token.lower == "=" and any(rest.lower not in _FILLERS for rest in tokens[position + 1 : stated.start]):
            return True
    return False


def _governed(tokens: Sequence[_Token], stated: _Quantity) -> bool:
    """Return True if the words next to the number make it something other than the answer."""
    before = tokens[stated.start - 1] if stated.start else None
    after = tokens[stated.end] if stated.end < len(tokens) else None
    governor, previous = _governor(tokens, stated)
    bound = {"to": _BOUND_TO, "by": _BOUND_BY}.get(governor, ())
    if governor in _GOVERNORS or previous in bound or _made_of(tokens, stated):
        return True
    if before is not None and (_is_month(before) or before.lower == "-" or _is_variable(before)):
        return True
    if after is not None:
        if after.lower in TAIL_WORDS or after.lower == "-" or (_is_variable(after) and after.text not in UNIT_LETTERS):
            return True
        if _is_month(tokens[min(stated.end + (after.lower == "of"), len(tokens) - 1)]):
            return True
    if str(stated.text).lower() == "one":
        left, right = _ONE_AS_PRONOUN
        return (before is not None and before.lower in left) or (after is None or after.lower in right)
    return False


def _is_statement(tokens: Sequence[_Token], stated: _Quantity) -> bool:
    """Return True if the words around the number make an English clause that states it, instead of a label or remark.

    A verb, a preposition or a pause stands before the number, or the number is the subject of a verb. A word that is
    none of these is a label ("page 18") or another language ("Sie hat 18").
    """
    if any(character >= "\u0250" for token in tokens for character in token.text):  # not Latin
        return False
    position = stated.start - 1
    while position >= 0 and tokens[position].lower in _FILLERS and not tokens[position].pause:
        if tokens[position].lower == "of":
            return True  # `_made_of` has looked at what is before it
        position -= 1
    if position > 0 and tokens[position].lower in _PARTICLES:
        position -= 1
    if position < 0 and stated.start:  # only "exactly" and the like before the number
        return is_measure([token.lower for token in tokens[stated.end :]])
    if position < 0 or (tokens[position].pause and tokens[position].lower not in _VERBS):
        return _is_subject(tokens, stated) or (position >= 0 and _introduces(tokens[: position + 1]))
    word, previous = tokens[position], tokens[position - 1].lower if position else ""
    if _is_verb(word.lower, previous) or word.lower in _BEFORE_NUMBER or is_quantity(word.lower):
        return True
    # "Dad gave Olaf 10 cars": a name between the verb and the number.
    before = tokens[position - 2].lower if position > 1 else ""
    return position > 0 and word.text[0].isupper() and _is_verb(previous, before)


def _is_subject(tokens: Sequence[_Token], stated: _Quantity) -> bool:
    """Return True if the number is the subject of a statement: "18 apples are left", but not "18 is a lie"."""
    words = [token.lower for token in tokens[stated.end :]]
    for position, word in enumerate(words):
        if not is_measure(words[:position]):
            continue
        following = "".join(words[position + 1 : position + 2])
        if word in _COPULAS:
            is_participle = _is_past(following) or following.endswith("ing")
            return not following or following in _PREDICATES or is_participle or is_plural(following)
        if _is_past(word) or (word in _VERBS and not is_measure(words[: position + 1])):
            return True
    return False


def _introduces(tokens: Sequence[_Token]) -> bool:
    """Return True if words before a pause leave the number behind it stated: "In total, 18", "The cost is this: 18"."""
    if not is_label([token.lower for token in tokens], "="):
        return False
    pairs = zip(["", *(token.lower for token in tokens)], tokens, strict=False)
    if any(_is_verb(token.lower, previous) for previous, token in pairs):
        return True
    words = {token.lower for token in tokens} - _FILLERS - _BEFORE_NUMBER
    return all(is_quantity(word) or is_measure([word]) for word in words)


def _is_past(word: str) -> bool:
    return word in _PAST_VERBS or (word.endswith("ed") and word.isascii())


def _is_verb(word: str, previous: str) -> bool:
    """Return True if a word may be a verb behind another word ("" for none, before which only a past tense stands)."""
    if _is_past(word) or word.endswith(("'s", "'re", "'ve")):
        return True
    if not previous:
        return word in ("has", "have", "=")
    if word in _VERBS or previous in _BEFORE_VERB:
        return True
    return is_plural(word) or is_plural(previous) or word.endswith("ing")


def _governor(tokens: Sequence[_Token], quantity: _Quantity) -> tuple[str, str]:
    """Return the word that governs a number, past articles and totals, and the word before that; "" for no word."""
    position = quantity.start - 1
    while position >= 0 and tokens[position].lower in _FILLERS and not tokens[position].pause:
        position -= 1
    if position < 0 or tokens[position].pause:
        return "", ""
    return tokens[position].lower, tokens[position - 1].lower if position else ""


def _made_of(tokens: Sequence[_Token], quantity: _Quantity) -> bool:
    """Return True if the number only measures something else: "the price of 18 books", "a multiple of 18"."""
    position = quantity.start - 1
    while position > 0 and tokens[position].lower in _FILLERS and tokens[position].lower != "of":
        position -= 1
    if position < 1 or tokens[position].lower != "of":
        return False
    whole = tokens[position - 1].lower
    definite = position > 1 and tokens[position - 2].lower in ("the", "this", "that")
    return whole in _MADE_OF or (definite and whole not in _TOTALS)


def _is_month(token: _Token) -> bool:
    return token.lower in _MONTHS and token.text[0].isupper()


def _is_variable(token: _Token) -> bool:
    return len(token.text) == 1 and token.text.isalpha() and token.lower != "a"
