"""First recipe for a table, guessed from its columns and the answers in its first rows (`grpo-recipes init`)."""

from __future__ import annotations

import glob
import json
import os
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import yaml

from grpo_recipes.checks.checks import Machine, check, check_model_exists
from grpo_recipes.data.load import load_prompts
from grpo_recipes.data.presets import PRESETS, gold_object, is_missing
from grpo_recipes.data.prompts import ENVIRONMENT, RESERVED, sample_of_rows
from grpo_recipes.data.sources import Keys, guess_source, read
from grpo_recipes.data.tables import BATCH, listed, shown
from grpo_recipes.data.text_files import has_cells
from grpo_recipes.plan import columns as found
from grpo_recipes.plan.columns import Column, LastTurns, SingleChoices
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.recipe.specs import DatasetName, DatasetSpec, SourceSpec
from grpo_rewards.errors import UserError
from grpo_rewards.files import expanded, relative_to, write_atomically
from grpo_rewards.math.answers import gold_answer
from grpo_rewards.math.decimals import Decimal, decimal_marks

LOOKED_AT = 1_000
"""Number of rows from which columns and forms are guessed."""

NAMED_ROWS = 20
"""Largest number of rows without an answer that are named."""

MOST_KEYS = 50
"""Largest number of keys of an object that a schema names."""

PLAIN_NAMES = (*found.ANSWERS[:14], "completion", "text")
"""Names of columns that do not say what kind of text the answer is."""

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"

JUDGE = {"base_url": "http://127.0.0.1:8000/v1", "model": "Qwen/Qwen3-8B"}
"""Endpoint and model of a judge in a first recipe."""


@dataclass(frozen=True, eq=False)
class Form:
    """Form of the answers in a table, and the keys of a recipe for it.

    Attributes:
        task: Name of the task, as in `--task`.
        what: Description of the form.
        has_form: Test of a single answer.
        rewards: Rewards for completions in the layout that `system_prompt` requests.
        rewards_for_prompts: Rewards for a table with complete prompts, which request no layout.
        parts: Names that the recipe gives the columns of the question and the answer.
        system_prompt: Name of the system prompt, or its text.
        preset: Name of the preset that reads such a table.
    """

    task: str
    what: str
    has_form: Callable[[Any], bool]
    rewards: Sequence[Mapping[str, Any]]
    rewards_for_prompts: Sequence[Mapping[str, Any]]
    parts: tuple[str, str] = ("question", "answer")
    system_prompt: str | None = "reasoning"
    preset: DatasetName | None = None


_TAGS = {"tags": ["reasoning", "answer"]}
_ON_PRESENCE = {"name": "tag_presence", "kwargs": _TAGS}


def _in_tags(reward: str, **kwargs: Any) -> list[dict[str, Any]]:
    return [{"name": reward, "kwargs": {**_TAGS, **kwargs}}, _ON_PRESENCE]


def _alone(reward: str, **kwargs: Any) -> list[dict[str, Any]]:
    return [{"name": reward, "kwargs": kwargs}]


_BY_OVERLAP = _alone("string_match", match="f1", extract="whole")
_BY_WORDS = _alone("string_match", match="casefold", extract="whole")

CODE = Form(
    *("code", "tests of a program", found.is_assertions, _alone("unit_tests"), _alone("unit_tests")),
    parts=("question", "tests"),
    system_prompt="program",
)
WORKED = Form(
    *("numbers", "solutions that end in `#### N`", found.is_worked),
    *(_in_tags("gsm8k_correctness"), _alone("math_correctness")),
    preset="gsm8k",
)
BOXED = Form(
    *("boxed", "solutions with the answer in \\boxed{}", found.is_boxed),
    *(_alone("math_correctness", extract="boxed"), _alone("math_correctness")),
    system_prompt="boxed",
    preset="math",
)
OBJECT = Form(
    *("extraction", "JSON objects", found.is_object),
    *(_alone("json_schema", **_TAGS), _alone("json_schema")),
    parts=("text", "object"),
    preset="extraction",
)
LABEL = Form(
    *("classification", "labels", found.is_short, _in_tags("string_match", match="casefold"), _BY_WORDS),
    parts=("text", "label"),
    preset="classification",
)
NUMBER = Form("numbers", "numbers", found.is_number, _in_tags("gsm8k_correctness"), _alone("math_correctness"))
WORDS = Form("words", "a few words", found.is_short, _in_tags("string_match"), _BY_WORDS)
TEXT = Form("text", "texts", found.is_prose, _BY_OVERLAP, _BY_OVERLAP, system_prompt=None)
CHOICE = Form(
    *("multiple_choice", "one of the choices", found.is_short),
    *(_in_tags("choice_correctness"), _alone("choice_correctness")),
    parts=("question", "label"),
    preset="multiple_choice",
)
NONE = Form("judged", "none", found.is_prose, _alone("judge", **JUDGE), _alone("judge", **JUDGE), system_prompt=None)

CERTAIN: Sequence[Form] = (CODE, WORKED, BOXED)
"""Forms that only an answer has."""

LIKELY: Sequence[Form] = (OBJECT, LABEL, NUMBER, WORDS)
"""Forms that columns about a row have too."""

FORMS: Sequence[Form] = (*CERTAIN, *LIKELY, TEXT)
"""Forms of a column, the most specific first."""

TASKS = tuple(dict.fromkeys(form.task for form in (*FORMS, CHOICE, NONE)))
"""Values of `--task`."""

_Found = tuple[Form, Column | None, str, Column | None]
# Form of the answers, their column, the reason, and the column with choices.


@dataclass(frozen=True)
class Wishes:
    """Options of `init` that replace its guesses. None leaves a guess to the content."""

    question: str | None = None
    answer: str | None = None
    choices: str | None = None
    task: str | None = None
    decimal: Decimal | None = None


@dataclass(frozen=True)
class Guess:
    """Guess about a table from its first rows.

    Attributes:
        form: Form of the answers.
        count: Number of answers that have the form.
        looked_at: Number of answers that were looked at.
        roles: Role and reason by the name of the column.
        columns: Old names of renamed columns, by new name.
        others: New names of the columns that are neither question nor answer.
        brings_prompts: True if a column holds complete prompts.
        requests_layout: True if the recipe's system prompt requests a layout of the answer.
        missing: Numbers of the rows without a question or an answer, counted from 1.
        labels: Labels of a classification.
        schema: JSON Schema of the objects of an extraction.
        decimal: Decimal mark of the answers if they are text with marks, else None.
        texts: Names of other columns with text.
        noun: Name of the column with the answers, for the prompt of a task with texts.
        has_marks: True if marks between digits decide about short answers, as in `(1,12)` and `(11,2)`.
        has_calls: True if the tests of a program are lists of assertions, the first of which names the function.
    """

    form: Form
    count: int
    looked_at: int
    roles: Mapping[str, str]
    columns: Mapping[str, str]
    others: Sequence[str]
    brings_prompts: bool
    requests_layout: bool
    missing: Sequence[int] = ()
    labels: Sequence[str] = ()
    schema: Mapping[str, Any] = field(default_factory=dict)
    decimal: Decimal | None = None
    texts: Sequence[str] = ()
    noun: str = ""
    has_marks: bool = False
    has_calls: bool = False

    def describe(self) -> str:
        """Return a sentence with the form of the answers and the number of rows that have it."""
        if self.form is NONE:
            return "found no column of answers, so a judge scores the completions"
        labels = f" ({listed(self.labels)})" if self.labels else ""
        return f"the answers are {self.form.what}{labels} in {self.count} of {self.looked_at} rows"

    def describe_columns(self) -> list[str]:
        """Return a line for each column that has a role, and lines about missing answers and the other columns."""
        lines = [f"  {name}: {role}" for name, role in self.roles.items()]
        for name in self.texts:
            lines.append(f"  {name}: text that the prompt does not hold (`dataset.prompt_template` can add it)")
        if self.others:
            lines.append(f"  passed to the rewards: {listed(self.others)}")
        if self.missing:
            lines.append(f"  {self.about_missing()}")
        return lines

    def about_missing(self) -> str:
        """Return a sentence about the rows that are left out."""
        named = ", ".join(map(str, self.missing[:NAMED_ROWS]))
        more = f" and {len(self.missing) - NAMED_ROWS:,} more" if len(self.missing) > NAMED_ROWS else ""
        rows = "row has" if len(self.missing) == 1 else "rows have"
        return (
            f"{len(self.missing):,} {rows} no question or no answer ({named}{more}, counted from 1); "
            "`drop_missing` leaves them out"
        )


def guessed(table: datasets.Dataset, wishes: Wishes = Wishes()) -> Guess:
    """Return the guess about a table. Raise `UserError` if its columns have no certain meaning."""
    columns = found.columns_of(table.select(range(min(LOOKED_AT, len(table)))))
    question, why = _question(columns, wishes)
    brings_prompts = question.is_messages or question.key == found.PROMPT
    rest = _unrelated(columns, question)
    chosen = None if brings_prompts else _choice(rest, wishes)
    form, answer, reason, choices = chosen or _answer(rest, wishes, found.last_turns(question))
    count = 0
    if answer is not None:
        count = answer.count(form.has_form) if choices is None else found.golds_among(choices, answer)
    parts = {"prompt" if brings_prompts else form.parts[0]: question}
    roles = {question.name: f"{'prompt' if brings_prompts else 'question'} ({why})"}
    if answer is not None:
        parts["answer" if brings_prompts and form is not CODE else form.parts[1]] = answer
        roles[answer.name] = f"answer ({reason})"
    optional: Collection[str] = ()
    if choices is not None:
        by_label = choices.by_label if isinstance(choices, SingleChoices) else {"choices": choices}
        parts |= by_label
        # A question may have fewer choices than others.
        optional = by_label if isinstance(choices, SingleChoices) else ()
        kind = "one choice each" if isinstance(choices, SingleChoices) else "lists of texts"
        roles[choices.name] = f"choices ({kind})"
    # A bare answer in a conversation is right only in a layout, which its own system prompt would not request.
    adds_layout = form in (LABEL, NUMBER, WORDS) and not found.brings_system_prompts(question)
    renamed, others = _names(table.column_names, parts, form)
    texts = [column for column in _unrelated(rest, *parts.values()) if column.is_text]
    if question.distinct == 1 and any(column.distinct > 1 for column in texts) and wishes.question is None:
        names = " and ".join(repr(column.name) for column in texts[:3])
        raise UserError(
            f"{question.name!r} has the same text in all rows, and {names} differ: name the question with `--question "
            "COLUMN`, and add the other text with `dataset.prompt_template`"
        )
    guess = Guess(
        *(form, count, 0 if answer is None else len(answer.filled), roles, renamed, others, brings_prompts),
        requests_layout=not brings_prompts or adds_layout,
        missing=_missing(table, [part for name, part in parts.items() if name not in optional]),
        texts=[column.name for column in texts],
    )
    if answer is None:
        return guess
    guess = _with_golds(guess, _sampled(table, answer), wishes)
    return replace(guess, has_calls=False) if question.is_messages else guess


def _question(columns: Sequence[Column], wishes: Wishes) -> tuple[Column, str]:
    """Return the column with the question, and the reason."""
    if wishes.question is not None:
        return found.find(columns, wishes.question, "--question"), "as asked"
    taken = []
    for option, name in (("--answer", wishes.answer), ("--choices", wishes.choices)):
        if name is not None:
            taken.append(found.find(columns, name, option))
    certain = [column for column, form in _candidates(columns, wishes.task) if form in CERTAIN]
    if not taken and len(certain) == 1 and certain[0].key not in found.QUESTIONS:
        taken = certain
    rest = _unrelated(columns, *taken)
    for group in found.find_single_choices(rest):
        without = _unrelated(rest, *group.parts)
        if len(group.parts) > 2 and any(column.is_text for column in without):
            rest = without
    return found.find_question(rest)


def _unrelated(columns: Sequence[Column], *taken: Column) -> list[Column]:
    """Return the columns that are none of `taken`, hold none of them, and are no keys of them."""
    rest = []
    for column in columns:
        if not any(column.is_within(other) or other.is_within(column) for other in taken):
            rest.append(column)
    return rest


def _candidates(columns: Sequence[Column], task: str | None) -> list[tuple[Column, Form]]:
    """Return the columns that may be the answer, each with its form."""
    candidates = []
    for column in columns:
        form = _form_of(column, task)
        if form is not None:
            candidates.append((column, form))
    return candidates


def _form_of(column: Column, task: str | None) -> Form | None:
    """Return the most specific form that enough values of a column have, among those of the task, or None."""
    if column.is_messages:
        return None
    for form in FORMS:
        if task is not None and form.task != task:
            continue
        if form is LABEL:
            fits = found.are_labels(column) if task is None else found.labels_of(column) is not None
        else:
            # The rows that an explicit task leaves out are named by the checks of the recipe.
            fits = column.share(form.has_form) >= (found.ENOUGH if task is None else 0.5)
        if fits:
            return form
    return None


def _choice(columns: Sequence[Column], wishes: Wishes) -> _Found | None:
    """Return the form, the gold, its reason and the choices of a table of multiple choice, or None for another."""
    if wishes.task not in (None, CHOICE.task):
        return None
    lists = found.find_choices(columns)
    if wishes.choices is not None:
        lists = [found.find(columns, wishes.choices, "--choices")]
    for choices in lists:
        golds = _unrelated(columns, *choices.parts)
        if any(part.name == wishes.answer for part in choices.parts):
            continue  # columns with neighbouring names that hold something else
        if wishes.answer is not None:
            golds = [found.find(golds, wishes.answer, "--answer")]
        fitting = []
        for gold in golds:
            count = found.golds_among(choices, gold)
            if wishes.choices is None and found.are_choices_weak(choices, gold):
                continue
            if gold.filled and count >= found.ENOUGH * len(gold.filled):
                fitting.append(gold)
            elif (
                count * 2 >= len(gold.filled) > 0
                and gold.key in found.ANSWERS
                and wishes.task is None
                and not isinstance(choices, SingleChoices)
            ):
                raise UserError(
                    f"{count} of {len(gold.filled)} answers in {gold.name!r} name one of the choices in "
                    f"{choices.name!r} (positions count from 0): correct the others, or choose with `--task`"
                )
        if fitting:
            gold, reason = _one_of(fitting, "names one of the choices")
            if not found.are_positions_certain(choices, gold):
                raise UserError(
                    f"the numbers in {gold.name!r} may be positions of the choices in {choices.name}, or the choices "
                    "themselves: write the letters of the choices (A, B, ...)"
                )
            return CHOICE, gold, reason, choices
    if wishes.task == CHOICE.task or wishes.choices is not None:
        raise UserError(
            "no column names one of the choices by its letter, its text or its position from 0: name the choices with "
            "`--choices COLUMN` and the answer with `--answer COLUMN`"
        )
    return None


def _answer(columns: Sequence[Column], wishes: Wishes, turns: Column | None) -> _Found:
    """Return the form of the answers, the column that holds them, and the reason.

    `turns` are the last turns of conversations, which are the answers unless a column has the name of answers.
    """
    if wishes.task == NONE.task:
        return NONE, None, "", None
    if wishes.answer is not None:
        columns = [found.find(columns, wishes.answer, "--answer")]
    elif turns is not None and not found.known_first(columns, found.ANSWERS):
        columns = [turns]
    candidates = _candidates(columns, wishes.task)
    for tier in (CERTAIN, LIKELY, (TEXT,)):
        fitting = [column for column, form in candidates if form in tier]
        known = found.known_first(fitting, found.ANSWERS)
        if wishes.answer is None and not known:
            if tier is not CERTAIN:
                fitting = [column for column in fitting if not column.is_about_rows]
            fitting = _without_keys_of_objects(fitting)
        if fitting:
            column, reason = _one_of(fitting, "as asked" if wishes.answer else "")
            form = next(form for candidate, form in candidates if candidate is column)
            if wishes.task is None:
                _check_one_form(column, form)
                _check_no_names(column, columns)
            return form, column, reason or form.what, None
    if wishes.answer is not None or wishes.task is not None:
        what = f"for the task {wishes.task}" if wishes.task else "of a known form"
        where = repr(wishes.answer) if wishes.answer else "no column"
        raise UserError(f"{where} has no answers {what}: name another `--answer`, or a `--task` of {', '.join(TASKS)}")
    return NONE, None, "", None


def _without_keys_of_objects(columns: Sequence[Column]) -> list[Column]:
    """Return the columns without the keys of those that are objects themselves."""
    kept = []
    for column in columns:
        if not any(column is not other and column.is_within(other) for other in columns):
            kept.append(column)
    return kept


def _one_of(columns: Sequence[Column], reason: str) -> tuple[Column, str]:
    """Return the only column, or the one with the first known name. Raise `UserError` if no name decides."""
    known = found.known_first(columns, found.ANSWERS)
    if len(columns) == 1:
        return columns[0], reason
    if known:
        return known[0], reason or "by its name"
    named = [column for column in columns if not column.is_about_rows] or list(columns)
    if len(named) == 1:
        return named[0], reason
    names = " and ".join(repr(column.name) for column in named[:3])
    raise UserError(f"the columns {names} could each be the answer: name one with `--answer COLUMN`")


def _check_one_form(column: Column, form: Form) -> None:
    """Raise `UserError` if many, but not enough, of the answers have a more specific form than the one found."""
    for specific in FORMS[: FORMS.index(form)]:
        if specific in (LABEL, OBJECT):
            continue
        count = column.count(specific.has_form)
        if count * 2 >= len(column.filled) and form in (WORDS, TEXT):
            raise UserError(
                f"{count} of {len(column.filled)} answers in {column.name!r} are {specific.what}, and the others are "
                f"not: correct them, or choose with `--task {specific.task}` or `--task {form.task}`"
            )


def _check_no_names(answer: Column, columns: Sequence[Column]) -> None:
    """Raise `UserError` if the answers are names of other columns, which then hold the choices of each row."""
    names = {column.name for column in columns if column is not answer}
    if answer.texts and set(answer.texts) <= names:
        raise UserError(
            f"the answers in {answer.name!r} are names of columns ({listed(sorted(set(answer.texts)))}), which hold "
            "the choices: name these columns A, B, C, ..., and write the letters as answers"
        )


def _names(names: Sequence[str], parts: Mapping[str, Column], form: Form) -> tuple[dict[str, str], list[str]]:
    """Return the old names of renamed columns by new name, and the new names of all columns without a part."""
    columns = {part: column.name for part, column in parts.items() if not isinstance(column, LastTurns)}
    # A preset makes the column `answer`. A column of another meaning with such a name, or a reserved one, is renamed.
    taken = {*RESERVED, ENVIRONMENT, *columns, found.PROMPT}
    if form.preset and found.PROMPT not in parts:
        taken |= {"answer"}.union(*PRESETS[form.preset].columns.values())
    others = []
    for name in names:
        if name not in columns.values():
            others.append(f"other_{name}" if name in taken else name)
            columns[others[-1]] = name
    return {new: old for new, old in columns.items() if new != old}, others


def _missing(table: datasets.Dataset, columns: Iterable[Column]) -> list[int]:
    """Return the numbers, from 1, of the rows that have no value in one of the columns."""
    used = list(columns)
    read = table.select_columns(list(dict.fromkeys(column.path[0] for column in used)))
    numbers, start = [], 1
    for batch in read.iter(BATCH):
        values = [column.read(batch) for column in used]
        for number, row in enumerate(zip(*values, strict=True), start=start):
            if any(map(is_missing, row)):
                numbers.append(number)
        start += len(values[0])
    return numbers


def _sampled(table: datasets.Dataset, column: Column) -> Column:
    """Return a column with the values of all rows, or of the sample that the checks of golds read."""
    rows = sample_of_rows(len(table))
    return replace(column, values=column.read(table.select_columns([column.path[0]]).select(rows)[:]))


def _with_golds(guess: Guess, golds: Column, wishes: Wishes) -> Guess:
    """Return the guess with what all golds of a table tell: labels, schema, decimal mark."""
    guess = replace(guess, noun=golds.path[-1])
    if guess.form is LABEL:
        labels = found.labels_of(golds)
        if labels is None:
            raise UserError(
                f"{golds.name!r} has more than {found.MOST_LABELS} labels, or rare ones: choose `--task words`, or "
                "another `--answer`"
            )
        return replace(guess, labels=labels)
    if guess.form is OBJECT:
        return replace(guess, schema=schema_of([gold_object(value) for value in golds.filled]))
    if guess.form is WORDS:
        return replace(guess, has_marks=any(found.has_marks(value) for value in golds.filled))
    if guess.form in (NUMBER, WORKED, BOXED):
        return replace(guess, decimal=_decimal(golds, wishes))
    if guess.form is CODE:
        is_list = [isinstance(tests, list) and isinstance(tests[0], str) for tests in golds.filled]
        return replace(guess, has_calls=all(is_list))
    return guess


def _decimal(golds: Column, wishes: Wishes) -> Decimal | None:
    """Return the decimal mark of golds that are text. Raise `UserError` if it is ambiguous."""
    texts = []
    for number, gold in enumerate(golds.values):
        if isinstance(gold, str):
            texts.append((number, gold_answer(gold) or ""))
    if wishes.decimal is not None:
        return wishes.decimal if texts else None
    marks = decimal_marks(texts)
    if marks.certain is None:
        _, gold = marks.first_ambiguous or marks.first_comma or (0, "")
        raise _ambiguous(golds.name, gold)
    return "comma" if marks.certain == "comma" else None


def schema_of(values: Sequence[Any]) -> dict[str, Any]:
    """Return a JSON Schema that all of the JSON values fit. A key is required if every object has it."""
    kinds = dict.fromkeys(_kind(value) for value in values if value is not None)
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


def _kind(value: Any) -> str:
    """Return the name that JSON Schema gives the type of a JSON value."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


# The recipe

ON_GPU = {"dtype": "bfloat16", "bf16": True, "use_peft": True, "lora_r": 16, "lora_alpha": 32}
ON_GPU |= {"lora_target_modules": "all-linear"}
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
CALL_TEMPLATE = (
    '{{ question }}\nYour program is called like this: {{ tests[0].split("==")[0] | replace("assert ", "") }}'
)
# MBPP's question does not name the function. The expected value is left out.
ABOUT_GPU = "LoRA on one GPU."
ABOUT_CPU = "For a CPU, as there is no GPU with bfloat16 here: all parameters, in float32."
ABOUT_REWARDS = (
    "The rewards; `grpo-rewards list` describes each of them, and `grpo-rewards audit` attacks one of your own."
)
ABOUT_OVERLAP = (
    "The reward pays for words in common with the text in the table. It is a rough measure: a `judge` or a "
    "`reward_model` follows the meaning (docs/rewards.md)."
)
ABOUT_CODE = "Programs run in a sandbox, on Linux only (docs/security.md)."
ABOUT_JUDGE = (
    "The table has no answers, so a model judges the completions. Serve one (`vllm serve Qwen/Qwen3-8B`), or write the "
    "URL and the name of your own, with `api_key_env` for a key. Or replace it with a reward of your own, as "
    "`module.function` (docs/rewards.md), which `grpo-rewards audit` attacks."
)
ABOUT_BATCH = "2 prompts × 8 completions per optimizer step; more prompts make steadier steps."
ABOUT_GPU_RATE = "A learning rate for LoRA; full fine-tuning needs about 1e-6."
ABOUT_CPU_RATE = "A learning rate for full fine-tuning of a small model."
ABOUT_EVALUATION = "Evaluation on the held-out rows every 50 steps."
ABOUT_FEW_ROWS = "There are too few rows to hold some out, so nothing is evaluated."


def write_first_recipe(
    path: str, output: Path, model: str = MODEL, *, machine: Machine, wishes: Wishes = Wishes()
) -> Guess:
    """Read a table, guess its form, write a recipe that passes every check, and return the guess.

    Args:
        path: Value for `dataset.path`: a hub ID, a folder, a file or a glob.
        output: Path of the recipe, where no file may exist.
        model: Value for `model_name_or_path`.
        machine: Machine that the recipe is for: LoRA on a GPU with bfloat16, or all parameters on a CPU.
        wishes: Options that replace guesses.

    Raises:
        UserError: The table can't be read, its columns have no certain meaning, or a check fails. No file is written.
    """
    if os.path.exists(output):  # False where a folder on the way can't be read
        raise UserError(f"--output {output} exists: name another file")
    source = _source(path, wishes)
    rows = read(source, Keys("path", "split"))
    if len(rows.table) < PROMPTS_PER_STEP:
        count = "no rows" if len(rows.table) == 0 else "only one row"
        raise UserError(f"{path} has {count}: name another table")
    guess = guessed(rows.table, wishes)
    if source.decimal == "comma" and guess.form in (NUMBER, WORKED, BOXED):
        guess = replace(guess, decimal="comma")  # a completion is written as the table is
    if wishes.decimal is None:
        _check_number_cells(source, guess)
    dataset = dataset_keys(source, guess)
    share = _share_to_hold_out(DatasetSpec.parse(dataset))
    text = recipe_text(dataset, guess, model, has_gpu=machine.bf16, rows=len(rows.table), share=share)
    _write(output, text)
    try:
        recipe = parse_recipe(["--config", str(output)])
        check_model_exists(recipe)
        check(recipe, machine)
    except UserError:
        output.unlink()
        raise
    return guess


def _write(output: Path, text: str) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text)
    except OSError as error:
        reason = "a file has the name of its folder" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(
            f"--output {output}{relative_to(output)} can't be written ({reason}): name another file"
        ) from error


def _source(path: str, wishes: Wishes) -> SourceSpec:
    """Return the source of a table, with the keys that its notation needs and the decimal mark that was asked for."""
    source = guess_source(path)
    if wishes.decimal is not None and _has_cells(path):
        return replace(source, decimal="comma" if wishes.decimal == "comma" else None)
    return source


def _has_cells(path: str) -> bool:
    """Return True for a CSV file, or a glob of CSV files."""
    return has_cells(Path(path)) and (expanded(path).is_file() or glob.has_magic(path))


def _check_number_cells(source: SourceSpec, guess: Guess) -> None:
    """Raise `UserError` if the cells of the answers, which are numbers, have two readings: `1.200` in each of them."""
    answer = guess.columns.get("answer", "answer")
    if source.decimal is not None or guess.form is not NUMBER or not _has_cells(source.path):
        return
    as_points = read(source, Keys("path", "split")).table
    as_commas = read(replace(source, decimal="comma"), Keys("path", "split")).table
    kinds = [str(table.features[answer].dtype) for table in (as_points, as_commas)]
    if kinds == ["float64", "int64"]:
        first = next(value for value in as_points[answer] if value is not None)
        raise _ambiguous(answer, str(first))


def _ambiguous(column: str, example: str) -> UserError:
    return UserError(
        f"the answers in {column!r} may have a decimal point or a decimal comma ({shown(example)}): choose with "
        "`--decimal point` or `--decimal comma`"
    )


def dataset_keys(source: SourceSpec, guess: Guess) -> dict[str, Any]:
    """Return the keys of `dataset` in a recipe."""
    form = guess.form
    keys: dict[str, Any] = {}
    if form.preset is not None and not guess.brings_prompts:
        keys["name"] = form.preset
    for key in ("path", "delimiter", "encoding", "decimal"):
        if getattr(source, key) is not None:
            keys[key] = getattr(source, key)
    if guess.columns:
        keys["columns"] = dict(guess.columns)
    if guess.labels and not guess.brings_prompts:
        keys["labels"] = list(guess.labels)
    if guess.missing:
        keys["drop_missing"] = True
    system_prompt = _system_prompt(guess) if guess.requests_layout else None
    if system_prompt is not None:
        keys["system_prompt"] = system_prompt
    if guess.has_calls:
        keys["prompt_template"] = CALL_TEMPLATE.replace("question", "prompt" if guess.brings_prompts else "question")
    return keys


def _system_prompt(guess: Guess) -> str | None:
    """Return the name or the text of the system prompt."""
    if guess.form is OBJECT:
        schema = json.dumps(guess.schema, ensure_ascii=False)
        return (
            "Read the text, and answer with one JSON object between <answer> and </answer>. It must fit this JSON "
            f"Schema:\n{schema}"
        )
    if guess.form is TEXT and guess.noun.lower() not in PLAIN_NAMES:
        return f"Write the {guess.noun} of the text. Answer with it alone."
    return guess.form.system_prompt


def _share_to_hold_out(spec: DatasetSpec) -> float | None:
    """Return the share of rows to hold out, or None if every share leaves one side without enough rows."""
    identities = load_prompts(spec).identities
    wanted = max(1, min(HELD_OUT, len(identities) // 5))
    for share in SHARES:
        held_out = int((identities < np.uint64(int(share * 2.0**64))).sum())
        if held_out >= wanted and len(identities) - held_out >= PROMPTS_PER_STEP:
            return share
    return None


def recipe_text(
    dataset: Mapping[str, Any], guess: Guess, model: str, *, has_gpu: bool, rows: int, share: float | None
) -> str:
    """Return a recipe as YAML with comments."""
    names = ", ".join(map(repr, guess.others))  # quoted, because a name may hold a line break
    about_rows = [f"{rows:,} rows; {guess.describe()}."]
    if guess.missing:
        about_rows.append(f"{guess.about_missing()}.")
    if names:
        about_rows.append(f"Every other column reaches the rewards: {names}.")
    evaluation: dict[str, Any] = {}
    if share is not None:
        dataset = {**dataset, "eval_share": share}
        evaluation = EVALUATION
        about_rows.append(f"About {share:.0%} of the rows are held out, by a hash of each.")
    rates = {"learning_rate": 5e-5 if has_gpu else 1e-5, "max_grad_norm": 0.2, "beta": 0.0}
    sections: list[tuple[str, Mapping[str, Any]]] = [
        (ABOUT_FILE, {}),
        (ABOUT_GPU if has_gpu else ABOUT_CPU, {"model_name_or_path": model, **(ON_GPU if has_gpu else ON_CPU)}),
        (" ".join(about_rows), {"dataset": dataset}),
        (_ABOUT_REWARDS_OF.get(guess.form.task, ABOUT_REWARDS), {"rewards": _rewards(guess)}),
        (ABOUT_BATCH, BATCH_KEYS),
        (ABOUT_GPU_RATE if has_gpu else ABOUT_CPU_RATE, rates),
        (
            ABOUT_EVALUATION if evaluation else ABOUT_FEW_ROWS,
            {**evaluation, **SAVES, "output_dir": f"runs/{_stem(str(dataset['path']))}"},
        ),
    ]
    return "\n".join(_comment(text) + _yaml(values) for text, values in sections)


def _rewards(guess: Guess) -> list[Any]:
    """Return the rewards of a recipe, with what the golds tell as arguments."""
    form = guess.form
    rewards = []
    for reward in form.rewards if guess.requests_layout else form.rewards_for_prompts:
        kwargs = dict(reward.get("kwargs", {}))
        if guess.has_marks and reward["name"] == "string_match":
            kwargs["match"] = "casefold"
        if guess.decimal is not None and reward["name"] in ("gsm8k_correctness", "math_correctness"):
            kwargs["decimal"] = guess.decimal
        if form is OBJECT:
            kwargs |= {"schema": dict(guess.schema), "gold_column": "answer"}
        rewards.append({"name": reward["name"], "kwargs": kwargs} if kwargs else reward["name"])
    return rewards


_ABOUT_REWARDS_OF = {TEXT.task: ABOUT_OVERLAP, NONE.task: ABOUT_JUDGE, CODE.task: ABOUT_CODE}


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


class _Dumper(yaml.SafeDumper):
    """Dumper that repeats a value in place of an alias, which a reader of a recipe need not know."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True for every value."""
        return True


def _yaml(values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _stem(path: str) -> str:
    """Return a name for the run of a table, from the last part of its path."""
    stem = Path(path).name.partition(".")[0]
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem).strip("-") or "run"


def default_output(path: str) -> Path:
    """Return the default path of a table's recipe: a YAML file of the table's name in this folder."""
    return Path(f"{_stem(path)}.yaml")
