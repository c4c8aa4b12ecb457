"""Format rewards for completions such as `<think>...</think><answer>...</answer>`, each in one linear pass.

| reward | pay |
|---|---|
| `tag_structure` | 0.5 for MiniMind's strict structure, else 0 |
| `tag_count` | 0.25 for each of the four tags that occurs exactly once |
| `tag_presence` | 0.2 for each of the four tags that occurs |
| `well_formed` | 1 for one reasoning block, then one answer block, and nothing else; otherwise 0 |

The first three are the rules of MiniMind and "GRPO from scratch", kept exactly because recipes reproduce them. They
overlook swapped, nested and repeated tags, which `well_formed` does not. Regular expressions are avoided, because `.*?`
between tags takes quadratic time on repeated tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_rewards.completions import completion_text
from grpo_rewards.reward import Kind, Scored, TaggedReward


@dataclass(frozen=True, kw_only=True)
class _TagReward(TaggedReward):
    kind: ClassVar[Kind] = "format"
    payments: ClassVar[tuple[str, ...]] = ("pay",)
    most_payments: ClassVar[int] = 1
    """Number of times that a completion can earn `pay`."""

    pay: float = 1.0

    @property
    def highest_pay(self) -> float:
        """Pay of a completion without a fault, or 0 if that is negative."""
        return max(0.0, self.pay * self.most_payments)

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        # A template that opens the block in the prompt ends with "<think>\n" (DeepSeek-R1, Qwen).
        opening = f"<{self.prefilled}>\n" if self.prefilled else ""
        faults = [self._faults(opening + completion_text(completion)) for completion in completions]
        return Scored(
            [self.pay * (self.most_payments - len(found)) for found in faults],
            reasons=[", ".join(found) or "no fault" for found in faults],
        )

    def _marks(self) -> tuple[str, str, str, str]:
        think, answer = self.tags
        return f"<{think}>", f"</{think}>", f"<{answer}>", f"</{answer}>"

    def _faults(self, text: str) -> Sequence[str]:
        """Return the faults of a completion, one for each payment that it does not get."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TagStructure(_TagReward):
    r"""Strict structure of MiniMind.

    | completion | pay |
    |---|---|
    | `<think>\n…\n</think>\n<answer>\n…\n</answer>`, one blank line allowed between the blocks | 0.5 (`pay`) |
    | anything else, CRLF and leading or trailing spaces included | 0 |

    Source: `reasoning_model_reward` of the MiniMind GRPO notebook, two regular expressions with `.` matching newlines.
    As there, bodies may be empty, contain further tags or repeat the whole document.
    """

    pay: float = 0.5
    name: str = "tag_structure"

    def _faults(self, text: str) -> Sequence[str]:
        think, end_think, answer, end_answer = self._marks()
        start, end = f"{think}\n", f"\n{end_answer}"
        # The sources' `$` also matches before one final newline.
        body_end = len(text) - len(end) - text.endswith("\n")
        if not text.startswith(start):
            return (f"does not start with {start}",)
        if not text.startswith(end, max(body_end, 0)):
            return (f"does not end with {end}",)
        for gap in ("\n", "\n\n"):
            middle = f"\n{end_think}{gap}{answer}\n"
            # The first occurrence leaves the most room for the answer, so no other one needs to be tried.
            position = text.find(middle, len(start))
            if position >= 0 and position + len(middle) <= body_end:
                return ()
        return (f"has no {middle} in between",)


@dataclass(frozen=True, kw_only=True)
class TagCount(_TagReward):
    """Tag count of MiniMind.

    | each of the four tags | pay |
    |---|---|
    | occurs exactly once | 0.25 (`pay`) |
    | is missing or repeated | 0 |

    Source: `mark_num` of the MiniMind GRPO notebook. The order of the tags does not matter.
    """

    most_payments: ClassVar[int] = 4

    pay: float = 0.25
    name: str = "tag_count"

    def _faults(self, text: str) -> Sequence[str]:
        counts = ((mark, text.count(mark)) for mark in self._marks())
        return [f"{mark} {count} times" for mark, count in counts if count != 1]


@dataclass(frozen=True, kw_only=True)
class TagPresence(_TagReward):
    """Tag presence of "GRPO from scratch".

    | each of the four tags | pay |
    |---|---|
    | occurs at least once | 0.2 (`pay`) |
    | is missing | 0 |

    Source: its `format_reward`, where `tags` are reasoning and answer.
    """

    most_payments: ClassVar[int] = 4

    pay: float = 0.2
    name: str = "tag_presence"

    def _faults(self, text: str) -> Sequence[str]:
        return [f"no {mark}" for mark in self._marks() if mark not in text]


@dataclass(frozen=True, kw_only=True)
class WellFormed(_TagReward):
    """Form of one reasoning block, then one answer block, and nothing else.

    | completion | pay |
    |---|---|
    | each tag once, in order, both bodies not blank, only white space around and between the blocks | 1 (`pay`) |
    | anything else | 0 |
    """

    name: str = "well_formed"

    def _faults(self, text: str) -> Sequence[str]:
        think, end_think, answer, end_answer = self._marks()
        text = text.strip()
        if not text.startswith(think):
            return (f"does not start with {think}",)
        if not text.endswith(end_answer):
            return (f"does not end with {end_answer}",)
        for mark in self._marks():
            if (count := text.count(mark)) != 1:
                return (f"{mark} {count} times",)
        reasoning, _, rest = text[len(think) : -len(end_answer)].partition(end_think)
        between, mark, final = rest.partition(answer)
        if not mark:
            return (f"{answer} before {end_think}",)
        if not reasoning.strip() or not final.strip():
            return ("a blank block",)
        return ("text between the blocks",) if between.strip() else ()


tag_structure = TagStructure()
tag_count = TagCount()
tag_presence = TagPresence()
well_formed = WellFormed()
