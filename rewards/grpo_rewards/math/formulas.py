r"""Formulas before they are compared by math-verify, which skips what it does not know and evaluates the rest.

math-verify drops `\text{ is wrong}`, `\ldots`, primes and all but the last side of an equation, takes a set for a
pair, and multiplies the parts of a mixed number. `comparisons` therefore reads an answer as a whole. It returns the
pairs of formulas that math-verify is to compare, or None if the answer can't be the gold: something in the answer is
neither in the gold nor part of a formula.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from grpo_rewards.math.kinds import kind_of, pairs_of
from grpo_rewards.math.prose import is_doubt
from grpo_rewards.math.sets import INTERVAL, RELATION, condition_of, interval_of, with_both_signs
from grpo_rewards.math.spellings import FUNCTIONS, respelled, squeezed
from grpo_rewards.math.units import are_opposed, is_unit, stated_units, units_differ
from grpo_rewards.vocabulary import words_of


class TooComplex(Exception):
    """Formula that is nested too deeply, or has too large numbers, to be compared in bounded time."""


_MAX_DEPTH = 24
_MAX_SIDES = 4
_MAX_DIGITS = 200
_MAX_POWER_DIGITS = 4
_MAX_POWERS = 2

_TEXT = re.compile(r"\\(?:text\w*|mbox|hbox|math(?:rm|bf|it|sf|tt)|operatorname\*?|emph|underline|fbox)\s*\{([^{}]*)\}")
_TEXT_TAIL = re.compile(
    r"\\(?:text\w*|mbox|hbox|math(?:rm|it|sf|tt))\s*\{(?P<text>[a-zA-Z/.\s]+)\}\s*"
    r"(?P<power>\^\s*\{?-?[1-4]\}?)?[\s.]*\Z"
)
_TEXT_LABEL = re.compile(r"\s*\\text\w*\s*\{([a-zA-Z ]+)\}\s*=(?!=)")
_CONNECTIVE = re.compile(r"\\text\w*\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", re.IGNORECASE)
_UNIT_TAIL = re.compile(r"(?:°|(?<![a-zA-Z\\])[a-zA-Z]{2,}\.?|(?<=\s)[a-zA-Z]{2,}|\s+)(?:\s*\^\s*\{?[23]\}?)?\s*\Z")
_BARE_RUN = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{([a-zA-Z]*\*?)\}(?:\{[lcr|]*\})?")
# Commands that math-verify reads, or that change nothing. The answer may hold another only if the gold holds it too.
_COMMANDS = FUNCTIONS | words_of("formulas.commands")
_CHARACTERS = frozenset("+-*/^_=<>()[]{}|,.;:!&\\ '°%×÷·αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ\n\t")
_BASED = re.compile(r"\d\s*\}?\s*_")
# A name that an equation gives a value to: `x`, `x_1`, `y'`, `f(x)`, `\theta`, `\frac{dy}{dx}`, `|AB|`, `P(X = 1)`.
_NAME = re.compile(
    r"""\s*(?: \\frac\{\s*d\^?\d?\s*[a-zA-Z]?\}\{\s*d[a-zA-Z](?:\^\{?\d\}?)?\s*\}(?:[a-zA-Z](?:\([a-zA-Z]\))?)?
      | \\frac\s*\{\s*[A-Z]{2}\s*\}\s*\{\s*[A-Z]{2}\s*\} | \([a-zA-Z](?:,\s*[a-zA-Z]){1,4}\)
      | \\(?:sin|cos|tan|cot|angle)\s*(?:\^\{?2\}?\s*)?(?:\d?\s*[a-zA-Z]|\([^()=]{1,12}\))
      | \|?(?:[a-zA-Z]
           |(?:\\(?:sin|cos|tan|cot)\s*)?\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|tau|phi|omega)
           |(?:\\(?:angle|triangle|overline|vec|mathbf|mathrm|text)\s*)\{?\s*[a-zA-Z\ ]+\}?
           |[A-Z]{2,4}|[a-zA-Z]{2,20}(?:\s+[a-zA-Z]{2,20}){0,3})
        '{0,3} (?:\s*\^\s*\{?-1\}?)? (?:_(?:\{[\w\ ,\\]*\}|\w))? '{0,3}\|?
        (?:\s*\([a-zA-Z0-9,\ =\\_{}<>|^]{0,20}\))? )\s*""",
    re.VERBOSE,
)
_MIXED = re.compile(r"(\d+)\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|(\d+)\s+(\d+)\s*/\s*(\d+)")
_NO_MIXED = re.compile(r"(?:[\d.,}^_]|\\[a-zA-Z]+|\\sqrt\s*\[[^\]]*\])\s*\Z")
_APPROXIMATELY = re.compile(r"\\approx(?![a-zA-Z])|≈")
_DECIMAL = re.compile(r"[-+]?\d+(?:\.(?P<places>\d+))?")
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class _Formula:
    """One side of a comparison, as it is handed to math-verify, and what math-verify would skip.

    Attributes:
        body: formula without units and words.
        units: text behind the formula that is a known unit, as written.
        words: other texts, in lower case.
    """

    body: str
    units: str
    words: tuple[str, ...]


def comparisons(gold: str, answer: str) -> list[tuple[str, str]] | None:
    """Return the pairs of formulas that must all be equal for an answer to be the gold, or None if it can't be.

    Args:
        gold: gold with Unicode folded and without formatting around it.
        answer: answer in the same form.

    Raises:
        TooComplex: the answer is too deep or too large to compare.
    """
    _check_size(answer)
    if not _is_balanced(answer):
        return None
    if "=" not in gold and (label := _TEXT_LABEL.match(answer)) and not any(map(is_doubt, label[1].lower().split())):
        answer = answer[label.end() :]
    if (kind := kind_of(gold)) is not None:
        return [] if _plain(gold) == _plain(answer) else pairs_of(kind, kind_of(answer))
    if _bars(gold) > _bars(respelled(answer)):
        return None
    wanted_parts, stated_parts = _APPROXIMATELY.split(gold), _APPROXIMATELY.split(answer)
    if len(wanted_parts) == 2:
        if is_name(wanted_parts[0]):
            return None
        if len(stated_parts) == 2 and not _same_decimals(wanted_parts[1], stated_parts[1]):
            return None
        return comparisons(wanted_parts[0].strip(), stated_parts[0].strip()) if len(stated_parts) <= 2 else None
    if len(stated_parts) == 2 and not _DECIMAL.fullmatch(gold) and _DECIMAL.fullmatch(stated_parts[1].strip()):
        answer = stated_parts[0].strip()
    wanted, stated = _read(gold), _read(answer)
    if wanted is None or stated is None:
        return [(gold, answer)] if squeezed(gold) == squeezed(answer) else None
    if not _is_read_whole(wanted, stated):
        return None
    if _BASED.search(wanted.body) or _BASED.search(stated.body):
        return [] if squeezed(wanted.body) == squeezed(stated.body) else None
    pairs = _sides(*_in_one_notation(wanted.body, stated.body))
    if pairs is None or not all(_same_brackets(left, right) for left, right in pairs):
        return None
    return [(left.replace("°", r"^{\circ}"), right.replace("°", r"^{\circ}")) for left, right in pairs]


def is_name(text: str) -> bool:
    """Return True if a text is the sign of a value, as the left side of `f(2) = 5` is. Words are not."""
    return re.search(r"(?<![a-zA-Z\\])[a-zA-Z]?[a-z]{2}", text) is None and _NAME.fullmatch(respelled(text)) is not None


def names_differ(gold: str, answer: str) -> bool:
    """Return True if both give a value to a function's value, but not to the same: `P(X=4) = 1` and `P(X=3) = 1`."""
    if not ("=" in gold and "=" in answer and "(" in gold and "(" in answer):
        return False
    names = [_name_of(respelled(text).strip()) for text in (gold, answer)]
    return all("(" in name for name in names) and names[0] != names[1]


def _in_one_notation(gold: str, answer: str) -> tuple[str, str]:
    """Return two formulas with their sets in the notation that both can have; see `sets`."""
    gold, answer = condition_of(gold), condition_of(answer)
    if INTERVAL.search(gold) and RELATION.search(answer) and not RELATION.search(gold):
        answer = interval_of(answer) or answer
    elif INTERVAL.search(answer) and RELATION.search(gold) and not RELATION.search(answer):
        gold = interval_of(gold) or gold
    gold, answer = _with_both_signs(gold), _with_both_signs(answer)
    items, others = _items(gold), _items(answer)
    if max(len(items), len(others)) > 1:
        names = {re.sub(r"_\{?\d\}?", "", _name_of(item)) for item in items + others if "=" in item}
        if len(names) == 1 and "" not in names:
            gold, answer = (", ".join(map(_without_name, side)) for side in (items, others))
    return gold, answer


def _with_both_signs(text: str) -> str:
    r"""Return a list with two values for each item that holds a `\pm`."""
    if r"\pm" not in text and r"\mp" not in text:
        return text
    is_set = text.startswith(r"\{") and text.endswith(r"\}")
    items = _items(_without_name(text[2:-2] if is_set else text))
    return ", ".join(value for item in items for value in with_both_signs(item))


def _name_of(item: str) -> str:
    sides = split_outside(item, "=")
    return squeezed(sides[0]) if len(sides) == 2 and _NAME.fullmatch(sides[0]) else ""


def is_same_formula(gold: str, answer: str) -> bool:
    """Return True if two formulas, and not words, differ in their spaces and in the spelling of commands only."""
    return _plain(gold) == _plain(answer) and re.search(r"[\d\\^=+*/(]", gold) is not None


def _plain(text: str) -> str:
    """Return a form that two spellings of a text share."""
    text = re.sub(r"(?<=\d)\s+(?=\d)", "¦", respelled(text))  # "1 8" is not 18
    return squeezed(_TEXT.sub(r" \1 ", text))


def _bars(text: str) -> int:
    """Return the number of absolute values of letters."""
    return len(re.findall(r"\|[^|]*[a-zA-Z][^|]*\|", _COMMAND.sub(" ", text)))


def _same_decimals(gold: str, answer: str) -> bool:
    """Return True if two decimals are roundings of one number."""
    decimals = [_DECIMAL.fullmatch(text.strip()) for text in (gold, answer)]
    if decimals[0] is None or decimals[1] is None:
        return _plain(gold) == _plain(answer)
    coarser = min(len(match["places"] or "") for match in decimals if match)
    return abs(float(decimals[0].group()) - float(decimals[1].group())) <= 0.5000001 * 10**-coarser


def _check_size(text: str) -> None:
    """Raise `TooComplex` if comparing a formula would take very long or overflow the stack."""
    depth = deepest = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH or text.count("{") > 8 * _MAX_DEPTH or _tower(text) > _MAX_POWERS:
        raise TooComplex
    if re.search(rf"\d{{{_MAX_DIGITS + 1}}}", text):
        raise TooComplex
    if re.search(rf"\^\s*\{{?\s*-?(?:\d{{{_MAX_POWER_DIGITS + 1},}}|\d{{3,}}\s*!)|\d{{5,}}\s*!|!\s*!\s*!", text):
        raise TooComplex


def _is_balanced(text: str) -> bool:
    """Return True if every brace is closed, and as many brackets open as close. `[1,2)` is balanced."""
    text = text.replace("\\{", "(").replace("\\}", ")")
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0 and sum(map(text.count, "([")) == sum(map(text.count, ")]"))


def _tower(text: str) -> int:
    """Return the largest number of powers on top of each other, as in `x^{x^x}` and `x^x^x`."""
    highest = run = 0
    heights: list[int] = []  # for each open brace, the powers that lead to its content
    for token in re.findall(r"\^|[{(\[]|[})\]]|[+*/=,<>-]|\\[a-zA-Z]+|\S", text):
        if token == "^":
            run += 1
            highest = max(highest, run)
        elif token in _OPENING:
            heights.append(run)
        elif token in _CLOSING:
            run = heights.pop() if heights else 0
        elif token in "+-*/=,<>" and not heights:
            run = 0
        elif token in "+*/=,<>":
            run = heights[-1]
    return highest


def _read(text: str) -> _Formula | None:
    """Return a formula without its words and units, or None if it holds a mixed number with two meanings."""
    text, measured = _without_unit_texts(respelled(text).strip())
    text, words = _without_texts(text)
    body, units = _without_units(text)
    mixed = _with_sums(body)
    return None if mixed is None else _Formula(mixed.strip(), f"{units} {measured}", words)


def _are_units(words: list[str]) -> bool:
    return all(is_unit(word) or word == "per" for word in words)


def _without_unit_texts(text: str) -> tuple[str, str]:
    r"""Return a formula without the texts at its end that are known units, `\text{ cm}^2`, and those units."""
    units = ""
    while (match := _TEXT_TAIL.search(text)) and match.start():
        if not _are_units(re.findall(r"[^\W\d_]+", match["text"].lower())):
            break
        units = f"{match['text']}{match['power'] or ''} {units}"
        text = text[: match.start()].rstrip(" /")
    return text, units


def _without_texts(text: str) -> tuple[str, tuple[str, ...]]:
    r"""Take the words in `\text{}` and its like out of a formula. Units, connectives and letters stay, bare."""
    words: list[str] = []

    def content(match: re.Match[str]) -> str:
        inner = match[1].strip()
        if re.fullmatch(r"\(?[a-zA-Z]\)?|\W*\d[\d.,\s]*(?:(?:and|or)[\d.,\s]+)*", inner) and "?" not in inner:
            return f" {inner} " if len(inner) > 1 else inner
        lower = inner.lower().strip(" .")
        parts = re.findall(r"[^\W\d_]+|[^\w\s./^*-]", lower)
        if lower in ("and", "or"):
            return match.group()
        if _are_units(parts):
            return f" {inner} "
        if lower in FUNCTIONS:
            return f"\\{lower} "
        words.append(" ".join(lower.split()))
        return " "

    return _TEXT.sub(content, text), tuple(words)


def _without_units(text: str) -> tuple[str, str]:
    """Return a formula without the known units at its end, and those units."""
    text = text.strip()
    body = text.rstrip(".")
    if "°" in body and not FUNCTIONS.isdisjoint(_COMMAND.findall(body)):
        return text, ""  # the argument's unit
    while match := _UNIT_TAIL.search(body):
        word = re.match(r"[a-zA-Z]+", match.group().strip())
        if word and not _are_units([word.group().lower()]):
            break
        start = match.start()
        rest = body[:start].rstrip(" /\\*")
        if word and len(word.group()) == 1 and _letters(rest):
            break  # a letter next to others is one of the formula
        body = rest
        if not body:
            return text, ""
    return body, text[len(body) :]


def _with_sums(text: str) -> str | None:
    r"""Return a formula with `1\frac{1}{2}` as `(1+\frac{1}{2})`, or None for `3\frac{4}{2}`, perhaps a product."""
    pieces: list[str] = []
    end = 0
    for match in _MIXED.finditer(text):
        if _NO_MIXED.search(text[: match.start()]):
            continue
        whole = match[1] or match[6]
        upper, lower = match[2] or match[3] or match[7], match[4] or match[5] or match[8]
        if not 0 < int(upper) < int(lower):
            return None
        pieces += [text[end : match.start()], rf"({whole}+\frac{{{upper}}}{{{lower}}})"]
        end = match.end()
    return "".join([*pieces, text[end:]])


def _is_read_whole(gold: _Formula, answer: _Formula) -> bool:
    """Return True if nothing in the answer is left over that math-verify would skip and the gold does not hold."""
    if Counter(answer.words) - Counter(gold.words) or are_opposed(" ".join(gold.words), " ".join(answer.words)):
        return False
    missing = list((Counter(gold.words) - Counter(answer.words)).elements())
    if any(is_doubt(word) or not word.isalpha() for text in missing for word in text.split()):
        return False
    if units_differ(f"1 {gold.units}", f"1 {answer.units}"):
        return False
    # An angle without a unit is in radians.
    if "deg" in stated_units(f"1 {answer.units}") and "deg" not in stated_units(f"1 {gold.units}"):
        return False
    if any(gold.body.count(mark) != answer.body.count(mark) for mark in (r"\ldots", "°", "?")):
        return False
    commands = Counter(_COMMAND.findall(_ENVIRONMENT.sub(" ", answer.body))) - Counter(_COMMAND.findall(gold.body))
    others = {character for character in set(answer.body) - set(gold.body) if not character.isascii()}
    if not commands.keys() <= _COMMANDS or not others <= _CHARACTERS or re.search("[#@`]", answer.body):
        return False
    letters = set(_letters(gold.body))
    for run in _BARE_RUN.findall(_bare(_without_name(answer.body))):
        is_known = run in gold.body or run.lower() in FUNCTIONS or _CONNECTIVE.match(run)
        if not is_known and (is_doubt(run.lower()) or not set(run.lower()) <= letters):
            return False
    return True


def _bare(text: str) -> str:
    """Return a formula without its commands and texts."""
    return _COMMAND.sub(" ", _TEXT.sub(" ", _ENVIRONMENT.sub(" ", text)))


def _letters(text: str) -> str:
    return "".join(re.findall(r"[a-z]", _bare(text).lower()))


def _without_name(text: str) -> str:
    sides = split_outside(text, "=")
    return " = ".join(sides[1:]) if len(sides) > 1 and _NAME.fullmatch(sides[0]) else text


def split_outside(text: str, separator: str) -> list[str]:
    r"""Split at a separator outside all brackets, but not at the "=" of `<=`, `>=`, `!=` and `\le=`."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character != separator or depth != 0:
            continue
        before, after = text[position - 1 : position], text[position + 1 : position + 2]
        if separator == "=" and (before in ("<", ">", "!", ":") or after in ("<", ">")):
            continue
        parts.append(text[start:position].strip())
        start = position + 1
    return [*parts, text[start:].strip()]


def _items(text: str) -> list[str]:
    """Return the items of a list that is not in brackets, or of several lines of equations."""
    items: list[str] = []
    lines = [line for line in re.split(r"[\n;]", text) if line.strip()]
    for item in split_outside(",".join(lines) if all("=" in line for line in lines) else text, ","):
        items += _CONNECTIVE.split(item)
    return [item.strip() for item in items if item.strip()]


def _connectives(text: str) -> set[str]:
    return {match.group().strip("{}").split("{")[-1].strip().lower() for match in _CONNECTIVE.finditer(text)}


def _sides(gold: str, answer: str) -> list[tuple[str, str]] | None:
    """Return the sides to compare: every side of the answer's equations must equal the gold, but for a name first."""
    gold_items, answer_items = _items(gold), _items(answer)
    if len(gold_items) == 1 and "or" in _connectives(answer) and "or" not in _connectives(gold):
        return None
    is_list = max(len(gold_items), len(answer_items)) > 1
    pairs = _sides_of_lists(gold, answer) if is_list else _sides_of_equations(gold, answer)
    return pairs if pairs is not None and all(left.count("'") == right.count("'") for left, right in pairs) else None


def _sides_of_lists(gold: str, answer: str) -> list[tuple[str, str]] | None:
    gold_items, answer_items = _items(gold), _items(answer)
    if len({*map(squeezed, gold_items)}) < len(gold_items):  # math-verify's sets hold an item once
        return list(zip(gold_items, answer_items, strict=True)) if len(answer_items) == len(gold_items) else None
    joined = [_connectives(gold), _connectives(answer)]
    if RELATION.search(gold) and all(joined) and joined[0] != joined[1]:
        return None
    if all("=" in item for item in gold_items + answer_items):
        # In the order of their left sides, which say what the right sides are.
        gold_items, answer_items = sorted(map(squeezed, gold_items)), sorted(map(squeezed, answer_items))
        pairs = list(map(_sides_of_equations, gold_items, answer_items))
        is_whole = len(gold_items) == len(answer_items) and None not in pairs
        return [pair for found in pairs for pair in found or ()] if is_whole else None
    for sides in (split_outside(item, "=") for item in answer_items):
        if len(sides) > 2 or (
            len(sides) == 2 and not _NAME.fullmatch(sides[0]) and answer.count("=") > gold.count("=")
        ):
            return None
    return [(gold, answer)]


def _sides_of_equations(gold: str, answer: str) -> list[tuple[str, str]] | None:
    wanted, stated = split_outside(gold, "="), split_outside(answer, "=")
    is_named = len(wanted) == 2 and _NAME.fullmatch(wanted[0]) is not None
    same_first = squeezed(wanted[0]) == squeezed(stated[0])
    if len(stated) > _MAX_SIDES:
        return None
    if is_named and same_first and len(stated) > 1:
        wanted, stated = wanted[1:], stated[1:]
    elif len(wanted) == 2 and len(stated) == 1 and (is_named or not _letters(gold)):
        wanted = wanted[1:]  # an equation between numbers states its right side
    elif len(wanted) == 1 and len(stated) > 1 and _NAME.fullmatch(stated[0]) and not same_first:
        if stated[0] in _letters(stated[-1]):  # "x = 2x" says something about x
            return None
        stated = stated[1:]
    if len(wanted) == 1:
        return [(wanted[0], side) for side in stated]
    if len(wanted) == len(stated) and (len(wanted) > 2 or not _letters(gold)):
        return list(zip(wanted, stated, strict=True))
    return None if len(stated) > len(wanted) or len(wanted) == 2 > len(stated) else [(gold, answer)]


def _same_brackets(gold: str, answer: str) -> bool:
    """Return True if both hold the same tuples, intervals and sets. A bare list may be a set."""
    differ = bool(RELATION.search(gold)) != bool(RELATION.search(answer))
    if differ or re.search(r"\\(?:setminus|mathbb)", gold + answer):
        return True  # an inequality and an interval, or a set without brackets
    wanted, stated = _brackets(gold), _brackets(answer)
    if wanted == stated:
        return True
    # A list without brackets is then taken for a set.
    groups = [{(kind or "{}", commas): count for (kind, commas), count in side.items()} for side in (wanted, stated)]
    return groups[0] == groups[1]


def _brackets(text: str) -> Counter[tuple[str, int]]:
    """Count the groups that hold a comma, and all sets, by their two brackets and their number of commas."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if "(" not in text and "\\{" not in text else text
    text = _CONNECTIVE.sub(",", _ENVIRONMENT.sub(" ", text)).replace(";", ",")
    found: Counter[tuple[str, int]] = Counter()
    kinds, commas = [""], [0]  # one entry for each group that is open
    for character in text.replace("\\{", "\x02").replace("\\}", "\x03"):
        if character in "([\x02{":
            kinds.append(character)
            commas.append(0)
        elif character in ")]\x03}" and len(kinds) > 1:
            kind, count = kinds.pop(), commas.pop()
            if (count or kind == "\x02") and kind != "{":
                found["{}" if kind + character == "\x02\x03" else kind + character, count] += 1
        elif character == ",":
            commas[-1] += 1
    if commas[0]:
        found["", commas[0]] += 1
    return found
