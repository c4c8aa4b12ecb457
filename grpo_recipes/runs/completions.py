"""Logged completions in a run's folder: one file for each logged step, as TRL writes it.

    completions/completions_01001.parquet          step 1,001
    completions/eval_completions_...               the same for evaluations during training
    completions/eval_NAME_completions_...          the same for an evaluation dataset with a name

Nothing here imports torch.

A column of Arrow has one type, and a policy may call a tool with a number once and with a text the next time.
`storable` therefore writes the arguments of calls as JSON text. Tables of TRL itself hold them as structs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.runs import files
from grpo_rewards.errors import one_line

FOLDER = "completions"
TRAINING, EVALUATION = "completions", "eval_completions"

NO_MAPPING = ""
"""Key under which arguments that are not a mapping are stored. TRL prints only mappings."""
MOST_LEVELS = 100
"""Depth of nested arguments that is stored. Python's JSON reader and writer fail at about 1,000."""

# Further keys of a call and of its function. A policy may write any others, and each would be a column.
_CALL_KEYS = frozenset({"type", "id", "index", "name"})

_STEP_FILE = re.compile(r"(.*completions)_(\d+)\.parquet")


@dataclass(frozen=True)
class Logged:
    """File of the completions of one step."""

    step: int
    path: Path


def logged(folder: Path, kind: str) -> list[Logged]:
    """Return the files of a kind (`TRAINING`, `EVALUATION`) in the order of their steps."""
    found = []
    for path in folder.glob("*.parquet"):
        if (match := _STEP_FILE.fullmatch(path.name)) and match[1] == kind:
            found.append(Logged(int(match[2]), path))
    return sorted(found, key=lambda one: one.step)


def drop_after(folder: Path, step: int) -> int:
    """Remove the files of later steps than `step`, of every kind, and return their number.

    Raises:
        RunError: a file can't be removed. The run would log its step again, or leave rows that it never made.
    """
    dropped = 0
    try:
        for path in folder.glob("*.parquet"):
            if (match := _STEP_FILE.fullmatch(path.name)) and int(match[2]) > step:
                path.unlink()
                dropped += 1
    except OSError as error:
        problem = f"the completions after step {step} can't be removed ({one_line(error)})"
        raise files.RunError(folder, problem, "allow it, or move the folder away") from error
    return dropped


def storable(conversations: Iterable[Any]) -> list[Any]:
    """Return the conversations of one column with messages that fit one Arrow type.

    The messages themselves are not changed. Texts, and messages of texts, are returned as they are.

    - Arguments of a call are JSON text of a mapping, which is what TRL prints. Arguments that are not a mapping stand
      under the key "".
    - If one message consists of content blocks, all do.
    - Lone surrogates, which UTF-8 does not have, are escaped.
    """
    listed = list(conversations)
    messages = [message for conversation in listed if isinstance(conversation, list) for message in conversation]
    has_blocks = any(isinstance(message.get("content"), list) for message in messages)
    stored = []
    for conversation in listed:
        if isinstance(conversation, list):
            conversation = [_storable_message(message, has_blocks) for message in conversation]
        stored.append(_encodable(conversation) if isinstance(conversation, str) else conversation)
    return stored


def arguments_of(stored: Any) -> Any:
    """Return the arguments of a logged call, from JSON text or from the struct of a table that TRL wrote.

    Arrow gives every struct of a column the fields of all: a field without a value counts as absent.
    """
    if isinstance(stored, str):
        try:
            value = json.loads(stored)
        except (ValueError, RecursionError):
            return stored
        return value[NO_MAPPING] if isinstance(value, dict) and set(value) == {NO_MAPPING} else value
    if isinstance(stored, Mapping):
        return {key: value for key, value in stored.items() if value is not None}
    return {} if stored is None else stored


def _storable_message(message: Mapping[str, Any], has_blocks: bool) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    for key, value in message.items():
        if key == "tool_calls":
            if value is not None:  # TRL's print loops over the calls
                stored[key] = [_storable_call(call) for call in (value if isinstance(value, list) else [value])]
        elif key == "content" and has_blocks:
            blocks = value if isinstance(value, list) else [{"type": "text", "text": value}]
            stored[key] = None if value is None else [_block(one) for one in blocks]
        else:
            stored[_encodable(key)] = _storable_value(value)
    # Parquet has no struct without fields.
    return stored or {"role": "assistant", "content": [] if has_blocks else ""}


def _storable_call(call: Any) -> dict[str, Any]:
    """Return a call, or the function in it, with the keys of a call only. The others are stored in `other`."""
    if not isinstance(call, Mapping):
        return {"other": _json(call)}
    stored: dict[str, Any] = {}
    for key, value in call.items():
        if key == "arguments":
            stored[key] = _json_arguments(value)
        elif key == "function" and isinstance(value, Mapping):
            stored[key] = _storable_call(value)
        elif key in _CALL_KEYS:
            stored[key] = _storable_value(value)
    other = {key: value for key, value in call.items() if key not in stored}
    if other or not stored:  # parquet has no struct without fields
        stored["other"] = _json(other)
    return stored


def _json_arguments(arguments: Any) -> str:
    """Return arguments as JSON text of a mapping."""
    if isinstance(arguments, str):  # some templates write the arguments as JSON text
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    # TRL prints the names as they are: a lone surrogate would raise, an escape sequence control the terminal.
    is_plain = isinstance(arguments, Mapping) and all(isinstance(key, str) and key.isprintable() for key in arguments)
    if not is_plain or set(arguments) == {NO_MAPPING}:  # a policy may write that key too
        arguments = {NO_MAPPING: arguments}
    return _json(arguments)


def _json(value: Any) -> str:
    try:
        if _levels(value) > MOST_LEVELS:
            raise RecursionError
        return json.dumps(value, default=str)
    except (ValueError, TypeError, RecursionError):
        lost = f"a {type(value).__name__} that is nested too deeply or that JSON does not have"
        return json.dumps({NO_MAPPING: lost})


def _levels(value: Any) -> int:
    """Return the depth of a nested value, or one more than `MOST_LEVELS` if it is deeper."""
    level, depth = [value], 0
    while level and depth <= MOST_LEVELS:
        depth += 1
        below: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                below.extend(one.values())
            elif isinstance(one, (list, tuple)):
                below.extend(one)
        level = below
    return depth


def _storable_value(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return None if value is None else _encodable(value)
    return _json(value)


def _block(block: Any) -> dict[str, Any]:
    """Return a content block as TRL prints and strips it: a text, or an image with its object."""
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": _encodable(text)}
        case {"type": "image"}:
            return dict(block)
        case _:
            return {"type": "text", "text": _json(block)}


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
