"""`grpo-recipes init`: a first recipe for a table, from its columns and the answers in its first rows."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
"""How many rows the answer's form is guessed from."""
ENOUGH = 0.9
"""The share of them that must have a form."""
SHORT_WORDS = 5

# What columns are called in tables that people train on; the first that is there is taken.
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
    """A form that answers may have, and what a recipe says of it.

    Attributes:
        what: the form in words.
        rewards: those for completions in the layout that `system_prompt` asks for.
        system_prompt: the system prompt, by name.
        preset: the preset that reads such a table.
        plain: the reward where the table brings whole prompts, so that no layout is asked for.
    """

    what: str
    rewards: Sequence[Mapping[str, Any]]
    system_prompt: str = "reasoning"
    preset: str | None = None
    plain: str = "math_correctness"


_TAGS = {"tags": ["reasoning", "answer"]}


def _in_tags(reward: str) -> list[dict[str, Any]]:
    return [{"name": reward, "kwargs": _TAGS}, {"name": "tag_presence", "kwargs": _TAGS}]


_IN_A_BOX = [{"name": "math_correctness", "kwargs": {"extract": "boxed"}}]

WORKED = Form("solutions that end in `#### N`", _in_tags("gsm8k_correctness"), preset="gsm8k")
BOXED = Form("solutions with the answer in \\boxed{}", _IN_A_BOX, system_prompt="boxed", preset="math")
NUMBER = Form("numbers", _in_tags("gsm8k_correctness"))
WORDS = Form("a few words", _in_tags("string_match"), plain="string_match")
CHOICE = Form("one of the choices", _in_tags("choice_correctness"), preset="multiple_choice")
NONE = Form("none", [{"name": "well_formed", "kwargs": _TAGS}], plain="well_formed")

FORMS: Sequence[tuple[Form, Callable[[str], bool]]] = (
    (WORKED, lambda gold: "####" in gold and bool(extract_answer(gold, "hashes"))),
    (BOXED, lambda gold: bool(extract_answer(gold, "boxed"))),
    (NUMBER, lambda gold: parse_number(gold) is not None),
    (WORDS, lambda gold: 0 < len(gold.split()) <= SHORT_WORDS),
)
"""How an answer of each form is told, the most particular first."""


@dataclass(frozen=True)
class Guess:
    """What the first rows of a table look like."""

    form: Form
    count: int
    looked_at: int
    columns: Mapping[str, str] = field(default_factory=dict)
    """New names of columns, from new to old."""
    others: Sequence[str] = ()
    """The columns that are neither question nor answer, under their new names."""
    brings_prompts: bool = False

    def describe(self) -> str:
        """A sentence on what was found, and in how many rows."""
        if self.form is NONE:
            return f"found no column of answers in the first {self.looked_at} rows"
        return f"the answers are {self.form.what} in {self.count} of the first {self.looked_at} rows"


def write_first_recipe(path: str, output: Path, model: str = MODEL, *, has_gpu: bool) -> Guess:
    """Look at the first rows of a table, guess what they are, and write a recipe for them.

    Args:
        path: what `dataset.path` may be: a hub id, a folder, a file, a glob.
        output: the recipe's file, which must not exist.
        model: its `model_name_or_path`.
        has_gpu: whether to write it for a GPU with bfloat16, with LoRA, or for a CPU.

    Raises `UserError` for a table that can't be read, or has no column that looks like a question.
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
    """What the columns and the first `LOOKED_AT` rows of a table look like. Raises `UserError` if nothing like a question."""
    names = {name.lower(): name for name in reversed(table.column_names)}
    head = table.select(range(min(LOOKED_AT, len(table))))
    prompt, question, choices = (_first(names, known) for known in ([PROMPT], QUESTIONS, CHOICES))
    if prompt is None and question is None:
        raise UserError(
            f"none of the columns {listed(map(repr, table.column_names))} looks like a question ({', '.join(QUESTIONS)}): "
            "write a recipe with `dataset.columns`, as in `columns: {question: ...}`"
        )
    candidates = [name for known in ANSWERS if (name := names.get(known.lower())) not in (None, prompt or question)]
    form, answer, count = _form(head, candidates, choices if prompt is None else None)
    parts = {"prompt": prompt} if prompt is not None else {"question": question}
    parts |= {"label" if form is CHOICE else "answer": answer, "choices": choices if form is CHOICE else None}
    parts = {part: column for part, column in parts.items() if column is not None}
    # A preset makes the column `answer`; any other of that name, and those that TRL keeps for itself, get new names.
    kept = (*RESERVED, *parts, *(["answer"] if form.preset else []))
    free = [name for name in table.column_names if name not in parts.values()]
    others = {f"other_{name}" if name in kept else name: name for name in free}
    columns = {new: old for new, old in {**parts, **others}.items() if new != old}
    return Guess(form, count, len(head), columns, list(others), brings_prompts=prompt is not None)


def _first(names: Mapping[str, str], known: Sequence[str]) -> str | None:
    return next((names[name] for name in known if name in names), None)


def _form(head: datasets.Dataset, answers: Sequence[str], choices: str | None) -> tuple[Form, str | None, int]:
    """The form that most answers have, the column that has them, and how many do."""
    if choices is not None:
        for name in answers:
            count = sum(_is_choice(row, gold) for row, gold in zip(head[choices], head[name], strict=True))
            if count >= ENOUGH * len(head):
                return CHOICE, name, count
    for name in answers:
        golds = [str(gold) if isinstance(gold, (str, int, float)) else "" for gold in head[name]]
        for form, has_form in FORMS:
            if (count := sum(map(has_form, golds))) >= ENOUGH * len(golds):
                return form, name, count
    return NONE, None, 0


def _is_choice(choices: Any, gold: Any) -> bool:
    known = read_choices(choices)
    return known is not None and bool(known.texts) and read_gold(gold, known) is not None


ON_GPU = {"dtype": "bfloat16", "bf16": True, "use_peft": True, "lora_r": 16, "lora_alpha": 32}
ON_GPU |= {"lora_target_modules": "all-linear"}
ON_CPU = {"dtype": "float32", "bf16": False, "use_cpu": True}
DATASET_KEYS = ("name", "path", "columns", "system_prompt", "eval_share")
BATCH = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 256, "max_steps": 500}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 50, "per_device_eval_batch_size": 16}
SAVES = {"logging_steps": 1, "save_steps": 50, "save_total_limit": 2}

ABOUT_REWARDS = "What is paid: `grpo-rewards list` says what each reward does."
WITHOUT_GOLDS = (
    "Nothing in the table says what a right answer is. This pays for the layout alone: put a reward of your own in its place, as "
    "`module.function` (docs/rewards.md)."
)


def recipe_text(path: str, guess: Guess, model: str, *, has_gpu: bool, rows: int) -> str:
    """A commented recipe, as YAML."""
    form = guess.form
    dataset: dict[str, Any] = {"path": path, "columns": dict(guess.columns) or None, "eval_share": 0.1}
    rewards: list[Any] = list(form.rewards)
    if guess.brings_prompts:
        rewards = [form.plain]
    else:
        dataset |= {"name": form.preset, "system_prompt": form.system_prompt}
    dataset = {key: dataset[key] for key in DATASET_KEYS if dataset.get(key) is not None}
    names = ", ".join(map(repr, guess.others))  # as Python writes them: a name may hold a line break
    reach = f" Every other column reaches the rewards: {names}." if names else ""
    sections: list[tuple[str, dict[str, Any]]] = [
        ("Written by `grpo-recipes init`; check it with `grpo-recipes plan`, run it with `grpo-recipes train`.", {}),
        (_about_machine(has_gpu), {"model_name_or_path": model, **(ON_GPU if has_gpu else ON_CPU)}),
        (
            f"{rows:,} rows; {guess.describe()}.{reach} A tenth of the rows is held out, by a hash of each.",
            {"dataset": dataset},
        ),
        (WITHOUT_GOLDS if form is NONE else ABOUT_REWARDS, {"rewards": rewards}),
        ("2 prompts × 8 completions for each optimiser step; more prompts make steadier steps.", BATCH),
        (
            "The rate for LoRA; about 1e-6 for full fine-tuning."
            if has_gpu
            else "For full fine-tuning of a small model.",
            {
                "learning_rate": 5e-5 if has_gpu else 1e-5,
                "max_grad_norm": 0.2,
                "beta": 0.0,
            },
        ),
        (
            "Held-out rows are generated and paid every 50 steps.",
            {**EVALUATION, **SAVES, "output_dir": f"runs/{_stem(path)}"},
        ),
    ]
    return "\n".join(f"{_comment(text)}{_yaml(values)}" for text, values in sections)


def _about_machine(has_gpu: bool) -> str:
    return (
        "LoRA on one GPU."
        if has_gpu
        else "For a CPU, as there is no GPU with bfloat16 here: all parameters, in float32."
    )


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=120) if values else ""


def _stem(path: str) -> str:
    """A name for the run of a table, from the last part of its path."""
    stem = Path(path).name.partition(".")[0]
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem).strip("-") or "run"


def default_output(path: str) -> Path:
    """Where the recipe of a table goes unless it is said: a YAML file of its name in this folder."""
    return Path(f"{_stem(path)}.yaml")
