"""Instructions that a program can check: IFEval's kinds that need no model, under IFEval's names.

Source: Zhou et al., "Instruction-Following Evaluation for Large Language Models" (arXiv 2311.07911), and its checks as
lm-evaluation-harness has them (`tasks/ifeval`). Each kind gives the reference's strict verdict, in linear time; where it
can't or should not, the kind's docstring says what differs. `tests/grpo_rewards/test_instructions.py` compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from grpo_rewards.completions import check_rows, completion_text, needed_column, outside_thinking
from grpo_rewards.reward import BaseReward, Kind, LogColumn, TaggedReward, checked_number
from grpo_rewards.strict_json import parse_json

RULES = ("share", "strict")

_Check = Callable[..., bool]  # of the text and of one keyword argument per key in the row's `kwargs`


@dataclass(frozen=True, kw_only=True)
class Instructions(TaggedReward):
    """How many of its row's instructions a completion follows, as IFEval checks them.

    | the completion | pay |
    |---|---|
    | follows every instruction of its row | 1 (`pay`) |
    | follows some | their share of `pay`; 0 under `rule: strict` |
    | is blank, or follows none | 0 |
    | its row has no instruction, or one that can't be checked | None |

    `share` is IFEval's strict accuracy per instruction, `strict` the one per prompt. What is checked is the completion
    outside its thinking. The columns are those of IFEval's data: `instruction_id_list`, a list of names, and `kwargs`,
    a mapping for each of them, in which null stands for an argument that its kind does not have.

    Every kind of IFEval but `language:response_language`, which needs a model of languages. For the same reason
    `change_case:english_capital` and `change_case:english_lowercase` check the case and not that the text is English,
    and `length_constraints:number_sentences` counts by rule rather than by NLTK's trained tokenizer.

    Args:
        rule: `share` or `strict`.
        ids_column: the dataset column with the names.
        kwargs_column: the dataset column with their arguments.
        tags: the reasoning and the answer tag; only the first is read.
        prefilled: the reasoning tag, if the prompt already opens it.
        prefix: put before the logged column `verdict`, where two rewards log it.
        name: the reward's name in logs.
    """

    kind: ClassVar[Kind] = "correctness"
    gold_forms: ClassVar[str] = "a row holds the names of IFEval's instructions, and a mapping of arguments for each"

    rule: str = "share"
    pay: float = 1.0
    ids_column: str = "instruction_id_list"
    kwargs_column: str = "kwargs"
    name: str = "instructions"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pay", checked_number(self.pay, "pay"))
        if self.rule not in RULES:
            raise ValueError(f"rule must be share or strict, not {self.rule!r}")

    @property
    def highest_pay(self) -> float:
        """The most that a completion can earn."""
        return max(self.pay, 0.0)

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The dataset columns that the reward needs."""
        return self.ids_column, self.kwargs_column

    def with_unit_pay(self) -> BaseReward | None:
        """Return this reward paying 1 or 0, without its name and prefix, or None if no completion earns anything."""
        return replace(self, pay=1.0, prefix="", name=type(self).name) if self.highest_pay > 0 else None

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_extra: LogColumn = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score each completion by the instructions of its row.

        Raises:
            ValueError: one of the two columns is missing, or is not a list with one entry per completion.
        """
        check_rows(self.name, completions=completions)
        names, arguments = (needed_column(self, key, columns, completions) for key in ("ids_column", "kwargs_column"))
        rows = zip(completions, names, arguments, strict=True)
        judged = [self._judge(completion_text(completion), *row) for completion, *row in rows]
        scores = [score for _, score in judged]
        self.log_column(log_extra, "verdict", [verdict for verdict, _ in judged])
        if log_metric is not None and scores:
            followed = [verdict == "follows all" for verdict, score in judged if score is not None]
            log_metric(f"rewards/{self.name}/unscorable", float(len(scores) - len(followed)))
            if followed:
                log_metric(f"rewards/{self.name}/follows_all", sum(followed) / len(followed))
        return scores

    def _judge(self, completion: str, ids: Any, arguments: Any) -> tuple[str, float | None]:
        try:
            instructions = read_instructions(ids, arguments)
        except ValueError as error:
            return str(error), None
        text = outside_thinking(completion, self.tags[0], self.prefilled is not None)
        broken = [instruction.name for instruction in instructions if not instruction.followed_by(text)]
        if not broken:
            return "follows all", self.pay
        share = 1 - len(broken) / len(instructions) if self.rule == "share" else 0.0
        return f"breaks {', '.join(broken)}", self.pay * share


class Instruction(NamedTuple):
    """One instruction with its arguments."""

    name: str
    check: _Check
    arguments: Mapping[str, Any]

    def followed_by(self, text: str) -> bool:
        """Whether `text` follows the instruction. Blank text follows none."""
        return bool(text.strip()) and self.check(text, **self.arguments)


def read_instructions(ids: Any, arguments: Any) -> list[Instruction]:
    """Return the instructions of one row of IFEval's data.

    Args:
        ids: the names.
        arguments: a mapping for each of them.

    Raises:
        ValueError: there is none, or one has an unknown name or lacks an argument; the message says which.
    """
    if not _is_list(ids) or not _is_list(arguments) or len(ids) != len(arguments) or not ids:
        raise ValueError("no list of instructions with as many mappings of arguments")
    return [_read_instruction(name, given) for name, given in zip(ids, arguments, strict=True)]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _read_instruction(name: Any, given: Any) -> Instruction:
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"unknown instruction {name!r}")
    check, readers = KINDS[name]
    given = given if isinstance(given, Mapping) else {}
    arguments = {}
    for key, read in readers.items():
        try:
            arguments[key] = read(given.get(key))
        except ValueError as error:
            raise ValueError(f"{name}: {key} must be {error}, not {given.get(key)!r}") from error
    return Instruction(name, check, arguments)


# --- Arguments: each reader returns the value, or raises ValueError with what it must be. ---


def _count(value: Any) -> int:
    # Data that went through pandas holds 3.0.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value == value // 1:
        return int(value)
    raise ValueError("a whole number")


def _position(value: Any) -> int:
    if (position := _count(value)) > 0:
        return position
    raise ValueError("a positive whole number")


def _relation(value: Any) -> str:
    if value in ("less than", "at least"):
        return value
    raise ValueError("'less than' or 'at least'")


def _phrase(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise ValueError("a string that is not blank")


def _character(value: Any) -> str:
    if isinstance(value, str) and len(value.strip()) == 1:
        return value.strip().lower()
    raise ValueError("one character")


def _phrases(value: Any) -> list[str]:
    if _is_list(value) and value:
        return [_phrase(phrase) for phrase in value]
    raise ValueError("a list of strings")


# --- Kinds: one function each, of the text and the arguments of IFEval's data. ---


def _holds(count: int, relation: str, limit: int) -> bool:
    return count < limit if relation == "less than" else count >= limit


def _occurrences(phrase: str, text: str) -> Iterator[re.Match[str]]:
    return re.finditer(re.escape(phrase), text, re.IGNORECASE)


def existence(text: str, keywords: Sequence[str]) -> bool:
    """Every keyword occurs, in any case, be it inside a longer word."""
    return all(next(_occurrences(keyword, text), None) for keyword in keywords)


def frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs so often, in any case, be it inside a longer word."""
    return _holds(sum(1 for _ in _occurrences(keyword, text)), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs, in any case, as a word of its own."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter, or any other character, occurs so often, in any case."""
    return _holds(text.lower().count(letter), let_relation, let_frequency)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """There are so many sentences; see `count_sentences`."""
    return _holds(count_sentences(text), relation, num_sentences)


_OPENING = "\"'“‘([{*_"
_CLOSING = "\"'”’)]}*_"
_ABBREVIATIONS = """
    mr mrs ms dr prof rev gen col sgt capt lt gov sen rep st mt jr sr inc ltd co corp vs etc e.g i.e eg ie cf al fig no
    vol ed approx dept est a.m p.m u.s u.k u.n jan feb mar apr jun jul aug sep sept oct nov dec
"""
_ABBREVIATED = frozenset(_ABBREVIATIONS.split())


def count_sentences(text: str) -> int:
    """Count sentences: one ends in `!`, `?` or a period before white space, or with the text.

    A period does not end one behind an abbreviation or an initial, nor before a word in lower case.
    """
    words = text.split()
    return sum(_ends_sentence(word, following) for word, following in pairwise(words)) + bool(words)


def _ends_sentence(word: str, following: str) -> bool:
    if not following.strip("\"'”’)]}"):
        return False  # a quotation mark that stands alone
    word = word.rstrip(_CLOSING)
    if word.endswith(("!", "?")):
        return True
    if not word.endswith(".") or following.lstrip(_OPENING)[:1].islower():
        return False
    stem = word.rstrip(".").lstrip(_OPENING)
    initial = len(stem) == 1 and stem.isupper() and stem != "I"
    return not initial and stem.lower() not in _ABBREVIATED


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """There are so many paragraphs, separated by `***`; none but the first and the last piece may be blank."""
    first, *rest = text.split("***")
    *middle, last = rest or [first]
    if not all(piece.strip() for piece in middle):
        return False
    ends = [first, last] if rest else [first]
    return len(middle) + sum(bool(piece.strip()) for piece in ends) == num_paragraphs


def number_words(text: str, num_words: int, relation: str) -> bool:
    """There are so many runs of letters, digits and underscores: "don't" is two."""
    return _holds(len(re.findall(r"\w+", text)), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    r"""There are so many paragraphs, separated by `\n\n`, and the n-th starts with the word, in any case."""
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    # As in the reference, the n-th is counted with blank ones, the total without.
    if count != num_paragraphs or nth_paragraph > count:
        return False
    words = paragraphs[nth_paragraph - 1].split(maxsplit=1)
    if not words:
        return False
    word = re.split("[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    return word.lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """There are at least so many placeholders `[…]`, each within a line."""
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """The marker occurs, in any case, with or without a space in `P.S.` and `P.P.S`.

    The reference takes any other marker for a regular expression, so that `P.S` matches "pass".
    """
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = known.get(postscript_marker) or re.escape(postscript_marker.lower())
    return re.search(pattern, text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """There are exactly so many lines that start with `-`, or with one `*` and not two."""
    count = 0
    lines = iter(text.split("\n"))
    for line in lines:
        line = line.lstrip()
        if line == "*":
            # As in the reference, what follows the asterisk may be the line break; then the next line is this bullet's.
            count += next(lines, None) is not None
        else:
            count += line.startswith("*") and not line.startswith("**")
    return count + sum(line.lstrip().startswith("-") for line in text.split("\n")) == num_bullets


def constrained_response(text: str) -> bool:
    """One of IFEval's three answers occurs."""
    return any(answer in text for answer in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """There are at least so many `*highlights*` that are not blank, each within a line; `**bold**` counts too."""
    single = re.findall(r"\*[^\n*]*\*", text)
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in single + double) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """There are at least so many section marks, such as `Section 1`."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """The whole text is JSON, in a fence or without; read as strictly as `strict_json` does."""
    text = text.strip()
    for marker in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(marker)
    try:
        parse_json(text.removesuffix("```"))
    except ValueError:
        return False
    return True


def title(text: str) -> bool:
    """A line holds a title in double angular brackets."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(text: str) -> bool:
    """There are two different responses, separated by six asterisks."""
    first, *rest = text.split("******")
    *middle, last = rest or [first]
    if not rest or not all(piece.strip() for piece in middle):
        return False
    responses = [piece.strip() for piece in (first, *middle, last) if piece.strip()]
    return len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The text starts with the prompt, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.lower())


def end_checker(text: str, end_phrase: str) -> bool:
    """The text ends with the phrase, in any case, perhaps in double quotation marks."""
    return text.strip().strip('"').lower().endswith(end_phrase.lower())


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """There are so many words in capital letters; see `count_capital_words`."""
    return _holds(count_capital_words(text), capital_relation, capital_frequency)


_APART = re.compile("[«»“”‘’„`;@#$%&?!*\\[\\](){}<>\"\u2012-\u2015]|''|--|\\.{2,}|[:,](?!\\d)|\\.(?=[\\s'])|\\.\\Z")
_CLITIC = re.compile(r"(?<=[^\s'])('[sSmMdD]|'ll|'LL|'re|'RE|'ve|'VE|n't|N'T)(?=\s)")
_JOINED = re.compile(r"\b(CAN)(NOT)\b|\b(GIM|LEM)(ME)\b|\b(GON|WAN)(NA)\b|\b(GOT)(TA)\b")


def count_capital_words(text: str) -> int:
    """Count tokens without a small letter and with a capital one, where NLTK's word tokenizer parts them.

    A hyphen or a slash joins; an apostrophe parts a clitic, so that DON'T is two.
    """
    text = _CLITIC.sub(r" \1", _APART.sub(" ", text) + " ")
    text = _JOINED.sub(lambda match: " ".join(filter(None, match.groups())), text)
    return sum(word.isupper() for word in text.split())


def english_capital(text: str) -> bool:
    """There is no small letter, and a capital one. That the text is English is not checked."""
    return text.isupper()


def english_lowercase(text: str) -> bool:
    """There is no capital letter, and a small one. That the text is English is not checked."""
    return text.islower()


def no_comma(text: str) -> bool:
    """There is no comma."""
    return "," not in text


def quotation(text: str) -> bool:
    """The text is wrapped in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


KINDS: Mapping[str, tuple[_Check, Mapping[str, Callable[[Any], Any]]]] = {
    "keywords:existence": (existence, {"keywords": _phrases}),
    "keywords:frequency": (frequency, {"keyword": _phrase, "frequency": _count, "relation": _relation}),
    "keywords:forbidden_words": (forbidden_words, {"forbidden_words": _phrases}),
    "keywords:letter_frequency": (
        letter_frequency,
        {"letter": _character, "let_frequency": _count, "let_relation": _relation},
    ),
    "length_constraints:number_sentences": (number_sentences, {"num_sentences": _count, "relation": _relation}),
    "length_constraints:number_paragraphs": (number_paragraphs, {"num_paragraphs": _count}),
    "length_constraints:number_words": (number_words, {"num_words": _count, "relation": _relation}),
    "length_constraints:nth_paragraph_first_word": (
        nth_paragraph_first_word,
        {"num_paragraphs": _count, "nth_paragraph": _position, "first_word": _phrase},
    ),
    "detectable_content:number_placeholders": (number_placeholders, {"num_placeholders": _count}),
    "detectable_content:postscript": (postscript, {"postscript_marker": _phrase}),
    "detectable_format:number_bullet_lists": (number_bullet_lists, {"num_bullets": _count}),
    "detectable_format:constrained_response": (constrained_response, {}),
    "detectable_format:number_highlighted_sections": (number_highlighted_sections, {"num_highlights": _count}),
    "detectable_format:multiple_sections": (multiple_sections, {"section_spliter": _phrase, "num_sections": _count}),
    "detectable_format:json_format": (json_format, {}),
    "detectable_format:title": (title, {}),
    "combination:two_responses": (two_responses, {}),
    "combination:repeat_prompt": (repeat_prompt, {"prompt_to_repeat": _phrase}),
    "startend:end_checker": (end_checker, {"end_phrase": _phrase}),
    "startend:quotation": (quotation, {}),
    "change_case:capital_word_frequency": (
        capital_word_frequency,
        {"capital_frequency": _count, "capital_relation": _relation},
    ),
    "change_case:english_capital": (english_capital, {}),
    "change_case:english_lowercase": (english_lowercase, {}),
    "punctuation:no_comma": (no_comma, {}),
}

instructions = Instructions()
