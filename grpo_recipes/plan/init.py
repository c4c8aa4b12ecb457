"""First recipe for a table, by the names of its columns and the form of its answers (`grpo-recipes init`).

Only what is certain is proposed. Anything else raises `UserError`, which names the option that decides: a recipe with
the wrong column would train on it without a sign.
"""

from __future__ import annotations

import glob
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import yaml

from grpo_recipes.checks.checks import Machine, check, check_model_exists
from grpo_recipes.data.load import load_prompts
from grpo_recipes.data.presets import gold_object, is_missing, single_choices, with_labels
from grpo_recipes.data.prompts import ENVIRONMENT, RESERVED, Prompts, sample_of_rows
from grpo_recipes.data.sources import Keys, guess_source, read
from grpo_recipes.data.tables import listed, shown
from grpo_recipes.data.text_files import has_cells
from grpo_recipes.plan import columns as known
from grpo_recipes.plan.columns import Column
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.recipe.specs import DatasetName, DatasetSpec, SourceSpec
from grpo_rewards.errors import UserError
from grpo_rewards.files import expanded, relative_to, write_atomically
from grpo_rewards.math.answers import gold_answer
from grpo_rewards.math.decimals import Decimal, decimal_marks

MOST_KEYS = 50
"""Largest number of keys of an object that a schema names."""

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"

Rewards = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of rewards, each with its `kwargs`."""


@dataclass(frozen=True, eq=False)
class Form:
    """Form of the answers in a table, and the keys of a recipe for it.

    Attributes:
        task: Name of the task, as in `--task`.
        what: Description of the form.
        has_form: Test of a single answer.
        rewards: Rewards for completions in the layout that `system_prompt` requests.
        bare: Rewards for complete prompts, which get no system prompt. Default: `rewards`.
        parts: Names that the recipe gives the columns of the question and the answer.
        system_prompt: Name of the system prompt.
        preset: Name of the preset that reads such a table.
    """

    task: str
    what: str
    has_form: Callable[[Any], bool]
    rewards: Rewards
    bare: Rewards = ()
    parts: tuple[str, str] = ("question", "answer")
    system_prompt: str | None = None
    preset: DatasetName | None = None


_TAGS = {"tags": ["reasoning", "answer"]}
_MATHS: Rewards = [("math_correctness", {})]
_CHOICE: Rewards = [("choice_correctness", {})]
_WHOLE: Rewards = [("string_match", {"match": "casefold", "extract": "whole"})]
_OVERLAP: Rewards = [("string_match", {"match": "f1", "extract": "whole"})]
_JUDGE: Rewards = [("judge", {"base_url": "http://127.0.0.1:8000/v1", "model": "Qwen/Qwen3-8B"})]


def _tagged(reward: str, bare: Rewards, **kwargs: Any) -> dict[str, Any]:
    """Return the rewards and the system prompt of an answer in a tag."""
    rewards = [(reward, {**_TAGS, **kwargs}), ("tag_presence", _TAGS)]
    return {"rewards": rewards, "bare": bare, "system_prompt": "reasoning"}


_BOX: dict[str, Any] = {
    "rewards": [("math_correctness", {"extract": "boxed"})],
    "bare": _MATHS,
    "system_prompt": "boxed",
}
_LABELLED = _tagged("string_match", _WHOLE, match="casefold")
_OBJECTS: dict[str, Any] = {"rewards": [("json_schema", _TAGS)], "bare": [("json_schema", {})]}
_CHOSEN = _tagged("choice_correctness", _CHOICE)

CODE = Form("code", "tests of a program", known.is_tests, [("unit_tests", {})], (), ("question", "tests"), "program")
WORKED = Form(
    "numbers", "solutions ending in `#### N`", known.is_worked, **_tagged("gsm8k_correctness", _MATHS), preset="gsm8k"
)
BOXED = Form("boxed", "solutions with \\boxed{}", known.is_boxed, **_BOX, parts=("problem", "answer"), preset="math")
LETTER = Form(
    "multiple_choice", "letters of choices in the question", known.is_letter, **_tagged("choice_correctness", _CHOICE)
)
NUMBER = Form("numbers", "numbers", known.is_number, **_tagged("gsm8k_correctness", _MATHS))
FORMULA = Form("boxed", "formulas and numbers", known.is_math, **_BOX)
LABEL = Form("classification", "labels", known.is_label, **_LABELLED, parts=("text", "label"), preset="classification")
OBJECT = Form("extraction", "JSON objects", known.is_object, **_OBJECTS, parts=("text", "object"), preset="extraction")
WORDS = Form("words", "a few words", known.is_short, **_tagged("string_match", _WHOLE))
TEXT = Form("text", "texts", known.is_prose, _OVERLAP)
CHOICE = Form(
    "multiple_choice", "choices", known.is_label, **_CHOSEN, parts=("question", "label"), preset="multiple_choice"
)
INSTRUCTIONS = Form("instructions", "instructions that a program checks", bool, [("instructions", {})])
JUDGED = Form("judged", "missing, so that a model judges the completions", bool, _JUDGE)

FORMS: Sequence[Form] = (CODE, WORKED, BOXED, LETTER, NUMBER, FORMULA, LABEL, OBJECT, WORDS, TEXT)
"""Forms of a column of answers, the most specific first."""

TASKS = tuple(dict.fromkeys(form.task for form in (*FORMS, INSTRUCTIONS, JUDGED)))
"""Values of `--task`."""

SHAPES = {
    "chosen|rejected": "is one side of preference pairs, and GRPO needs prompts and a reward",
    "tools|functions": "holds functions for the policy to call (docs/tools.md), whose calls no reward compares",
    ".*(image|img|picture|photo|audio|video).*": "is about a picture or a sound, which the policy never gets",
    "distractor.*|incorrect.*|wrong.*": "holds wrong answers, which are not mixed with the right one into choices",
}
"""Patterns of names in tables that are more than questions and answers, and what such a column is."""


class NoQuestion(UserError):
    """Error for a table without a text that can be the question.

    Attributes:
        example: Six lines with a template of a prompt and a reward of one's own.
    """

    def __init__(self, message: str, example: str) -> None:
        super().__init__(message)
        self.example = example


@dataclass(frozen=True)
class Wishes:
    """Options of `init`. None leaves a decision to the names and the content."""

    question: str | None = None
    answer: str | None = None
    choices: str | None = None
    task: str | None = None
    decimal: Decimal | None = None


@dataclass(frozen=True)
class Roles:
    """Columns of a table by their role.

    Attributes:
        form: Form of the answers.
        question: Column with the question, or with complete prompts.
        answer: Column with the answers, or None.
        choices: Columns with the choices, by the name that the recipe gives them.
        contexts: Columns that the prompt shows beside the question.
        is_complete: True if the question is a complete prompt, which gets no system prompt.
    """

    form: Form
    question: Column
    answer: Column | None
    choices: Mapping[str, Column]
    contexts: Sequence[Column]
    is_complete: bool


@dataclass(frozen=True)
class Proposal:
    """Recipe for a table.

    Attributes:
        task: Name of the task.
        about: Clause on the answers.
        roles: Lines with the columns and their roles.
        notes: Sentences on what the recipe leaves to its reader.
        dataset: Keys of `dataset`, without those that name the table.
        rewards: Value of `rewards`.
    """

    task: str
    about: str
    roles: Sequence[str]
    notes: Sequence[str]
    dataset: Mapping[str, Any]
    rewards: Sequence[Any]


def proposed(table: datasets.Dataset, path: str, wishes: Wishes = Wishes()) -> Proposal:
    """Return a recipe for a table. Raise `UserError` with the option that decides what is not certain."""
    columns = known.columns_of(table.select(sample_of_rows(len(table))))
    roles = _roles(columns, path, wishes)
    form, answer = roles.form, roles.answer
    part, gold_part = form.parts
    if roles.is_complete:
        part, gold_part = known.PROMPT, "tests" if form is CODE else "answer"
    parts = {part: roles.question}
    if answer is not None and answer.path != roles.question.path:
        parts[gold_part] = answer
    lines = [f"{column.name}: {name}" for name, column in {**parts, **roles.choices}.items()]
    lines += [f"{column.name}: part of the prompt" for column in roles.contexts]
    notes = []
    missing = sum(any(map(is_missing, row)) for row in zip(*(one.values for one in parts.values()), strict=True))
    parts |= {**roles.choices, **{column.key: column for column in roles.contexts}}
    renamed, others = _names(table.column_names, parts, form)
    if others:  # quoted, because a name may hold a line break
        notes.append(f"Every other column reaches the rewards: {', '.join(map(repr, others))}.")
    if missing:
        notes.append(f"{missing:,} rows have no question or no answer: `drop_missing` leaves them out.")
        if any(column.key in known.INPUTS and len(column.filled) < len(column.values) for column in roles.contexts):
            raise UserError(f"{notes[-1]} It also leaves out all rows without `input`: remove the rows from the table")
    if roles.is_complete and not roles.question.is_messages:
        notes.append(
            "`prompt` is text, which reaches a model without its chat template: for an instruct model, set "
            "`dataset.prompt_format: conversational`."
        )
    if roles.is_complete and form.bare is _WHOLE:
        notes.append("The prompts get no system prompt, so they must ask for the answer alone.")
    labels = known.labels_of(answer) if form is LABEL and answer is not None else None
    schema = schema_of([gold_object(value) for value in answer.filled]) if form is OBJECT and answer is not None else {}
    dataset = {
        "name": None if roles.is_complete else form.preset,
        "columns": renamed,
        "labels": None if roles.is_complete else labels,
        "drop_missing": missing > 0,
        "system_prompt": _system_prompt(roles, schema),
        "prompt_template": _template(roles, labels),
    }
    about = f"the answers are {form.what}"
    if answer is not None:
        about += f" in {sum(map(form.has_form, answer.filled)):,} of {len(answer.filled):,} rows"
        if any(isinstance(value, list) for value in answer.filled) and form is not CODE:
            notes.append("Each answer in a list is accepted.")
    rewards = _rewards(roles, schema, wishes)
    return Proposal(form.task, about, lines, notes, {key: value for key, value in dataset.items() if value}, rewards)


# Roles of the columns


def _roles(columns: Sequence[Column], path: str, wishes: Wishes) -> Roles:
    if wishes.question is None:
        _check_shape(columns)
    question = _question(columns, path, wishes)
    rest = _unrelated(columns, question)
    form, answer, choices = _answer(rest, question, wishes)
    # A program is wanted in a fence, which only a system prompt requests.
    is_complete = question.is_messages or (question.key == known.PROMPT and form is not CODE)
    contexts = []
    if not is_complete and not choices:
        contexts = [one for one in known.named(rest, known.CONTEXTS) if one is not answer and one.is_text(0)]
        contexts += [one for one in known.named(rest, known.INPUTS) if one is not answer and one.is_text(0)]
    if wishes.question is None:
        _check_all_read(rest, question, answer, [*choices.values(), *contexts])
    return Roles(form, question, answer, choices, contexts, is_complete)


def _check_shape(columns: Sequence[Column]) -> None:
    """Raise `UserError` for a column that a recipe for questions and answers does not fit."""
    for column in columns:
        for pattern, what in SHAPES.items():
            if len(column.path) == 1 and column.filled and re.fullmatch(pattern, column.key):
                raise UserError(
                    f"the column {column.name!r} {what}: to train without it, name the question with `--question "
                    "COLUMN`, and the answer with `--answer COLUMN` or `--task judged`"
                )


def _unrelated(columns: Sequence[Column], *taken: Column) -> list[Column]:
    """Return the columns that share no value with those in `taken`."""
    rest = []
    for column in columns:
        if not any(column.is_within(other) or other.is_within(column) for other in taken):
            rest.append(column)
    return rest


def _question(columns: Sequence[Column], path: str, wishes: Wishes) -> Column:
    """Return the column with the question, or with complete prompts."""
    if wishes.question is not None:
        return known.find(columns, wishes.question, "--question")
    readable = [column for column in columns if column.is_messages or column.is_text(2)]
    for names in ((known.PROMPT, *known.QUESTIONS), known.CONVERSATIONS, known.TEXTS):
        found = known.named(readable, names)
        if len(found) > 1:
            raise _ambiguous_columns(found, "question")
        if found:
            return found[0]
    fields = [one.name for one in columns if one.name.isidentifier() and one.key not in known.METADATA] or ["column"]
    raise NoQuestion(
        f"no column of {listed(repr(column.name) for column in columns)} has the name of a question, and texts that "
        "differ: name one with `--question COLUMN`, or write a template and a reward of your own",
        f"dataset: {{path: {path}, prompt_template: 'Work on {{{{ {fields[0]} }}}}.'}}\nrewards: [mine.score]\n"
        f"# mine.py:\ndef score(completions, {fields[-1]}, **columns):\n"
        '    texts = [completion[-1]["content"] for completion in completions]\n'
        f"    return [float(str(gold) in text) for gold, text in zip({fields[-1]}, texts)]",
    )


def _ambiguous_columns(columns: Sequence[Column], role: str) -> UserError:
    names = " and ".join(repr(column.name) for column in columns[:3])
    return UserError(f"the columns {names} could each be the {role}: name one with `--{role} COLUMN`")


def _answer(
    rest: Sequence[Column], question: Column, wishes: Wishes
) -> tuple[Form, Column | None, Mapping[str, Column]]:
    """Return the form of the answers, the column that holds them, and the columns of the choices by new name."""
    names = {column.name for column in rest}
    if wishes.task == INSTRUCTIONS.task or (wishes.task is None and {"instruction_id_list", "kwargs"} <= names):
        return INSTRUCTIONS, None, {}
    if wishes.task == JUDGED.task:
        return JUDGED, None, {}
    choices = _choices(rest, wishes)
    if choices:
        return CHOICE, _gold_of(choices, rest, wishes), choices
    answer = _named_answer(rest, question, wishes)
    if answer is not None:
        form = _form_of(answer, wishes)
        if wishes.task is None:
            _check_certain(form, answer, question, rest)
        needs_question = wishes.question is None and question.key in known.TEXTS
        if needs_question and form in (NUMBER, WORDS, FORMULA) and question.share(known.asks) < 0.5:
            raise UserError(
                f"{question.name!r} may be a text without a question: name it with `--question {question.name}`, or "
                "add a question with `dataset.prompt_template`"
            )
        return form, answer, {}
    ignored = (*known.METADATA, *known.CONVERSATIONS, *known.CONTEXTS, *known.INPUTS)
    unknown = [repr(one.name) for one in rest if len(one.path) == 1 and one.filled and one.key not in ignored]
    if unknown or question.key in known.TEXTS or wishes.task is not None:
        raise UserError(
            f"no column has the name of an answer (beside {question.name!r} the table has {listed(unknown) or 'none'}"
            "): name one with `--answer COLUMN`, or choose `--task judged`, so that a model judges"
        )
    return JUDGED, None, {}


def _choices(rest: Sequence[Column], wishes: Wishes) -> Mapping[str, Column]:
    """Return the column with the choices as `choices`, or the columns of one choice each by label; {} without any."""
    if wishes.choices is not None:
        found = [known.find(rest, name.strip(), "--choices") for name in wishes.choices.split(",")]
        return {"choices": found[0]} if len(found) == 1 else dict(zip("ABCDEFGHIJ", found, strict=False))
    if wishes.task not in (None, CHOICE.task):
        return {}
    lists = known.named([column for column in rest if column.share(known.are_choices) >= known.ENOUGH], known.CHOICES)
    if len(lists) > 1:
        raise _ambiguous_columns(lists, "choices")
    if lists:
        return {"choices": lists[0]}
    return known.find_single_choices([column for column in rest if column.name != wishes.answer])


def _gold_of(choices: Mapping[str, Column], rest: Sequence[Column], wishes: Wishes) -> Column:
    """Return the column whose values name one of the choices."""
    golds = _unrelated(rest, *choices.values())
    if wishes.answer is not None:
        golds = [known.find(golds, wishes.answer, "--answer")]
    else:
        golds = known.named(golds, (*known.ANSWERS, *known.LABELS, *known.POSITIONS))
    rows = [dict(zip(choices, row, strict=True)) for row in zip(*(one.values for one in choices.values()), strict=True)]
    given = [row["choices"] if "choices" in choices else single_choices(row) for row in rows]
    fitting: dict[tuple[str | None, ...], Column] = {}
    for gold in golds:
        labels = tuple(map(known.label_of, given, gold.values))
        if len(labels) - labels.count(None) >= max(1, known.ENOUGH * len(gold.filled)):
            fitting.setdefault(labels, gold)
    if len(fitting) > 1:
        raise _ambiguous_columns([*fitting.values()], "answer")
    for gold in fitting.values():
        if known.are_positions_certain(given, gold.values):
            return gold
    names = " or ".join(repr(gold.name) for gold in golds) or "a column"
    raise UserError(
        f"it is not certain that {names} names one of the choices in {listed(one.name for one in choices.values())}, "
        "by its letter, its text, or its position from 0: write letters, name another `--answer COLUMN`, or choose "
        "`--task words`"
    )


def _named_answer(rest: Sequence[Column], question: Column, wishes: Wishes) -> Column | None:
    """Return the column with the answers by its name, or the last turns of conversations, or None."""
    if wishes.answer is not None:
        return known.find(rest, wishes.answer, "--answer")
    tests = known.named(rest, known.TESTS)
    readable = [column for column in tests if column.share(known.is_tests) >= known.ENOUGH]
    if tests and not readable and wishes.task in (None, CODE.task):
        raise UserError(
            f"{tests[0].name!r} holds no tests that `unit_tests` reads (docs/rewards.md): rewrite them, or name an "
            "answer with `--answer COLUMN`"
        )
    turns = known.last_turns(question) if question.is_messages else None
    for found in (
        readable,
        known.named(rest, (*known.ANSWERS, *known.LABELS)),
        [] if turns is None else [turns],
        known.named(rest, known.SOLUTIONS),
        known.named(rest, known.OUTPUTS),
        known.named(rest, (*known.KINDS, *known.OBJECTS)) if question.key in known.TEXTS else [],
    ):
        if any(column.key.startswith("label_") for column in found):  # the names of the numbers in `label`
            found = [column for column in found if column.key != "label"]
        if len({tuple(map(_final, column.values)) for column in found}) > 1:
            raise _ambiguous_columns(found, "answer")
        if found:
            return found[0]
    return None


def _final(value: Any) -> str:
    return str(gold_answer(value) or value)


def _form_of(answer: Column, wishes: Wishes) -> Form:
    """Return the most specific form, among those of the task, that enough of the answers have."""
    # The rows that an explicit task leaves out are named by the checks of the recipe.
    enough = known.ENOUGH if wishes.task is None else 0.5
    for form in FORMS:
        if wishes.task not in (None, form.task) or answer.share(form.has_form) < enough:
            continue
        # Where some answers are formulas, `math_correctness` has to read all of them.
        is_mixed = form is NUMBER and wishes.task is None and any(map(known.is_formula, answer.filled))
        are_no_labels = form is LABEL and known.labels_of(answer, is_asked=wishes.task is not None) is None
        if not is_mixed and not are_no_labels:
            return form
    what = f"for the task {wishes.task}" if wishes.task else "of a known form"
    raise UserError(
        f"{answer.name!r} has no answers {what}: name another `--answer COLUMN`, or a `--task` of {', '.join(TASKS)}"
    )


def _check_certain(form: Form, answer: Column, question: Column, rest: Sequence[Column]) -> None:
    """Raise `UserError` if the form of the answers, found without `--task`, can mean something else."""
    texts = answer.texts
    is_label = answer.key in (*known.LABELS, *known.KINDS)
    are_digits = 4 * len(set(texts)) <= min(len(texts), 20) and all(len(text) == 1 for text in texts)
    is_complete = question.is_messages or question.key == known.PROMPT
    mixed = [one.task for one in (WORKED, BOXED, NUMBER, FORMULA) if answer.share(one.has_form) >= 0.5]
    needs_name = form is CODE and any("fn_name" in str(value) or "def check(" in str(value) for value in answer.filled)
    is_named = any(column.key in ("entry_point", "starter_code") for column in rest)
    problem = ""
    if len(texts) > 2 and len(set(texts)) == 1:
        problem = "are the same in all rows: name another `--answer COLUMN`, or choose `--task words`"
    elif answer.key in known.OUTPUTS and any(column.key in known.RATINGS for column in rest):
        problem = "are rated, so that they may be wrong: choose `--task judged`, or name another `--answer COLUMN`"
    elif needs_name and not is_named:
        problem = "call a function that no column names: add a column `starter_code`, or choose `--task code`"
    elif texts and set(texts) <= {column.name for column in rest}:
        problem = "are names of columns, which hold choices: name these with `--choices ONE,OTHER`"
    elif form is LETTER and not is_complete and question.share(known.holds_choices) < known.ENOUGH:
        problem = "are letters of choices: name these with `--choices COLUMN`, or choose `--task words`"
    elif form is NUMBER and (is_label or are_digits):
        problem = (
            "may be amounts, or numbers of labels: choose `--task numbers` or `--task classification`, or name the "
            "column with the names of the labels with `--answer COLUMN`"
        )
    elif is_label and form is not LABEL:
        problem = "are lists, rare or long: choose `--task words`, or name another `--answer COLUMN`"
    elif form is OBJECT and not (answer.key in known.OBJECTS and question.key in known.TEXTS):
        problem = (
            "are objects: choose `--task extraction` to train on writing them as JSON, or name a part of them as in "
            "`--answer answer.value`"
        )
    elif form is TEXT and not (answer.key in known.SUMMARIES and question.key in known.TEXTS):
        problem = (
            "are texts, and others can be right: choose `--task text` to pay words in common, or `--task judged` to "
            "let a model judge"
        )
    elif form in (WORDS, LABEL, TEXT) and mixed:
        problem = f"have several forms: choose `--task {mixed[0]}` or `--task {form.task}`"
    if problem:
        raise UserError(f"the answers in {answer.name!r} {problem}")


def _check_all_read(rest: Sequence[Column], question: Column, answer: Column | None, used: Sequence[Column]) -> None:
    """Raise `UserError` if a column that neither the prompt nor the answer is made of may be a part of the prompt."""
    held = (*known.HELD, *known.CONVERSATIONS, known.PROMPT)
    for column in rest:
        if column.path[:-1] not in ((), question.path[:-1]) or column in used or not column.filled:
            continue
        is_context = column.key in (*known.CONTEXTS, *known.INPUTS, *known.CHOICES)
        # A title has some words, and a text in `source` has many.
        is_other_text = column.key not in held and column.is_text(15 if column.key in known.METADATA else 5)
        if column is not answer and (is_context or is_other_text):
            raise UserError(
                f"the column {column.name!r} may belong to the prompt: write a recipe without it with `--question "
                f"{question.name}`, and add it with `dataset.prompt_template`"
            )


def _names(names: Sequence[str], parts: Mapping[str, Column], form: Form) -> tuple[dict[str, str], list[str]]:
    """Return the old names of renamed columns by new name, and the new names of all columns without a part."""
    columns = {part: column.name for part, column in parts.items()}
    # A preset makes the column `answer`, and the trainer has names of its own. A column with such a name is renamed.
    taken = {*RESERVED, ENVIRONMENT, *columns, known.PROMPT, *(("answer",) if form.preset else ())}
    others = []
    for name in names:
        if name not in columns.values():
            others.append(f"other_{name}" if name in taken else name)
            columns[others[-1]] = name
    return {new: old for new, old in columns.items() if new != old}, others


# Keys of the recipe


def _system_prompt(roles: Roles, schema: Mapping[str, Any]) -> str | None:
    if roles.is_complete and roles.form is not CODE:
        return None
    if roles.form is TEXT and roles.answer is not None and roles.answer.key in known.SUMMARIES:
        return f"Write the {roles.answer.key} of the text. Answer with it alone."
    if roles.form is not OBJECT:
        return roles.form.system_prompt
    return (
        "Read the text, and answer with one JSON object between <answer> and </answer>. It must fit this JSON "
        f"Schema:\n{json.dumps(schema, ensure_ascii=False)}"
    )


def _template(roles: Roles, labels: Sequence[str] | None) -> str | None:
    """Return the template of a prompt with contexts or with the call of a function, or None if it needs none."""
    before: list[str] = []
    behind: list[str] = []
    for one in roles.contexts:
        is_before = one.key in known.CONTEXTS
        part = f"{{{{ {one.key} }}}}\n\n" if is_before else f"\n\n{{{{ {one.key} }}}}"
        if len(one.filled) < len(one.values):
            part = f"{{% if {one.key} %}}{part}{{% endif %}}"
        (before if is_before else behind).append(part)
    if roles.form is CODE and roles.answer is not None and not roles.is_complete:
        first = roles.answer.filled[0]
        tests = "tests[0]" if isinstance(first, list) else "tests"
        if re.search(r"\bassert ", str(first)) and "def check(" not in str(first):
            # A question such as MBPP's does not name the function. The expected value is left out.
            call = f'{{{{ {tests}.split("assert ")[1].split("==")[0] }}}}'
            behind.append(f"\nYour program is called like this: {call}")
    if not before and not behind:
        return None
    template = "".join([*before, f"{{{{ {roles.form.parts[0]} }}}}", *behind])
    return template if labels is None else with_labels(template, labels)


def _rewards(roles: Roles, schema: Mapping[str, Any], wishes: Wishes) -> list[Any]:
    """Return the rewards of a recipe, with what the golds decide as arguments."""
    form = roles.form
    decimal = None
    if roles.answer is not None and form in (NUMBER, FORMULA, WORKED, BOXED):
        decimal = wishes.decimal or _decimal(roles.answer)
    rewards: list[Any] = []
    for name, given in form.bare if roles.is_complete and form.bare else form.rewards:
        kwargs = dict(given)
        if decimal is not None and name != "tag_presence":
            kwargs["decimal"] = decimal
        if form is OBJECT:
            kwargs |= {"schema": schema, "gold_column": "answer"}
        rewards.append({"name": name, "kwargs": kwargs} if kwargs else name)
    return rewards


def _decimal(golds: Column) -> Decimal | None:
    """Return the decimal mark of golds that are text. Raise `UserError` if it is ambiguous."""
    texts = [(number, gold_answer(gold) or "") for number, gold in enumerate(golds.values) if isinstance(gold, str)]
    marks = decimal_marks(texts)
    if marks.certain is None:
        _, gold = marks.first_ambiguous or marks.first_comma or (0, "")
        raise _ambiguous_mark(golds.name, gold)
    return "comma" if marks.certain == "comma" else None


def _ambiguous_mark(column: str, example: str) -> UserError:
    return UserError(
        f"the answers in {column!r} may have a decimal point or a decimal comma ({shown(example)}): choose with "
        "`--decimal point` or `--decimal comma`"
    )


def schema_of(values: Sequence[Any]) -> dict[str, Any]:
    """Return a JSON Schema that all of the JSON values fit. A key is required if every object has it."""
    kinds = dict.fromkeys(_KINDS[type(value)] for value in values if value is not None)
    if "number" in kinds:
        kinds.pop("integer", None)
    schema: dict[str, Any] = {"type": next(iter(kinds)) if len(kinds) == 1 else list(kinds)} if kinds else {}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        keys = dict.fromkeys(key for value in objects for key in value)
        if len(keys) > MOST_KEYS:
            return schema
        schema["properties"] = {key: schema_of([value[key] for value in objects if key in value]) for key in keys}
        schema["required"] = [key for key in keys if all(key in value for value in objects)]
        schema["additionalProperties"] = False
    entries = [entry for value in values if isinstance(value, list) for entry in value]
    if entries:
        schema["items"] = schema_of(entries)
    return schema


_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}

# The recipe

LORA = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": "all-linear"}
ON_GPU = {"dtype": "bfloat16", "bf16": True, **LORA}
ON_CPU = {"dtype": "float32", "bf16": False, "use_cpu": True}
BATCH_KEYS = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 256, "max_steps": 500}
PROMPTS_PER_STEP = 2
EVALUATION = {"eval_strategy": "steps", "eval_steps": 50, "per_device_eval_batch_size": 16}
SAVES = {"logging_steps": 1, "save_steps": 50, "save_total_limit": 2}

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of held-out rows, from which the smallest is taken that holds out enough rows."""

HELD_OUT = 10
"""Number of rows that are held out, if that is at most a fifth of the rows."""

ABOUT_FILE = "Written by `grpo-recipes init`; check it with `grpo-recipes plan`, run it with `grpo-recipes train`."
ABOUT_REWARDS = "The rewards; `grpo-rewards list` describes each, and `grpo-rewards audit` attacks one of your own."
ABOUT_REWARDS_OF = {
    "text": "Words in common are a rough measure: a `judge` or a `reward_model` follows the meaning (docs/rewards.md).",
    "code": "Programs run in a sandbox, on Linux only (docs/security.md).",
    "judged": (
        "Serve a judge (`vllm serve Qwen/Qwen3-8B`), or write the URL and the name of your own, with `api_key_env` for "
        "a key. Or replace it with a reward of your own, as `module.function` (docs/rewards.md)."
    ),
}


def write_first_recipe(
    path: str, output: Path, model: str = MODEL, *, machine: Machine, wishes: Wishes = Wishes()
) -> Proposal:
    """Read a table, write a recipe for it that passes every check, and return what the recipe makes of the table.

    Args:
        path: Value for `dataset.path`: a hub ID, a folder, a file or a glob.
        output: Path of the recipe, where no file may exist.
        model: Value for `model_name_or_path`.
        machine: Machine that the recipe is for: LoRA on a GPU with bfloat16, or all parameters on a CPU.
        wishes: Options that replace decisions.

    Raises:
        UserError: The table can't be read, an option has to decide, or a check fails. No file is written.
    """
    if os.path.exists(output):  # False where a folder on the way can't be read
        raise UserError(f"--output {output} exists: name another file")
    source = guess_source(path)
    if wishes.decimal is not None and _has_cells(path):
        source = replace(source, decimal="comma" if wishes.decimal == "comma" else None)
    table = read(source, Keys("path", "split")).table
    if len(table) < PROMPTS_PER_STEP:
        raise UserError(f"{path} has {'only one row' if len(table) else 'no rows'}: name another table")
    # A completion is written as the table is.
    marks = wishes if source.decimal is None else replace(wishes, decimal=source.decimal)
    proposal = proposed(table, path, marks)
    if wishes.decimal is None and source.decimal is None and proposal.task == "numbers" and _has_cells(path):
        _check_number_cells(source, table, proposal.dataset.get("columns", {}).get("answer", "answer"))
    notation = {key: getattr(source, key) for key in ("path", "delimiter", "encoding", "decimal")}
    dataset = {**{key: value for key, value in notation.items() if value is not None}, **proposal.dataset}
    prompts = load_prompts(DatasetSpec.parse(dataset))
    dataset["max_prompt_tokens"] = _room_for(prompts)
    share = _share_to_hold_out(prompts.identities)
    text = recipe_text(dataset, proposal, model, has_gpu=machine.bf16, rows=len(table), share=share)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text)
    except OSError as error:
        reason = "a file has the name of its folder" if isinstance(error, FileExistsError) else error.strerror
        place = f"{output}{relative_to(output)}"
        raise UserError(f"--output {place} can't be written ({reason}): name another file") from error
    try:
        recipe = parse_recipe(["--config", str(output)])
        check_model_exists(recipe)
        golds = check(recipe, machine).golds
    except UserError:
        output.unlink()
        raise
    return proposal if golds is None else replace(proposal, notes=[*proposal.notes, golds.describe()])


def _has_cells(path: str) -> bool:
    """Return True for a CSV file, or a glob of CSV files."""
    return has_cells(Path(path)) and (expanded(path).is_file() or glob.has_magic(path))


def _check_number_cells(source: SourceSpec, table: datasets.Dataset, answer: str) -> None:
    """Raise `UserError` if the cells of the answers, which are numbers, have two readings: `1.200` in each of them."""
    as_commas = read(replace(source, decimal="comma"), Keys("path", "split")).table
    if (table.features[answer].dtype, as_commas.features[answer].dtype) == ("float64", "int64"):
        raise _ambiguous_mark(answer, str(next(value for value in table[answer] if value is not None)))


def _room_for(prompts: Prompts) -> int:
    """Return a number of tokens that is enough for the longest prompt, as far as its bytes show."""
    longest = 0
    for prompt in prompts.dataset.select(sample_of_rows(len(prompts.dataset)))["prompt"]:
        text = prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt)
        longest = max(longest, len(text.encode()))
    # English has about four bytes a token, and numbers and other scripts two. The chat template adds some tokens.
    return 256 * (longest // 2 // 256 + 1)


def _share_to_hold_out(identities: np.ndarray) -> float | None:
    """Return the share of rows to hold out, or None if every share leaves one side without enough rows."""
    wanted = max(1, min(HELD_OUT, len(identities) // 5))
    for share in SHARES:
        held_out = int((identities < np.uint64(int(share * 2.0**64))).sum())
        if held_out >= wanted and len(identities) - held_out >= PROMPTS_PER_STEP:
            return share
    return None


def recipe_text(
    dataset: Mapping[str, Any], proposal: Proposal, model: str, *, has_gpu: bool, rows: int, share: float | None
) -> str:
    """Return a recipe as YAML with comments."""
    about_rows = [f"{rows:,} rows; {proposal.about}.", *proposal.notes]
    about_rows.append("Prompts of more than `max_prompt_tokens` are dropped.")
    evaluation: Mapping[str, Any] = {}
    about_evaluation = "There are too few rows to hold some out, so nothing is evaluated."
    if share is not None:
        dataset, evaluation = {**dataset, "eval_share": share}, EVALUATION
        about_rows.append(f"About {share:.0%} of the rows are held out, by a hash of each.")
        about_evaluation = "Evaluation on the held-out rows every 50 steps."
    about_machine, machine, rate = "For a CPU, as there is no GPU with bfloat16: all parameters.", ON_CPU, 1e-5
    if has_gpu:
        about_machine, machine, rate = "LoRA on one GPU.", ON_GPU, 5e-5
    sections: list[tuple[str, Mapping[str, Any]]] = [
        (ABOUT_FILE, {}),
        (about_machine, {"model_name_or_path": model, **machine}),
        (" ".join(about_rows), {"dataset": dataset}),
        (ABOUT_REWARDS_OF.get(proposal.task, ABOUT_REWARDS), {"rewards": proposal.rewards}),
        ("2 prompts × 8 completions per optimizer step; more prompts make steadier steps.", BATCH_KEYS),
        (
            "A learning rate for LoRA is about 50 times that of full fine-tuning of a large model.",
            {"learning_rate": rate, "max_grad_norm": 0.2, "beta": 0.0},
        ),
        (about_evaluation, {**evaluation, **SAVES, "output_dir": f"runs/{_stem(str(dataset['path']))}"}),
    ]
    return "\n".join(_comment(text) + _yaml(values) for text, values in sections)


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _yaml(values: Mapping[str, Any]) -> str:
    copied = json.loads(json.dumps(values))  # YAML has aliases for values that are one object
    return yaml.safe_dump(copied, sort_keys=False, allow_unicode=True, width=120) if copied else ""


def _stem(path: str) -> str:
    """Return a name for the run of a table, from the last part of its path."""
    stem = Path(path).name.partition(".")[0]
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem).strip("-") or "run"


def default_output(path: str) -> Path:
    """Return the default path of a table's recipe: a YAML file of the table's name in this folder."""
    return Path(f"{_stem(path)}.yaml")
