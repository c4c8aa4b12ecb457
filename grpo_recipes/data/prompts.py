"""From rows to prompts: which columns make one, the system prompt, the template, and the length in tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo_recipes.data.presets import PRESETS, Preset, Turns, message, text_of, user_turn
from grpo_recipes.data.sources import Rows
from grpo_recipes.data.tables import BATCH, SHOWN, fingerprint, listed, stored
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_rewards.errors import UserError, one_line, shortened

SYSTEM_PROMPTS: Mapping[str, str | None] = MappingProxyType(
    {
        # "GRPO from scratch": SYSTEM_PROMPT, stripped as its build_prompt does.
        "reasoning": "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
        # "Full-vocabulary KL": format_dataset.
        "think": (
            "Solve the math problem step-by-step, providing reasoning in <think> tags "
            "and the final answer in <answer> tags."
        ),
        # Qwen2.5-Math's system prompt.
        "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
        # MiniMind: the system turn of its training prompts.
        "minimind": "你是 MiniMind，是一个有用的人工智能助手。",
        "none": None,
    }
)
"""System prompts by name, those of the source documents among them; `none` sends the question alone."""

RESERVED = (
    *("prompts", "completion", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric", "environment", "environments", "image", "images"),
)
"""Names that a row's own columns can't have: TRL fills them, or reads more into them than a reward's column."""

SAMPLE = 20_000
"""Of more rows than this, golds and lengths are checked on a sample of as many."""

_VERSION = 1
"""Part of a table's name: raise it when the same rows give other prompts."""
_IDENTITY = "identity"
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@dataclass(frozen=True)
class Prompts:
    """Rows as prompts.

    Attributes:
        dataset: the column `prompt` (messages or a string), those that a preset makes (`answer`), and the other columns.
        identities: for each row a 64-bit hash of what its prompt is made from, (N,) uint64: the same for rows that pose the
            same problem, whatever the system prompt, the wording of the template, and the other columns.
    """

    dataset: datasets.Dataset
    identities: np.ndarray

    def select(self, rows: np.ndarray) -> Prompts:
        """The rows with these numbers, from 0."""
        return Prompts(self.dataset.select(rows), self.identities[rows])


@dataclass(frozen=True)
class _Reading:
    """How the rows of one table are read: its columns for each part of a row, and what `Preset` says of them."""

    columns: Mapping[str, str]
    read: Callable[[Mapping[str, Any], str], tuple[Turns, dict[str, Any]]]
    made: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    template: str | None = None

    @property
    def used_up(self) -> set[str]:
        """The columns that do not stay in the row."""
        return set(self.columns.values()) - set(self.keeps)


def phrased(rows: Rows, spec: DatasetSpec) -> Prompts:
    """The rows as prompts, every one of them checked; kept on disk and mapped from there.

    Raises `UserError` for columns that are missing or reserved, and for a row without a prompt or on which the template
    fails.
    """
    table = rows.table
    if len(table) == 0:
        return Prompts(table, np.empty(0, np.uint64))
    reading = _reading(table, rows.place, spec)
    _check_names(table, reading, rows)
    is_text = _is_text(table, reading, spec)
    system = _system_prompt(spec)
    as_it_is = _is_prompt_column(reading) and system is None and is_text == _holds_text(table, reading)
    inputs = table.select_columns(list(dict.fromkeys(reading.columns.values())))
    phrasing = _Phrasing(reading, system, is_text, as_it_is, rows.place)
    name = fingerprint(
        "prompts", _VERSION, inputs._fingerprint, len(inputs), spec.name, system, reading.template, is_text, as_it_is
    )
    made = stored(name, lambda: phrasing.tables(inputs))
    identities = made.data.column(_IDENTITY).to_numpy()
    made = made.remove_columns([_IDENTITY])
    used_up = set() if as_it_is else reading.used_up
    others = [column for column in table.column_names if column not in used_up]
    parts = [part for part in (made, table.select_columns(others) if others else None) if part is not None]
    parts = [part for part in parts if part.column_names]
    return Prompts(datasets.concatenate_datasets(parts, axis=1) if len(parts) > 1 else parts[0], identities)


@dataclass(frozen=True)
class _Phrasing:
    """How the rows of a table become prompts."""

    reading: _Reading
    system: str | None
    is_text: bool
    as_it_is: bool
    place: Callable[[int], str]

    def tables(self, inputs: datasets.Dataset) -> Iterator[pa.Table]:
        """The table of prompts, made columns and identities, batch by batch."""
        template = None if self.reading.template is None else _environment().from_string(self.reading.template)
        start = 0
        for batch in inputs.with_format("arrow").iter(BATCH):
            rows = batch.to_pylist()
            yield self._table([self._row(row, start + number, template) for number, row in enumerate(rows)])
            start += len(rows)

    def _row(self, row: Mapping[str, Any], index: int, template: Any) -> tuple[Turns, dict[str, Any], int]:
        parts = {part: row[column] for part, column in self.reading.columns.items()}
        try:
            turns, made = self.reading.read(parts, _PLACE)
        except UserError as error:  # the place takes time to find, so it is asked for only now
            raise UserError(str(error).replace(_PLACE, self.place(index))) from None
        if template is None:
            return turns, made, _hash(turns)
        try:
            content = template.render(row)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            reason = one_line(error).rstrip(".")
            raise UserError(
                f"`dataset.prompt_template` fails on {self.place(index)} ({reason}): correct the template or the row"
            ) from error
        if not content.strip():
            raise UserError(
                f"`dataset.prompt_template` leaves the prompt of {self.place(index)} empty: correct the row"
            )
        used = sorted(_template_columns(self.reading.template or ""))
        return user_turn(content), made, _hash([row.get(column) for column in used])

    def _table(self, rows: Sequence[tuple[Turns, dict[str, Any], int]]) -> pa.Table:
        columns: dict[str, pa.Array] = {}
        if not self.as_it_is:
            prompts = [prompt_of(turns, self.system, self.is_text) for turns, _, _ in rows]
            columns["prompt"] = pa.array(prompts, pa.string() if self.is_text else _MESSAGES)
        for name in self.reading.made:
            columns[name] = pa.array([made[name] for _, made, _ in rows], pa.string())
        columns[_IDENTITY] = pa.array([identity for _, _, identity in rows], pa.uint64())
        return pa.table(columns)


_PLACE = "\0"
"""Stands for a row's place in an error until that is known."""


def prompt_of(turns: Turns, system: str | None, is_text: bool) -> Turns:
    """The turns with the system prompt before them, unless they bring one; as text, their contents joined by newlines."""
    if isinstance(turns, str):
        if is_text and system is None:
            return turns
        turns = user_turn(turns)
    messages = list(turns)
    if system is not None and turns[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return "\n".join(turn["content"] for turn in messages) if is_text else messages


def _hash(content: Any) -> int:
    return xxhash.xxh64_intdigest(json.dumps(content, ensure_ascii=False, sort_keys=True, default=str).encode())


# Which columns make a prompt


def _reading(table: datasets.Dataset, place: Callable[[int], str], spec: DatasetSpec) -> _Reading:
    preset = PRESETS.get(spec.name) if spec.name else None
    reading = _preset_reading(preset, table, place) if preset else _own_reading(table, place, spec)
    if spec.prompt_template is None:
        return reading
    used = _template_columns(spec.prompt_template)
    if missing := sorted(used - set(table.column_names)):
        raise UserError(
            f"`dataset.prompt_template` names {missing[0]!r}, and {_has(table, place)}: correct the template, or map the "
            "column with `dataset.columns`"
        )
    columns = {**reading.columns, **{f"template/{name}": name for name in sorted(used)}}
    # What the template shows stays in the row; a column `prompt` can't, since the result takes its place.
    keeps = (*reading.keeps, *(used - reading.used_up - {"prompt"}))
    return _Reading(columns, reading.read, reading.made, keeps, spec.prompt_template)


def _preset_reading(preset: Preset, table: datasets.Dataset, place: Callable[[int], str]) -> _Reading:
    columns = {}
    for part, names in preset.columns.items():
        found = [name for name in names if name in table.column_names]
        if not found:
            raise UserError(
                f"`dataset`: {_has(table, place)}, and none is {' or '.join(map(repr, names))}: map one with "
                f"`columns: {{{names[0]}: ...}}`"
            )
        columns[part] = found[0]
    return _Reading(columns, preset.read, ("answer",), preset.keeps)


def _own_reading(table: datasets.Dataset, place: Callable[[int], str], spec: DatasetSpec) -> _Reading:
    """Without a preset: a template, or a column `prompt` as TRL takes it, or a column `question`."""
    if spec.prompt_template is not None:
        prompt = {"prompt": "prompt"} if "prompt" in table.column_names else {}
        return _Reading(prompt, lambda parts, where: ("", {}))
    if "prompt" in table.column_names:
        return _Reading({"prompt": "prompt"}, _given_prompt)
    if "question" in table.column_names:
        return _Reading(
            {"question": "question"}, lambda parts, where: (user_turn(text_of(parts, "question", where)), {})
        )
    raise UserError(
        f"`dataset`: {_has(table, place)}, and none is 'prompt' or 'question': map one with `columns: {{question: ...}}`, "
        "or write a `prompt_template`"
    )


def _given_prompt(parts: Mapping[str, Any], where: str) -> tuple[Turns, dict[str, Any]]:
    prompt = parts["prompt"]
    if isinstance(prompt, str) and prompt.strip():
        return prompt, {}
    if not isinstance(prompt, list) or not prompt:
        raise UserError(
            f"`dataset`: {where} has the prompt {shortened(repr(prompt), SHOWN)}: it must be text or messages, and not empty"
        )
    turns = [message(turn, where) for turn in prompt]
    if not any(turn["content"].strip() for turn in turns):
        raise UserError(
            f"`dataset`: {where} has the prompt {shortened(repr(prompt), SHOWN)}: it must be text or messages, and not empty"
        )
    return turns, {}


def _has(table: datasets.Dataset, place: Callable[[int], str]) -> str:
    return f"{place(0)} has the columns {listed(table.column_names)}"


def _check_names(table: datasets.Dataset, reading: _Reading, rows: Rows) -> None:
    """Raise `UserError` for a column that stays in the row under a name that it can't have."""
    used_up = reading.used_up
    for column in table.column_names:
        if column not in used_up and column in (*RESERVED, "prompt", *reading.made):
            raise UserError(
                f"`dataset`: {rows.place(0)} has a column {column!r}, a name that the trainer takes for itself: rename it, as "
                f"in `columns: {{other_{column}: {column}}}`, or leave it out"
            )


def _is_prompt_column(reading: _Reading) -> bool:
    return reading.read is _given_prompt and reading.template is None


def _holds_text(table: datasets.Dataset, reading: _Reading) -> bool:
    return _is_prompt_column(reading) and isinstance(table.features["prompt"], datasets.Value)


def _is_text(table: datasets.Dataset, reading: _Reading, spec: DatasetSpec) -> bool:
    if spec.prompt_format is not None:
        return spec.prompt_format == "text"
    is_text = _holds_text(table, reading)
    if is_text and _system_prompt(spec) is not None:
        raise UserError(
            "`dataset.system_prompt`: the column `prompt` is text: set `prompt_format: conversational` to send it as the "
            "user's message, or `text` to put the system prompt before it"
        )
    return is_text


def _system_prompt(spec: DatasetSpec) -> str | None:
    """The text of the system prompt, if there is one."""
    asked = str(spec.system_prompt or "none")
    return SYSTEM_PROMPTS.get(asked, asked)


# Templates


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)


def _template_columns(template: str) -> set[str]:
    """The columns that a template names. Raises `UserError` if it is no template."""
    try:
        return meta.find_undeclared_variables(_environment().parse(template))
    except TemplateError as error:
        reason = one_line(error).rstrip(".")
        raise UserError(f"`dataset.prompt_template` is not a jinja2 template ({reason}): correct it") from error


# Lengths


def hash_sample(count: int) -> np.ndarray:
    """The numbers of the rows to check, ascending: all of them, or of more than `SAMPLE` those with the lowest hashes.

    The hash is SplitMix64's finaliser of the row's number, so that every look at the same rows takes the same ones.
    """
    if count <= SAMPLE:
        return np.arange(count)
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.sort(np.argpartition(mixed ^ (mixed >> np.uint64(31)), SAMPLE)[:SAMPLE])


def token_lengths(dataset: datasets.Dataset, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> np.ndarray:
    """The length of every prompt in tokens, as the trainer will feed it, (N,): messages through the chat template with the
    generation prompt, text with the tokenizer's special tokens.

    Raises `UserError` for messages and a tokenizer without a chat template.
    """
    lengths = [
        [len(ids) for ids in _token_ids(batch["prompt"], tokenizer, template_kwargs)]
        for batch in dataset.select_columns(["prompt"]).iter(1_000)
    ]
    return np.concatenate([np.asarray(batch, np.int64) for batch in lengths])


def _token_ids(prompts: Sequence[Any], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[list[int]]:
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    if tokenizer.chat_template is None:
        raise UserError(
            "`dataset.prompt_format`: conversational prompts need a tokenizer with a chat template, and this one has "
            "none: use an instruct model, or prompt_format: text"
        )
    rendered = tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True, **template_kwargs
    )
    return rendered["input_ids"]


def rendered(prompt: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    """A prompt as the model sees it: text, or messages through the chat template with the generation prompt."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **template_kwargs)


def limit_prompts(
    dataset: datasets.Dataset, spec: DatasetSpec, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
) -> tuple[datasets.Dataset, int]:
    """Apply `max_prompt_tokens` (TRL 1.16 has no such option) and count the prompts that it touched.

    `cut_left` drops the oldest turns of a conversation behind its system prompt, then leading tokens of the last user
    message, or of the text. `template_kwargs` are TRL's `chat_template_kwargs`.

    Returns:
        The dataset and how many prompts were dropped or cut; the very same dataset when there is no limit.

    Raises:
        UserError: every prompt is too long, or what surrounds the question exceeds the limit by itself.
    """
    limit, given = spec.max_prompt_tokens, template_kwargs or {}
    if limit is None:
        return dataset, 0
    lengths = token_lengths(dataset, tokenizer, given)
    overlong = np.flatnonzero(lengths > limit)
    if len(overlong) == 0:
        return dataset, 0
    if spec.overlong_prompts == "drop":
        if len(overlong) == len(lengths):
            raise UserError(
                f"`dataset.max_prompt_tokens`: all {len(lengths)} prompts are longer than {limit} tokens "
                f"(the shortest has {lengths.min()}): raise the limit"
            )
        return dataset.select(np.flatnonzero(lengths <= limit)), len(overlong)
    return _with_cut_prompts(dataset, lengths, limit, tokenizer, given), len(overlong)


def _with_cut_prompts(
    dataset: datasets.Dataset, lengths: np.ndarray, limit: int, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> datasets.Dataset:
    prompts, start = [], 0
    kind = dataset.features.arrow_schema.field("prompt").type
    for batch in dataset.select_columns(["prompt"]).iter(BATCH):
        sized = zip(batch["prompt"], lengths[start : start + BATCH], strict=True)
        cut = [
            _cut_left(prompt, limit, tokenizer, template_kwargs) if size > limit else prompt for prompt, size in sized
        ]
        prompts.append(pa.array(cut, kind))
        start += len(cut)
    features = datasets.Features({"prompt": dataset.features["prompt"]})
    column = datasets.Dataset(pa.table({"prompt": pa.chunked_array(prompts)}), fingerprint=None).cast(features)
    others = [name for name in dataset.column_names if name != "prompt"]
    parts = [column, dataset.select_columns(others)] if others else [column]
    return datasets.concatenate_datasets(parts, axis=1).select_columns(dataset.column_names)


def _cut_left(prompt: Any, limit: int, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Any:
    """Drop earlier turns, then leading tokens of the question, until the rendered prompt has at most `limit` tokens."""
    while (excess := len(_token_ids([prompt], tokenizer, template_kwargs)[0]) - limit) > 0:
        if not isinstance(prompt, str) and (later := _without_oldest_turns(prompt)) is not None:
            prompt = later
            continue
        content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        kept = tokenizer(content, add_special_tokens=False)["input_ids"][excess:]
        if not kept:
            raise UserError(
                f"`dataset.max_prompt_tokens`: {limit} leaves no room for the question beside the system prompt and the "
                "chat template: raise the limit"
            )
        # A cut inside a character decodes to U+FFFD, which the model never meets otherwise.
        content = tokenizer.decode(kept).lstrip("\ufffd")
        prompt = content if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": content}]
    return prompt


def _without_oldest_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The conversation from its second user turn on, behind its system prompt; None if there is one user turn alone."""
    users = [place for place, turn in enumerate(messages) if turn["role"] == "user"]
    if len(users) < 2:
        return None
    return [*(turn for turn in messages[:1] if turn["role"] == "system"), *messages[users[1] :]]
