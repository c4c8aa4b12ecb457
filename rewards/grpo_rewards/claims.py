"""Grammar of claims: words around "the answer is" or a box that deny it, doubt it or take it back.

A claim is read in three places. The clause before it may leave it unclaimed ("I doubt that", "one more than"). The
words that touch the answer may deny it ("not 18", "18 is wrong"). The sentence behind it may take it back ("No.").
Words of denial, hypothesis and comparison are listed, because they can be counted. All other words are read past.
"""

from __future__ import annotations

import re

from grpo_rewards.vocabulary import word_set, words_of

CLAUSE_CHARS = 200
"""Number of characters on each side of a claim that are read."""

# Negations, and words for "wrong", of frequent languages other than English. An answer that holds one is denied.
_NEGATIONS = words_of("claims.negations")
_WRONG = words_of("claims.wrong")
# Chinese, Japanese and Korean join words without spaces, so these are searched within a text.
_JOINED = words_of("claims.joined")


# Words that call an answer wrong.
_DENYING = words_of("claims.denying")
# Words that leave a claim to somebody else, to chance or to a hypothesis.
_UNSURE = words_of("claims.unsure")
_ADVERBS_OF_SENTENCE = words_of("claims.adverbs_of_sentence")
_CONTRACTED_NOT = re.compile(r"\w+n't")
_SAYING = word_set(
    "say says said think thinks thought claim claims claimed argue argues believe believes suggest suggests"
)
_ANSWERING = word_set("write put answer say choose pick enter submit box use think believe claim")
_PARTS = word_set("opposite negation reverse half root square cube third quarter multiple factor reciprocal instead")
_THINKING = word_set("claims claimed thinks thought believes believed argues suggests")
_REPORTING = _THINKING | word_set("wrote writes said says answered put")
_FOREIGN_COPULAS = word_set("es é è son este sea")
# Two words in front of an answer that together deny it: "anything but 18", "no longer 18".
_PAIRS = {
    "of": _PARTS, "but": word_set("anything all everything nothing"), "from": word_set("far"), "longer": word_set("no"),
    "out": word_set("rule rules ruled ruling"),
}  # fmt: skip
_SELF = word_set("i we i'd we'd i'll i'm")
# Words between a denial and what it denies: "not the final answer", "is certainly wrong", "ist nicht".
_PASSED_OVER = words_of("claims.passed_over")
# Words that, directly before an answer, bound it or calculate with it: "more than 18", "twice 18".
_BOUNDS = words_of("claims.bounds")
_RELATED_TO = word_set("of than before after twice half double")
_WORD = re.compile(r"[^\W_]+(?:['\u2019.][^\W\d_]+)*")
_SENTENCE_MARK = re.compile(r"\n|[.!?;](?!\w)")
_CLAUSE_MARK = re.compile(r"\n|[.!?;](?!\w)|,(?=\s)|\b(?:so|thus|hence|therefore)\b", re.IGNORECASE)

# Adjectives that leave "the ... answer" the final one. Any other makes it another answer: "the tempting answer".
_OWN = words_of("claims.own")
_DETERMINERS = word_set("the a an my our your his her their another one")
_OTHERS = word_set("your his her their another")
_ONE_OF_SEVERAL = word_set("possible plausible common likely")
_OTHER = word_set("previous earlier former old first naive sample example initial")
_NO_OWNER = word_set("here's that's it's what's there's let's")

_MARKS = "\u274c\u2717\u2718\U0001f6ab\U0001f44e\u2260\u00ac"
_OPENING = re.compile(r"(?:\s|\$|\\\(|\\\[|\\displaystyle|\*\*|[`{(\[\"'\u201c\u2018])*\Z")
# Mathematics that a box is part of, before and behind it: "-\boxed{18}", "\frac{1}{\boxed{18}}", "\boxed{18}^2".
_PART_BEFORE = re.compile(
    r"""(?: \\(?!text|math|color|displaystyle|large|Large|huge|Huge|emph|underline|left|fbox|d?frac\{\s*\Z)[a-zA-Z]+
            \s*(?:\[[^\]]*\])?(?:\{[^{}]*\}){0,2}\{\s*
      | \\(?:ne|neq|not|le|leq|ge|geq|lt|gt|approx|sim|simeq|pm|mp|cdot|times|div|neg|lnot|sqrt)\s*=?\s*[$({]*
      | \\not\s*=\s*[$({]*
      | (?<=\S\s)[<>]\s+[$({]* | [\u2264\u2265\u2260\u2248\u00b1\u00d7\u00ac\u221a]\s*[$({]*
      | (?<![-\w\s])[-+/^] | (?<=\s)[-+/^](?<!\n-) | \d\s*[-+/*]\s*[$({]*
      | ~~[$*\s]* | <(?:s|del|strike)>[$*\s]* | <!--\s* | (?:\A|\n)\s*%\s*
    )\Z""",
    re.VERBOSE,
)
_PART_BEHIND = re.compile(
    r"""\s*(?: \^(?!\s*\{?\s*\\circ) | _(?=[\w{]) | \+ | -\s*(?:\d|\\) | <[\s\d] | !\s*(?:\$|\\\))
      | [\u2260\u2264\u2265\u00d7\u00b1]
      | \\(?:cdot|times|div|pm|mp|ne|neq|not|le|ge|leq|geq|approx)(?![a-zA-Z])
      | [$*\s]*~~ | [$*\s]*</(?:s|del|strike)> )""",
    re.VERBOSE,
)
_CLOSING = re.compile(r"(?:\s|\$|\\\)|\\\]|[*_`})\]\"'\u201d\u2019\u3002]|-->)*")
_CALLED_WRONG = re.compile(
    rf"""[^\w\n]*\?
    | [^\w\n]*[{_MARKS}]
    | [^\w\n]*(?:\\text\{{\s*)?[(\[]?\s*(?:a\ )?(?:no|not|{"|".join(sorted(_DENYING))})(?=\s*(?:[.,!;:)\]}}\n]|\Z))
    | [^\w.!?;\n]*(?:or|to|and)\W{{1,4}}\d | [^\w.!?;\n]*(?:plus|minus)\b
    | [^\w.!?;,\n]*(?:does|did|do|can|could|would|will|is|was)(?:n['\u2019]t|not|\ not)[ ]
      (?:be\ |a\ |the\ |my\ )?(?:final\ |right\ |correct\ )?
      (?:answer|solution|result|correct|right|true|possible|it|work|hold|fit|satisfy|make|add)\b
    | [^\w.!?;\n]*leads?\ to\ (?:a\ )?contradiction
    | [^\w.!?;\n]*(?:is|was|would\ be)\ (?:what\ an?|too)\b
    | [^\w.!?;\n]*is\ the\ (?:answer|solution)\ (?:to|of|for)\ (?:another|a\ different)\b
    | [^\w.!?;\n]*is\ [^.!?;\n]*than\ the\ (?:\w+\ )?answer
    | [^\w.!?;\n]*not\ (?:the|my|a)\ (?:final\ |right\ |correct\ )?(?:answer|solution)\b
    | \W*i\ (?:don['\u2019]t|do\ not)\ (?:think|believe)\b
    | \W*but\b[^.!?\n]*(?:\d|\b(?:{"|".join(sorted(_DENYING))})\b)""",
    re.VERBOSE | re.IGNORECASE,
)
_INTERJECTION = (
    r"(?:(?:wait|oops|hmm+|sorry|actually|but|no|well|so|however|hold\ on|hang\ on|on\ second\ thoughts?)\W+)*"
)
_CLAIMED_BEFORE = (
    r"(?:that|this|it|which|(?:the|this|that|my)\ (?:\w+\ )?(?:answer|claim|statement|sentence|result|above))"
)
_RETRACTION = re.compile(
    rf"""\W* (?: {_INTERJECTION}
    (?: {_CLAIMED_BEFORE}
        (?:\ (?:is|was|can?|could|does|did|must\ be|seems)|['\u2019]s)\ ?
        (?:n['\u2019]t\b|not\b|an?\b|(?:all|just|clearly|obviously)\b|be\b|\ )*
        (?:wrong|incorrect|false|untrue|invalid|mistake|mistaken|lie|guess|joke|impossible|nonsense|right|correct|true|it|so
          |the\ (?:right\ )?answer|add\ up|work|hold|make\ sense|fit)\b
      | (?:the\ )?opposite\b
      | (?:just\ )?(?:kidding|joking)\b | psych\b | never\ ?mind\b
      | (?:please\ )?(?:scratch|strike|ignore|disregard|forget)\ (?:that|this|it|the\ above|what\ i)\b
      | (?:please\ )?disregard\b
      | i\ (?:take\ (?:that|it|this)\ back|was\ wrong|lied|made\ a\ mistake|retract|withdraw|am\ not\ sure)\b
      | i\ (?:doubt|don['\u2019]t\ (?:think|believe)|do\ not\ (?:think|believe))
        (?:\ (?:so|(?:that|this|it)(?:(?:\ is|['\u2019]s)\ (?:right|correct|true))?))?\W*(?:[.!\n]|\Z)
      | (?:no|nope|not|nah|wrong|incorrect|false|oops|hmm+|wait)\W*(?:[.,!;:\n]|\Z) )
    | {_INTERJECTION}
      (?:actually|correction|edit|update|i\ mean|i\ meant|make\ that|rather|on\ second\ thoughts?|no|wait)\b\W{{0,3}}
      (?:\w+\W{{1,3}}){{0,3}}(?:\d|(?:no|wrong|false|incorrect)\b) )""",
    re.VERBOSE | re.IGNORECASE,
)
# "That is right." confirms; only with a negation does it take back.
_CONFIRMS = re.compile(
    rf"""\W*{_INTERJECTION}{_CLAIMED_BEFORE}
    (?:\ (?:is|was|must\ be|seems|can\ be|does)|['\u2019]s)\ (?:(?:the|all|just|clearly|obviously|be|indeed)\ )*
    (?:right|correct|true|it|so|answer|hold|fit|work)\b""",
    re.VERBOSE | re.IGNORECASE,
)


def is_denial(word: str) -> bool:
    """Return True if a word in lower case denies something in a language other than English."""
    if word in _NEGATIONS or word in _WRONG:
        return True
    return not word.isascii() and any(joined in word for joined in _JOINED)


def is_bound(word: str) -> bool:
    """Return True if a word in lower case, directly before an answer, bounds it or calculates with it."""
    return word in _BOUNDS


def is_unclaimed(before: str, names_answer: bool = True) -> bool:
    """Return True if the text before a claim leaves it unclaimed, as in "I doubt that the" or "Twice the".

    Args:
        before: text before the claim.
        names_answer: True if the claim starts with a noun such as "answer", whose adjectives end the text.
    """
    before = before[-CLAUSE_CHARS:]
    sentence, clause = _words(_last(before, _SENTENCE_MARK)), _words(_last(before, _CLAUSE_MARK))
    if any(word in _ADVERBS_OF_SENTENCE for word in sentence[:1]) or sentence[:2] == ["not", "sure"]:
        return True
    for position, word in enumerate(clause):
        if _is_unsure(word) or (word in _SAYING and _SELF.isdisjoint(clause[max(0, position - 2) : position])):
            return True
    if re.search(r"\bno (?:one|way|world|circumstances|means)\b", " ".join(clause)):
        return True
    return names_answer and _is_another(clause)


def _is_another(clause: list[str]) -> bool:
    """Return True if the words before "answer" make it another one: "his", "the tempting", "one less than the"."""
    start = len(clause)
    while start and clause[start - 1] not in _DETERMINERS and not _owns(clause[start - 1]) and len(clause) - start < 4:
        start -= 1
    adjectives = clause[start:]
    if start == 0 or len(adjectives) == 4:  # no determiner
        return bool(adjectives) and (adjectives[-1] in _OTHER or adjectives[-1] in _RELATED_TO)
    determiner, previous = clause[start - 1], clause[max(0, start - 3) : start - 1]
    if determiner in _OTHERS or _owns(determiner) or not _OWN.issuperset(adjectives):
        return True
    if determiner in ("a", "an", "one") and not _ONE_OF_SEVERAL.isdisjoint(adjectives):
        return True
    if previous in (["bound", "for"], ["bound", "on"]):
        return True
    return bool(previous) and previous[-1] in _RELATED_TO and previous[0] not in ("value", "result")


def _owns(word: str) -> bool:
    return word.endswith("'s") and word not in _NO_OWNER


def is_denied(before: str, after: str) -> bool:
    """Return True if the text before or behind an answer denies it, doubts it, makes it a part, or takes it back."""
    before, after = before[-CLAUSE_CHARS:], after[:CLAUSE_CHARS]
    if _PART_BEFORE.search(before) or _PART_BEHIND.match(after) or _CALLED_WRONG.match(after):
        return True
    return _is_governed(before) or _is_predicated(after) or is_retraction(after)


def _is_governed(before: str) -> bool:
    """Return True if the word that governs an answer denies or bounds it: "not", "it can't be", "more than"."""
    start = _OPENING.search(before).start()  # type: ignore[union-attr]
    text, opening = before[:start], before[start:]
    if text.endswith((*_MARKS, "e.g.")):
        return True
    mark = text[-1:]
    words = _words(_last(text.rstrip(":,"), _SENTENCE_MARK))
    if mark in (":", ","):
        return bool(words) and (
            words[-1] == "example" or words[-2:] == ["not", "sure"] or (mark == ":" and _is_unsure(words[-1]))
        )
    passed: list[str] = []
    while words and words[-1] in _PASSED_OVER:
        passed.insert(0, words.pop())
    if not words:
        return False
    word, previous = words[-1], words[-2] if len(words) > 1 else ""
    if word.isdigit():
        return passed == ["to"]
    if _is_unsure(word) or (word in _BOUNDS and not (word == "least" and "possible" in passed)):
        return True
    if word == "or":
        return re.search(r"\d[\s$]+or\b[^\d]*\Z", text) is not None  # but of "\boxed{17} or \boxed{18}" the last counts
    if word in _ANSWERING and any(map(_is_unsure, words[-3:-1])):
        return True
    if word in _REPORTING and (word in _THINKING or not set("\"'\u201c\u2018").isdisjoint(opening)):
        return previous not in _SELF
    if word == "no":
        return bool(passed) and passed[0] in _FOREIGN_COPULAS
    return previous in _PAIRS.get(word, ()) or (word == "and" and "between" in words)


def _is_predicated(after: str) -> bool:
    """Return True if a predicate behind an answer denies it: "is clearly wrong", "can be ruled out", "ist falsch"."""
    start = _CLOSING.match(after).end()  # type: ignore[union-attr]
    end = _SENTENCE_MARK.search(after, start)
    clause = re.split(r",(?=\s)", after[start : end.start() if end else len(after)])[0]
    words = _words(re.sub(r"\\[a-zA-Z]+", " ", clause))
    position = next((index for index, word in enumerate(words) if word not in _PASSED_OVER), None)
    if position is None:
        return False
    word = words[position]
    if word in _DENYING and words[position + 1 : position + 2] == ["as"]:  # "Unlikely as it sounds"
        return False
    return is_denial(word) or word in _DENYING or (position > 0 and word in ("guess", "guessed"))


def is_retraction(following: str) -> bool:
    """Return True if a sentence takes the claim before it back, as "That is wrong." does."""
    following = following[:CLAUSE_CHARS]
    return _RETRACTION.match(following) is not None and _CONFIRMS.match(following) is None


def _is_unsure(word: str) -> bool:
    if word in _UNSURE or word in _DENYING or is_denial(word):
        return True
    return _CONTRACTED_NOT.fullmatch(word) is not None


def _words(text: str) -> list[str]:
    return [word.replace("\u2019", "'") for word in _WORD.findall(text.lower())]


def _last(text: str, mark: re.Pattern[str]) -> str:
    """Return the text behind the last match of a mark."""
    ends = [match.end() for match in mark.finditer(text)]
    return text[ends[-1] :] if ends else text
