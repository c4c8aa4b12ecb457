"""Presets: how rows of a known form are read, and the word problems of `arithmetic`, which need no network.

`name: gsm8k` is short for the columns and the reader of its entry in `PRESETS`, and for a system prompt
(`DatasetSpec.SYSTEM_PROMPTS`). A preset reads no file: sources, splits and templates do not depend on it.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_recipes.data.tables import shown
from grpo_recipes.recipe.specs import DatasetName
from grpo_rewards.choices import read_choices, read_gold
from grpo_rewards.errors import UserError
from grpo_rewards.math.answers import extract_answer

RLAIF_PLACEHOLDER = "空"
"""Text ("empty") that MiniMind's RLAIF files have where the assistant's last turn is to be generated."""

Message = dict[str, Any]
Turns = list[Message] | str
"""Turns that lead to the completion, or the text of a prompt that is no conversation."""
Read = Callable[[Mapping[str, Any], str], tuple[Turns, dict[str, Any]]]
"""Function from a row's parts and its position (for errors) to the turns and the text columns made of the row."""


@dataclass(frozen=True)
class Preset:
    """Reader of rows of a known form.

    Attributes:
        columns: possible names of the column for each part of a row. The first name that the table has is read.
        read: reader of one row. Its parts have the keys of `columns`.
        keeps: columns that are read and also stay in the row for rewards.
        hub_id: repository of the table on the hub, or None if the preset has no home there.
        hub_config: configuration of the table on the hub.
    """

    columns: Mapping[str, tuple[str, ...]]
    read: Read
    keeps: tuple[str, ...] = ()
    hub_id: str | None = None
    hub_config: str | None = None


def text_of(row: Mapping[str, Any], part: str, where: str) -> str:
    """Return the text of a part, stripped. Raise `UserError` for a value that is empty or not text."""
    value = row[part]
    if not isinstance(value, str) or not value.strip():
        raise _not_text(part, value, where)
    return value.strip()


def _gold_of(row: Mapping[str, Any], where: str) -> str:
    """Return the text of the answer, or of a number as it is written. Raise `UserError` for anything else."""
    value = row["answer"]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(int(value) if value == int(value) else value)
    return text_of(row, "answer", where)


def _not_text(part: str, value: Any, where: str) -> UserError:
    return UserError(f"`dataset`: {where} has the {part} {shown(value)}: it must be text that is not empty")


def user_turn(content: str) -> list[Message]:
    """Return a conversation of one user turn."""
    return [{"role": "user", "content": content}]


def message(turn: Any, where: str) -> Message:
    """Return a turn as a message. Raise `UserError` unless the turn has a role and text."""
    if isinstance(turn, Mapping):
        role, content = turn.get("role"), turn.get("content")
        if role in ("system", "user", "assistant") and isinstance(content, str):
            return {"role": role, "content": content}
    raise UserError(
        f"`dataset`: {where} has the turn {shown(turn)}: it needs a role (system, user or assistant) and text"
    )


def final_answer(answer: str) -> str:
    """Return the text after the last `####` of a GSM8K answer, stripped. Without the mark, return all of it."""
    return answer.rpartition("####")[2].strip()


def _worked(row: Mapping[str, Any], where: str) -> tuple[Turns, dict[str, Any]]:
    """Read a question, and worked steps that end in `#### N`."""
    question, answer = text_of(row, "question", where), final_answer(_gold_of(row, where))
    if not answer:
        raise _not_text("answer", row["answer"], where)
    return user_turn(question), {"answer": answer}


def _boxed(row: Mapping[str, Any], where: str) -> tuple[Turns, dict[str, Any]]:
    r"""Read a problem, and an answer or a solution that holds `\boxed{...}`. MATH-500 has a column for the answer."""
    gold = _gold_of(row, where)
    return user_turn(text_of(row, "question", where)), {"answer": extract_answer(gold, "boxed") or gold}


def _choice(row: Mapping[str, Any], where: str) -> tuple[Turns, dict[str, Any]]:
    """Read a question, its choices, and the label of the right choice, which becomes a letter."""
    question, choices = text_of(row, "question", where), read_choices(row["choices"])
    if choices is None or row["choices"] is None:
        raise UserError(
            f"`dataset`: {where} has the choices {shown(row['choices'])}: give a list of texts, or texts and labels"
        )
    lines = [f"{label}. {text}" for label, text in zip(choices.labels, choices.texts, strict=True)]
    return user_turn("\n".join([question, *lines])), {"answer": read_gold(row["answer"], choices)}


def _conversation(row: Mapping[str, Any], where: str) -> tuple[Turns, dict[str, Any]]:
    """Read MiniMind's RLAIF form: the turns of a conversation, with the assistant's last turn left to be generated."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"`dataset`: {where} has the conversations {shown(turns)}: they must be a list of messages")
    messages = [message(turn, where) for turn in turns]
    reference = messages.pop()["content"].strip() if messages[-1]["role"] == "assistant" else ""
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise UserError(f"`dataset`: {where} has no user turn before the one to generate: correct or remove the row")
    return messages, {"answer": "" if reference == RLAIF_PLACEHOLDER else reference}


_WORKED = {"question": ("question",), "answer": ("answer",)}

# `scored` has no entry: its responses are read in `load`.
PRESETS: Mapping[DatasetName, Preset] = {
    "gsm8k": Preset(_WORKED, _worked, hub_id="openai/gsm8k", hub_config="main"),
    "math": Preset(
        {"question": ("problem", "question"), "answer": ("answer", "solution")},
        _boxed,
        keeps=("solution",),
        hub_id="DigitalLearningGmbH/MATH-lighteval",
    ),
    "multiple_choice": Preset(
        {"question": ("question",), "choices": ("choices",), "answer": ("label", "answer", "answerKey")},
        _choice,
        keeps=("choices",),
    ),
    "rlaif": Preset({"conversations": ("conversations",)}, _conversation),
    "arithmetic": Preset(_WORKED, _worked),
}


# Arithmetic

DEFAULT_ARITHMETIC_SIZE = 2_000
MAX_ARITHMETIC_SIZE = 20_000
_TEST_SHARE = 5  # one question in five belongs to the test split
_OPERANDS = range(2, 10)
_NAMES = ("Ann", "Ben", "Carla", "Dev", "Emma", "Femi", "Grace", "Hugo", "Ines", "Jun", "Kofi", "Lena", "Maya", "Noah")
_ITEMS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")
# Questions with the operations that answer them, applied to a, then b, then c, from left to right.
_TEMPLATES = (
    ("{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?", "+"),
    ("{name} finds {a} {item} in the morning and {b} in the afternoon. How many {item} is that in all?", "+"),
    ("{name} had {a} {item} and gave away {b}. How many {item} are left?", "-"),
    ("There are {a} {item} on the table and {name} takes {b}. How many {item} stay there?", "-"),
    ("{name} fills {a} bags with {b} {item} each. How many {item} are in the bags?", "*"),
    ("{name} has {a} {item}, gets {b} more and then loses {c}. How many {item} does {name} have now?", "+-"),
    ("{name} sells {a} {item} on Monday, {b} on Tuesday and {c} on Friday. How many {item} is that in all?", "++"),
)
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def arithmetic_problems(split: str, size: int, seed: int = 0) -> list[dict[str, str]]:
    """Draw word problems in GSM8K's form: `question`, and `answer` with worked steps that end in `#### N`.

    The splits are disjoint for all sizes and seeds, because a checksum of the question's text decides its split. No
    question occurs twice in a draw. A shorter draw with the same seed is the beginning of a longer one.

    Args:
        split: `train` or `test`.
        size: number of problems, at most `MAX_ARITHMETIC_SIZE`.
        seed: random seed of the draw.

    Raises:
        UserError: `size` is too large.
    """
    if size > MAX_ARITHMETIC_SIZE:
        raise UserError(f"`dataset.size` is {size}: `arithmetic` makes at most {MAX_ARITHMETIC_SIZE} problems")
    generator = random.Random(f"{split}-{seed}")  # a string is hashed the same way in every process
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < size:
        problem = _draw_problem(generator)
        question = problem["question"]
        is_test = zlib.crc32(question.encode()) % _TEST_SHARE == 0
        if is_test == (split == "test"):
            problems.setdefault(question, problem)
    return list(problems.values())


def _draw_problem(generator: random.Random) -> dict[str, str]:
    question, operations = generator.choice(_TEMPLATES)
    operands = [generator.choice(_OPERANDS) for _ in range(len(operations) + 1)]
    if "-" in operations:
        operands.sort(reverse=True)  # nobody gives away more than they have
    words = {"name": generator.choice(_NAMES), "item": generator.choice(_ITEMS)}
    question = question.format(**words, **dict(zip("abc", operands, strict=False)))
    return {"question": question, "answer": _worked_answer(operands, operations)}


def _worked_answer(operands: Sequence[int], operations: str) -> str:
    total, lines = operands[0], []
    for operation, operand in zip(operations, operands[1:], strict=True):
        result = _OPERATIONS[operation](total, operand)
        lines.append(f"{total}{operation}{operand}={result}")
        total = result
    return "\n".join([*lines, f"#### {total}"])
