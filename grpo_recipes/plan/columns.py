"""Columns of a table, judged by their content: which one is the question, which one the answer, and in what form.

Content decides, so that a table with column names in any language is read. Names only break ties. If two columns are
equally good, `UserError` asks for an option: a recipe with the wrong answers would pay them without a sign.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import datasets

from grpo_recipes.data.presets import (
    choices_of,
    gold_label,
    gold_object,
    is_missing,
    label_text,
    role_and_content,
    single_choices,
)
from grpo_recipes.data.tables import listed
from grpo_rewards.choices import read_choices
from grpo_rewards.errors import UserError
from grpo_rewards.math.answers import extract_answer, parse_number
from grpo_rewards.math.decimals import with_point
from grpo_rewards.strings import folded

ENOUGH = 0.9
"""Share of the answers that must have a form."""

SHORT_WORDS = 5
"""Largest number of words of an answer that counts as a few words."""

MOST_LABELS = 50
"""Largest number of labels that a prompt names."""

_LABEL_CHARACTERS = 60
_DEPTH = 4
"""Number of objects in each other whose keys count as columns."""

# Names that break ties, in common tables and in other languages. The first one that a table has is taken.
PROMPT = "prompt"
QUESTIONS = (
    *("question", "problem", "instruction", "query", "task", "input", "text", "statement", "article", "document"),
    *("frage", "aufgabe", "pregunta", "problema", "enunciado", "question_text", "domanda", "pergunta", "вопрос"),
    *("问题", "題目", "题目", "質問", "질문", "exercice", "énoncé", "enonce", "sentence", "review", "body", "content"),
)
ANSWERS = (
    *("answer", "solution", "final_answer", "expected_answer", "ground_truth", "gold", "target", "reference_answer"),
    *(
        "answers",
        "label",
        "answer_key",
        "answerkey",
        "correct",
        "correct_answer",
        "output",
        "response",
        "result",
        "summary",
    ),
    *("antwort", "lösung", "loesung", "ergebnis", "respuesta", "solución", "solucion", "resultado", "réponse"),
    *(
        "reponse",
        "solution_text",
        "résultat",
        "risposta",
        "resposta",
        "ответ",
        "答案",
        "解答",
        "回答",
        "정답",
        "richtig",
    ),
)
LABELS = ("label", "labels", "class", "category", "sentiment", "intent", "klasse", "kategorie", "categoría", "标签")
"""Names of columns whose numbers are labels, not quantities."""

ABOUT_ROWS = (
    *("id", "idx", "index", "nr", "no", "uid", "uuid", "url", "source", "split", "date", "year", "level", "difficulty"),
    *(
        "meta",
        "metadata",
        "info",
        "extra",
        "subject",
        "topic",
        "type",
        "lang",
        "language",
        "author",
        "stufe",
        "jahr",
        "datum",
        "quelle",
        "nivel",
        "fecha",
    ),
)
"""Names of columns that describe a row and answer nothing."""

CHOICES = (
    "choices",
    "options",
    "choice",
    "option",
    "opciones",
    "optionen",
    "alternatives",
    "antworten",
    "选项",
    "candidates",
)
"""Names of columns with the choices of each row."""

_SINGLE = re.compile(r"(?P<stem>.*?)[ _.-]?(?P<label>[a-z]|\d)")
_IDENTIFIER = re.compile(r"\S*\d\S*")
_MARK = re.compile(r"\d[^\w\s]+ *\d")
_DIGIT = re.compile(r"-?[0-5]")
_TURN_KEYS = ({"role", "content"}, {"from", "value"})  # keys of messages, and of ShareGPT's turns
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}")
_WITHOUT_SPACES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


@dataclass(frozen=True)
class Column:
    """First values of a column, or of a key in objects, which a dotted path names."""

    path: tuple[str, ...]
    values: Sequence[Any]

    @property
    def name(self) -> str:
        """Name of the column, with the keys inside it behind dots, as in a recipe."""
        return ".".join(self.path)

    def is_within(self, other: Column) -> bool:
        """Return True if this is the other column, or a key in its objects."""
        return self.path[: len(other.path)] == other.path

    def read(self, rows: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Return the values in rows given as columns."""
        values = list(rows[self.path[0]])
        for key in self.path[1:]:
            values = [None if value is None else value.get(key) for value in values]
        return values

    @cached_property
    def filled(self) -> list[Any]:
        """Values that are not missing."""
        return [value for value in self.values if not is_missing(value)]

    @cached_property
    def texts(self) -> list[str]:
        """Filled values that are text or numbers, as text."""
        texts = []
        for value in self.filled:
            if isinstance(value, (str, int, float)):
                texts.append(label_text(value))
        return texts

    @cached_property
    def distinct(self) -> int:
        """Number of distinct values."""
        return len(set(map(repr, self.filled)))

    @property
    def key(self) -> str:
        """Last part of the name, in lower case, to compare with known names."""
        return self.path[-1].strip().lower().replace(" ", "_")

    def share(self, has_form: Callable[[Any], bool]) -> float:
        """Return the share of the filled values for which `has_form` is true; 0 if there are none."""
        return self.count(has_form) / max(len(self.filled), 1)

    def count(self, has_form: Callable[[Any], bool]) -> int:
        """Return the number of filled values for which `has_form` is true."""
        return sum(map(has_form, self.filled))

    @property
    def words(self) -> float:
        """Mean number of words of a text. A character of a script without spaces counts as half a word."""
        counts = []
        for text in self.texts:
            counts.append(len(text.split()) + len(_WITHOUT_SPACES.findall(text)) / 2)
        return statistics.fmean(counts) if counts else 0.0

    @property
    def is_text(self) -> bool:
        """True if the values are texts of several words, most of them different."""
        is_string = self.share(lambda value: isinstance(value, str)) >= ENOUGH
        return is_string and self.words >= 3 and self.distinct * 2 > len(self.filled)

    @property
    def is_messages(self) -> bool:
        """True if the values are conversations: lists of messages with a role and text."""
        return self.share(_is_conversation) >= ENOUGH

    @property
    def parts(self) -> tuple[Column, ...]:
        """Columns of the table in which the values are."""
        return (self,)

    @property
    def is_about_rows(self) -> bool:
        """True if the values describe a row and answer nothing: counters, identifiers, dates, constants."""
        filled = self.filled
        if self.key in ABOUT_ROWS or not filled:
            return True
        if len(self.values) > 2 and self.distinct == 1:
            return True
        if all(type(value) is int for value in filled):
            steps = {after - before for before, after in pairwise(filled)}
            return len(filled) > 2 and len(steps) == 1
        texts = [value for value in filled if isinstance(value, str)]
        if len(texts) < len(filled):
            return False
        if all(map(_DATE.fullmatch, texts)) or all(text.startswith(("http://", "https://")) for text in texts):
            return True
        is_identifier = all(_IDENTIFIER.fullmatch(text) and parse_number(text) is None for text in texts)
        return is_identifier and self.distinct == len(texts)


@dataclass(frozen=True)
class LastTurns(Column):
    """Last turns of the conversations of a column, which reading makes the golds if they are the assistant's."""

    @property
    def name(self) -> str:
        """Name of the column and the place in it, for messages."""
        return f"{super().name}, last turn"

    def read(self, rows: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Return the texts of the assistant's last turns in rows given as columns, None where it has none."""
        return list(map(_last_answer, super().read(rows)))


def last_turns(conversations: Column) -> LastTurns | None:
    """Return the last turns of conversations if the first of them ends with the assistant's, else None."""
    if not conversations.is_messages or _last_answer(conversations.values[0]) is None:
        return None
    return LastTurns(conversations.path, list(map(_last_answer, conversations.values)))


@dataclass(frozen=True)
class SingleChoices(Column):
    """Columns that hold one choice each, as one column of mappings from labels to texts.

    Attributes:
        by_label: Column by the label of its choice.
    """

    by_label: Mapping[str, Column]

    @property
    def name(self) -> str:
        """Names of the columns, for messages."""
        return listed(column.name for column in self.by_label.values())

    @property
    def parts(self) -> tuple[Column, ...]:
        """Columns of the single choices."""
        return tuple(self.by_label.values())


def find_single_choices(columns: Sequence[Column]) -> list[SingleChoices]:
    """Return the groups of columns that hold one choice each: `A`, `B`, ..., `option_a`, ..., or `option1`, ...."""
    groups: dict[tuple[Any, ...], dict[str, Column]] = {}
    for column in columns:
        match = _SINGLE.fullmatch(column.key)
        if match is not None and column.filled and len(column.texts) == len(column.filled):
            label = match["label"].upper()
            groups.setdefault((column.path[:-1], match["stem"], label.isdigit()), {})[label] = column
    found = []
    for group in groups.values():
        labels = sorted(group)
        first = labels[0]
        following = [chr(ord(first) + place) for place in range(len(labels))]
        if len(labels) > 1 and labels == following and first in ("A", "0", "1"):
            rows = zip(*(group[label].values for label in labels), strict=True)
            values = [single_choices(dict(zip(labels, row, strict=True))) for row in rows]
            found.append(SingleChoices(group[first].path, values, {label: group[label] for label in labels}))
    return found


def brings_system_prompts(column: Column) -> bool:
    """Return True if one of the values is a text, or a conversation that begins with a system prompt."""
    return any(not _is_conversation(value) or role_and_content(value[0])[0] == "system" for value in column.filled)


def _last_answer(conversation: Any) -> Any:
    if not _is_conversation(conversation):
        return None
    role, content = role_and_content(conversation[-1])
    return content if role == "assistant" else None


def columns_of(head: datasets.Dataset) -> list[Column]:
    """Return the columns of the first rows of a table, and the keys of their objects under dotted paths."""
    rows = head[:]
    columns: list[Column] = []
    for name in head.column_names:
        columns += _with_keys((name,), rows[name], _DEPTH)
    return columns


def _with_keys(path: tuple[str, ...], values: Sequence[Any], depth: int) -> Iterator[Column]:
    yield Column(path, values)
    keys: dict[str, None] = {}
    for value in values:
        if not isinstance(value, Mapping):
            if value is not None:
                return
            continue
        keys |= dict.fromkeys(value)
    if depth > 0:
        for key in keys:
            inner = [None if value is None else value.get(key) for value in values]
            yield from _with_keys((*path, key), inner, depth - 1)


# Forms of single answers


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, Mapping) and any(keys <= set(turn) for keys in _TURN_KEYS) for turn in value)


def is_assertions(value: Any) -> bool:
    """Return True for tests of a program: assertions, HumanEval's `check`, or inputs and outputs, also as text."""
    if isinstance(value, str):
        is_pairs = value.lstrip().startswith("[{") and '"input"' in value and '"output"' in value
        is_inputs = value.lstrip().startswith("{") and '"inputs"' in value and '"outputs"' in value
        is_check = re.search(r"^def check\(\w+\):$", value, re.MULTILINE) is not None
        return is_pairs or is_inputs or is_check or re.match(r"\s*(\[\s*[\"'])?assert\b", value) is not None
    if isinstance(value, Mapping):
        return {"inputs", "outputs"} <= set(value)
    if not isinstance(value, list) or not value:
        return False
    return all(_is_test(test) for test in value)


def _is_test(test: Any) -> bool:
    if isinstance(test, Mapping):
        return {"input", "output"} <= set(test)
    return isinstance(test, str) and test.lstrip().startswith("assert")


def is_worked(value: Any) -> bool:
    """Return True for a solution that ends in `#### N`."""
    return isinstance(value, str) and "####" in value and bool(extract_answer(value, "hashes"))


def is_boxed(value: Any) -> bool:
    r"""Return True for a solution with its answer in `\boxed{}`."""
    return isinstance(value, str) and bool(extract_answer(value, "boxed"))


def is_object(value: Any) -> bool:
    """Return True for an object, or its JSON, except for SQuAD's list of accepted answers."""
    return not _is_squad(value) and bool(gold_object(value))


def _is_squad(value: Any) -> bool:
    return isinstance(value, Mapping) and {"text", "answer_start"} <= set(value)


def is_number(value: Any) -> bool:
    """Return True for a number, or text that is one with a decimal point or a decimal comma."""
    if isinstance(value, bool):
        return False
    if isinstance(value, (int, float)):
        return True
    if not isinstance(value, str):
        return False
    return parse_number(value) is not None or parse_number(with_point(value)) is not None


def is_short(value: Any) -> bool:
    """Return True for a few words, or a list of them."""
    if _is_squad(value):
        return is_short(value["text"])
    if isinstance(value, list):
        return bool(value) and all(map(is_short, value))
    return isinstance(value, (str, int, float)) and 0 < len(str(value).split()) <= SHORT_WORDS


def has_marks(value: Any) -> bool:
    """Return True for a text, or a list with one, that has punctuation between digits (`(1,2)`, `2024-01-02`)."""
    if isinstance(value, list):
        return any(map(has_marks, value))
    return isinstance(value, str) and _MARK.search(value) is not None


def is_prose(value: Any) -> bool:
    """Return True for text."""
    return isinstance(value, str)


# Roles of columns


def labels_of(column: Column) -> list[str] | None:
    """Return the labels of a column, sorted, in their most frequent spelling, or None if its values are no labels."""
    spellings = Counter(column.texts)
    labels: dict[str, str] = {}
    for text, _ in spellings.most_common():
        if len(text) > _LABEL_CHARACTERS or len(text.split()) > SHORT_WORDS:
            return None
        labels.setdefault(folded(text), text)
    rare = len(column.texts) < 2 * len(labels)
    if rare or not 2 <= len(labels) <= MOST_LABELS or len(column.texts) < len(column.filled):
        return None
    return sorted(labels.values(), key=folded)


def are_labels(column: Column) -> bool:
    """Return True if the values are labels. Numbers are labels only if the name says so, or if they are few digits."""
    labels = labels_of(column)
    if labels is None:
        return False
    if column.key in LABELS or not any(map(is_number, labels)):
        return True
    # Few amounts that recur (`1.200 €`) are still amounts, whose decimal mark has to be read.
    return all(_DIGIT.fullmatch(label) for label in labels) and len(column.texts) >= 10 * len(labels)


def find(columns: Sequence[Column], name: str, option: str) -> Column:
    """Return the column with a name. Raise `UserError` that names the option if there is none."""
    for column in columns:
        if column.name == name:
            return column
    names = listed(repr(column.name) for column in columns)
    raise UserError(f"{option} names the column {name!r}, and the table has {names}: choose one of these")


def known_first(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """Return the columns that have one of the known names, in the order of these names."""
    found = [column for column in columns if column.key in names]
    return sorted(found, key=lambda column: names.index(column.key))


def find_question(columns: Sequence[Column]) -> tuple[Column, str]:
    """Return the column with the prompt or the question, and the reason.

    Raises:
        UserError: No column is text, or two are equally good.
    """
    for column in columns:
        if column.key == PROMPT and (column.is_messages or column.share(is_prose) >= ENOUGH):
            return column, "complete prompts"
    messages = [column for column in columns if column.is_messages]
    if len(messages) == 1:
        return messages[0], "conversations"
    for column in known_first(columns, QUESTIONS):
        if column.share(is_prose) >= ENOUGH and column.words >= 2:
            return column, "by its name"
    texts = [column for column in columns if column.is_text]
    texts = [column for column in texts if column.key not in ANSWERS] or texts
    if not texts:
        names = listed(repr(column.name) for column in columns)
        raise UserError(f"none of the columns {names} looks like a question: name one with `--question COLUMN`")
    if len(texts) > 1:
        names = " and ".join(repr(column.name) for column in texts[:3])
        raise UserError(
            f"the columns {names} could each be the question: name one with `--question COLUMN`, and the answer with "
            "`--answer COLUMN`"
        )
    return texts[0], "the only text"


def find_choices(columns: Sequence[Column]) -> list[Column]:
    """Return the columns with lists of choices, and the groups of columns with one choice each."""
    found: list[Column] = []
    for column in columns:
        if column.share(_are_choices) >= ENOUGH:
            found.append(column)
    return [*found, *find_single_choices(columns)]


def _are_choices(value: Any) -> bool:
    if isinstance(value, Mapping) and set(value) != {"text", "label"}:
        return False
    known = read_choices(choices_of(value))
    return known is not None and len(known.texts) >= 2


def is_gold(choices: Any, gold: Any) -> bool:
    """Return True if a gold names one of the choices."""
    known = read_choices(choices_of(choices))
    if known is None or not known.texts:
        return False
    return gold_label(gold, known) is not None


def golds_among(choices: Column, gold: Column) -> int:
    """Return the number of rows whose gold names one of their choices."""
    return sum(map(is_gold, choices.values, gold.values))


def are_positions_certain(choices: Column, gold: Column) -> bool:
    """Return False for golds that are numbers, and in most rows both the position and the text of a choice."""
    texts = 0
    for given, one in zip(choices.values, gold.values, strict=True):
        if isinstance(one, (int, float)) and is_gold(given, one):
            known = read_choices(choices_of(given))
            if known is not None and not known.labels[0].isdecimal():
                texts += label_text(one) in known.texts
    return texts * 2 < len(gold.filled)


def are_choices_weak(choices: Column, gold: Column) -> bool:
    """Return True for text with `|` and golds that are numbers, which may be anything else than choices."""
    is_text = choices.share(is_prose) > 0
    return is_text and choices.key not in CHOICES and gold.share(is_number) >= ENOUGH
