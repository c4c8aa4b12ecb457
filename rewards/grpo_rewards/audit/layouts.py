r"""Layouts of a completion: the places in which a reward may look for the answer, such as tags or `\boxed{}`."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from grpo_rewards.math.answers import parse_number

ANSWER = "{answer}"
"""Mark of the answer in a template."""

_VALUE = "{value}"  # the answer as a JSON string
_NUMBER = "{number}"  # the answer as a JSON number, or as a string if it is none
_THINKING = "{thinking}"
THOUGHT = "Let me work through it step by step."
"""Thinking of a completion if a generator needs no other. It has no number."""

_TAG = re.compile(r"</?([A-Za-z_]\w{0,30})>")
_MOST_WORDS = 40
_MOST_CHARS = 80
_THINKING_TAGS = ("think", "thinking", "reasoning", "thought", "scratchpad")


@dataclass(frozen=True)
class Layout:
    """Layout of a completion.

    Attributes:
        name: description for a table.
        slot: template of one place for the answer.
        opening: template of the text before it, with a place for the thinking.
        thinking_tag: name of the tag around thinking that does not count.
    """

    name: str
    slot: str
    opening: str = ""
    thinking_tag: str = "think"

    def place(self, answer: str) -> str:
        """Return the answer in its place, without thinking."""
        value = json.dumps(answer, ensure_ascii=False)
        is_number = parse_number(answer) is not None and re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", answer)
        placed = self.slot.replace(_NUMBER, answer if is_number else value).replace(_VALUE, value)
        return placed.replace(ANSWER, answer)

    def render(self, *answers: str, thinking: str = THOUGHT) -> str:
        """Return a completion with these answers, each in its own place."""
        places = [self.place(answer) for answer in answers]
        return self.opening.replace(_THINKING, thinking) + "\n".join(places)

    @property
    def closing(self) -> str:
        """Text behind the answer that closes its tag, box or fence, such as `</answer>`; "" if nothing does."""
        end = self.slot.partition(ANSWER)[2].strip()
        return end if end and end[0] in "<}`" else ""

    def unclosed(self, answer: str) -> str:
        """Return a completion that ends before the place of the answer is closed."""
        return self.render(answer).rstrip().removesuffix(self.closing).rstrip()


_PLAIN: tuple[Layout, ...] = (
    Layout("boxed", "\\boxed{{answer}}", "{thinking}\n"),
    Layout("#### line", "#### {answer}", "{thinking}\n"),
    Layout("sentence", "The answer is {answer}.", "{thinking}\n"),
    Layout("Answer: line", "Answer: {answer}", "{thinking}\n"),
    Layout("A: line", "A: {answer}", "{thinking}\n"),
    Layout("JSON string", '{"answer": {value}}'),
    Layout("JSON number", '{"answer": {number}}'),
    Layout("fence", "```\n{answer}\n```", "{thinking}\n"),
    Layout("boxed formula", "$\\boxed{{answer}}$", "{thinking}\n"),
    Layout("formula", "${answer}$"),
    Layout("JSON fence", '```json\n{"answer": {number}}\n```', "{thinking}\n"),
)


def layouts_for(
    rewards: Iterable[Callable[..., Any]], tags: Sequence[tuple[str, str]], template: str | None = None
) -> list[Layout]:
    """Return the layouts to try, the most structured first.

    Args:
        rewards: functions whose sources may name other tags and keys.
        tags: pairs of reasoning tag and answer tag that rewards declare.
        template: completion with `{answer}` in it that replaces all other layouts.
    """
    if template is not None:
        return [Layout("given", template)]
    words = [word for reward in rewards for word in source_texts(reward)]
    found = list(dict.fromkeys(tag for word in words for tag in _TAG.findall(word)))
    pairs = [*tags]
    if not tags:
        thinking = next((tag for tag in found if tag in _THINKING_TAGS), "think")
        pairs += [(thinking, tag) for tag in found if tag not in _THINKING_TAGS]
        pairs += [("think", "answer"), ("reasoning", "answer")]
    layouts = []
    for reasoning, answer in dict.fromkeys(pairs):
        named = "tags" if (reasoning, answer) == ("think", "answer") else f"tags {reasoning}, {answer}"
        # Only the first tag is known to hold thinking: to the reward, another one may be part of its answer.
        layouts += [replace(layout, thinking_tag=pairs[0][0]) for layout in _tagged(named, reasoning, answer)]
    reasoning, answer = pairs[0]
    opening = f"<{reasoning}>\n{_THINKING}\n</{reasoning}>\n"
    layouts.append(Layout("boxed in tags", f"<{answer}>\n\\boxed{{{ANSWER}}}\n</{answer}>", opening, reasoning))
    layouts += [replace(layout, thinking_tag=reasoning) for layout in _PLAIN]
    layouts.append(Layout("after thinking", ANSWER, opening, reasoning))
    layouts.append(Layout("bare", ANSWER, "", reasoning))
    keys = [word for word in words if re.fullmatch(r"[A-Za-z_]{2,30}", word) and word not in ("content", "role")]
    for key in keys[:6]:
        if key != "answer":
            layouts.append(Layout(f"JSON key {key}", f'{{"{key}": {_NUMBER}}}', "", reasoning))
    return layouts


def _tagged(name: str, reasoning: str, answer: str) -> list[Layout]:
    opening = f"<{reasoning}>\n{_THINKING}\n</{reasoning}>\n"
    return [
        Layout(name, f"<{answer}>\n{ANSWER}\n</{answer}>", opening),
        Layout(f"{name}, one line", f"<{answer}>{ANSWER}</{answer}>", opening.replace("\n", "")),
    ]


def source_texts(function: Callable[..., Any]) -> list[str]:
    """Return the string constants in the source of a function or class, without docstrings: tags, keys and words."""
    target: Any = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    if str(getattr(target, "__module__", "")).startswith("grpo_rewards."):
        return []
    texts: list[str] = []
    # The module follows the function, because patterns are often compiled beside it.
    for place in (target, inspect.getmodule(target)):
        texts += _texts_of(place)
    return list(dict.fromkeys(texts))[:_MOST_WORDS]


@lru_cache(maxsize=64)
def _texts_of(place: Any) -> list[str]:
    """Return the string constants of a function, class or module; none for a builtin or one without a file."""
    try:
        return _constants(ast.parse(textwrap.dedent(inspect.getsource(place))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return []


def _constants(tree: ast.AST) -> list[str]:
    alone = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = []
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in alone
        if is_text and 0 < len(node.value) <= _MOST_CHARS:  # type: ignore[attr-defined]
            texts.append(node.value)  # type: ignore[attr-defined]
    return texts
