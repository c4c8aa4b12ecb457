"""Presets: tables of a known form, as a row of one table each: the columns read, and what a row is made into.

`name: gsm8k` is short for the columns and the reading of the gold that its entry states, and for a system prompt
(`DatasetSpec.SYSTEM_PROMPTS`). A preset reads no file: where rows lie, which are taken and how a prompt is phrased is the
same with and without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from grpo_recipes.data.tables import SHOWN
from grpo_recipes.recipe.specs import DatasetName
from grpo_rewards.choices import read_choices, read_gold
from grpo_rewards.errors import UserError, shortened
from grpo_rewards.math.answers import extract_answer

RLAIF_PLACEHOLDER = "空"
"""What MiniMind's RLAIF files write where the assistant's last turn is to be generated ("empty")."""

Message = dict[str, Any]
Turns = list[Message] | str
"""The turns that lead to the completion, or the text of a prompt that is no conversation."""


@dataclass(frozen=True)
class Preset:
    """How a row of a known form is read.

    Attributes:
        columns: what each part of a row may be called in the table; the first that is there is read.
        read: a row's parts, by the keys of `columns`, and its place for an error: the turns, and the columns made of it,
            which are text.
        keeps: the columns read that stay in the row for rewards.
        hub_id: where the table lies on the hub, if the preset has a home there.
        hub_config: its configuration.
    """

    columns: Mapping[str, tuple[str, ...]]
    read: Callable[[Mapping[str, Any], str], tuple[Turns, dict[str, Any]]]
    keeps: tuple[str, ...] = ()
    hub_id: str | None = None
    hub_config: str | None = None


def text_of(row: Mapping[str, Any], part: str, where: str) -> str:
    """The text of a part, stripped. Raises `UserError` for anything else, and for none."""
    value = row[part]
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"`dataset`: {where} has the {part} {shortened(repr(value), SHOWN)}: it must be text that is not empty"
        )
    return value.strip()


def _gold_of(row: Mapping[str, Any], where: str) -> str:
    """The text of the answer, a number as it is written. Raises `UserError` for anything else, and for none."""
    value = row["answer"]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(int(value) if value == int(value) else value)
    return text_of(row, "answer", where)


def user_turn(content: str) -> list[Message]:
    """A conversation of one turn."""
    return [{"role": "user", "content": content}]


def final_answer(answer: str) -> str:
    """The text after the last `####` of a GSM8K answer, stripped; an answer without the mark is final as it stands."""
    return answer.rpartition("####")[2].strip()


def _worked(row: Mapping[str, Any], where: str) -> tuple[Turns, dict[str, Any]]:
    """A question, and worked steps that end in `#### N`."""
    question, answer = text_of(row, "question", where), final_answer(_gold_of(row, where))
    if not answer:
        raise UserError(
            f"`dataset`: {where} has the answer {shortened(repr(row['answer']), SHOWN)}: it must be text that is not empty"
        )
    return user_turn(question), {"answer": answer}


def _boxed(row: Mapping[str, Any], where: str) -> tuple[Turns, dict[str, Any]]:
    r"""A problem, and a solution that holds `\boxed{...}`; MATH-500 has the boxed answer in a column of its own too."""
    gold = _gold_of(row, where)
    return user_turn(text_of(row, "question", where)), {"answer": extract_answer(gold, "boxed") or gold}


def _choice(row: Mapping[str, Any], where: str) -> tuple[Turns, dict[str, Any]]:
    """A question, choices as `read_choices` takes them, and the label of the right one; the gold becomes its letter."""
    question, choices = text_of(row, "question", where), read_choices(row["choices"])
    if choices is None or row["choices"] is None:
        raise UserError(
            f"`dataset`: {where} has the choices {shortened(repr(row['choices']), SHOWN)}: they must be a list of texts, or "
            "lists of texts and of labels"
        )
    listed = [f"{label}. {text}" for label, text in zip(choices.labels, choices.texts, strict=True)]
    return user_turn("\n".join([question, *listed])), {"answer": read_gold(row["answer"], choices)}


def _conversation(row: Mapping[str, Any], where: str) -> tuple[Turns, dict[str, Any]]:
    """MiniMind's RLAIF schema: the turns of a conversation, the assistant's last one left to be generated."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise UserError(
            f"`dataset`: {where} has the conversations {shortened(repr(turns), SHOWN)}: they must be a list of messages"
        )
    messages = [message(turn, where) for turn in turns]
    reference = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise UserError(f"`dataset`: {where} has no user turn before the one to generate: correct or remove the row")
    return messages, {"answer": "" if reference.strip() == RLAIF_PLACEHOLDER else reference.strip()}


def message(turn: Any, where: str) -> Message:
    """A turn as a message. Raises `UserError` unless it has a role and text."""
    role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, Mapping) else (None, None)
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise UserError(
            f"`dataset`: {where} has the turn {shortened(repr(turn), SHOWN)}: a turn needs the role system, user or "
            "assistant, and text as content"
        )
    return {"role": role, "content": content}


_WORKED = {"question": ("question",), "answer": ("answer",)}

PRESETS: Mapping[DatasetName, Preset] = MappingProxyType(
    {
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
        "arithmetic": Preset(_WORKED, _worked),  # made in `arithmetic`, in GSM8K's schema
    }
)
"""`scored` is not among them: what it makes of rows, `recorded` says."""
