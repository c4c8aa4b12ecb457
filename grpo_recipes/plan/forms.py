"""Forms of the answers in a table, with the reward and the system prompt that a recipe has for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_recipes.data.presets import choices_of, gold_object
from grpo_recipes.plan.columns import words_in
from grpo_recipes.recipe.dataset import DatasetName
from grpo_rewards.choices import read_choices
from grpo_rewards.math.answers import extract_answer
from grpo_rewards.math.decimals import with_point
from grpo_rewards.math.golds import read_golds
from grpo_rewards.math.numbers import parse_number
from grpo_rewards.programs import UnitTests

SHORT_WORDS = 5
"""Largest number of words of an answer that counts as a few words."""

_UNIT_TESTS = UnitTests()
_LATEX = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"(?!sin|cos|tan|log|exp|sqrt|mod|max|min)[^\W\d_]{3,}")
_FORMULA = re.compile(r"[\d\\^_=+/]")


def is_tests(value: Any) -> bool:
    """Return True for tests that `unit_tests` can use, given the name of their function."""
    (score,) = _UNIT_TESTS(prompts=[""], completions=[""], tests=[value], entry_point=["f"])
    return score is not None


def are_choices(value: Any) -> bool:
    """Return True for a list of choices, also as text or with their labels."""
    read = read_choices(choices_of(value)) if value else None
    return read is not None and len(read.texts) > 1


def is_letter(value: Any) -> bool:
    """Return True for a letter that can name a choice."""
    return isinstance(value, str) and re.fullmatch(r"\(?[A-J]\)?\.?", value.strip()) is not None


def is_number(value: Any) -> bool:
    """Return True for a number, plain text that is one, or a solution that ends in `#### N`."""
    if isinstance(value, str):
        value = extract_answer(value, "hashes") or value
        return "\\" not in value and (parse_number(value) is not None or parse_number(with_point(value)) is not None)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_formula(value: Any) -> bool:
    r"""Return True for a formula that is not a number, a list of formulas as JSON, or a solution with `\boxed{}`."""
    if not isinstance(value, str) or is_number(value):
        return False
    if extract_answer(value, "boxed"):
        return True
    plain = _LATEX.sub(" ", value)
    return _FORMULA.search(value) is not None and _WORD.search(plain) is None and bool(read_golds(value))


def is_math(value: Any) -> bool:
    """Return True for a number or a formula."""
    return is_number(value) or is_formula(value)


def is_label(value: Any) -> bool:
    """Return True for a value that can be one of several labels."""
    return isinstance(value, (str, int, float))


def is_object(value: Any) -> bool:
    """Return True for an object or its JSON, except for SQuAD's list of accepted answers."""
    found = gold_object(value) or {}
    return len(found) > 0 and "answer_start" not in found


def is_short(value: Any) -> bool:
    """Return True for a few words, or a list of them, which may be SQuAD's."""
    if isinstance(value, Mapping) and "answer_start" in value:
        value = value["text"]
    if isinstance(value, list):
        return bool(value) and all(map(is_short, value))
    return is_label(value) and 0 < words_in(str(value)) <= SHORT_WORDS and not str(value).startswith(("[", "{"))


def is_prose(value: Any) -> bool:
    """Return True for text that is not JSON."""
    return isinstance(value, str) and not value.lstrip().startswith(("[{", "{"))


@dataclass(frozen=True, eq=False)
class Form:
    """Form of the answers in a table, and the keys of a recipe for it.

    Attributes:
        task: Name of the task, as in `--task`.
        what: Description of the form.
        has_form: Test of a single answer.
        reward: Name of the reward.
        kwargs: Arguments of the reward, beside the tags that the system prompt `reasoning` requests.
        system_prompt: Name of the system prompt, which complete prompts do not get.
        preset: Name of the preset that reads such a table.
    """

    task: str
    what: str
    has_form: Callable[[Any], bool]
    reward: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = "reasoning"
    preset: DatasetName | None = None


FOLDED = {"match": "casefold"}
OVERLAP = {"match": "f1", "extract": "whole"}
JUDGE = {"base_url": "http://127.0.0.1:8000/v1", "model": "Qwen/Qwen3-8B"}

CODE = Form("code", "tests", is_tests, "unit_tests", {}, "program")
NUMBER = Form("numbers", "numbers", is_number, "gsm8k_correctness")
FORMULA = Form("boxed", "formulas and numbers", is_math, "math_correctness", {}, "boxed")
LABEL = Form("classification", "labels", is_label, "string_match", FOLDED, preset="classification")
OBJECT = Form("extraction", "objects", is_object, "json_schema", preset="extraction")
WORDS = Form("words", "a few words", is_short, "string_match", FOLDED)
TEXT = Form("text", "texts", is_prose, "string_match", OVERLAP, None)
CHOICE = Form("multiple_choice", "choices", is_label, "choice_correctness", preset="multiple_choice")
INSTRUCTIONS = Form("instructions", "instructions that a program checks", bool, "instructions", {}, None)
JUDGED = Form("judged", "missing, so that a model judges the completions", bool, "judge", JUDGE, None)

PARTS = {
    CODE: ("question", "tests"),
    LABEL: ("text", "label"),
    OBJECT: ("text", "object"),
    CHOICE: ("question", "label"),
}
"""Names of the columns of question and answer in a recipe, for forms where they are not `question` and `answer`."""

FORMS: Sequence[Form] = (CODE, NUMBER, FORMULA, LABEL, OBJECT, WORDS, TEXT)
"""Forms of a column of answers, the most specific first."""

TASKS = tuple(dict.fromkeys(form.task for form in (*FORMS, CHOICE, INSTRUCTIONS, JUDGED)))
"""Values of `--task`."""
