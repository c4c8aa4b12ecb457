"""Columns of a table by their known names, and the forms of single answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_recipes.data.presets import is_missing, label_text, role_and_content
from grpo_recipes.data.tables import listed
from grpo_rewards.errors import UserError
from grpo_rewards.strings import folded

ENOUGH = 0.9
"""Share of the values that must have a form."""

MOST_PARTS = 4
"""Largest number of names in the path of a column."""

MOST_LABELS = 50
"""Largest number of labels that a prompt names."""

_NAMES = {
    "prompt": "prompt",
    "question": "question problem instruction query task statement exercise question_text question_stem",
    "conversation": "messages conversations",
    # Texts to work on. Where the table has a question too, such a column may belong to its prompt.
    "text": "text article document review sentence content body tweet comment",
    # Texts that a question is about. A prompt shows them before the question.
    "context": "context passage paragraph background story article document evidence table tables paragraphs passages "
    "documents facts",
    # Texts that an instruction is applied to. A prompt shows them behind it. Many rows may have none.
    "input": "input starter_code",
    "choices": "choices options",
    "tests": "tests test test_list test_cases testcases unit_tests input_output assertions",
    "answer": "answer answers final_answer expected_answer reference_answer correct_answer gold gold_answer "
    "ground_truth target answerkey answer_key correct",
    "label": "label_text label_name label labels",
    # Labels of a text, or what is read from it. In a table of questions, such a column mostly describes the row.
    "kind": "category class sentiment intent emotion object fields json",
    # Further names of golds in a table that has choices.
    "position": "answer_idx answer_index correct_option correct_choice key",
    "solution": "solution",
    "summary": "summary highlights",
    "output": "output response completion",
    # Columns that hold or explain the solution, which a prompt never shows.
    "held": "solutions canonical_solution code explanation rationale reasoning reasoning_content cot cot_content "
    "thought chain_of_thought proof generations test_setup_code challenge_test_list entry",
    "rating": "score rating reward quality helpfulness correctness",
    "metadata": "id idx index nr uid uuid url source data_source dataset split date year level difficulty meta "
    "metadata info extra extra_info subject topic type lang language author ability domain length task_id name "
    "problem_id prompt_id question_id entry_point title reward_model question_type problem_type src "
    "question_source question_concept",
}
NAMES: Mapping[str, Sequence[str]] = {role: names.split() for role, names in _NAMES.items()}
"""Known names of columns by their role, the preferred name first."""

SINGLE_CHOICE = re.compile(r"(?:(?:option|opt|op|choice|ending|alternative)[ _.-]?)?([a-j]|\d)")
"""Pattern of the names of columns that hold one choice each."""

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

    def has_role(self, *roles: str) -> bool:
        """Return True if the name is a known name of one of the roles."""
        return any(self.key in NAMES[role] for role in roles)

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


def columns_of(values: Mapping[str, Sequence[Any]], path: tuple[str, ...] = ()) -> Iterator[Column]:
    """Yield the columns with some values, and the keys of their objects under dotted paths."""
    for name, column in values.items():
        yield Column((*path, name), column)
        objects = [value for value in column if value is not None]
        if len(path) < MOST_PARTS - 1 and all(isinstance(value, Mapping) for value in objects):
            inner = {}
            for key in dict.fromkeys(key for value in objects for key in value):
                inner[key] = [None if value is None else value.get(key) for value in column]
            yield from columns_of(inner, (*path, name))


def last_turns(conversations: Column) -> list[Column]:
    """Return the last turns of conversations, which reading makes the golds if the first row has an assistant's."""
    turns = []
    for conversation in conversations.values:
        role, content = role_and_content(conversation[-1]) if _is_conversation(conversation) else (None, None)
        turns.append(content if role == "assistant" else None)
    return [] if turns[0] is None else [Column(conversations.path, turns)]


def find(columns: Sequence[Column], name: str, option: str) -> Column:
    """Return the column with a name. Raise `UserError` that names the option if there is none."""
    for column in columns:
        if column.name == name:
            return column
    names = listed(repr(column.name) for column in columns)
    raise UserError(option, f"it names the column {name!r}, and the table has {names}", "choose one of these")


def named(columns: Sequence[Column], *roles: str) -> list[Column]:
    """Return the filled columns of some roles, the preferred names first, without those inside other objects."""
    names = [name for role in roles for name in NAMES[role]]
    found = [column for column in columns if column.key in names and column.filled]
    depth = min((len(column.path) for column in found), default=0)
    return sorted((one for one in found if len(one.path) == depth), key=lambda one: names.index(one.key))


# Forms of single values


def words_in(text: str) -> float:
    """Return the number of words. A character of a script without spaces counts as half a word."""
    return len(text.split()) + len(_WITHOUT_SPACES.findall(text)) / 2


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(role_and_content(turn)[0] is not None for turn in value)


def labels_of(column: Column) -> list[str] | None:
    """Return the labels of a column, sorted, in their most frequent spelling, or None if its values are not labels."""
    labels: dict[str, str] = {}
    for text, _ in Counter(column.texts).most_common():
        labels.setdefault(folded(text), text)
    are_labels = 2 <= len(labels) <= min(MOST_LABELS, len(column.texts) // 2)
    return sorted(labels.values(), key=folded) if are_labels else None
