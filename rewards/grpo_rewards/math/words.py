"""English words that decide whether a text with a number in it states that number: numerals, hedges, comparisons.

All are lower case. What a sentence is about (verbs, nouns, units) is open-ended and not listed; what makes its number
doubtful is mostly grammar, whose words can be counted.
"""

from __future__ import annotations

import re


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text, which white space separates."""
    return frozenset(text.split())


_NUMERALS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
SMALL = {word: i if i < 20 else 10 * (i - 18) for i, word in enumerate(_NUMERALS.split())}
SCALES = {"k": 10**3, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
CJK_NUMERALS = frozenset("〇一二三四五六七八九十百千万萬億亿兆")
# Letters that are units; any other letter by itself is a variable, or a constant such as pi.
UNIT_LETTERS = frozenset("mghslLKCFAVWJN")

# Directly after a number these make it a bound, a guess or a part of a larger number: "18 max", "18 odd", "18 squared".
TAIL_WORDS = word_set("ish odd something some tops below plus minus point squared cubed pi")
# Words that, like the doubtful ones, make of "18 ..." something else than a quantity, but mean no harm in a sentence.
NO_UNITS = TAIL_WORDS | word_set("and to over is are was isn both")

_DOUBTS = word_set("""
    no not non nor never none neither nobody nothing nowhere cannot without barely hardly scarcely wrong false untrue
    invalid unable instead rather unlike oops sorry correction scratch hmm deny denies denied reject rejects rejected
    except excluding
    or either else otherwise whether if unless let depending but however though although alternatively respectively
    versus vs
    perhaps maybe might may could think thinks thought thinking idk dunno say says said saying hope hopes hoping
    hopefully sure unsure confident fairly pretty unclear unknown feel feels looks sounds somewhere somewhat something
    slightly ballpark ish bit nearly almost practically virtually roughly approx loosely basically essentially
    circa ca kidding joking rounded rounding closer closest nearest usually typically generally normally sometimes
    mostly largely partly theoretically ideally conceivably arguably ostensibly reportedly technically
    than least most min max minimum maximum exceed exceeds exceeding surpass surpasses range ranges ranging vary varies
    upward upwards tops bounded capped approaches nears hovers
    plus squared cubed factorial mod modulo sqrt
""")
_DOUBTFUL_STEMS = tuple(
    word_set("""
    approximat estimat guess suppos assum presum believ doubt uncertain incorrect mistak erron error inaccura imposs
    possib probabl improbab likel unlikel seem appear apparent reckon suspect wonder imagin predict expect claim alleg
    potential tentativ suggest fail speculat hypothe conjectur
""")
)
_CONTRACTED_NOT = re.compile(r"\w+n't|(?:is|are|was|were|do|does|did|has|have|had|ca|wo|could|should|would|must)nt")
_VAGUE_NUMBER = re.compile(
    r"half|halved?|halves|quarter|thirds?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand"
    r"|million)ths?|first|dozens?|twice|thrice|doubled?|tripled?|quadrupled?|(?:hundred|thousand|million|billion)s"
)


def is_numeral(word: str) -> bool:
    """Whether a word is part of a spelled-out cardinal number."""
    return word in SMALL or (word in SCALES and word != "k")


def is_vague_number(word: str) -> bool:
    """Whether a word is a number without being read as one: a fraction, a multiple, an ordinal, "dozens"."""
    return _VAGUE_NUMBER.fullmatch(word) is not None


def is_doubt(word: str) -> bool:
    """Whether a word makes the number of its sentence a guess, a bound, a denial, an alternative or a condition."""
    return word in _DOUBTS or word.startswith(_DOUBTFUL_STEMS) or _CONTRACTED_NOT.fullmatch(word) is not None
