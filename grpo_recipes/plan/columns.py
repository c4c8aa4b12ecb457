"""Columns of a table by their known names, and the forms of single answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from grpo_recipes.data.presets import choices_of, gold_label, gold_object, is_missing, label_text, role_and_content
from grpo_recipes.data.tables import listed
from grpo_rewards.choices import read_choices
from grpo_rewards.errors import UserError
from grpo_rewards.math.answers import extract_answer, parse_number, read_golds
from grpo_rewards.math.decimals import with_point
from grpo_rewards.strict import parse_json
from grpo_rewards.strings import folded

ENOUGH = 0.9
"""Share of the values that must have a form."""

SHORT_WORDS = 5
"""Largest number of words of an answer that counts as a few words."""

MOST_LABELS = 50
"""Largest number of labels that a prompt names."""

PROMPT = "prompt"
CONVERSATIONS = ("messages", "conversations")
QUESTIONS = (
    *("question", "problem", "instruction", "query", "task", "statement", "exercise"),
    *("question_text", "question_stem"),
)
TEXTS = ("text", "article", "document", "review", "sentence", "content", "body", "tweet", "comment")
"""Names of texts to work on. Where the table has a question too, such a column may belong to its prompt."""

CONTEXTS = (
    *("context", "passage", "paragraph", "background", "story", "article", "document", "evidence"),
    *("table", "tables", "paragraphs", "passages", "documents", "facts"),
)
"""Names of what a question is about, which a prompt shows before the question."""

INPUTS = ("input", "starter_code")
"""Names of what an instruction is applied to, which a prompt shows behind it. Many rows may have none."""

TESTS = ("tests", "test", "test_list", "test_cases", "testcases", "unit_tests", "input_output", "assertions")
ANSWERS = (
    *("answer", "answers", "final_answer", "expected_answer", "reference_answer", "correct_answer", "gold"),
    *("gold_answer", "ground_truth", "target", "answerkey", "answer_key", "correct"),
)
LABELS = ("label_text", "label_name", "label", "labels")
KINDS = ("category", "class", "sentiment", "intent", "emotion")
"""Names of labels of a text. In a table of questions, such a column mostly describes the row."""

POSITIONS = ("answer_idx", "answer_index", "correct_option", "correct_choice", "key")
"""Further names of golds in a table that has choices."""

SOLUTIONS = ("solution",)
SUMMARIES = ("summary", "highlights")
OUTPUTS = (*SUMMARIES, "output", "response", "completion")
RATINGS = ("score", "rating", "reward", "quality", "helpfulness", "correctness")
CHOICES = ("choices", "options")
OBJECTS = ("object", "fields", "json", "target")

HELD = (
    *(*SOLUTIONS, *OUTPUTS, *POSITIONS, *TESTS, "solutions", "canonical_solution", "code", "explanation", "rationale"),
    *("reasoning", "reasoning_content", "cot", "cot_content", "thought", "chain_of_thought", "proof", "generations"),
)
"""Names of columns that hold or explain the solution, which a prompt never shows."""

METADATA = (
    *("id", "idx", "index", "nr", "uid", "uuid", "url", "source", "data_source", "dataset", "split", "date", "year"),
    *("level", "difficulty", "meta", "metadata", "info", "extra", "extra_info", "subject", "topic", "type", "lang"),
    *("language", "author", "ability", "domain", "length", "task_id", "problem_id", "prompt_id", "title"),
    *("reward_model", "question_type", "problem_type"),
)
"""Names of columns that describe a row."""

_SINGLE = re.compile(r"(?:(?:option|opt|op|choice|ending|alternative)[ _.-]?)?([a-j]|\d)")
_LATEX = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"(?!sin|cos|tan|log|exp|sqrt|mod|max|min)[^\W\d_]{3,}")
_FORMULA = re.compile(r"[\d\\^_=+/]")
_WITHOUT_SPACES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f]")


@dataclass(frozen=True)
class Column:
    """Column of a table, or a key of the objects in one, with the values of some rows."""

    path: tuple[str, ...]
    values: Sequence[Any]

    @property
    def name(self) -> str:
        """Name as a recipe writes it: the keys of a path, joined by dots."""
        return ".".join(self.path)

    @property
    def key(self) -> str:
        """Last part of the name, in the spelling of the known names."""
        return self.path[-1].strip().lower().replace(" ", "_")

    def is_within(self, other: Column) -> bool:
        """Return True if the values are those of `other`, or a part of them."""
        return self.path[: len(other.path)] == other.path

    @property
    def filled(self) -> list[Any]:
        """Values that are not missing."""
        return [value for value in self.values if not is_missing(value)]

    @property
    def texts(self) -> list[str]:
        """Values as texts, if all of them are texts, numbers or booleans; else []."""
        filled = self.filled
        return list(map(label_text, filled)) if all(isinstance(value, (str, int, float)) for value in filled) else []

    def share(self, has_form: Callable[[Any], bool]) -> float:
        """Return the share of the filled values for which `has_form` is true; 0 if there are none."""
        filled = self.filled
        return sum(map(has_form, filled)) / max(len(filled), 1)

    def is_text(self, words: float) -> bool:
        """Return True if the values are texts that differ and have at least so many words on average."""
        if self.share(lambda value: isinstance(value, str)) < ENOUGH or len(set(self.texts)) < min(2, len(self.values)):
            return False
        return sum(map(words_in, self.texts)) >= words * len(self.texts)

    @property
    def is_messages(self) -> bool:
        """True if the values are conversations."""
        return self.share(_is_conversation) >= ENOUGH


def columns_of(head: datasets.Dataset) -> list[Column]:
    """Return the columns of some rows, and the keys of their objects under dotted paths."""
    columns: list[Column] = []
    for name, values in head[:].items():
        columns += _with_keys((name,), values, depth=3)
    return columns


def _with_keys(path: tuple[str, ...], values: Sequence[Any], depth: int) -> Iterator[Column]:
    yield Column(path, values)
    objects = [value for value in values if value is not None]
    if depth > 0 and all(isinstance(value, Mapping) for value in objects):
        for key in dict.fromkeys(key for value in objects for key in value):
            inner = [None if value is None else value.get(key) for value in values]
            yield from _with_keys((*path, key), inner, depth - 1)


def last_turns(conversations: Column) -> Column | None:
    """Return the last turns of conversations, which reading makes the golds if the first row has an assistant's."""
    turns = list(map(_last_answer, conversations.values))
    return None if turns[0] is None else Column(conversations.path, turns)


def _last_answer(conversation: Any) -> Any:
    role, content = role_and_content(conversation[-1]) if _is_conversation(conversation) else (None, None)
    return content if role == "assistant" else None


def find(columns: Sequence[Column], name: str, option: str) -> Column:
    """Return the column with a name. Raise `UserError` that names the option if there is none."""
    for column in columns:
        if column.name == name:
            return column
    names = listed(repr(column.name) for column in columns)
    raise UserError(f"{option} names the column {name!r}, and the table has {names}: choose one of these")


def named(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """Return the filled columns with a known name, in the order of the names, without those inside other objects."""
    found = [column for column in columns if column.key in names and column.filled]
    depth = min((len(column.path) for column in found), default=0)
    return sorted((one for one in found if len(one.path) == depth), key=lambda one: names.index(one.key))


def find_single_choices(columns: Sequence[Column]) -> dict[str, Column]:
    """Return the columns that hold one choice each by label: `A`, `B`, ..., `option_a`, ..., or `option1`, ...."""
    found = {}
    for column in columns:
        match = _SINGLE.fullmatch(column.key)
        if match is not None and column.texts:
            found[match[1].upper()] = column
    labels = sorted(found)
    following = [chr(ord(labels[0]) + place) for place in range(len(labels))] if labels else []
    return {label: found[label] for label in labels} if len(labels) > 1 and labels == following else {}


def label_of(choices: Any, gold: Any) -> str | None:
    """Return the label of the choice that a gold names, or None."""
    read = read_choices(choices_of(choices)) if choices else None
    return gold_label(gold, read) if read is not None and read.texts else None


def are_positions_certain(choices: Sequence[Any], golds: Sequence[Any]) -> bool:
    """Return False for golds that are numbers, and never 0 or mostly the texts of choices too."""
    count = texts = zeros = 0
    for given, gold in zip(choices, golds, strict=True):
        read = read_choices(choices_of(given)) if given else None
        if read is not None and isinstance(gold, (int, float)) and not read.labels[0].isdecimal():
            count += 1
            zeros += gold == 0
            texts += label_text(gold) in read.texts
    return count == 0 or (zeros > 0 and texts * 2 < count)


# Forms of single values


def words_in(text: str) -> float:
    """Return the number of words. A character of a script without spaces counts as half a word."""
    return len(text.split()) + len(_WITHOUT_SPACES.findall(text)) / 2


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(role_and_content(turn)[0] is not None for turn in value)


def is_tests(value: Any) -> bool:
    """Return True for tests that `unit_tests` reads: assertions, `check`, or inputs and outputs, also as JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError):
            return False
    if isinstance(value, Mapping):
        return {"inputs", "outputs"} <= set(value)
    tests = [value] if isinstance(value, str) else value
    return isinstance(tests, list) and bool(tests) and all(map(_is_test, tests))


def _is_test(test: Any) -> bool:
    if isinstance(test, Mapping):  # with a name of a function, the input holds its arguments
        return {"input", "output"} <= set(test) and not test.get("fn_name")
    return (
        isinstance(test, str) and re.search(r"^(assert\b|def check\(\w+\):)", test.lstrip(), re.MULTILINE) is not None
    )


def asks(value: Any) -> bool:
    """Return True for a text with a question mark."""
    return isinstance(value, str) and re.search("[?？]", value) is not None


def is_letter(value: Any) -> bool:
    """Return True for a letter that can name a choice."""
    return isinstance(value, str) and re.fullmatch(r"\(?[A-J]\)?\.?", value.strip()) is not None


def holds_choices(value: Any) -> bool:
    """Return True for a text that lists choices by their letters."""
    return isinstance(value, str) and all(re.search(rf"(?<!\w){letter}[).:]", value) for letter in "AB")


def are_choices(value: Any) -> bool:
    """Return True for a list of choices, also as text or with their labels."""
    read = read_choices(choices_of(value)) if value else None
    return read is not None and len(read.texts) > 1


def is_worked(value: Any) -> bool:
    """Return True for a solution that ends in `#### N`."""
    return isinstance(value, str) and "####" in value and bool(extract_answer(value, "hashes"))


def is_boxed(value: Any) -> bool:
    r"""Return True for a solution with its answer in `\boxed{}`."""
    return isinstance(value, str) and bool(extract_answer(value, "boxed"))


def is_number(value: Any) -> bool:
    """Return True for a number, or plain text that is one with a decimal point or a decimal comma."""
    if isinstance(value, str):
        return "\\" not in value and (parse_number(value) is not None or parse_number(with_point(value)) is not None)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_formula(value: Any) -> bool:
    """Return True for a formula that is not a plain number, or a list of formulas as JSON."""
    if not isinstance(value, str) or is_number(value):
        return False
    plain = _LATEX.sub(" ", value)
    return _FORMULA.search(value) is not None and _WORD.search(plain) is None and bool(read_golds(value))


def is_object(value: Any) -> bool:
    """Return True for an object or its JSON, except for SQuAD's list of accepted answers."""
    return bool(gold_object(value)) and not _is_squad(value)


def _is_squad(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"text", "answer_start"}


def is_math(value: Any) -> bool:
    """Return True for a number or a formula."""
    return is_number(value) or is_formula(value)


def is_label(value: Any) -> bool:
    """Return True for a value that can be one of several labels."""
    return isinstance(value, (str, int, float))


def is_short(value: Any) -> bool:
    """Return True for a few words, or a list of them."""
    if _is_squad(value):
        value = value["text"]
    if isinstance(value, list):
        return bool(value) and all(map(is_short, value))
    return (
        isinstance(value, (str, int, float))
        and 0 < words_in(str(value)) <= SHORT_WORDS
        and not str(value).startswith(("[", "{"))
    )


def is_prose(value: Any) -> bool:
    """Return True for text that is not JSON."""
    return isinstance(value, str) and not value.lstrip().startswith(("[{", "{"))


def labels_of(column: Column, *, is_asked: bool = True) -> list[str] | None:
    """Return the labels of a column, sorted, in their most frequent spelling, or None if its values are not labels.

    Unless `is_asked`, texts without the name of labels are labels only if they are few and recur often.
    """
    labels: dict[str, str] = {}
    for text, _ in Counter(column.texts).most_common():
        labels.setdefault(folded(text), text)
    is_named = is_asked or column.key in (*LABELS, *KINDS) or all(isinstance(one, bool) for one in column.filled)
    most = min(MOST_LABELS, len(column.texts) // 2) if is_named else min(10, len(column.texts) // 5)
    return sorted(labels.values(), key=folded) if 2 <= len(labels) <= most else None
