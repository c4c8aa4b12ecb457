"""First recipe for a table, by the names of its columns and the form of its answers (`grpo-recipes init`).

Only what is certain is proposed. Anything else raises `UserError`, which names the options that decide. A guess could
train on the wrong column, and nothing would show it.
"""

from __future__ import annotations

import glob
import json
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import yaml

from grpo_recipes.checks.checks import Machine, check, check_model_exists
from grpo_recipes.data import presets
from grpo_recipes.data.load import load_prompts
from grpo_recipes.data.prompts import RESERVED, Prompts
from grpo_recipes.data.rendering import ENVIRONMENT
from grpo_recipes.data.sources import Keys, guess_source, read
from grpo_recipes.data.tables import listed, sample_of_rows
from grpo_recipes.data.text_files import has_cells
from grpo_recipes.plan import forms
from grpo_recipes.plan.columns import ENOUGH, SINGLE_CHOICE, Column, columns_of, find, labels_of, last_turns, named
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_rewards.choices import read_choices
from grpo_rewards.errors import UserError
from grpo_rewards.files import expanded, write_atomically
from grpo_rewards.math.decimals import Decimal, decimal_marks
from grpo_rewards.math.golds import gold_answer
from grpo_rewards.terminal import say

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
TAGS = {"tags": ["reasoning", "answer"]}


SHAPES = {
    "chosen|rejected": "is one side of preference pairs, and GRPO needs prompts and a reward",
    "tools|functions": "holds functions for the policy to call (docs/tools.md), whose calls no reward compares",
    ".*(image|img|picture|photo|audio|video).*": "is about a picture or a sound, which the policy never gets",
    "distractor.*|incorrect.*|wrong.*": "holds wrong answers, which are not mixed with the right one into choices",
}
"""Patterns of the names of columns that need more than a question and an answer, with the problem of each."""


@dataclass(frozen=True)
class Wishes:
    """Options of `init`. None leaves the decision to the names and the values of the columns."""

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

    form: forms.Form
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
        notes: Sentences on the answers, on the columns, and on what the recipe leaves to its reader.
        dataset: Keys of `dataset`, without those that name the table.
        rewards: Value of `rewards`.
    """

    task: str
    notes: Sequence[str]
    dataset: Mapping[str, Any]
    rewards: Sequence[Any]


def unsure(place: str, problem: str) -> UserError:
    """Return the error for a table that the options have to describe."""
    fix = "name the columns with `--question`, `--answer` or `--choices`, or the kind of the answers with `--task`"
    return UserError(place, problem, f"{fix} ({', '.join(forms.TASKS)})")


def proposed(table: datasets.Dataset, path: str, wishes: Wishes = Wishes()) -> Proposal:
    """Return a recipe for a table. Raise `UserError` with the options that decide what is not certain."""
    columns = [*columns_of(table.select(sample_of_rows(len(table)))[:])]
    roles = _roles(columns, path, wishes)
    form, answer = roles.form, roles.answer
    part, gold_part = forms.PARTS.get(form, ("question", "answer"))
    if roles.is_complete:
        part, gold_part = "prompt", "tests" if form is forms.CODE else "answer"
    parts = {part: roles.question}
    about = f"The answers are {form.what}"
    if answer is not None:
        about += f" in {sum(map(form.has_form, answer.filled)):,} of {len(answer.filled):,} rows"
        if answer.path != roles.question.path:
            parts[gold_part] = answer
    rows = zip(*(one.values for one in parts.values()), strict=True)
    missing = sum(any(map(presets.is_missing, row)) for row in rows)
    parts |= roles.choices
    shown = [f"{name} = {column.name}" for name, column in parts.items()]
    notes = [f"{about}: {', '.join([*shown, *(f'{one.name} in the prompt' for one in roles.contexts)])}."]
    if missing:
        notes.append(f"{missing:,} rows have no question or no answer: `drop_missing` leaves them out.")
        if any(one.has_role("input") and len(one.filled) < len(one.values) for one in roles.contexts):
            problem = "`drop_missing` would also leave out all rows without `input`"
            raise UserError(f"{missing:,} rows without a question or an answer", problem, "remove them from the table")
    if roles.is_complete and not roles.question.is_messages:
        notes.append(
            "`prompt` is text, which reaches a model without its chat template: for an instruct model, set "
            "`dataset.prompt_format: conversational`."
        )
    labels = labels_of(answer) if form is forms.LABEL and answer is not None and not roles.is_complete else None
    system_prompt = None if roles.is_complete and form is not forms.CODE else form.system_prompt
    if form is forms.OBJECT and answer is not None:
        keys = dict.fromkeys(key for value in answer.filled for key in presets.gold_object(value) or ())
        system_prompt = (
            f"Read the text. Answer with one JSON object between <answer> and </answer>. Keys: {listed(keys)}."
        )
    elif form is forms.TEXT and answer is not None and answer.has_role("summary"):
        system_prompt = f"Write the {answer.key} of the text. Answer with it alone."
    dataset = {
        "name": None if roles.is_complete else form.preset,
        "columns": _names(table.column_names, {**parts, **{one.key: one for one in roles.contexts}}, form),
        "labels": labels,
        "drop_missing": missing > 0,
        "system_prompt": system_prompt,
        "prompt_template": _template(roles, part, labels),
    }
    return Proposal(form.task, notes, {key: value for key, value in dataset.items() if value}, _rewards(roles, wishes))


# Roles of the columns


def _roles(columns: Sequence[Column], path: str, wishes: Wishes) -> Roles:
    for column in columns if wishes.question is None else ():
        for pattern, what in SHAPES.items():
            if len(column.path) == 1 and column.filled and re.fullmatch(pattern, column.key):
                raise unsure(f"column {column.name!r}", f"it {what}")
    question = _question(columns, path, wishes)
    # A column that holds the question, or a part of it, has a path with the same beginning.
    rest = [column for column in columns if not all(map(str.__eq__, column.path, question.path))]
    form, answer, choices = _answer(rest, question, wishes)
    # A program is wanted in a fence, which only a system prompt requests.
    is_complete = question.is_messages or (question.has_role("prompt") and form is not forms.CODE)
    contexts: list[Column] = []
    if not is_complete and not choices:
        contexts = [one for one in named(rest, "context", "input") if one is not answer and one.is_text(0)]
    if wishes.question is None:
        _check_all_read(rest, question, [answer, *choices.values(), *contexts])
    return Roles(form, question, answer, choices, contexts, is_complete)


def _question(columns: Sequence[Column], path: str, wishes: Wishes) -> Column:
    """Return the column with the question, or with complete prompts."""
    if wishes.question is not None:
        return find(columns, wishes.question, "--question")
    readable = [column for column in columns if column.is_messages or column.is_text(2)]
    for roles in (("prompt", "question"), ("conversation",), ("text",)):
        found = named(readable, *roles)
        if found:
            return _only(found, "question")
    # Shown above the error: a prompt of any columns, and a reward of any.
    fields = [one.name for one in columns if one.name.isidentifier() and not one.has_role("metadata")] or ["column"]
    say(
        f"dataset: {{path: {path}, prompt_template: 'Work on {{{{ {fields[0]} }}}}.'}}\nrewards: [mine.score]\n"
        f"# mine.py:\ndef score(completions, {fields[-1]}, **columns):\n"
        '    texts = [completion[-1]["content"] for completion in completions]\n'
        f"    return [float(str(gold) in text) for gold, text in zip({fields[-1]}, texts)]",
        to_stderr=True,
    )
    problem = "none has the name of a question, and texts that differ"
    fix = "name one with `--question COLUMN`, or write a template and a reward of your own"
    raise UserError(f"columns {listed(repr(column.name) for column in columns)}", problem, fix)


def _only(found: Sequence[Column], role: str) -> Column:
    """Return the first of some columns. Raise `UserError` if their values differ."""
    if len({tuple(str(gold_answer(value) or value) for value in column.values) for column in found}) > 1:
        raise unsure(f"columns {listed(repr(one.name) for one in found)}", f"each could be the {role}")
    return found[0]


def _answer(
    rest: Sequence[Column], question: Column, wishes: Wishes
) -> tuple[forms.Form, Column | None, Mapping[str, Column]]:
    """Return the form of the answers, the column that holds them, and the columns of the choices (`_choices`)."""
    names = {column.name for column in rest}
    if wishes.task == forms.INSTRUCTIONS.task or (wishes.task is None and {"instruction_id_list", "kwargs"} <= names):
        return forms.INSTRUCTIONS, None, {}
    if wishes.task == forms.JUDGED.task:
        return forms.JUDGED, None, {}
    choices = _choices(rest, wishes)
    if choices:
        return forms.CHOICE, _gold_of(choices, rest, wishes), choices
    answer = _named_answer(rest, question, wishes)
    form = _form_of(answer, wishes)
    if wishes.task is None and not _is_certain(form, answer, question, rest):
        raise unsure(f"column {answer.name!r}", f"its answers look like {form.what}, and may be anything else")
    if wishes.question is None and question.has_role("text") and form in (forms.NUMBER, forms.WORDS, forms.FORMULA):
        raise unsure(f"column {question.name!r}", "it may be a text without a question")
    return form, answer, {}


def _choices(rest: Sequence[Column], wishes: Wishes) -> Mapping[str, Column]:
    """Return the columns with choices by their name in the recipe, or {} if the table has none.

    A column with lists of choices is named `choices`. Columns with one choice each are named by the letters A to J.
    """
    if wishes.choices is not None:
        found = [find(rest, name.strip(), "--choices") for name in wishes.choices.split(",")]
        return {"choices": found[0]} if len(found) == 1 else dict(zip("ABCDEFGHIJ", found, strict=False))
    if wishes.task not in (None, forms.CHOICE.task):
        return {}
    if any(SINGLE_CHOICE.fullmatch(column.key) for column in rest if len(column.path) == 1):
        raise unsure("the choices", "some columns hold one choice each, as in `--choices option_a,option_b`")
    lists = named([one for one in rest if one.share(forms.are_choices) >= ENOUGH], "choices")
    return {"choices": _only(lists, "choices")} if lists else {}


def _gold_of(choices: Mapping[str, Column], rest: Sequence[Column], wishes: Wishes) -> Column:
    """Return the column whose values name one of the choices."""
    golds = named(rest, "answer", "label", "position")
    if wishes.answer is not None:
        golds = [find(rest, wishes.answer, "--answer")]
    read = []
    for row in zip(*(one.values for one in choices.values()), strict=True):
        cells = dict(zip(choices, row, strict=True))
        own = presets.choices_of(*row) if len(row) == 1 else presets.single_choices(cells)
        read.append(read_choices(own) if own else None)
    fitting: dict[tuple[str | None, ...], Column] = {}
    for gold in golds:
        pairs = zip(gold.values, read, strict=True)
        labels = tuple(presets.gold_label(value, one) if one and one.texts else None for value, one in pairs)
        if len(labels) - labels.count(None) >= max(1, ENOUGH * len(gold.filled)):
            fitting.setdefault(labels, gold)
    if len(fitting) == 1:
        (gold,) = fitting.values()
        numbers = [value for value in gold.filled if isinstance(value, (int, float))]
        texts = sum(presets.label_text(value) in one.texts for value, one in zip(gold.values, read, strict=True) if one)
        # Numbers are positions from 0 if a 0 is among them, and they are not the choices.
        if not numbers or (0 in numbers and texts * 2 < len(numbers)):
            return gold
    names = listed(repr(gold.name) for gold in golds) or "known names"
    problem = f"no column of {names} certainly names one of them, by its letter, its text, or its position from 0"
    raise unsure(f"choices in {listed(one.name for one in choices.values())}", problem)


def _named_answer(rest: Sequence[Column], question: Column, wishes: Wishes) -> Column:
    """Return the column with the answers by its name, or the last turns of conversations."""
    if wishes.answer is not None:
        return find(rest, wishes.answer, "--answer")
    tests = named(rest, "tests")
    readable = [column for column in tests if column.share(forms.is_tests) >= ENOUGH]
    if tests and not readable and wishes.task in (None, forms.CODE.task):
        raise unsure(f"column {tests[0].name!r}", "it holds no tests that `unit_tests` reads (docs/rewards.md)")
    for found in (
        readable,
        named(rest, "answer", "label"),
        last_turns(question),
        named(rest, "solution"),
        named(rest, "summary", "output"),
        named(rest, "kind") if question.has_role("text") else [],
    ):
        if any(column.key.startswith("label_") for column in found):  # the names of the numbers in `label`
            found = [column for column in found if column.key != "label"]
        if found:
            return _only(found, "answer")
    names = [repr(one.name) for one in rest if len(one.path) == 1 and one.filled and not one.has_role("metadata")]
    others = f"beside {question.name!r} the table has {listed(names) or 'none'}"
    raise unsure("the answer", f"no column has the name of one ({others})")


def _form_of(answer: Column, wishes: Wishes) -> forms.Form:
    """Return the most specific form, among those of the task, that enough of the answers have."""
    # The rows that an explicit task leaves out are named by the checks of the recipe.
    enough = ENOUGH if wishes.task is None else 0.5
    names_labels = wishes.task is not None or answer.has_role("label", "kind")
    names_labels = names_labels or all(isinstance(value, bool) for value in answer.filled)
    for form in forms.FORMS:
        if wishes.task not in (None, form.task) or answer.share(form.has_form) < enough:
            continue
        # Where some answers are formulas, `math_correctness` has to read all of them.
        is_mixed = form is forms.NUMBER and wishes.task is None and any(map(forms.is_formula, answer.filled))
        are_no_labels = form is forms.LABEL and not (names_labels and labels_of(answer))
        if not is_mixed and not are_no_labels:
            return form
    kind = f"for the task {wishes.task}" if wishes.task else "of a known form"
    raise unsure(f"column {answer.name!r}", f"it has no answers {kind}")


def _is_certain(form: forms.Form, answer: Column, question: Column, rest: Sequence[Column]) -> bool:
    """Return True if answers of this form, which was found without `--task`, can't mean anything else."""
    texts = answer.texts
    names_labels = answer.has_role("label", "kind")
    if len(texts) > 2 and (len(set(texts)) == 1 or set(texts) <= {column.name for column in rest}):
        return False
    if answer.has_role("output") and any(column.has_role("rating") for column in rest):
        return False  # rated responses, which can be wrong
    if form is forms.CODE:  # a prompt has to name the function that the tests call
        is_named = any(column.key in ("entry_point", "starter_code") for column in rest)
        return is_named or not any("fn_name" in str(value) or "def check(" in str(value) for value in answer.filled)
    if form is forms.NUMBER:  # numbers of labels
        are_digits = 4 * len(set(texts)) <= min(len(texts), 20) and all(len(text) == 1 for text in texts)
        return not names_labels and not are_digits
    if form is forms.TEXT:
        return answer.has_role("summary") and question.has_role("text")
    if form is forms.WORDS:  # letters stand for choices
        return not names_labels and answer.share(forms.is_letter) < 0.5 and answer.share(forms.is_math) < 0.5
    return form is forms.LABEL or (form is forms.FORMULA and not names_labels)


def _check_all_read(rest: Sequence[Column], question: Column, used: Sequence[Column | None]) -> None:
    """Raise `UserError` if a column that the recipe does not use may belong to the prompt."""
    held = ("held", "solution", "summary", "output", "position", "tests", "conversation", "prompt")
    for column in rest:
        if column.path[:-1] not in ((), question.path[:-1]) or column in used or not column.filled:
            continue
        # A title has some words, and a text in `source` has many.
        is_text = not column.has_role(*held) and column.is_text(15 if column.has_role("metadata") else 2)
        if is_text or column.has_role("context", "input", "choices"):
            fix = f"leave it out with `--question {question.name}`, and add it with `dataset.prompt_template`"
            raise UserError(f"column {column.name!r}", "it may belong to the prompt", fix)


def _names(names: Sequence[str], parts: Mapping[str, Column], form: forms.Form) -> dict[str, str]:
    """Return the columns that the recipe renames: their names in the table, by their names in the recipe."""
    columns = {part: column.name for part, column in parts.items()}
    # A preset makes the column `answer`, and the trainer has names of its own. A column with such a name is renamed.
    taken = {*RESERVED, ENVIRONMENT, *columns, "prompt", *(("answer",) if form.preset else ())}
    columns |= {f"other_{name}": name for name in names if name in taken and name not in columns.values()}
    return {new: old for new, old in columns.items() if new != old}


# Keys of the recipe


def _template(roles: Roles, part: str, labels: Sequence[str] | None) -> str | None:
    """Return the template of a prompt with contexts or with the call of a function, or None if it needs none."""
    before: list[str] = []
    behind: list[str] = []
    for one in roles.contexts:
        is_before = one.has_role("context")
        text = f"{{{{ {one.key} }}}}\n\n" if is_before else f"\n\n{{{{ {one.key} }}}}"
        if len(one.filled) < len(one.values):
            text = f"{{% if {one.key} %}}{text}{{% endif %}}"
        (before if is_before else behind).append(text)
    if roles.form is forms.CODE and roles.answer is not None and not roles.is_complete:
        first = roles.answer.filled[0]
        if re.search(r"\bassert ", str(first)) and "def check(" not in str(first):
            # A question such as MBPP's does not name the function. The expected value is left out.
            tests = "tests[0]" if isinstance(first, list) else "tests"
            call = f'{{{{ {tests}.split("assert ")[1].split("==")[0] }}}}'
            behind.append(f"\nYour program is called like this: {call}")
    if not before and not behind:
        return None
    template = "".join([*before, f"{{{{ {part} }}}}", *behind])
    return template if labels is None else presets.with_labels(template, labels)


def _rewards(roles: Roles, wishes: Wishes) -> list[Any]:
    """Return the rewards of a recipe, with arguments that fit the form of the golds."""
    form = roles.form
    name, kwargs = form.reward, dict(form.kwargs)
    has_tags = form.system_prompt == "reasoning" and not roles.is_complete
    if has_tags:
        kwargs |= TAGS
    elif form is forms.NUMBER:
        name = "math_correctness"
    elif name == "string_match":
        kwargs["extract"] = "whole"
    if form is forms.FORMULA and not roles.is_complete:
        kwargs["extract"] = "boxed"
    if form is forms.OBJECT:
        kwargs |= {"schema": {"type": "object"}, "gold_column": "answer"}
    if roles.answer is not None and form in (forms.NUMBER, forms.FORMULA):
        texts = [(number, gold_answer(gold) or "") for number, gold in enumerate(roles.answer.values)]
        if wishes.decimal is None and decimal_marks(texts).certain != "point":
            raise _ambiguous_mark(roles.answer.name)
        if wishes.decimal == "comma":
            kwargs["decimal"] = "comma"
    reward = {"name": name, "kwargs": kwargs} if kwargs else name
    return [reward, {"name": "tag_presence", "kwargs": TAGS}] if has_tags else [reward]


def _ambiguous_mark(column: str) -> UserError:
    fix = "choose with `--decimal point` or `--decimal comma`"
    return UserError(f"column {column!r}", "its numbers may have a decimal comma", fix)


# The recipe

LORA = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": "all-linear"}
ON_GPU = {"dtype": "bfloat16", "bf16": True, **LORA, "learning_rate": 5e-5}
ON_CPU = {"dtype": "float32", "bf16": False, "use_cpu": True, "learning_rate": 1e-5}
BATCH_KEYS = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 256, "max_steps": 500}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 50, "per_device_eval_batch_size": 16}
REST = {"max_grad_norm": 0.2, "beta": 0.0, "logging_steps": 1, "save_steps": 50, "save_total_limit": 2}

ABOUT = (
    "Written by `grpo-recipes init`; check it with `grpo-recipes plan`, run it with `grpo-recipes train`. "
    "docs/rewards.md describes the rewards: a `judge` needs a server, and `unit_tests` a sandbox, on Linux only."
)


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
        raise UserError(f"--output {output}", "the file exists", "name another file")
    source = guess_source(path)
    are_cells = has_cells(Path(path)) and (expanded(path).is_file() or glob.has_magic(path))
    if wishes.decimal is not None and are_cells:
        source = replace(source, decimal="comma" if wishes.decimal == "comma" else None)
    table = read(source, Keys("path", "split")).table
    if len(table) < 2:
        raise UserError(path, f"it has {'only one row' if len(table) else 'no rows'}", "name another table")
    # A completion is written as the table is.
    marks = replace(wishes, decimal=wishes.decimal or source.decimal)
    proposal = proposed(table, path, marks)
    if marks.decimal is None and are_cells and proposal.task == forms.NUMBER.task:
        answer = proposal.dataset.get("columns", {}).get("answer", "answer")
        as_commas = read(replace(source, decimal="comma"), Keys("path", "split")).table
        if (table.features[answer].dtype, as_commas.features[answer].dtype) == ("float64", "int64"):
            raise _ambiguous_mark(answer)  # such as `1.200` in each of the cells
    notation = {key: getattr(source, key) for key in ("path", "delimiter", "encoding", "decimal")}
    dataset = {**{key: value for key, value in notation.items() if value is not None}, **proposal.dataset}
    dataset["max_prompt_tokens"] = _room_for(load_prompts(DatasetSpec.parse(dataset)))
    text = recipe_text(dataset, proposal, model, has_gpu=machine.bf16, rows=len(table))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text)
    except OSError as error:
        raise UserError(f"--output {output}", f"it can't be written ({error.strerror})", "name another file") from error
    try:
        recipe = parse_recipe(["--config", str(output)])
        check_model_exists(recipe)
        golds = check(recipe, machine).golds
    except UserError:
        output.unlink()
        raise
    return proposal if golds is None else replace(proposal, notes=[*proposal.notes, golds.describe()])


def _room_for(prompts: Prompts) -> int:
    """Return a number of tokens that the longest prompt does not exceed, estimated from its bytes."""
    longest = 0
    for prompt in prompts.dataset.select(sample_of_rows(len(prompts.dataset)))["prompt"]:
        text = prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt)
        longest = max(longest, len(text.encode()))
    # English has about four bytes a token, and numbers and other scripts two. The chat template adds some tokens.
    return 256 * (longest // 2 // 256 + 1)


def recipe_text(dataset: Mapping[str, Any], proposal: Proposal, model: str, *, has_gpu: bool, rows: int) -> str:
    """Return a recipe as YAML below a comment."""
    about = [ABOUT, f"{rows:,} rows.", *proposal.notes, "Prompts of more than `max_prompt_tokens` are dropped."]
    share = {}
    if rows >= 20:  # a hash of each row decides, so that a small share of few rows could be empty
        share = {"eval_share": 0.1 if rows >= 100 else 0.3}
    recipe = {
        **{"model_name_or_path": model, "dataset": {**dataset, **share}, "rewards": proposal.rewards},
        **(ON_GPU if has_gpu else ON_CPU),
        **BATCH_KEYS,
        **REST,
        **(EVALUATION if share else {}),
        "output_dir": f"runs/{_stem(str(dataset['path']))}",
    }
    comment = textwrap.wrap(" ".join(about), 118, break_long_words=False, break_on_hyphens=False)
    copied = json.loads(json.dumps(recipe))  # YAML has aliases for values that are one object
    written = yaml.safe_dump(copied, sort_keys=False, allow_unicode=True, width=120)
    return "".join(f"# {line}\n" for line in comment) + written


def _stem(path: str) -> str:
    """Return a name for the run of a table, from the last part of its path."""
    stem = Path(path).name.partition(".")[0]
    return re.sub(r"[^\w-]", "-", stem).strip("-") or "run"


def default_output(path: str) -> Path:
    """Return the default path of a table's recipe: a YAML file of the table's name in this folder."""
    return Path(f"{_stem(path)}.yaml")
