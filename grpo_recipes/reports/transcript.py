"""Turns of a logged completion for the report and the checks: text, calls with their arguments, and results.

Tables of completions are read as they are, damaged or made by a stranger: no message raises. Nothing here imports
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_recipes.runs.completions import arguments_of
from grpo_rewards.completions import completion_text
from grpo_rewards.errors import one_line, shortened

NAME_CHARACTERS = 80
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which templates put the reasoning of a message."""

PartKind = Literal["reasoning", "text", "call", "result", "gap"]


@dataclass(frozen=True)
class TurnPart:
    """Part of a transcript."""

    kind: PartKind
    """`reasoning`, `text` and `call` are the policy's, `result` is a tool's, and `gap` stands for parts left out."""
    turn: int
    """Number of the policy's turn, from 1. A result has the number of the turn that called the tool."""
    text: str
    name: str = ""
    """Name of the tool, or role of a message that is neither the policy's nor a tool's."""

    @property
    def label(self) -> str:
        """Heading of the part."""
        headings = {
            "reasoning": f"Turn {self.turn}, reasoning",
            "text": f"Turn {self.turn}",
            "call": f"Turn {self.turn} calls {self.name}",
            "result": f"Result of {self.name}, not trained on",
            "gap": "Left out",
        }
        return headings[self.kind]


def transcript(completion: Any) -> list[TurnPart]:
    """Return the parts of a completion with several messages, calls or reasoning, or [] for a plain answer."""
    messages = [] if isinstance(completion, str) else [one for one in completion if isinstance(one, Mapping)]
    parts: list[TurnPart] = []
    turn = 0
    for message in messages:
        role = str(message.get("role") or "assistant")  # an array of a damaged table can't be compared
        if role == "assistant":
            turn += 1
            parts += _assistant(message, turn)
        else:
            name = message.get("name") if role == "tool" else role
            parts.append(TurnPart("result", turn, _text(message), _name(name)))
    is_plain = len(messages) == 1 and len(parts) == 1 and parts[0].kind == "text"
    return [] if is_plain else parts


def limited(parts: Sequence[TurnPart], first: int, last: int) -> list[TurnPart]:
    """Return the first and the last parts, with a gap between them if there are more."""
    if len(parts) <= first + last + 1:
        return list(parts)
    gap = TurnPart("gap", parts[first].turn, f"… {len(parts) - first - last:,} parts …")
    return [*parts[:first], gap, *parts[len(parts) - last :]]


def _assistant(message: Mapping[str, Any], turn: int) -> Iterator[TurnPart]:
    for key in REASONING:
        if isinstance(value := message.get(key), str) and value:
            yield TurnPart("reasoning", turn, value)
    text, called = _text(message), list(_calls(message, turn))
    if text or not called:
        yield TurnPart("text", turn, text)
    yield from called


def _calls(message: Mapping[str, Any], turn: int) -> Iterator[TurnPart]:
    called = message.get("tool_calls")
    if called is None or isinstance(called, (str, Mapping)) or not hasattr(called, "__iter__"):
        return
    for call in called:
        if not isinstance(call, Mapping):
            yield TurnPart("call", turn, _json(call), "unknown")
            continue
        function = call.get("function")
        if not isinstance(function, Mapping):
            function = call
        yield TurnPart("call", turn, _json(arguments_of(function.get("arguments"))), _name(function.get("name")))


def _text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with a mark for each image."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not hasattr(content, "__iter__") or isinstance(content, Mapping):
        return _json(content)
    blocks = [block for block in content if isinstance(block, Mapping)]
    images = sum(str(block.get("type")) == "image" for block in blocks)
    return completion_text([{"content": blocks}]) + " [image]" * images


def _name(name: Any) -> str:
    return shortened(one_line(name), NAME_CHARACTERS) if isinstance(name, str) and name else "unknown"


def _json(value: Any) -> str:
    """Return a value as JSON text. Arrays of a table are lists."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (ValueError, TypeError, RecursionError):
        return f"a {type(value).__name__} that can't be shown"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
