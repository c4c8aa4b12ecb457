"""The one choice that a completion claims in a sentence: "The answer is B", "(B) is correct", "La respuesta es B".

The last claim that its own words do not deny counts, unless the text behind it takes it back.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque

from grpo_rewards import languages
from grpo_rewards.choice_answers import after_text, leading, letters_in, mentioned, named_alone, named_choice
from grpo_rewards.choice_questions import Choices, cleaned_text
from grpo_rewards.claims import is_denial, is_retraction, is_unclaimed

_MAX_CLAIMS = 20
"""Number of claims of a completion that are read, from its end."""

_MAX_CORRECTION_WORDS = 4
_MAX_CORRECTION_CHARS = 40
"""Number of words, and of their characters, of a sentence in another language that may take an answer back."""
_CORRECTION = re.compile(
    r"""\W*(?:or|and|no|nope|wait|actually|maybe|perhaps|alternatively|also|hmm|sorry|correction|but|however|oops|rather
    |edit|update|then\ again|hold\ on|hang\ on|on\ (?:second|further)\ thoughts?|on\ reflection|(?:just\ )?kidding
    |never\ ?mind|i\ mean|i\ meant|i\ also|make\ that|scratch\ that)(?!\w)""",
    re.VERBOSE | re.IGNORECASE,
)
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
_NAMES_ANSWER = re.compile(r"(?!I\b|let|ans\b)[a-z]", re.IGNORECASE)
_CLAUSE_START = re.compile(r"[.!?,](?=\s)|[;:\n]")
_SENTENCE_END = re.compile(r"[.!?](?=\s|\Z)")


def claimed_choice(text: str, choices: Choices) -> tuple[bool, str | None]:
    """Return True if a sentence claims an answer, and the one choice that the last such sentence names."""
    text = unicodedata.normalize("NFC", text)
    end = len(text)
    for start, claim_end, claim in reversed(_claims(text)):
        if claim is not None and claim["right"]:
            if label := _claimed_before(text, claim, choices):
                return True, label
        # A claim that starts with a noun, "answer", or its adjectives, and not with "I choose".
        elif not is_unclaimed(text[:start], claim is not None and _NAMES_ANSWER.match(claim.group()) is not None):
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
    cleaned = cleaned_text(line)
    named = named_choice if is_english else named_alone
    ends = [match.end() for match in _SENTENCE_END.finditer(cleaned)][:4]
    for end in [*ends, len(cleaned)]:
        sentence, following = cleaned[:end], f"{cleaned[end:]}\n{below}"
        if label := named(sentence, choices):
            taken_back = _taken_back(following, label, choices)
            if not is_english:
                taken_back = taken_back or _taken_back_elsewhere(following, label, choices)
            return True, None if taken_back else label
    found = mentioned(cleaned, choices)
    if not is_english:
        found |= letters_in(cleaned, choices)
    return bool(found), None


def _taken_back_elsewhere(following: str, label: str, choices: Choices) -> bool:
    """Return True if the next sentence corrects or denies an answer in any language: "Oder D.", "Das ist falsch."."""
    line = cleaned_text(following.strip().partition("\n")[0])
    words = _SENTENCE_END.split(line)[0].casefold().replace(",", " ").split()
    if not words or len(words) > _MAX_CORRECTION_WORDS or sum(map(len, words)) > _MAX_CORRECTION_CHARS:
        return False
    if re.match(languages.any_word("because"), line, re.IGNORECASE):
        return False
    others = letters_in(line, choices) - {label}
    # A line that starts with another letter is about that choice: "D. no es correcta".
    if others:
        return line[:1] not in others
    return any(map(is_denial, words))


def _taken_back(following: str, label: str, choices: Choices) -> bool:
    """Return True if the next sentence is another choice's text ("B. London"), or corrects to another choice."""
    following = following.strip()
    line, _, below = following.partition("\n")
    cleaned = cleaned_text(line)
    own, named = leading(cleaned, choices.keys)
    if named == label:  # the choice's own text, "False" of "D. False", takes nothing back
        following = f"{after_text(cleaned, own)}\n{below}".strip()
    line = following.partition("\n")[0]
    next_sentence = cleaned_text(_SENTENCE_END.split(line)[0])
    # A letter counts only alone on its line: "B. New York is ..." may go on to say why not.
    named = choices.named_by_text(next_sentence) or choices.named_by_label(cleaned_text(line))
    if named and named != label:
        return True
    if is_retraction(following):
        return True
    return bool(_CORRECTION.match(following) and mentioned(cleaned_text(following), choices) - {label})
