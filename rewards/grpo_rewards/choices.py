r"""A reward for multiple choice: the one choice that a completion names, by its letter or its text, against the gold's.

| the completion | pay |
|---|---|
| names the gold's choice and no other: `B`, `(b)`, `B) Paris`, `Paris`, `The answer is B.` | 1 (`pay`) |
| names another choice, several, a letter and a text that disagree, or none | 0 (`pay_wrong`) |
| the gold or the choices can't be read | None |

An answer is read by a small grammar instead of searched for a letter. It is a letter, a choice's text, or both in
agreement. A phrase may introduce it ("the correct option is", "I think it's"), and a reason ("because ...") or a claim
("is correct") may follow. Behind a label in another language ("La respuesta es", "正解は") only the choice, its text
and a reason may stand, because the hedges of all languages can't be listed. Anything else names no choice, so that "A
cat", "I don't know", "A or B" and "not B" earn nothing.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, ClassVar

from grpo_rewards import languages
from grpo_rewards.claims import is_denial, is_denied, is_retraction, is_unclaimed
from grpo_rewards.completions import completion_text, needed_column
from grpo_rewards.math.correctness import AgainstGold, Judgement
from grpo_rewards.math.phrases import word_set
from grpo_rewards.reward import Scored, check_choice

_MAX_EXTRA_CHARS = 1000
"""Number of characters by which an answer may be longer than the longest choice. A longer one names no choice."""

_MAX_CLAIMS = 20
"""Number of claims of a completion that are read, from its end."""

_MAX_CORRECTION_WORDS = 4
_MAX_CORRECTION_CHARS = 40
"""Number of words, and of their characters, of a sentence in another language that may take an answer back."""

_LABEL = re.compile(r"[A-Za-z0-9]{1,3}")
_LABELLED = re.compile(r"\s*\(?([A-Za-z])(?:\)|[.:](?=\s))\s*(\S.*)", re.DOTALL)

_FOLDED = {**dict.fromkeys("−‐‑–—﹣―", "-"), **dict.fromkeys("‘’‚‛", "'"), **dict.fromkeys("“”„«»", '"'),
           "。": ". ", "、": ", ", "，": ", ", "：": ": ", "；": "; ", "！": "! ", "？": "? ", "।": ". ", "،": ", ",
           "؟": "? ", "\n": " ", "\t": " ", "\r": " "}  # fmt: skip
_LATEX_COMMAND = re.compile(
    r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|[bf]?boxed|fbox|underline|emph|operatorname)\s*\{([^{}]*)\}"
)
_LATEX_SPACE = re.compile(r"\\[()\[\],;:! ]|\\quad\b|\\left\b|\\right\b|(?<=[\w).}])~(?=\S)")
_PAIRED = (
    re.compile(r"(?<![\w*])(\*{1,3})(?=[^\s*])([^*]*)\1(?![\w*])"),
    re.compile(r"(?<!\w)(_{1,2})(?=[^\s_])([^_]*)\1(?!\w)"),
    re.compile(r"(`+)([^`]*)\1"),
    re.compile(r'(")([^"]*)"'),
    re.compile(r"(?<!\w)(')([^']*)'(?!\w)"),
    re.compile(r"(\${1,2})([^$]*)\1"),
)
# The mark that remains of "**Answer: B**" behind the claim. Between letters it is a power and stays.
_HALF_A_PAIR = re.compile(r"(?<![^\W_])(?:\*\*+|__+)|(?:\*\*+|__+)(?![^\W_])")
_AROUND_SYMBOL = re.compile(r"\s*([^\w\s])\s*")
_ARTICLE = re.compile(r"(?:the|an?) (?=\S)")
_END_OF_WORDS = re.compile(r"(?<=[^\W\d_])!+\Z")  # a question mark is doubt


@lru_cache(maxsize=4096)
def _plain_character(character: str) -> str:
    """Return the ASCII form of a character that only looks different, such as a full-width letter or a dash.

    Circled and bold letters, spaces and quotes are folded too. Invisible characters vanish.
    """
    if character in _FOLDED:
        return _FOLDED[character]
    if character.isascii():
        return character
    category = unicodedata.category(character)
    if category == "Cf":
        return ""
    if category == "Zs":
        return " "
    if category == "Nd":
        return str(unicodedata.decimal(character))
    plain = unicodedata.normalize("NFKC", character)
    return plain if plain.isascii() and category[0] in "LPS" else character


def _cleaned(text: str) -> str:
    """Return an answer or a choice's text without LaTeX, Markdown, quotes and runs of white space."""
    text = "".join(map(_plain_character, unicodedata.normalize("NFC", text)))
    if "\\" in text:
        while (inner := _LATEX_COMMAND.sub(r"\1", text)) != text:  # nested: \boxed{\textbf{(B)}}
            text = inner
        text = _LATEX_SPACE.sub(" ", text).replace("\\%", "%").replace("\\$", "$")
    for pair in _PAIRED:
        text = pair.sub(r"\2", text)
    return " ".join(_HALF_A_PAIR.sub("", text).split())


def _key(cleaned: str) -> str:
    """Return a form that two spellings of one text share: no case, leading article, final period, spaces by symbols."""
    folded = cleaned.casefold()
    key = _END_OF_WORDS.sub("", folded[_end_of(_ARTICLE, folded) :].rstrip(" .,;:"))
    if key[:1] + key[-1:] in ("()", "[]") and not re.search(r"[()\[\],]", key[1:-1]):
        key = key[1:-1]
    return _AROUND_SYMBOL.sub(r"\1", key).strip() or folded


def _end_of(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0


@dataclass(frozen=True)
class Choices:
    """Choices of one question, built by `read_choices`.

    Attributes:
        labels: letters (or numbers) of the choices, as written.
        texts: texts of the choices; () if only the letters are known.
        by_label: labels by their case-folded form.
        by_text: labels by the cleaned text; None for a text that two choices have.
        by_key: labels by the key of the text; None for a key that two choices have.
        keys: (key, label) pairs of the unique keys, longest key first.
        head: pattern of a label at the start of an answer.
        mention: pattern of a label anywhere in a text.
        max_chars: number of characters of the longest answer that is read.
    """

    labels: tuple[str, ...]
    texts: tuple[str, ...]
    by_label: Mapping[str, str]
    by_text: Mapping[str, str | None]
    by_key: Mapping[str, str | None]
    keys: Sequence[tuple[str, str]]
    head: re.Pattern[str]
    mention: re.Pattern[str]
    max_chars: int


@lru_cache(maxsize=1024)
def _choices(labels: tuple[str, ...], texts: tuple[str, ...]) -> Choices | None:
    by_label = {label.casefold(): label for label in labels}
    if len(by_label) < len(labels):
        return None
    by_text: dict[str, str | None] = {}
    by_key: dict[str, str | None] = {}
    for label, text in zip(labels, texts, strict=False):
        cleaned = _cleaned(text)
        # A question among the choices may be named without its mark.
        for table, entry in ((by_text, cleaned), (by_key, _key(cleaned.rstrip("?")))):
            # A text that looks like a letter ("A" among the letters of a word) is always read as the letter.
            if entry and entry.casefold() not in by_label:
                table[entry] = None if entry in table else label
    keys = [(key, label) for key, label in by_key.items() if label]
    keys.sort(key=lambda pair: len(pair[0]), reverse=True)
    either = "|".join(map(re.escape, labels))
    head = re.compile(
        rf"""(?P<word>(?:the\ )?(?:option|choice|answer|letter|alternative|statement)\ )?
        (?P<open>[(\[{{<]*)\ ?(?P<label>{either})
        (?P<close>(?:\ ?[)\]}}>.:,;!]|\ -)*) (?: (?=\s|\Z) | (?<=[)\]:.])(?=[^\W\d]) | (?<=[)\]])(?=[-\d]) )""",
        re.VERBOSE | re.IGNORECASE,
    )
    mention = re.compile(rf"(?<![\w'-])([(\[]?)({either})([)\]]?)(?![\w'-])(?=(\ [a-z]+)?)", re.IGNORECASE)
    max_chars = max(map(len, texts), default=0) + _MAX_EXTRA_CHARS
    return Choices(labels, texts, by_label, by_text, by_key, keys, head, mention, max_chars)


_LETTERS_ALONE = tuple(string.ascii_uppercase)


def read_choices(value: Any) -> Choices | None:
    """Return the choices of a row, or None if they can't be read.

    Args:
        value: list of texts, with the letters A, B, C, ... unless the texts bring their own ("B) Paris", "A) Rome"); or
            a mapping from letters to texts, in which None stands for no choice; or ARC's mapping
            `{"text": [...], "label": [...]}`; or None for letters alone. A letter may be a number.
    """
    if value is None:
        return _choices(_LETTERS_ALONE, ())
    pairs = _label_and_text(value)
    for label, text in pairs:
        if not isinstance(label, str) or not _LABEL.fullmatch(label) or not isinstance(text, (str, Real)):
            return None
    labels = tuple(label for label, _ in pairs)
    texts = tuple(str(text) for _, text in pairs)
    return _choices(labels, texts) if pairs else None


def _label_and_text(value: Any) -> list[tuple[Any, Any]]:
    value = _listed(value)
    if isinstance(value, Mapping):
        if set(value) == {"text", "label"}:
            texts, labels = _listed(value["text"]), _listed(value["label"])
            same = isinstance(texts, Sequence) and isinstance(labels, Sequence) and len(texts) == len(labels)
            return list(zip(labels, texts, strict=True)) if same else []
        return [(label, text) for label, text in value.items() if text is not None]
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > len(_LETTERS_ALONE):
        return []
    labelled = []
    for text in value:
        if isinstance(text, str) and (match := _LABELLED.match(text)):
            labelled.append((match[1], match[2]))
    # Exactly the first letters, so that names with initials ("I. Newton", "M. Curie") stay names.
    if sorted(label.upper() for label, _ in labelled) == list(_LETTERS_ALONE[: len(value)]):
        return labelled
    return list(zip(_LETTERS_ALONE, value, strict=False))


def _listed(value: Any) -> Any:
    """Return the list of an array of numpy or pyarrow, and any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def read_gold(gold: Any, choices: Choices, form: str = "auto") -> str | None:
    """Return the letter of the right choice, or None if the gold can't be read.

    Args:
        gold: letter of the choice, its text, or its position from 0. A position is a number, or digits that are neither
            a letter nor a text of the question.
        choices: choices of the question.
        form: "letter", "text" or "index", for golds that could be read as several; "auto" tries them in that order.
    """
    gold = _listed(gold)
    if isinstance(gold, Real) and not isinstance(gold, bool) and form in ("auto", "index"):
        return _at(gold, choices)
    if not isinstance(gold, str) or not gold.strip() or len(gold) > choices.max_chars:
        return None
    cleaned = _cleaned(gold)
    if form in ("auto", "letter") and (label := _by_label(cleaned, choices)):
        return label
    if form in ("auto", "text") and (label := _of_text(cleaned, choices)):
        return label
    if form in ("auto", "index") and cleaned.isdecimal() and len(cleaned) < 4:
        return _at(int(cleaned), choices)
    return named_choice(gold, choices) if form == "auto" else None


def _of_text(cleaned: str, choices: Choices) -> str | None:
    """Return the letter of the one choice with this text, even if the text looks like another choice's letter."""
    texts = list(map(_cleaned, choices.texts))
    if cleaned not in texts:
        texts, cleaned = list(map(_key, texts)), _key(cleaned)
    return choices.labels[texts.index(cleaned)] if texts.count(cleaned) == 1 else None


def _at(index: Any, choices: Choices) -> str | None:
    return dict(enumerate(choices.labels)).get(index)


def _by_label(cleaned: str, choices: Choices) -> str | None:
    # "A!" is a letter, "!A" its negation.
    return choices.by_label.get(cleaned.casefold().lstrip("()[]{}<>.,:; ").rstrip("()[]{}<>.,:;! "))


def _by_text(cleaned: str, choices: Choices) -> str | None:
    if cleaned in choices.by_text:
        return choices.by_text[cleaned]
    return choices.by_key.get(_key(cleaned))


def _exactly(cleaned: str, choices: Choices) -> str | None:
    """Return the choice that a text names by its letter or its text and nothing else."""
    return _by_label(cleaned, choices) or _by_text(cleaned, choices)


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
_AFTER_LETTER = word_set("""
    is isn seems must was are or and nor to through but not with because since than rather instead over vs versus
""")


def named_choice(answer: str, choices: Choices) -> str | None:
    """Return the letter of the one choice that an answer names, or None if it names none or several."""
    if len(answer) > choices.max_chars:
        return None
    first, _, below = answer.strip().partition("\n")
    if below:  # an answer in the first line, and an explanation below
        label = _parsed(_cleaned(first), choices)
        if label and _agrees(_cleaned(below), label, True, choices):
            return label
    cleaned = _cleaned(answer)
    if label := _parsed(cleaned, choices):
        return label
    rest = cleaned[_end_of(_INTRODUCTION, cleaned) :]
    if rest in ("a", "i") and not _ASKS_FOR_LETTER.search(cleaned):
        return None  # "It is a", cut off
    if label := _parsed(rest, choices):
        return label
    end = 0
    for start, label_end in languages.find_labels(cleaned, of_choices=True):
        if start != end:  # not "Respuesta: La respuesta es C", but two sentences
            return None
        end = label_end
    return _named_alone(cleaned[end:], choices) if end else None


def _parsed(text: str, choices: Choices) -> str | None:
    """Parse "B", "Paris", "B) Paris", "Paris (B)", "B, not C", "not C but B", each perhaps with a reason after it."""
    if label := _exactly(text, choices):
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
            return label if _by_text(rest, choices) == label else None
        if head["close"].endswith("-") and _by_text(f"-{rest}", choices) == label:  # "A - 19" for the text "-19"
            return label
        return label if _agrees(rest, label, sure, choices) else None
    # A text first: "Paris (B)". The longest texts come first, so that "New York" is not read as "New".
    known, label = _leading(text, choices.keys)
    return label if label and _agrees(_after_text(text, known), label, False, choices) else None


def _leading(text: str, keys: Sequence[tuple[str, str]]) -> tuple[str, str | None]:
    """Return the first of the keys with which a text starts as a whole, and its label, or None for no such key."""
    start = _key(text)
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


def _after_text(text: str, known: str) -> str:
    """Return the rest of `text` behind the words whose key is `known`."""
    wanted = len(known.replace(" ", ""))
    text = text[_end_of(_ARTICLE, text.casefold()) :]
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
        if named := _by_text(rest, choices):  # before "5!" loses its mark
            return named == label
        rest = rest.rstrip(_SEPARATORS)
        inner = rest[1:-1] if rest[:1] + rest[-1:] in ("()", "[]") else rest
        inner = inner[_end_of(_KEYWORD, inner) :]
        if not inner:
            return True
        if named := _exactly(inner, choices):  # "B) Paris": the letter and the text must agree
            return named == label
        # A choice's text, which goes on: "B) Paris, the capital". It may be "False" or "No", so denials are read later.
        opened = rest.lstrip("([")
        known, named = _leading(opened, choices.keys)
        if named == label:
            rest, sure, is_first = _after_text(opened, known).lstrip(")]"), True, False
            continue
        if named or (opened[:1] == "-" and _leading(opened[1:], choices.keys)[1] == label):  # "(B) -5" for the text "5"
            return False
        if _IS_RULED_OUT.match(rest) or is_denied("", rest):  # "A is impossible", "A. I lied"
            return False
        if _REASON.match(inner):  # "(because ...)": a reason may mention any other choice
            return True
        if contrast := _CONTRAST.match(rest):  # "rather than C"
            return _names_only_others(rest[contrast.end() :], label, choices)
        if end := _end_of(_IS_RIGHT, rest):  # "is correct": whatever follows is a remark
            rest, sure = rest[end:], True
            continue
        if is_first and _IS.match(rest):  # "A is what a fool would pick"
            return False
        is_first = False
        if reason := _REASON.search(rest):  # only the remark before a reason can contradict
            rest = rest[: reason.start()]
            continue
        return sure and not _DOUBT.search(rest) and not _mentioned(rest, choices) - {label}


def _without_separators(rest: str, choices: Choices) -> str:
    """Return a text without the separators at its start, but with a sign, or a point, that starts a choice's text."""
    start = len(rest) - len(rest.lstrip(_SEPARATORS))
    signed = [pair for pair in choices.keys if pair[0][0] in _SEPARATORS]
    for position in range(max(0, start - 3), start if signed else 0):
        if rest[position] != " " and _leading(rest[position:], signed)[1]:
            return rest[position:].rstrip()
    if rest[start : start + 1].isdecimal() and rest[:start].endswith("-"):  # no separator: "(A) -5"
        start -= 1
    return rest[start:].rstrip()


def _names_only_others(text: str, label: str | None, choices: Choices) -> bool:
    """Return True if a text is a list of other choices' letters and texts, and nothing else."""
    if named := _exactly(text, choices):
        return named != label
    names = [_exactly(item, choices) for item in _SEPARATOR.split(text) if item]
    return bool(names) and not {None, label} & set(names)


def _mentioned(text: str, choices: Choices) -> set[str]:
    """Return the choices that a cleaned text mentions anywhere, by a letter that is not a word or by their text."""
    found = set()
    for left, letter, right, following in choices.mention.findall(text):
        is_word = letter.upper() in ("A", "I") and following.strip() and following.strip() not in _AFTER_LETTER
        if left or right or not (is_word or letter in ("a", "i")):
            found.add(choices.by_label[letter.casefold()])
    key = _key(text)
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


# The start of a claim: "the answer is", "**Answer:**", "### Final answer", "I choose"; or its end: "... is correct".
_CLAIM = re.compile(
    r"""\b(?:answer|solution  # alone, but "the first option is A" only lists it
        |(?:correct|right|best|final|my|chosen|selected|appropriate|suitable|accurate|likely)
         \ (?:option|choice|letter|alternative|statement)
        )\b[*_"']{0,3}
        (?:\ (?:to|for)\ (?:the|this|that)\ (?:question|problem)|\ here|,\ then,|\ I\ (?:choose|chose))?[ \t]{0,3}
        (?: (?:is|'s|was|would\ be|must\ be|should\ be|has\ to\ be)\b [*_]{0,3}\s{0,3}[:=\uff1a]?
          | [:=\uff1a] | (?=\n) )
      | \bans\ ?[:=] | \blet's\ go\ with\b
      | \bI(?:\ will|\ would|'ll|'d)?\ (?:choose|pick|select|go\ with)\b
      | (?P<right>\b(?:is|must\ be|seems\ to\ be)\ (?:the\ )?(?:most\ )?(?:correct|right|best|likely\ answer)\b
        | \bis\ the\ answer\b)""",
    re.VERBOSE | re.IGNORECASE,
)
_CLAUSE_START = re.compile(r"[.!?,](?=\s)|[;:\n]")
_SENTENCE_END = re.compile(r"[.!?](?=\s|\Z)")


def _claimed(text: str, choices: Choices) -> tuple[bool, str | None]:
    """Return True if a sentence claims an answer, and the one choice that the last such sentence names."""
    text = unicodedata.normalize("NFC", text)
    end = len(text)
    for start, claim_end, claim in reversed(_claims(text)):
        if claim is not None and claim["right"]:
            if label := _claimed_before(text, claim, choices):
                return True, label
        elif not is_unclaimed(text[:start], claim is not None and _names_answer(claim)):
            segment = text[claim_end : min(end, claim_end + choices.max_chars)]
            claimed, label = _claimed_after(segment, choices, is_english=claim is not None)
            if claimed:
                return True, label
        end = start
    return False, None


def _claims(text: str) -> list[tuple[int, int, re.Match[str] | None]]:
    """Return where the last claims start and end, and their match, or None for a claim in another language."""
    english = deque(_CLAIM.finditer(text), maxlen=_MAX_CLAIMS)
    claims: list[tuple[int, int, re.Match[str] | None]] = [(match.start(), match.end(), match) for match in english]
    ends = {end for _, end, _ in claims}
    for start, end in languages.find_labels(text, of_choices=True)[-_MAX_CLAIMS:]:
        if end not in ends:  # "Solution:" is English and French
            claims.append((start, end, None))
    return sorted(claims, key=lambda claim: claim[:2])[-_MAX_CLAIMS:]


def _names_answer(claim: re.Match[str]) -> bool:
    """Return True if a claim starts with a noun, "answer", or its adjectives, and not with "I choose"."""
    return bool(re.match(r"(?!I\b|let|ans\b)[a-z]", claim.group(), re.IGNORECASE))


def _claimed_before(text: str, claim: re.Match[str], choices: Choices) -> str | None:
    """Read "(B) Paris is the correct answer because ..." from the start of its clause to the end of its line."""
    before = text[: claim.start()]
    after = text[claim.start() :].partition("\n")[0]
    if sentence_end := _SENTENCE_END.search(after):
        after = after[: sentence_end.end()]
    # "B. Paris is" is one clause in spite of the period, so the last few starts are tried, the longest clause first.
    for offset in [0, *(match.end() for match in _CLAUSE_START.finditer(before))][-4:]:
        if label := named_choice(before[offset:] + after, choices):
            return label
    return None


def _claimed_after(segment: str, choices: Choices, is_english: bool = True) -> tuple[bool, str | None]:
    """Read the first line behind "the answer is", and check that the rest does not take the answer back."""
    segment = segment.lstrip(" \t\r\n*_:=,")
    line, _, below = segment.partition("\n")
    if not line:
        return False, None
    cleaned = _cleaned(line)
    named = named_choice if is_english else _named_alone
    ends = [match.end() for match in _SENTENCE_END.finditer(cleaned)][:4]
    for end in [*ends, len(cleaned)]:
        sentence, following = cleaned[:end], f"{cleaned[end:]}\n{below}"
        if label := named(sentence, choices):
            taken_back = _taken_back(following, label, choices)
            if not is_english:
                taken_back = taken_back or _taken_back_elsewhere(following, label, choices)
            return True, None if taken_back else label
    mentioned = _mentioned(cleaned, choices)
    if not is_english:
        mentioned |= _letters_in(cleaned, choices)
    return bool(mentioned), None


def _named_alone(sentence: str, choices: Choices) -> str | None:
    """Return the choice of a sentence in any language that holds its letter, its text or both, and perhaps a reason.

    Hedges and alternatives of all languages can't be listed, so any other word leaves the choice unnamed.
    """
    frame, reason = _frame_of_choice(), _reasons().search(sentence)
    for said in (sentence, sentence[: reason.start()] if reason else ""):
        bare = frame.sub("", said.strip(" .,;:!"))
        for text in (said, bare):
            label = _parsed(text, choices)
            if label and _squashed(text) in _own_spellings(label, choices):
                return label
    return None


def _own_spellings(label: str, choices: Choices) -> set[str]:
    letter = _squashed(label)
    text = _squashed(_cleaned(dict(zip(choices.labels, choices.texts, strict=False)).get(label, "")))
    return {letter, text, letter + text, text + letter}


def _squashed(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


@lru_cache(maxsize=1)
def _frame_of_choice() -> re.Pattern[str]:
    """Return the pattern of the words that may surround a choice, as in "la opción C" and "Cです"."""
    nouns, ends = languages.any_word("choice"), languages.any_word("end")
    article = r"(?:(?:la|el|die|a|o)\s|l['\u2019])?"
    return re.compile(rf"\A{article}{nouns}\s?(?=\W|[A-Z]\b|\d)|\s?{ends}\Z", re.IGNORECASE)


@lru_cache(maxsize=1)
def _reasons() -> re.Pattern[str]:
    return re.compile(languages.any_word("because"), re.IGNORECASE)


def _letters_in(text: str, choices: Choices) -> set[str]:
    """Return the letters, as written, that no other ASCII letter or digit touches, as C in "CかD"."""
    return {label for label in choices.labels if re.search(rf"(?<![A-Za-z\d]){re.escape(label)}(?![A-Za-z\d])", text)}


def _taken_back_elsewhere(following: str, label: str, choices: Choices) -> bool:
    """Return True if the next sentence corrects or denies an answer in any language: "Oder D.", "Das ist falsch."."""
    line = _cleaned(following.strip().partition("\n")[0])
    words = _SENTENCE_END.split(line)[0].casefold().replace(",", " ").split()
    if not words or len(words) > _MAX_CORRECTION_WORDS or sum(map(len, words)) > _MAX_CORRECTION_CHARS:
        return False
    if _reasons().match(line):
        return False
    others = _letters_in(line, choices) - {label}
    # A line that starts with another letter is about that choice: "D. no es correcta".
    if others:
        return line[:1] not in others
    return any(map(is_denial, words))


def _taken_back(following: str, label: str, choices: Choices) -> bool:
    """Return True if the next sentence is another choice's text ("B. London"), or corrects to another choice."""
    following = _after_own_text(following.strip(), label, choices)
    line = following.partition("\n")[0]
    next_sentence = _cleaned(_SENTENCE_END.split(line)[0])
    # A letter counts only alone on its line: "B. New York is ..." may go on to say why not.
    named = _by_text(next_sentence, choices) or _by_label(_cleaned(line), choices)
    if named and named != label:
        return True
    if is_retraction(following):
        return True
    return bool(_CORRECTION.match(following) and _mentioned(_cleaned(following), choices) - {label})


def _after_own_text(following: str, label: str, choices: Choices) -> str:
    """Return a text without the choice's own text at its start, "False" of "D. False", which takes nothing back."""
    line, _, below = following.partition("\n")
    cleaned = _cleaned(line)
    own, named = _leading(cleaned, choices.keys)
    return f"{_after_text(cleaned, own)}\n{below}".strip() if named == label else following


@dataclass(frozen=True, kw_only=True)
class ChoiceCorrectness(AgainstGold):
    r"""Correctness of the choice that a completion names, by its letter or by its text.

    | the completion | pay |
    |---|---|
    | names the gold's choice and no other: `B`, `(b)`, `B) Paris`, `Paris`, `The answer is B.` | 1 (`pay`) |
    | names another choice, several, a letter and a text that disagree, or none | 0 (`pay_wrong`) |
    | the gold or the choices can't be read | None |

    The choices may differ from row to row, as when letters are shuffled.

    Args:
        extract: layout of the answer, as in `answers.extract_answer`, or `whole` for all text outside the thinking.
            `auto` is the first of an answer tag, a `####` line that names a choice, a box, a sentence that claims a
            choice, and the whole. A line `A: ...` counts as an answer with `a_line` only, because it may well list
            choice A.
        pay: score for the right choice.
        pay_wrong: score for anything else.
        tags: names of the reasoning tag and the answer tag.
        prefilled: name of the reasoning tag if the prompt already opens it.
        gold_column: name of the dataset column with the gold: the letter, the text, or the position from 0.
        choices_column: name of the dataset column with the choices, as `read_choices` takes them. If it is null, or not
            in the batch, the answer is one of the letters A to Z.
        gold_form: "letter", "text" or "index", for golds that could be read as several; see `read_gold`.
        prefix: prefix of the logged columns `extracted`, `gold` and `verdict`, for runs in which two rewards log them.
        name: name of the reward in logs.
    """

    gold_forms: ClassVar[str] = (
        "a gold is a letter, a choice's text or its position from 0, and the choices are in `choices_column`"
    )

    extract: str = "auto"
    choices_column: str | None = "choices"
    gold_form: str = "auto"
    name: str = "choice_correctness"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.gold_form, "gold_form", ("auto", "letter", "text", "index"))

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Names of the dataset columns that the reward needs. The default column `choices` may be missing."""
        if self.choices_column in (None, "choices"):
            return super().columns_read
        return *super().columns_read, self.choices_column

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Name of the column with the choices, if the reward reads one."""
        return () if self.choices_column is None else (self.choices_column,)

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        golds = needed_column(self, "gold_column", columns, completions)
        given: Sequence[Any] = [None] * len(completions)
        if self.choices_column is not None and (self.choices_column != "choices" or "choices" in columns):
            given = needed_column(self, "choices_column", columns, completions)
        letters_alone = all(choices is None for choices in given)
        judged: list[Judgement] = []
        for completion, gold, value in zip(completions, golds, given, strict=True):
            choices = read_choices(value) if value is not None or letters_alone else None
            right = read_gold(gold, choices, self.gold_form) if choices is not None else None
            if choices is None or right is None:
                judged.append((None, None, "no gold", None))
                continue
            found, label = self._named(completion_text(completion), choices)
            if label == right:
                judged.append((label, right, "right", self.pay))
            elif label:
                judged.append((label, right, "wrong", self.pay_wrong))
            else:
                judged.append((None, right, "unclear" if found else "missing", self.pay_wrong))
        return self._with_columns(judged)

    def _named(self, text: str, choices: Choices) -> tuple[bool, str | None]:
        """Return True if there is an answer, and the choice that it names."""
        outside = self._outside_thinking(text)
        if self.extract == "sentence":
            return _claimed(outside, choices)
        if self.extract != "auto":
            return self._named_in(self.extract, text, choices)
        if f"<{self.tags[1]}>" in outside:
            return self._named_in("answer_tag", text, choices)
        found, label = self._named_in("hashes", text, choices)
        if label:
            return found, label
        found, label = self._named_in("boxed", text, choices)
        if not found:
            found, label = _claimed(outside, choices)
        return (found, label) if found else self._named_in("whole", text, choices)

    def _named_in(self, layout: str, text: str, choices: Choices) -> tuple[bool, str | None]:
        answer = self._answers([text], layout)[0]
        return bool(answer), named_choice(answer, choices) if answer else None


choice_correctness = ChoiceCorrectness()
