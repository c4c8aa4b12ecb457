"""A reward for instructions that a program can check: IFEval's kinds that need no model, under IFEval's names.

| the completion | pay |
|---|---|
| follows every instruction of its row | 1 (`pay`) |
| follows some | their share of `pay`; 0 under `rule: strict` |
| is blank, or follows none | 0 |
| its row has no instruction, or one that can't be checked | None |

Source: Zhou et al., "Instruction-Following Evaluation for Large Language Models" (arXiv 2311.07911), with the checks of
lm-evaluation-harness (`tasks/ifeval`). Each kind gives the strict verdict of that reference, in linear time. The
docstring of a kind names any difference. `tests/grpo_rewards/test_instructions.py` compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

from grpo_rewards.completions import completion_text, needed_column
from grpo_rewards.reward import Kind, Scored, TaggedReward, check_choice
from grpo_rewards.strict import parse_json
from grpo_rewards.vocabulary import words_of

InstructionCheck = Callable[..., bool]
"""Function of a text and, by keyword, the arguments of an instruction. It returns True if the text follows it."""


@dataclass(frozen=True, kw_only=True)
class Instructions(TaggedReward):
    """Share of its row's instructions that a completion follows, as IFEval checks them.

    | the completion | pay |
    |---|---|
    | follows every instruction of its row | 1 (`pay`) |
    | follows some | their share of `pay`; 0 under `rule: strict` |
    | is blank, or follows none | 0 |
    | its row has no instruction, or one that can't be checked | None |

    `share` is IFEval's strict accuracy per instruction, `strict` its accuracy per prompt. The completion is checked
    outside its thinking. The columns are those of IFEval's data: `instruction_id_list`, a list of names, and `kwargs`,
    a mapping of arguments for each name, in which null stands for an argument that the kind does not have.

    The kind `language:response_language` is missing, because it needs a model of languages. For the same reason
    `change_case:english_capital` and `change_case:english_lowercase` check the case but not that the text is English,
    and `length_constraints:number_sentences` counts by rule instead of by NLTK's trained tokenizer.

    Args:
        rule: `share` or `strict`.
        pay: score for following every instruction.
        ids_column: name of the dataset column with the names.
        kwargs_column: name of the dataset column with their arguments.
        tags: names of the reasoning tag and the answer tag; only the first is read.
        prefilled: name of the reasoning tag if the prompt already opens it.
        prefix: prefix of the logged column `verdict`, for runs in which two rewards log it.
        name: name of the reward in logs.
    """

    kind: ClassVar[Kind] = "correctness"
    payments: ClassVar[tuple[str, ...]] = ("pay",)
    gold_forms: ClassVar[str] = "a row holds the names of IFEval's instructions, and a mapping of arguments for each"

    rule: str = "share"
    pay: float = 1.0
    ids_column: str = "instruction_id_list"
    kwargs_column: str = "kwargs"
    prefix: str = ""
    name: str = "instructions"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.rule, "rule", ("share", "strict"))

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Names of the two dataset columns that the reward needs."""
        return self.ids_column, self.kwargs_column

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        names = needed_column(self, "ids_column", columns, completions)
        arguments = needed_column(self, "kwargs_column", columns, completions)
        judged = list(map(self._judge, completions, names, arguments))
        verdicts, scores = [verdict for verdict, _ in judged], [score for _, score in judged]
        unscorable = scores.count(None)
        metrics = {"unscorable": float(unscorable)}
        if unscorable < len(scores):
            metrics["follows_all"] = verdicts.count("follows all") / (len(scores) - unscorable)
        return Scored(scores, {"verdict": verdicts}, metrics)

    def _judge(self, completion: Any, names: Any, arguments: Any) -> tuple[str, float | None]:
        try:
            instructions = read_instructions(names, arguments)
        except ValueError as error:
            return str(error), None
        text = self._outside_thinking(completion_text(completion))
        # A blank text follows no instruction, not even "no commas".
        broken = [name for name, follows in instructions if not text.strip() or not follows(text)]
        if not broken:
            return "follows all", self.pay
        share = 1 - len(broken) / len(instructions) if self.rule == "share" else 0.0
        return f"breaks {', '.join(broken)}", self.pay * share


def read_instructions(names: Any, arguments: Any) -> list[tuple[str, InstructionCheck]]:
    """Return the instructions of one row of IFEval's data, each as its name and a check of the text alone.

    Args:
        names: list of names.
        arguments: list with a mapping of arguments for each name.

    Raises:
        ValueError: the row has no instruction, or one with an unknown name or a bad argument. The message names it.
    """
    if not _is_list(names) or not _is_list(arguments) or len(names) != len(arguments) or not names:
        raise ValueError("no list of instructions with as many mappings of arguments")
    instructions: list[tuple[str, InstructionCheck]] = []
    for name, given in zip(names, arguments, strict=True):
        if not isinstance(name, str) or name not in KINDS:
            raise ValueError(f"unknown instruction {name!r}")
        check, readers = KINDS[name]
        given = given if isinstance(given, Mapping) else {}
        read = {}
        for key, reader in readers.items():
            read[key] = reader(given.get(key))
            if read[key] is None:
                raise ValueError(f"{name}: {key} must be {_FORMS[reader]}, not {given.get(key)!r}")
        instructions.append((name, partial(check, **read)))
    return instructions


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


# --- Arguments: each reader returns the value, or None for a value without the form in _FORMS. ---


def _count(value: Any) -> int | None:
    # Data that went through pandas holds 3.0.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and value >= 0 and value == value // 1 else None


def _position(value: Any) -> int | None:
    return _count(value) or None


def _relation(value: Any) -> str | None:
    return value if value in ("less than", "at least") else None


def _phrase(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _character(value: Any) -> str | None:
    character = _phrase(value) or ""
    return character.lower() if len(character) == 1 else None


def _phrases(value: Any) -> list[str] | None:
    phrases = [phrase for item in value if (phrase := _phrase(item))] if _is_list(value) else []
    return phrases if phrases and len(phrases) == len(value) else None


_FORMS: Mapping[Callable[[Any], Any], str] = {
    _count: "a whole number",
    _position: "a positive whole number",
    _relation: "'less than' or 'at least'",
    _phrase: "a string that is not blank",
    _character: "one character",
    _phrases: "a list of strings that are not blank",
}


# --- Kinds: one function each, of the text and the arguments of IFEval's data. ---

KINDS: dict[str, tuple[InstructionCheck, Mapping[str, Callable[[Any], Any]]]] = {}
"""Checks and the readers of their arguments, by IFEval's name of the kind."""


def _kind(name: str, **readers: Callable[[Any], Any]) -> Callable[[InstructionCheck], InstructionCheck]:
    """Return a decorator that registers a check under IFEval's name, with one reader per argument."""

    def register(check: InstructionCheck) -> InstructionCheck:
        KINDS[name] = check, readers
        return check

    return register


def _holds(count: int, relation: str, limit: int) -> bool:
    return count < limit if relation == "less than" else count >= limit


def _occurrences(phrase: str, text: str) -> Iterator[re.Match[str]]:
    return re.finditer(re.escape(phrase), text, re.IGNORECASE)


@_kind("keywords:existence", keywords=_phrases)
def _existence(text: str, keywords: Sequence[str]) -> bool:
    """Return True if every keyword occurs, in any case, also inside a longer word."""
    return all(next(_occurrences(keyword, text), None) for keyword in keywords)


@_kind("keywords:frequency", keyword=_phrase, frequency=_count, relation=_relation)
def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """Return True if the keyword occurs that often, in any case, also inside longer words."""
    return _holds(len(list(_occurrences(keyword, text))), relation, frequency)


@_kind("keywords:forbidden_words", forbidden_words=_phrases)
def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """Return True if none of the words occurs, in any case, as a word of its own."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


@_kind("keywords:letter_frequency", letter=_character, let_frequency=_count, let_relation=_relation)
def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return True if the letter, or any other character, occurs that often, in any case."""
    return _holds(text.lower().count(letter), let_relation, let_frequency)


@_kind("length_constraints:number_sentences", num_sentences=_count, relation=_relation)
def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Return True if there are that many sentences by `count_sentences`. The reference uses NLTK's tokenizer."""
    return _holds(count_sentences(text), relation, num_sentences)


_OPENING = "\"'“‘([{*_"
_CLOSING = "\"'”’)]}*_"
_ABBREVIATED = words_of("ifeval.abbreviations")


def count_sentences(text: str) -> int:
    """Return the number of sentences: one ends with the text, or in `!`, `?` or a period before white space.

    A period behind an abbreviation or an initial, or before a word in lower case, does not end a sentence. A closing
    mark that stands alone belongs to the sentence before it, as in NLTK.
    """
    words = [word for word in text.split() if word.strip("\"'”’)]}")]
    return sum(_ends_sentence(word, following) for word, following in pairwise(words)) + bool(text.strip())


def _ends_sentence(word: str, following: str) -> bool:
    word = word.rstrip(_CLOSING)
    if word.endswith(("!", "?")):
        return True
    if not word.endswith(".") or following.lstrip(_OPENING)[:1].islower():
        return False
    stem = word.rstrip(".").lstrip(_OPENING)
    initial = len(stem) == 1 and stem.isupper() and stem != "I"
    return not initial and stem.lower() not in _ABBREVIATED


@_kind("length_constraints:number_paragraphs", num_paragraphs=_count)
def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Return True if there are that many paragraphs, separated by `***`. Only the first and last piece may be blank."""
    pieces = _pieces(text, "***")
    return pieces is not None and len(pieces) == num_paragraphs


def _pieces(text: str, separator: str) -> list[str] | None:
    """Return the stripped pieces of a text without a blank first or last one, or None if another one is blank."""
    pieces = [piece.strip() for piece in text.split(separator)]
    return list(filter(None, pieces)) if all(pieces[1:-1]) else None


@_kind("length_constraints:number_words", num_words=_count, relation=_relation)
def _number_words(text: str, num_words: int, relation: str) -> bool:
    """Return True if there are that many runs of letters, digits and underscores: "don't" is two."""
    return _holds(len(re.findall(r"\w+", text)), relation, num_words)


@_kind(
    "length_constraints:nth_paragraph_first_word", num_paragraphs=_count, nth_paragraph=_position, first_word=_phrase
)
def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    r"""Return True if there are that many paragraphs, separated by `\n\n`, and the n-th starts with the word.

    Case does not count.
    """
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    count = len(list(filter(None, paragraphs)))
    # As in the reference, the n-th is counted with blank ones, the total without.
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1]:
        return False
    first = paragraphs[nth_paragraph - 1].split(maxsplit=1)[0]
    word = re.split("[.,?!'\"]", first.lstrip("'").lstrip('"'), maxsplit=1)[0]
    return word.lower() == first_word.lower()


@_kind("detectable_content:number_placeholders", num_placeholders=_count)
def _number_placeholders(text: str, num_placeholders: int) -> bool:
    """Return True if there are at least that many placeholders `[…]`, each within a line."""
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count >= num_placeholders


@_kind("detectable_content:postscript", postscript_marker=_phrase)
def _postscript(text: str, postscript_marker: str) -> bool:
    """Return True if the marker occurs, in any case, with or without a space in `P.S.` and `P.P.S`.

    The reference takes any other marker for a regular expression, so that `P.S` matches "pass".
    """
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = known.get(postscript_marker) or re.escape(postscript_marker.lower())
    return re.search(pattern, text.lower()) is not None


@_kind("detectable_format:number_bullet_lists", num_bullets=_count)
def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Return True if exactly that many lines start with `-`, or with one `*` and not two."""
    stripped = [line.lstrip() for line in text.split("\n")]
    count = sum(line.startswith("-") for line in stripped)
    lines = iter(stripped)
    for line in lines:
        if line == "*":
            # As in the reference, the line break may follow the asterisk; then the next line is this bullet's.
            count += next(lines, None) is not None
        else:
            count += line.startswith("*") and not line.startswith("**")
    return count == num_bullets


@_kind("detectable_format:constrained_response")
def _constrained_response(text: str) -> bool:
    """Return True if one of IFEval's three answers occurs."""
    return any(answer in text for answer in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


@_kind("detectable_format:number_highlighted_sections", num_highlights=_count)
def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Return True if there are at least that many `*highlights*` that are not blank, each within a line.

    `**bold**` counts too.
    """
    found = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in found) >= num_highlights


@_kind("detectable_format:multiple_sections", section_spliter=_phrase, num_sections=_count)
def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Return True if there are at least that many section marks, such as `Section 1`."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


@_kind("detectable_format:json_format")
def _json_format(text: str) -> bool:
    """Return True if the text, or the fence that it consists of, is JSON, read as strictly as by `json_schema`."""
    text = text.strip()
    for marker in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(marker)
    try:
        parse_json(text.removesuffix("```"))
    except ValueError:
        return False
    return True


@_kind("detectable_format:title")
def _title(text: str) -> bool:
    """Return True if a line holds a title in double angular brackets."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


@_kind("combination:two_responses")
def _two_responses(text: str) -> bool:
    """Return True if there are two different responses, separated by six asterisks."""
    responses = _pieces(text, "******") or []
    return len(responses) == 2 and responses[0] != responses[1]


@_kind("combination:repeat_prompt", prompt_to_repeat=_phrase)
def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """Return True if the text starts with the prompt, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.lower())


@_kind("startend:end_checker", end_phrase=_phrase)
def _end_checker(text: str, end_phrase: str) -> bool:
    """Return True if the text ends with the phrase, in any case, perhaps in double quotation marks."""
    return text.strip().strip('"').lower().endswith(end_phrase.lower())


@_kind("change_case:capital_word_frequency", capital_frequency=_count, capital_relation=_relation)
def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Return True if there are that many words in capital letters by `count_capital_words`."""
    return _holds(count_capital_words(text), capital_relation, capital_frequency)


_APART = re.compile("[«»“”‘’„`;@#$%&?!*\\[\\](){}<>\"\u2012-\u2015]|''|--|\\.{2,}|[:,](?!\\d)|\\.(?=[\\s'])|\\.\\Z")
_CLITIC = re.compile(r"(?<=[^\s'])('[sSmMdD]|'ll|'LL|'re|'RE|'ve|'VE|n't|N'T)(?=\s)")
_JOINED = re.compile(r"\b(CAN)(NOT)\b|\b(GIM|LEM)(ME)\b|\b(GON|WAN)(NA)\b|\b(GOT)(TA)\b")


def count_capital_words(text: str) -> int:
    """Return the number of tokens with a capital letter and without a small one, split as by NLTK's word tokenizer.

    Words joined by a hyphen or a slash are one token. An apostrophe splits off a clitic, so that DON'T is two.
    """
    text = _CLITIC.sub(r" \1", _APART.sub(" ", text) + " ")
    text = _JOINED.sub(lambda match: " ".join(filter(None, match.groups())), text)
    return sum(map(str.isupper, text.split()))


@_kind("change_case:english_capital")
def _english_capital(text: str) -> bool:
    """Return True if there is a capital letter and no small one. Unlike the reference, this takes any language."""
    return text.isupper()


@_kind("change_case:english_lowercase")
def _english_lowercase(text: str) -> bool:
    """Return True if there is a small letter and no capital one. Unlike the reference, this takes any language."""
    return text.islower()


@_kind("punctuation:no_comma")
def _no_comma(text: str) -> bool:
    """Return True if there is no comma."""
    return "," not in text


@_kind("startend:quotation")
def _quotation(text: str) -> bool:
    """Return True if the text is wrapped in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


instructions = Instructions()
