"""Questions of an audit: the rows of a dataset, with their golds as texts and the comparison that an audit trusts.

The comparison decides whether a made-up answer equals a gold. It reads numbers exactly, choices by letter and text, and
other answers without case, spaces and marks, so that an answer that a person would accept is never called wrong.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from grpo_rewards.choices import Choices, named_choice, read_choices, read_gold
from grpo_rewards.completions import completion_text, fenced_blocks
from grpo_rewards.math.answers import (
    RIGHT_VERDICTS,
    Number,
    accepted_golds,
    answer_number,
    compare,
    extract_answer,
    gold_answer,
    number_text,
    parse_number,
)
from grpo_rewards.strings import squad_normalised

AnswerForm = Literal["number", "choice", "formula", "text", "object", "program"]
"""Form of a gold, which decides the wrong answers that can be made of it."""

GOLD_COLUMNS = ("answer", "solution", "gold", "label", "target", "ground_truth", "final_answer", "reference", "tests")
"""Usual names of the column with the gold, the most usual first."""

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "input", "query", "text")
CHOICES_COLUMNS = ("choices", "options")

_FORMULA = re.compile(r"\\[a-zA-Z]+|[=^_+*<>]|\d\s*[a-zA-Z]\b|\b[a-zA-Z]\s*[-/(]|^[a-z]$")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LETTERS = "ABCDE"


@dataclass(frozen=True, eq=False)
class Question:
    """Row of a dataset with its golds as texts.

    Attributes:
        number: number of the row in its file, from 1.
        columns: columns of the row.
        prompt: text of the prompt; "" if the row has none.
        golds: accepted answers. The first is the right answer of the audit.
        form: form of the gold.
        choices: choices of the row, for the form `choice`; None for any other.
        label: letter of the right choice, for the form `choice`.
    """

    number: int
    columns: Mapping[str, Any]
    prompt: str
    golds: tuple[str, ...]
    form: AnswerForm
    choices: Choices | None = None
    label: str = ""

    @property
    def gold(self) -> str:
        """Right answer."""
        return self.golds[0]

    def answers(self) -> dict[str, str]:
        """Return the right answer in each way to state it, by the name of the way."""
        if self.choices is None:
            return {"answer": self.gold}
        ways = {"letter": self.label}
        if self.choices.texts:
            ways["text"] = self.choices.texts[self.choices.labels.index(self.label)]
        if self.gold not in ways.values():
            ways["gold"] = self.gold
        return ways

    def options(self, way: str) -> list[str]:
        """Return the wrong choices in one way to state them; none if the row has no choices."""
        if self.choices is None:
            return []
        labels = self.choices.labels if self.choices.texts else tuple(dict.fromkeys(_LETTERS + self.label))
        wrong = [label for label in labels if label != self.label]
        if way == "text" and self.choices.texts:
            return [self.choices.texts[self.choices.labels.index(label)] for label in wrong]
        return [str(labels.index(label)) for label in wrong] if way == "gold" and self.gold.isdigit() else wrong

    @cached_property
    def numbers(self) -> frozenset[Number]:
        """Golds that are numbers."""
        return frozenset(number for gold in self.golds if (number := parse_number(gold)) is not None)

    def is_right(self, answer: str) -> bool:
        """Return True if `answer` states the gold."""
        if answer not in self._known:
            self._known[answer] = self._compared(answer)
        return self._known[answer]

    @cached_property
    def _known(self) -> dict[str, bool]:
        return {}

    def _compared(self, answer: str) -> bool:
        if answer.strip() in self.golds:
            return True
        if self.choices is not None:
            return named_choice(answer, self.choices) == self.label
        if self.numbers:
            return answer_number(answer) in self.numbers
        if _folded(answer) in {_folded(gold) for gold in self.golds}:
            return True
        if self.form == "formula":
            return _is_equal_formula(self.golds, answer)
        normalised = squad_normalised(answer)
        return bool(normalised) and normalised in map(squad_normalised, self.golds)

    def mentions_gold(self, text: str) -> bool:
        """Return True if a number in `text` is a gold, or if `text` states one."""
        if self.is_right(text):
            return True
        return any(parse_number(found) in self.numbers for found in _NUMBER.findall(text)) if self.numbers else False


def _folded(text: str) -> str:
    """Return a text without case, spaces and formatting. Signs, points and operators stay: they change a value."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"[\s,;:!?\"'`$*{}()\[\]]|\.(?!\d)", "", folded)


def _is_equal_formula(golds: Sequence[str], answer: str) -> bool:
    try:
        return compare(list(golds), answer) in RIGHT_VERDICTS
    except ImportError:  # math-verify is not installed
        return False


def question_of(
    number: int,
    columns: Mapping[str, Any],
    gold_column: str,
    solution_column: str | None,
    right_column: str | None = None,
) -> Question | None:
    """Return the question of a row, or None if its gold can't be read.

    Args:
        number: number of the row in its file.
        columns: columns of the row.
        gold_column: name of the column with the gold.
        solution_column: name of the column with a right answer, for a reward whose gold is none, such as tests.
        right_column: name of the column with a right completion or answer, for a reward that verifies.
    """
    prompt = next((prompt_text(columns[name]) for name in PROMPT_COLUMNS if columns.get(name)), "")
    if solution_column is not None:
        solution = columns.get(solution_column)
        return Question(number, columns, prompt, (solution,), "program") if isinstance(solution, str) else None
    if right_column is not None:
        answer = _stated(completion_text(columns.get(right_column)))
        return Question(number, columns, prompt, (answer,), "program") if answer else None
    gold = columns.get(gold_column)
    choice = _choice(columns, gold)
    if choice is not None:
        choices, label = choice
        return Question(number, columns, prompt, (str(gold), label), "choice", choices, label)
    if isinstance(gold, Mapping) and "text" not in gold:
        return Question(number, columns, prompt, (json.dumps(gold, ensure_ascii=False),), "object")
    golds = [text for entry in accepted_golds(gold) if (text := _gold_text(entry))]
    return Question(number, columns, prompt, tuple(golds), _form(golds[0])) if golds else None


def _stated(completion: str) -> str:
    """Return the answer of a right completion: in its last tag, where `extract: auto` looks, in a fence, or all."""
    text = completion.strip()
    if tagged := re.search(r"<(\w+)>([^<]*)</\1>\Z", text):
        return tagged[2].strip()
    fences = fenced_blocks(text)
    return extract_answer(text, "auto") or (fences[-1][1].strip() if fences else text)


def _choice(columns: Mapping[str, Any], gold: Any) -> tuple[Choices, str] | None:
    """Return the choices of a row and the letter of the right one, or None if it is no multiple choice."""
    for name in CHOICES_COLUMNS:
        if columns.get(name):
            choices = read_choices(columns[name])
            label = read_gold(gold, choices) if choices is not None else None
            if choices is not None and label is not None:
                return choices, label
    if isinstance(gold, str) and len(gold.strip()) == 1 and gold.strip() in _LETTERS:
        letters = read_choices(None)
        return (letters, gold.strip()) if letters is not None else None
    return None


def _gold_text(gold: Any) -> str:
    if isinstance(gold, bool) or gold is None:
        return "" if gold is None else str(gold)
    if isinstance(gold, (int, float)):
        return number_text(gold)
    if not isinstance(gold, str):
        return json.dumps(gold, ensure_ascii=False, default=str)
    return gold_answer(gold) or gold.strip()


def _form(gold: str) -> AnswerForm:
    if parse_number(gold) is not None:
        return "number"
    if gold.startswith("{") and gold.endswith("}"):
        try:
            json.loads(gold)
            return "object"
        except ValueError:
            pass
    is_formula = len(gold) <= 200 and _FORMULA.search(gold) and not re.search(r"[^\W\d_]{4,} [^\W\d_]{3,}", gold)
    return "formula" if is_formula else "text"


def prompt_text(prompt: Any) -> str:
    """Return the text of a prompt: a string, or the last message of a conversation."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return completion_text([{**prompt[-1], "role": "assistant"}])
    return ""
