"""First recipe for a table, guessed from its columns and the answers in its first rows (`grpo-recipes init`)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import yaml

from grpo_recipes.data.prompts import RESERVED
from grpo_recipes.data.sources import Keys, read
from grpo_recipes.data.tables import listed
from grpo_recipes.recipe.specs import SourceSpec
from grpo_rewards.choices import read_choices, read_gold
from grpo_rewards.errors import UserError
from grpo_rewards.files import write_atomically
from grpo_rewards.math.answers import extract_answer, parse_number

LOOKED_AT = 100
"""Number of rows from which the form of the answers is guessed."""

ENOUGH = 0.9
"""Share of these rows that must have a form."""

SHORT_WORDS = 5
"""Largest number of words of an answer that counts as a few words."""

# Names of columns in common training tables. The first one that a table has is taken.
PROMPT = "prompt"
QUESTIONS = ("question", "problem", "instruction", "query", "task", "input", "text")
ANSWERS = (
    *("answer", "solution", "final_answer", "expected_answer", "ground_truth", "gold", "target", "reference_answer"),
    *("label", "answer_key", "answerKey", "correct", "output", "response"),
)
CHOICES = ("choices", "options")

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


@dataclass(frozen=True)
class Form:
    """Form of the answers in a table, and the keys of a recipe for it.

    Attributes:
        what: Description of the form.
        rewards: Rewards for completions in the layout that `system_prompt` requests.
        system_prompt: Name of the system prompt.
        preset: Name of the preset that reads such a table.
        reward_for_prompts: Reward for a table with complete prompts, which request no layout.
    """

    what: str
    rewards: Sequence[Mapping[str, Any]]
    system_prompt: str = "reasoning"
    preset: str | None = None
    reward_for_prompts: str = "math_correctness"


_TAGS = {"tags": ["reasoning", "answer"]}


def _in_tags(reward: str) -> list[dict[str, Any]]:
    return [{"name": reward, "kwargs": _TAGS}, {"name": "tag_presence", "kwargs": _TAGS}]


_IN_A_BOX = [{"name": "math_correctness", "kwargs": {"extract": "boxed"}}]

WORKED = Form("solutions that end in `#### N`", _in_tags("gsm8k_correctness"), preset="gsm8k")
BOXED = Form("solutions with the answer in \\boxed{}", _IN_A_BOX, system_prompt="boxed", preset="math")
NUMBER = Form("numbers", _in_tags("gsm8k_correctness"))
WORDS = Form("a few words", _in_tags("string_match"), reward_for_prompts="string_match")
CHOICE = Form("one of the choices", _in_tags("choice_correctness"), preset="multiple_choice")
NONE = Form("none", [{"name": "well_formed", "kwargs": _TAGS}], reward_for_prompts="well_formed")

FORMS: Sequence[tuple[Form, Callable[[str], bool]]] = (
    (WORKED, lambda gold: "####" in gold and bool(extract_answer(gold, "hashes"))),
    (BOXED, lambda gold: bool(extract_answer(gold, "boxed"))),
    (NUMBER, lambda gold: parse_number(gold) is not None),
    (WORDS, lambda gold: 0 < len(gold.split()) <= SHORT_WORDS),
)
"""Forms with the test of an answer, the most specific first."""


@dataclass(frozen=True)
class Guess:
    """Guess about a table from its first rows.

    Attributes:
        form: Form of the answers.
        count: Number of rows whose answer has the form.
        looked_at: Number of rows that were read.
        columns: Old names of renamed columns, by new name.
        others: New names of the columns that are neither question nor answer.
        brings_prompts: True if a column holds complete prompts.
    """

    form: Form
    count: int
    looked_at: int
    columns: Mapping[str, str]
    others: Sequence[str]
    brings_prompts: bool

    def describe(self) -> str:
        """Return a sentence with the form of the answers and the number of rows that have it."""
        if self.form is NONE:
            return f"found no column of answers in the first {self.looked_at} rows"
        return f"the answers are {self.form.what} in {self.count} of the first {self.looked_at} rows"


def write_first_recipe(path: str, output: Path, model: str = MODEL, *, has_gpu: bool) -> Guess:
    """Read the first rows of a table, guess their form, write a recipe for them, and return the guess.

    Args:
        path: Value for `dataset.path`: a hub ID, a folder, a file or a glob.
        output: Path of the recipe, where no file may exist.
        model: Value for `model_name_or_path`.
        has_gpu: True for a recipe with LoRA on a GPU with bfloat16, False for a recipe on a CPU.

    Raises:
        UserError: The table can't be read, or no column looks like a question.
    """
    if output.exists():
        raise UserError(f"--output {output} exists: name another file")
    rows = read(SourceSpec(path), Keys("path", "split"))
    if len(rows.table) == 0:
        raise UserError(f"{path} has no rows: name another table")
    guess = guessed(rows.table)
    text = recipe_text(path, guess, model, has_gpu=has_gpu, rows=len(rows.table))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, text)
    return guess


def guessed(table: datasets.Dataset) -> Guess:
    """Return the guess about a table. Raise `UserError` if no column looks like a question."""
    names = {name.lower(): name for name in reversed(table.column_names)}
    head = table.select(range(min(LOOKED_AT, len(table))))
    prompt, question, choices = _first(names, [PROMPT]), _first(names, QUESTIONS), _first(names, CHOICES)
    if prompt is None and question is None:
        raise UserError(
            f"none of the columns {listed(map(repr, table.column_names))} looks like a question "
            f"({', '.join(QUESTIONS)}): write a recipe with `dataset.columns`, as in "
            "`columns: {question: ...}`"
        )
    candidates = []
    for known in ANSWERS:
        name = names.get(known.lower())
        if name is not None and name != (prompt or question):
            candidates.append(name)
    form, answer, count = _form(head, candidates, choices if prompt is None else None)
    parts: dict[str, str | None] = {"prompt": prompt, "question": question if prompt is None else None}
    if form is CHOICE:
        parts |= {"label": answer, "choices": choices}
    else:
        parts["answer"] = answer
    columns = {part: column for part, column in parts.items() if column is not None}
    # A preset makes the column `answer`. Another column of that name, or of one that TRL reserves, gets a new name.
    taken = {*RESERVED, *columns}
    if form.preset:
        taken.add("answer")
    others = []
    for name in table.column_names:
        if name not in columns.values():
            others.append(f"other_{name}" if name in taken else name)
            columns[others[-1]] = name
    renamed = {new: old for new, old in columns.items() if new != old}
    return Guess(form, count, len(head), renamed, others, brings_prompts=prompt is not None)


def _first(names: Mapping[str, str], known: Sequence[str]) -> str | None:
    return next((names[name] for name in known if name in names), None)


def _form(head: datasets.Dataset, answers: Sequence[str], choices: str | None) -> tuple[Form, str | None, int]:
    """Return the form of the answers, the column that holds them, and the number of rows that have the form."""
    if choices is not None:
        for name in answers:
            count = sum(_is_choice(row, gold) for row, gold in zip(head[choices], head[name], strict=True))
            if count >= ENOUGH * len(head):
                return CHOICE, name, count
    for name in answers:
        golds = [str(gold) for gold in head[name] if isinstance(gold, (str, int, float))]
        for form, has_form in FORMS:
            count = sum(map(has_form, golds))
            if count >= ENOUGH * len(head):
                return form, name, count
    return NONE, None, 0


def _is_choice(choices: Any, gold: Any) -> bool:
    known = read_choices(choices)
    return known is not None and bool(known.texts) and read_gold(gold, known) is not None


ON_GPU = {"dtype": "bfloat16", "bf16": True, "use_peft": True, "lora_r": 16, "lora_alpha": 32}
ON_GPU |= {"lora_target_modules": "all-linear"}
ON_CPU = {"dtype": "float32", "bf16": False, "use_cpu": True}
BATCH = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 256, "max_steps": 500}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 50, "per_device_eval_batch_size": 16}
SAVES = {"logging_steps": 1, "save_steps": 50, "save_total_limit": 2}

ABOUT_FILE = "Written by `grpo-recipes init`; check it with `grpo-recipes plan`, run it with `grpo-recipes train`."
ABOUT_GPU = "LoRA on one GPU."
ABOUT_CPU = "For a CPU, as there is no GPU with bfloat16 here: all parameters, in float32."
ABOUT_REWARDS = "The rewards; `grpo-rewards list` describes each of them."
WITHOUT_GOLDS = (
    "The table has no answers, so this reward checks only the layout. Replace it with your own reward, as "
    "`module.function` (docs/rewards.md)."
)
ABOUT_BATCH = "2 prompts × 8 completions per optimizer step; more prompts make steadier steps."
ABOUT_GPU_RATE = "A learning rate for LoRA; full fine-tuning needs about 1e-6."
ABOUT_CPU_RATE = "A learning rate for full fine-tuning of a small model."
ABOUT_EVALUATION = "Evaluation on the held-out rows every 50 steps."


def recipe_text(path: str, guess: Guess, model: str, *, has_gpu: bool, rows: int) -> str:
    """Return a recipe as YAML with comments."""
    form = guess.form
    dataset: dict[str, Any] = {} if guess.brings_prompts or form.preset is None else {"name": form.preset}
    dataset["path"] = path
    if guess.columns:
        dataset["columns"] = dict(guess.columns)
    if not guess.brings_prompts:
        dataset["system_prompt"] = form.system_prompt
    dataset["eval_share"] = 0.1
    rewards = [form.reward_for_prompts] if guess.brings_prompts else list(form.rewards)
    names = ", ".join(map(repr, guess.others))  # quoted, because a name may hold a line break
    others = f" Every other column reaches the rewards: {names}." if names else ""
    about_rows = f"{rows:,} rows; {guess.describe()}.{others} A tenth of the rows is held out, by a hash of each."
    rates = {"learning_rate": 5e-5 if has_gpu else 1e-5, "max_grad_norm": 0.2, "beta": 0.0}
    sections: list[tuple[str, Mapping[str, Any]]] = [
        (ABOUT_FILE, {}),
        (ABOUT_GPU if has_gpu else ABOUT_CPU, {"model_name_or_path": model, **(ON_GPU if has_gpu else ON_CPU)}),
        (about_rows, {"dataset": dataset}),
        (WITHOUT_GOLDS if form is NONE else ABOUT_REWARDS, {"rewards": rewards}),
        (ABOUT_BATCH, BATCH),
        (ABOUT_GPU_RATE if has_gpu else ABOUT_CPU_RATE, rates),
        (ABOUT_EVALUATION, {**EVALUATION, **SAVES, "output_dir": f"runs/{_stem(path)}"}),
    ]
    return "\n".join(_comment(text) + _yaml(values) for text, values in sections)


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=120) if values else ""


def _stem(path: str) -> str:
    """Return a name for the run of a table, from the last part of its path."""
    stem = Path(path).name.partition(".")[0]
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem).strip("-") or "run"


def default_output(path: str) -> Path:
    """Return the default path of a table's recipe: a YAML file of the table's name in this folder."""
    return Path(f"{_stem(path)}.yaml")
