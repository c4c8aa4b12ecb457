r"""The final answer that a completion states, as written, if the words around it claim it.

`extract_answer` finds it, `numbers` reads the number in it, `golds` reads the gold of a dataset, and `comparison` gives
the verdict. No step evaluates text as code.

Where several readings are defensible, these rules decide (docs/answers.md has the whole table, and each row is a test):

- Thinking is everything up to the last `</think>`, and everything after a `<think>` that is never closed. An answer
  counts outside the thinking only.
- Of several answers in one layout the last counts. A box, or a sentence, that is denied or taken back is not an answer.
  Neither is a tag, or a `\boxed{`, that is never closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from grpo_rewards import languages
from grpo_rewards.claims import is_denied, is_unclaimed
from grpo_rewards.completions import thinking_remover
from grpo_rewards.math import prose
from grpo_rewards.math.numbers import parse_number
from grpo_rewards.reward import check_choice

_MAX_DENIED = 20
"""Number of denied claims of a completion that are skipped, from its end."""


def last_hashes(text: str) -> str | None:
    """Return what stands behind the last `####`, up to the end of its line."""
    start = text.rfind("####")
    return None if start < 0 else _line(text, start + 4)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`."""
    if "box" not in text:
        return None
    text = _with_braces(text)
    span = _last_box(text)
    return span and _with_boxes_before(text, span)


def _last_claimed_box(text: str) -> str | None:
    """Return the text of the last box that the words before it don't deny; None if those behind it take it back."""
    if "box" not in text:
        return None
    text = _with_braces(text)
    end = len(text)
    for _ in range(_MAX_DENIED):
        span = _last_box(text[:end])
        if span is None or is_denied("", text[span[1] + 1 :]):
            return None
        before = span[0] - len(_BOXED)
        if not is_denied(text[:before], ""):
            return _with_boxes_before(text, span)
        end = before
    return None


def _with_braces(text: str) -> str:
    r"""Return a text with `\boxed{5}` for `\boxed 5`, `\boxed {5}` and `\fbox{5}`."""
    if "\\fbox" in text or ("\\boxed" in text and _BOXED not in text):
        text = _BOX_TOKEN.sub(r"\\boxed{\1}", _BOX.sub(r"\\boxed{", text))
    return text


def _with_boxes_before(text: str, span: tuple[int, int]) -> str:
    """Return the content of a box, behind those of the boxes that a comma or "and" joins to it."""
    content = text[slice(*span)].strip()
    for _ in range(_MAX_JOINED):
        start = span[0] - len(_BOXED)
        joint = _JOINT.search(text, max(0, start - 40), start)
        previous = _last_box(text[: joint.start() + 1]) if joint else None
        if previous is None or not joint or previous[1] != joint.start():
            break
        span, content = previous, f"{text[slice(*previous)].strip()}, {content}"
    return content


def _last_box(text: str) -> tuple[int, int] | None:
    """Return where the content of the last box starts and ends; an empty span if that box is never closed."""
    start = text.find(_BOXED)
    if start < 0:
        return None
    span, depth = None, 0
    for brace in _BRACE.finditer(text, start):
        token = brace.group()
        if depth == 0 and token == _BOXED:
            span, depth, start = (brace.end(), brace.end()), 1, brace.end()  # empty until the box is closed
        elif depth:
            depth += (token in ("{", _BOXED)) - (token == "}")
            if depth == 0:
                span = start, brace.start()
    return span


def last_a_line(text: str) -> str | None:
    """Return the rest of the last line that starts with `A:`."""
    start = text.rfind("\nA:")
    if start >= 0:
        return _line(text, start + 3)
    return _line(text, 2) if text.startswith("A:") else None


def _last_sentence(text: str) -> str | None:
    if "</" in text:
        text = _HTML_BOLD.sub("**", text)
    lower = text.lower()
    if len(lower) != len(text):  # a few characters change their length, and positions in `lower` would be wrong
        lower = text
    position, denied = len(text), 0
    while (position := lower.rfind("answer", 0, position)) >= 0:
        if not (claim := _ANSWER_IS.match(text, position)):
            continue
        if is_unclaimed(text[:position]):
            denied += 1
            if denied > _MAX_DENIED:
                return None
            continue
        return _claimed(text, claim.end())
    labels = languages.find_labels(text)
    return _claimed(text, labels[-1][1]) if labels else None


def _claimed(text: str, start: int) -> str | None:
    """Return what a claim states behind its label, or None if the text behind it takes it back."""
    stated, after = _stated(text, start)
    if is_denied("", text[after:]):
        return None
    # A reason behind the answer does not count, as in "72, which is the total", unless it may be a doubt.
    reason = _REASON.search(stated)
    if reason is None or not _REASON_WORDS.fullmatch(rest := stated[reason.start() :]):
        return stated
    is_doubtful = any(prose.is_doubt(word.lower()) for word in _LETTERS.findall(rest))
    return stated if is_doubtful else stated[: reason.start()]


def _stated(text: str, start: int) -> tuple[str, int]:
    """Return what a claim states, up to the end of its sentence or of the block that follows it, and where it ends."""
    if block := _BLOCK.match(text, start):
        closing = _BLOCK_ENDS[block[1][:2]]
        if (close := text.find(closing, block.end())) > 0:
            return text[block.end() : close].strip(), close + len(closing)
    line = _line(text, start)
    after = text.find(line, start)
    for mark in _UNPAIRED.findall(line):  # the mark that remains of "**Answer: 12**"
        if line.count(mark) % 2:
            line = line.replace(mark, " " * len(mark), 1)
    if end := _SENTENCE_END.search(line):
        line = line[: end.start()]
    return line.strip(), after + len(line)


def _line(text: str, start: int) -> str:
    end = text.find("\n", start)
    return text[start : end if end >= 0 else len(text)].strip()


_BOXED = "\\boxed{"
_BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BOX_TOKEN = re.compile(r"\\boxed\s+(\w+(?:[./]\d+)?)(?=[\s$.,]|\Z)")
_MAX_JOINED = 8
_JOINT = re.compile(r"\}[\s$]*(?:,|,?\s*(?:and|\\text\{\s*and\s*\}))[\s$]*\Z")
_ANSWER_IS = re.compile(
    r"answer[*_]{0,3}(?:\s+(?:to|for|of)\s+(?:the|this)\s+(?:problem|question|exercise))?"
    r"(?:\s+(?:is|equals)\b\s*[:=]?|\s*[:=](?:[*_]{1,3}(?=\s))?)\s*",
    re.IGNORECASE,
)
_BLOCK = re.compile(r"(\$\$|\\\[|```\w*\n)\s*")
_BLOCK_ENDS = {"$$": "$$", "\\[": "\\]", "``": "```"}
_UNPAIRED = re.compile(r"\*\*|__|\*(?=\.?\Z)")
_REASON = re.compile(
    r",?\s+(?:because|since)\b|,\s+(?:which|so|as|in\s+total|and\s+(?:so|thus|hence|therefore))\b|;\s", re.IGNORECASE
)
_REASON_WORDS = re.compile(r"[^\d?=<>\\$]*")
_LETTERS = re.compile(r"[^\W\d_]+")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[。！।]")
_HTML_BOLD = re.compile(r"</?(?:b|strong|em|i)>", re.IGNORECASE)

_LAYOUTS: dict[str, Callable[[str], str | None]] = {
    "hashes": last_hashes, "boxed": _last_claimed_box, "a_line": last_a_line, "sentence": _last_sentence
}  # fmt: skip
LAYOUTS = ("answer_tag", *_LAYOUTS, "auto")


def extract_answer(
    text: str, layout: str = "answer_tag", *, tags: tuple[str, str] = ("think", "answer"), prefilled: bool = False
) -> str | None:
    r"""Return the final answer that a completion states outside its thinking, as written, or None.

    Args:
        text: text of the completion.
        layout: `answer_tag` (`<answer>N</answer>`), `hashes` (`#### N`), `boxed` (`\boxed{N}`), `a_line` (a line
            `A: N`), `sentence` ("The answer is N."), or `auto`, the first of these, in this order, that the completion
            uses. In `auto`, a `####` or `A:` line that is not a number (a heading, a dialogue) gives way to the later
            layouts.
        tags: names of the reasoning tag and the answer tag.
        prefilled: True if the prompt already opens the reasoning block, so that the completion starts inside it.

    Raises:
        ValueError: `layout` is not one of LAYOUTS.
    """
    return answer_extractor(layout, tags, prefilled)(text)


@lru_cache(maxsize=64)
def answer_extractor(layout: str, tags: tuple[str, str], prefilled: bool = False) -> Callable[[str], str | None]:
    """Return `extract_answer` for one layout and its tags. Checking and building them costs as much as an answer."""
    check_choice(layout, "extract", LAYOUTS)
    opening, closing = f"<{tags[1]}>", f"</{tags[1]}>"
    outside = thinking_remover(tags[0], prefilled)
    uses_tag = layout in ("answer_tag", "auto")
    find_otherwise = _first_layout if layout == "auto" else _LAYOUTS.get(layout)

    def extract(text: str) -> str | None:
        text = outside(text)
        answer = None
        if uses_tag and (start := text.rfind(opening)) >= 0:
            stated, closed, _ = text[start + len(opening) :].partition(closing)
            answer = stated.strip() if closed else None
        elif find_otherwise is not None:
            answer = find_otherwise(text)
        return answer or None

    return extract


def _first_layout(text: str) -> str | None:
    doubtful = None
    for layout, find in _LAYOUTS.items():
        answer = find(text)
        if answer is None:
            continue
        if layout not in ("hashes", "a_line") or parse_number(answer) is not None:
            return answer
        doubtful = doubtful or answer
    return doubtful
