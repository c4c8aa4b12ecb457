"""Grammar of claims in English: whether the words around "the answer is" or a box deny it or take it back."""

from __future__ import annotations

import re

from grpo_rewards.math.phrases import word_set

# Negations, and words for "wrong", of frequent languages other than English. An answer that holds one is denied.
_NEGATIONS = word_set("""
    nicht kein keine keinen niemals nie weder nein pas jamais aucun aucune ni non nunca jamás ningún ninguna tampoco
    não nao nenhum nenhuma né mai nessun nessuna niet geen nooit nee inte aldrig ikke ikkje aldri ingen nej nei ei eikä
    nigdy není nejsou nem soha nu niciodată не ні нет нет никогда нельзя değil hiçbir yok hayır asla bukan tidak tak
    không chẳng hindi δεν όχι ποτέ לא אינו ليس لا ليست نہیں नहीं মা না ไม่
""")
_WRONG = word_set("""
    falsch unrichtig inkorrekt faux fausse incorrecte erroné errado errada falso falsa incorrecto incorrecta incorreto
    equivocado equivocada sbagliato sbagliata errato scorretto fout onjuist verkeerd felaktigt fel forkert feil väärin
    błędne błędna nieprawda źle fałsz špatně chybně rossz hibás greșit неверно неверный неверна неправильно ошибка
    yanlış hatalı salah keliru sai λάθος שגוי خطأ غلط गलत ผิด
""")
# Chinese, Japanese and Korean join words without spaces, so these are searched within a text.
_JOINED = "不是 并非 不等于 不可能 不对 不正确 不會 错 錯 误 誤 ない ません 間違 違う 아니 아닌 아님 틀렸 틀린 틀림".split()

CLAUSE_CHARS = 200
"""Number of characters on each side of a claim that are read."""

# Words that, in the clause before "the answer is", leave the answer unclaimed: "I doubt that", "One might say that".
_UNCLAIMED = re.compile(
    r"""(?<!\w)(?:not|\w{2,8}n['\u2019]t|cannot|never|hardly|doubt|deny|denies|reject|refute|disagree
    |false|wrong|untrue|incorrect|impossible|absurd|mistaken|nobody|no\ one|might|may|could|if|unless
    |whether|(?:some|many|people|they|others)\ (?:would\ )?(?:say|think|argue|claim|believe))(?!\w)[^.!?;:,\n]*\Z
    # Somebody else's answer, or one of several: directly before "answer".
    | (?<!\w)(?:incorrect|worst|least\ likely|previous|earlier|example|sample|another|an?\ (?:possible|plausible|common)
      |one\ (?:possible|plausible)
      |(?:his|her|their|(?:student|user|author|teacher|assistant)['\u2019]s)(?:\ \w+)?)\ \Z""",
    re.VERBOSE | re.IGNORECASE,
)
# A negation that reaches a box. Others in its clause belong to the question: "Those who do not play are \boxed{18}".
_DENIED = re.compile(
    r"""(?<!\w)(?: (?:not|\w{2,8}n['\u2019]t|cannot|can\ not|never|hardly|anything\ but|far\ from|rather\ than
        |instead\ of)
        (?:\ (?:be|been|is|equal|equals|to|the|a|my|our|correct|right|final|answer|solution|result|value|number))*
      | (?:wrong|incorrect|false|invalid|mistaken)\ (?:(?:final|numerical)\ )?(?:answer|result|solution|value|guess|one)
        (?:\ (?:is|was|would\ be|of))?
      | (?:wrong|false|untrue|incorrect|absurd|mistaken|impossible|not\ true|not\ the\ case)
        \ (?:that|to\ (?:say|claim|think|answer|conclude|write))\b[^.!?;:\n]*
      | (?:doubt|deny|reject|refute|ruled?\ out|(?:not|n['\u2019]t)\ (?:think|believe|claim|say))\b[^.!?;:,\n]*
    )[^\w.!?;\n]*\Z""",
    re.VERBOSE | re.IGNORECASE,
)
_RETRACTION = re.compile(
    r"""\W* (?:(?:wait|oops|hmm|sorry|actually|but|no|well)\W+)*
    (?: (?:that|this|it|which)(?:\ is|['\u2019]s|\ was)
        \ (?:wrong|incorrect|false|untrue|a\ mistake|a\ lie|not\ (?:right|correct|true|it|so|the\ (?:right\ )?answer))\b
      | (?:just\ )?kidding\b | never\ ?mind\b | (?:scratch|strike|ignore|disregard|forget)\ that\b
      | i\ (?:take\ (?:that|it)\ back|was\ wrong|lied|made\ a\ mistake)\b )""",
    re.VERBOSE | re.IGNORECASE,
)
# Behind an answer itself: "18? No.", "18. Wrong!", "\boxed{18} is not the answer".
_DENIED_BEHIND = re.compile(
    r"""[^\w\n]*\?
    | \W*(?:no|nope|nah|not|wrong|incorrect|false)(?=\s*(?:[.,!;:\n]|\Z))
    | [^\w.!?;\n]*(?:is|was|would\ be)\ (?:(?:clearly|obviously|definitely|certainly|simply|just|also)\ )?
      (?:wrong|incorrect|false|untrue|impossible|mistaken)\b
    | [^\w.!?;\n]*(?:is|was|would|can|could)(?:n['\u2019]t|not|\ not)\ (?:be\ )?(?:the\ |a\ |my\ )?
      (?:final\ |right\ |correct\ )?
      (?:answer|solution|result|correct|right|true|possible|it)\b""",
    re.VERBOSE | re.IGNORECASE,
)


def is_denial(word: str) -> bool:
    """Return True if a word in lower case denies something in a language other than English."""
    if word.isascii():
        return word in _NEGATIONS or word in _WRONG
    return word in _NEGATIONS or word in _WRONG or any(joined in word for joined in _JOINED)


def is_unclaimed(before: str) -> bool:
    """Return True if the text before "the answer is" leaves the answer unclaimed, as in "I doubt that the"."""
    return _UNCLAIMED.search(before[-CLAUSE_CHARS:]) is not None


def is_denied(before: str, after: str) -> bool:
    """Return True if the text before or behind an answer denies it, asks for it or takes it back."""
    after = after[:CLAUSE_CHARS]
    if _DENIED.search(before[-CLAUSE_CHARS:]) or _DENIED_BEHIND.match(after):
        return True
    return is_retraction(after)


def is_retraction(following: str) -> bool:
    """Return True if a sentence takes the claim before it back, as "That is wrong." does."""
    return _RETRACTION.match(following[:CLAUSE_CHARS]) is not None
