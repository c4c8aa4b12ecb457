"""Presets: how rows of a known form are read.

`name: gsm8k` is short for the columns and the reader of its entry in `PRESETS`, and for a system prompt
(`DatasetSpec.DEFAULT_SYSTEM_PROMPTS`). A preset reads no file: sources, splits and templates do not depend on it.
"""

from __future__ import annotations

import ast
import json
import math
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from grpo_recipes.data.tables import is_image_part, listed, shown
from grpo_recipes.recipe.dataset import MADE_PROBLEMS, DatasetName, DatasetSpec
from grpo_rewards.choices import Choices, read_choices, read_gold
from grpo_rewards.errors import UserError
from grpo_rewards.math.answers import extract_answer
from grpo_rewards.math.numbers import number_text
from grpo_rewards.strict import parse_json
from grpo_rewards.strings import folded

RLAIF_PLACEHOLDER = "空"
"""Text ("empty") that MiniMind's RLAIF files have where the assistant's last turn is to be generated."""

Message = dict[str, Any]
Conversation = list[Message] | str
"""Turns that lead to the completion, or the text of a prompt that is not a conversation."""
Read = Callable[[Mapping[str, Any], object], tuple[Conversation, dict[str, Any]]]
"""Function from a row's parts and its position (for errors) to the turns and the columns made of the row. A made column
holds texts or floats, lists of them if the row accepts several answers, or choices with their labels."""

ONE_CHOICE = "choices/"
"""Beginning of the names of parts that are one choice each, as in `choices/A`."""


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


def text_of(row: Mapping[str, Any], part: str, where: object) -> str:
    """Return the text of a part, stripped. Raise `UserError` for a value that is empty or not text."""
    value = row[part]
    if not isinstance(value, str) or not value.strip():
        raise _not_text(part, value, where)
    return value.strip()


def _gold(row: Mapping[str, Any], where: object, read: Callable[[str], str]) -> Any:
    """Return what `read` makes of the answer: one gold, or the list of all that a row accepts.

    A float stays a float. As text, 1.234 would be 1234 for a reward with `decimal: comma`.

    Raises:
        UserError: an answer is neither a number nor text, or is empty.
    """
    value = row["answer"]
    golds = []
    for answer in value if isinstance(value, list) else [value]:
        gold = read(_answer_text(answer))
        if not gold:
            raise _not_text("answer", value, where)
        golds.append(answer if isinstance(answer, float) else gold)
    if not golds:
        raise _not_text("answer", value, where)
    return golds if isinstance(value, list) else golds[0]


def _answer_text(value: Any) -> str:
    """Return the text of an answer, stripped, or of a number as it is written. Any other value gives ""."""
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return ""
    return number_text(value)


def _not_text(part: str, value: Any, where: object) -> UserError:
    fix = "correct the row, or set `dataset.drop_missing: true`" if is_missing(value) else "write it as text"
    return UserError(f"`dataset`: {where}", f"it has the {part} {shown(value)}", fix)


def is_missing(value: Any) -> bool:
    """Return True for a value that stands for an empty cell: null, NaN, blank text or an empty list."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or value != value or (isinstance(value, list) and not value)


def user_turn(content: str) -> list[Message]:
    """Return a conversation of one user turn."""
    return [{"role": "user", "content": content}]


# ShareGPT's names of the roles.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}


def role_and_content(turn: Any) -> tuple[Any, Any]:
    """Return the role and the content of a turn, which may be written as in ShareGPT, with `from` and `value`."""
    if not isinstance(turn, Mapping):
        return None, None
    if turn.get("role") is None and isinstance(turn.get("from"), str):
        return _ROLES.get(turn["from"], turn["from"]), turn.get("value")
    return turn.get("role"), turn.get("content")


def message(turn: Any, where: object) -> Message:
    """Return a turn as a message. Raise `UserError` unless the turn has a role and text."""
    role, content = role_and_content(turn)
    if role in ("system", "user", "assistant") and isinstance(content, str):
        return {"role": role, "content": content}
    if isinstance(content, list) and any(map(is_image_part, content)):
        problem = "it has a message with an image or a sound, which is not supported"
        raise UserError(f"`dataset`: {where}", problem, "name rows of text")
    fix = "give it a role (system, user or assistant) and text"
    raise UserError(f"`dataset`: {where}", f"it has the turn {shown(turn)}", fix)


def final_answer(answer: str) -> str:
    """Return the text after the last `####` of a GSM8K answer, stripped. Without the mark, return all of it."""
    return answer.rpartition("####")[2].strip()


def boxed_answer(answer: str) -> str:
    r"""Return the content of the last `\boxed{}` of an answer. Without one, return all of it."""
    return extract_answer(answer, "boxed") or answer


def _worked(final: Callable[[str], str], row: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    """Read a question, and an answer or worked steps of which `final` returns the gold."""
    return user_turn(text_of(row, "question", where)), {"answer": _gold(row, where, final)}


def _choice(row: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    """Read a question, its choices, and the label of the right choice, which becomes a letter."""
    question, answer = text_of(row, "question", where), row["answer"]
    own = {part.removeprefix(ONE_CHOICE): value for part, value in row.items() if part.startswith(ONE_CHOICE)}
    given = single_choices(own) if own else choices_of(row["choices"])
    if given is None or (choices := read_choices(given)) is None:
        fix = "give a list of texts (also as JSON), parts between `|`, or texts and labels"
        raise UserError(f"`dataset`: {where}", f"it has the choices {shown(own or row['choices'])}", fix)
    lines = [f"{label}. {text}" for label, text in zip(choices.labels, choices.texts, strict=True)]
    made = {"text": list(choices.texts), "label": list(choices.labels)}
    return user_turn("\n".join([question, *lines])), {"answer": gold_label(answer, choices), "choices": made}


def choices_of(value: Any) -> Any:
    """Return choices in a form that `read_choices` takes, or None.

    Text is read as JSON, as a list in Python's notation, which pandas writes into CSV files, or as parts between `|`.
    """
    if not isinstance(value, str):
        return value
    found: Any = None
    for read in (parse_json, ast.literal_eval):
        if found is None and value.lstrip().startswith(("[", "{", "(")) and len(value) < _CHOICES_CHARACTERS:
            try:
                found = read(value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
    if found is None:
        found = [part.strip() for part in value.split("|")]
        found = found if all(found) else None
    # One choice alone is not a list: `['a' 'b']`, as numpy writes it, is one text for Python.
    return found if isinstance(found, (list, tuple, dict)) and len(found) > 1 else None


def single_choices(own: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the choices of a row by label, without the empty ones. Return None if there are fewer than two."""
    texts = {label: label_text(value) for label, value in own.items() if not is_missing(value)}
    return texts if len(texts) > 1 else None


def gold_label(answer: Any, choices: Choices) -> str | None:
    """Return the label of the right choice, or None. A number is a position from 0 only if the labels are letters."""
    text = "" if isinstance(answer, (bool, list, dict)) else label_text(answer)
    if text.isdecimal() and all(label.isdecimal() for label in choices.labels):
        return read_gold(text, choices, "letter") or read_gold(text, choices, "text")
    return read_gold(answer, choices)


def choice_columns(names: Collection[str]) -> list[str]:
    """Return the columns that hold one choice each: `A`, `B`, ..., or `0`, `1`, ..., or `1`, `2`, ...."""
    for labels in (string.ascii_uppercase, string.digits, string.digits[1:]):
        found = list(takewhile(names.__contains__, labels))
        if len(found) > 1:
            return found
    return []


def _program(row: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    """Read a programming task and its solution."""
    return user_turn(text_of(row, "question", where)), {"answer": text_of(row, "answer", where)}


def _labelled(labels: Sequence[str], row: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    """Read a text and its label, and name the labels in the prompt. The gold is the label as the recipe spells it."""
    text, label = text_of(row, "text", where), label_text(row["label"])
    known = {folded(name): name for name in labels}
    if folded(label) not in known:
        if is_missing(row["label"]):
            raise _not_text("label", row["label"], where)
        problem = f"it has the label {shown(label)}, and `dataset.labels` has {listed(labels)}"
        raise UserError(f"`dataset`: {where}", problem, "correct one")
    return user_turn(with_labels(text, labels)), {"answer": known[folded(label)]}


def with_labels(text: str, labels: Sequence[str]) -> str:
    """Return a text to classify and the labels to choose from, as a prompt."""
    return f"{text}\n\nAnswer with one of these labels: {', '.join(labels)}."


def label_text(value: Any) -> str:
    """Return a label as text: a number as it is written, `true` or `false` for a boolean."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        return number_text(value)
    return "" if is_missing(value) else str(value).strip()


def _extracted(row: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    """Read a text and the object to extract, which is a JSON object as text or a mapping. The gold is its JSON."""
    text, found = text_of(row, "text", where), gold_object(row["object"])
    if found is None:
        if is_missing(row["object"]):
            raise _not_text("object", row["object"], where)
        raise UserError(f"`dataset`: {where}", f"it has the object {shown(row['object'])}", "write one JSON object")
    return user_turn(text), {"answer": json.dumps(found, ensure_ascii=False)}


def gold_object(value: Any) -> dict[str, Any] | None:
    """Return the object in a mapping or JSON text, without keys that have null, or None for any other value."""
    try:
        read = parse_json(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return None
    return _without_nulls(read) if isinstance(read, dict) else None


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without keys that have null, which Arrow also writes for the missing keys of mappings."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _conversation(row: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    """Read MiniMind's RLAIF form: the turns of a conversation, with the assistant's last turn left to be generated."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"`dataset`: {where}", f"it has the conversations {shown(turns)}", "write a list of messages")
    messages = [message(turn, where) for turn in turns]
    reference = messages.pop()["content"].strip() if messages[-1]["role"] == "assistant" else ""
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        problem = "it has no user turn before the one to generate"
        raise UserError(f"`dataset`: {where}", problem, "correct or remove the row")
    return messages, {"answer": "" if reference == RLAIF_PLACEHOLDER else reference}


_WORKED = {"question": ("question",), "answer": ("answer",)}
_CHOICES_CHARACTERS = 100_000

# `scored` has no entry: its responses are read in `load`.
PRESETS: Mapping[DatasetName, Preset] = {
    "gsm8k": Preset(_WORKED, partial(_worked, final_answer), hub_id="openai/gsm8k", hub_config="main"),
    "math": Preset(
        {"question": ("problem", "question"), "answer": ("answer", "solution")},  # MATH-500 has a column `answer`
        partial(_worked, boxed_answer),
        keeps=("solution",),
        hub_id="DigitalLearningGmbH/MATH-lighteval",
    ),
    "multiple_choice": Preset(
        {"question": ("question",), "choices": ("choices",), "answer": ("label", "answer", "answerKey")},
        _choice,
        keeps=("choices",),
    ),
    "classification": Preset({"text": ("text", "question"), "label": ("label", "answer")}, partial(_labelled, ())),
    "extraction": Preset({"text": ("text", "question"), "object": ("object", "answer")}, _extracted),
    "rlaif": Preset({"conversations": ("conversations",)}, _conversation),
    **dict.fromkeys(MADE_PROBLEMS, Preset(_WORKED, partial(_worked, final_answer))),
    "programs": Preset({"question": ("question",), "answer": ("solution",)}, _program, keeps=("solution",)),
}


def preset_of(spec: DatasetSpec) -> Preset | None:
    """Return the preset that a dataset names, with the dataset's labels, or None if it names no preset here."""
    preset = PRESETS.get(spec.name) if spec.name else None
    if preset is None or spec.labels is None:
        return preset
    return replace(preset, read=partial(_labelled, tuple(spec.labels)))
