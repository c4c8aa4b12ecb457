r"""A reward for multiple choice: the one choice that a completion names, by its letter or its text, against the gold's.

| the completion | pay |
|---|---|
| names the gold's choice and no other: `B`, `(b)`, `B) Paris`, `Paris`, `The answer is B.` | 1 (`pay`) |
| names another choice, several, a letter and a text that disagree, or none | 0 (`pay_wrong`) |
| the gold or the choices can't be read | None |

`choice_answers` reads an answer by a small grammar instead of searching it for a letter, and `choice_claims` finds the
sentence that claims one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_rewards.choice_answers import named_choice, read_gold
from grpo_rewards.choice_claims import claimed_choice
from grpo_rewards.choice_questions import Choices, read_choices
from grpo_rewards.completions import completion_text, needed_column
from grpo_rewards.math.correctness import AgainstGold, Judgement
from grpo_rewards.reward import Scored, check_choice


@dataclass(frozen=True, kw_only=True)
class ChoiceCorrectness(AgainstGold):
    r"""Correctness of the choice that a completion names, by its letter or by its text.

    | the completion | pay |
    |---|---|
    | names the gold's choice and no other: `B`, `(b)`, `B) Paris`, `Paris`, `The answer is B.` | 1 (`pay`) |
    | names another choice, several, a letter and a text that disagree, or none | 0 (`pay_wrong`) |
    | the gold or the choices can't be read | None |

    The choices may differ from row to row, as when letters are shuffled.

    Args:
        extract: layout of the answer, as in `answers.extract_answer`, or `whole` for all text outside the thinking.
            `auto` is the first of an answer tag, a `####` line that names a choice, a box, a sentence that claims a
            choice, and the whole. A line `A: ...` counts as an answer with `a_line` only, because it may well list
            choice A.
        pay: score for the right choice.
        pay_wrong: score for anything else.
        tags: names of the reasoning tag and the answer tag.
        prefilled: name of the reasoning tag if the prompt already opens it.
        gold_column: name of the dataset column with the gold: the letter, the text, or the position from 0.
        choices_column: name of the dataset column with the choices, as `read_choices` takes them. If it is null, or not
            in the batch, the answer is one of the letters A to Z.
        gold_form: "letter", "text" or "index", for golds that could be read as several; see `read_gold`.
        prefix: prefix of the logged columns `extracted`, `gold` and `verdict`, for runs in which two rewards log them.
        name: name of the reward in logs.
    """

    gold_forms: ClassVar[str] = (
        "a gold is a letter, a choice's text or its position from 0, and the choices are in `choices_column`"
    )

    extract: str = "auto"
    choices_column: str | None = "choices"
    gold_form: str = "auto"
    name: str = "choice_correctness"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.gold_form, "gold_form", ("auto", "letter", "text", "index"))

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Names of the dataset columns that the reward needs. The default column `choices` may be missing."""
        if self.choices_column in (None, "choices"):
            return super().columns_read
        return *super().columns_read, self.choices_column

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Name of the column with the choices, if the reward reads one."""
        return () if self.choices_column is None else (self.choices_column,)

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        golds = needed_column(self, "gold_column", columns, completions)
        given: Sequence[Any] = [None] * len(completions)
        if self.choices_column is not None and (self.choices_column != "choices" or "choices" in columns):
            given = needed_column(self, "choices_column", columns, completions)
        letters_alone = all(choices is None for choices in given)
        judged: list[Judgement] = []
        for completion, gold, value in zip(completions, golds, given, strict=True):
            choices = read_choices(value) if value is not None or letters_alone else None
            right = read_gold(gold, choices, self.gold_form) if choices is not None else None
            if choices is None or right is None:
                judged.append((None, None, "no gold", None))
                continue
            found, label = self._named(completion_text(completion), choices)
            if label == right:
                judged.append((label, right, "right", self.pay))
            elif label:
                judged.append((label, right, "wrong", self.pay_wrong))
            else:
                judged.append((None, right, "unclear" if found else "missing", self.pay_wrong))
        return self._with_columns(judged)

    def _named(self, text: str, choices: Choices) -> tuple[bool, str | None]:
        """Return True if there is an answer, and the choice that it names."""
        outside = self._outside_thinking(text)
        if self.extract == "sentence":
            return claimed_choice(outside, choices)
        if self.extract != "auto":
            return self._named_in(self.extract, text, choices)
        if f"<{self.tags[1]}>" in outside:
            return self._named_in("answer_tag", text, choices)
        found, label = self._named_in("hashes", text, choices)
        if label:
            return found, label
        found, label = self._named_in("boxed", text, choices)
        if not found:
            found, label = claimed_choice(outside, choices)
        return (found, label) if found else self._named_in("whole", text, choices)

    def _named_in(self, layout: str, text: str, choices: Choices) -> tuple[bool, str | None]:
        answer = self._answers([text], layout)[0]
        return bool(answer), named_choice(answer, choices) if answer else None


choice_correctness = ChoiceCorrectness()
