"""Prompts from rows: the columns that form a prompt, the system prompt, and the template."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from jinja2 import StrictUndefined, Template, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo_recipes.data import presets
from grpo_recipes.data.places import Places, RowName, selected
from grpo_recipes.data.presets import Conversation, Preset, Read
from grpo_recipes.data.sources import PlacedRows
from grpo_recipes.data.tables import BATCH, IMAGE_COLUMNS, fingerprint, listed, reason_of, shown, stored
from grpo_recipes.recipe.dataset import SYSTEM_PROMPTS, DatasetSpec
from grpo_rewards.errors import UserError

logger = logging.getLogger(__name__)

TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that TRL passes to every reward, with the dataset's columns (`GRPOTrainer._calculate_rewards`)."""

RESERVED = (*TRL_ARGUMENTS, "completion", "environments", *IMAGE_COLUMNS)
"""Names that columns of a row can't have, because TRL fills them or gives them a meaning of its own."""

_VERSION = 3
"""Part of a cached table's name. It must be raised when the same rows give other prompts."""

GOLDS = ("answer", "tests")
"""Columns with the gold of a row, which rewards read by default."""

_IDENTITY = "identity"
_TEXT = pa.string()
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_CHOICES = pa.struct([("text", pa.list_(pa.string())), ("label", pa.list_(pa.string()))])

CONVERSATIONS = ("messages", "conversations")
"""Columns that are the prompt if there is neither a column `prompt` nor `question`."""


@dataclass(frozen=True)
class Prompts:
    """Rows as prompts.

    Attributes:
        dataset: table with the column `prompt` (messages or a string), the columns that a preset makes (`answer`), and
            the remaining columns of the rows.
        identities: 64-bit hash (N,) uint64 of the content that each prompt is made from. Rows that pose the same
            problem have the same hash: the system prompt, the wording of the template and other columns do not count.
        places: positions of the rows in the user's files.
    """

    dataset: datasets.Dataset
    identities: np.ndarray
    places: Places

    def select(self, rows: np.ndarray) -> Prompts:
        """Return the rows with these indices."""
        return Prompts(self.dataset.select(rows), self.identities[rows], selected(self.places, rows))


@dataclass(frozen=True)
class _Reading:
    """Reader of the rows of one table: a column for each part of a row, and the fields of `Preset`."""

    columns: Mapping[str, str]
    read: Read
    made: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    template: str | None = None
    template_columns: tuple[str, ...] = ()
    gold_kind: pa.DataType = _TEXT

    @property
    def used_up(self) -> set[str]:
        """Columns that do not stay in the row."""
        return set(self.columns.values()) - set(self.keeps)

    @property
    def is_prompt_column(self) -> bool:
        """True if the column `prompt` is the prompt."""
        return self.read is _given_prompt


def phrased(rows: PlacedRows, spec: DatasetSpec) -> Prompts:
    """Check all rows and return them as prompts, which are cached on disk and memory-mapped.

    Raises:
        UserError: a column is missing or reserved, a row has no prompt, or the template fails on a row.
    """
    table = rows.table
    if len(table) == 0:
        return Prompts(table, np.empty(0, np.uint64), rows.places)
    reading = _reading(rows, spec)
    if spec.drop_missing:
        # A question may have fewer choices than others.
        needed = [column for part, column in reading.columns.items() if not part.startswith(presets.ONE_CHOICE)]
        rows = _complete(rows, [*needed, *GOLDS])
        table = rows.table
    _check_names(rows, reading)
    has_text = reading.is_prompt_column and isinstance(table.features["prompt"], datasets.Value)
    system = system_text(spec)
    if has_text and system is not None and spec.prompt_format is None:
        fix = (
            "set `prompt_format: conversational` to make it the user's message, or `text` to put the system prompt "
            "before it"
        )
        raise UserError("`dataset.system_prompt`", "the column `prompt` is text", fix)
    is_text = has_text if spec.prompt_format is None else spec.prompt_format == "text"
    is_unchanged = reading.is_prompt_column and system is None and is_text == has_text and _has_roles(table)
    # A template may name no column, and `datasets` can't count the rows of a table without columns.
    read = list(dict.fromkeys(reading.columns.values()))
    inputs = table.select_columns(read or table.column_names[:1])
    phrasing = _Phrasing(reading, system, is_text, is_unchanged, rows.places)
    settings = (spec.name, system, reading.template, is_text, is_unchanged, spec.labels)
    name = fingerprint("prompts", _VERSION, inputs._fingerprint, len(inputs), *settings)
    made = stored(name, lambda: phrasing.tables(inputs))
    identities = made.data.column(_IDENTITY).to_numpy()
    used_up = set() if is_unchanged else reading.used_up
    others = [column for column in table.column_names if column not in used_up]
    dataset = made.remove_columns([_IDENTITY])
    if others:  # `datasets` can't select rows of a table without columns
        dataset = datasets.concatenate_datasets([dataset, table.select_columns(others)], axis=1)
    return Prompts(dataset, identities, rows.places)


def _complete(rows: PlacedRows, columns: Sequence[str]) -> PlacedRows:
    """Return the rows that have a value in each of the columns. Columns that the table lacks are ignored."""
    names = [name for name in dict.fromkeys(columns) if name in rows.table.column_names]
    kept: list[int] = []
    start = 0
    for batch in rows.table.select_columns(names).iter(BATCH):
        values = list(zip(*batch.values(), strict=True))
        kept += [start + number for number, row in enumerate(values) if not any(map(presets.is_missing, row))]
        start += len(values)
    if os.environ.get("RANK", "0") == "0" and len(kept) < start:
        logger.info("drop_missing: %d of %d rows have no prompt or no gold", start - len(kept), start)
    return PlacedRows(rows.table.select(kept), selected(rows.places, kept))


def system_text(spec: DatasetSpec) -> str | None:
    """Return the text of a dataset's system prompt, or None if it has none."""
    system_prompt = str(spec.system_prompt or "none")
    return SYSTEM_PROMPTS.get(system_prompt, system_prompt)


@dataclass(frozen=True)
class _Phrasing:
    """Conversion of the rows of a table to prompts."""

    reading: _Reading
    system: str | None
    is_text: bool
    is_unchanged: bool
    """True if the column `prompt` is kept as it is, so that it is only checked and hashed."""
    places: Places

    def tables(self, inputs: datasets.Dataset) -> Iterator[pa.Table]:
        """Yield tables of prompts, made columns and identities, one per batch."""
        template = None if self.reading.template is None else _environment().from_string(self.reading.template)
        start = 0
        for batch in inputs.with_format("arrow").iter(BATCH):
            rows = batch.to_pylist()
            yield self._table([self._row(row, start + number, template) for number, row in enumerate(rows)])
            start += len(rows)

    def _row(
        self, row: Mapping[str, Any], index: int, template: Template | None
    ) -> tuple[Conversation, dict[str, Any], int]:
        """Return the turns, the made columns and the identity of one row."""
        parts = {part: row[column] for part, column in self.reading.columns.items()}
        where = RowName(index, self.places)  # only an error finds the position, which takes a pass over the file
        turns, made = self.reading.read(parts, where)
        if template is None:
            return turns, made, _hash(turns)
        try:
            content = template.render(row)
            content.encode()  # fails for half of a surrogate pair
        except Exception as error:  # a filter or method in a template may raise any exception
            place = f"`dataset.prompt_template`: {where}"
            raise UserError(place, f"it fails here ({reason_of(error)})", "correct template or row") from error
        if not content.strip():
            raise UserError(f"`dataset.prompt_template`: {where}", "it leaves the prompt empty", "correct the row")
        # The columns are hashed, not the text: another wording of the template must not move a row to another side.
        return presets.user_turn(content), made, _hash([row.get(column) for column in self.reading.template_columns])

    def _table(self, rows: Sequence[tuple[Conversation, dict[str, Any], int]]) -> pa.Table:
        columns: dict[str, pa.Array] = {}
        if not self.is_unchanged:
            prompts = [prompt_of(turns, self.system, self.is_text) for turns, _, _ in rows]
            columns["prompt"] = pa.array(prompts, pa.string() if self.is_text else _MESSAGES)
        for name in self.reading.made:
            kind = _CHOICES if name == "choices" else self.reading.gold_kind
            columns[name] = pa.array([made[name] for _, made, _ in rows], kind)
        columns[_IDENTITY] = pa.array([identity for _, _, identity in rows], pa.uint64())
        return pa.table(columns)


def prompt_of(turns: Conversation, system: str | None, is_text: bool) -> Conversation:
    """Return the system prompt, unless the turns begin with their own, and the turns, as messages or as one text."""
    if isinstance(turns, str):
        if is_text and system is None:
            return turns
        turns = presets.user_turn(turns)
    messages = list(turns)
    if system is not None and turns[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return "\n".join(turn["content"] for turn in messages) if is_text else messages


def _hash(content: Any) -> int:
    return xxhash.xxh64_intdigest(json.dumps(content, ensure_ascii=False, sort_keys=True, default=str).encode())


# Columns of a prompt


def _reading(rows: PlacedRows, spec: DatasetSpec) -> _Reading:
    preset = presets.preset_of(spec)
    reading = _own_reading(rows, spec) if preset is None else _preset_reading(preset, rows)
    if spec.prompt_template is None:
        return reading
    columns = _template_columns(spec.prompt_template)
    parts = dict(reading.columns)
    for name in columns:
        if name not in rows.table.column_names:
            problem = f"it names {name!r}, and {rows.place(0)} {_has(rows)}"
            raise UserError("`dataset.prompt_template`", problem, "correct it, or set `columns`")
        parts[f"template/{name}"] = name
    # Columns of the template stay in the row, except a column `prompt`, which the new prompt replaces.
    keeps = (*reading.keeps, *(set(columns) - reading.used_up - {"prompt"}))
    return replace(reading, columns=parts, keeps=keeps, template=spec.prompt_template, template_columns=columns)


def _preset_reading(preset: Preset, rows: PlacedRows) -> _Reading:
    columns: dict[str, str] = {}
    for part, names in preset.columns.items():
        found = [name for name in names if name in rows.table.column_names]
        single = presets.choice_columns(rows.table.column_names) if part == "choices" and not found else []
        columns |= {f"{presets.ONE_CHOICE}{name}": name for name in single}
        if found:
            columns[part] = found[0]
        elif not single:
            also = ", or one for each choice with `columns: {A: ..., B: ...}`" if part == "choices" else ""
            problem = f"it {_has(rows)}, and none is {' or '.join(map(repr, names))}"
            fix = f"map one with `columns: {{{names[0]}: ...}}`{also}"
            raise UserError(f"`dataset`: {rows.place(0)}", problem, fix)
    schema = rows.table.features.arrow_schema
    made: tuple[str, ...] = ("answer",)
    keeps = preset.keeps
    kind = schema.field(columns["choices"]).type if "choices" in columns else pa.string()
    if "choices" in preset.columns and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        made, keeps = ("answer", "choices"), ()  # rewards read lists, with their labels
    gold_kind = _TEXT
    if "answer" in columns and "choices" not in preset.columns:
        gold_kind = _gold_kind(schema.field(columns["answer"]).type)
    return _Reading(columns, preset.read, made, keeps, gold_kind=gold_kind)


def _gold_kind(kind: pa.DataType) -> pa.DataType:
    """Return the type of the golds that a preset makes of answers of type `kind`: floats or text, or lists of them."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_gold_kind(kind.value_type))
    return pa.float64() if pa.types.is_floating(kind) else _TEXT


def _own_reading(rows: PlacedRows, spec: DatasetSpec) -> _Reading:
    """Return the reader of rows without a preset: by a template, or of a column `prompt`, `question` or `messages`."""
    names = rows.table.column_names
    if spec.prompt_template is not None:
        return _Reading({"prompt": "prompt"} if "prompt" in names else {}, _no_turns)
    conversation = next((name for name in CONVERSATIONS if name in names), "")
    has_gold = _ends_with_gold(rows.table, "prompt" if "prompt" in names else conversation)
    made = ("answer",) if has_gold and "answer" not in names else ()
    if "prompt" in names:
        return _Reading({"prompt": "prompt"}, _answered_prompt if has_gold else _given_prompt, made)
    if "question" in names:
        return _Reading({"question": "question"}, _question)
    if conversation:
        return _Reading({"prompt": conversation}, _answered_prompt, made)
    problem = f"it {_has(rows)}, and none is 'prompt', 'question', 'messages' or 'conversations'"
    fix = "map one with `columns: {question: ...}`, or write a `prompt_template`"
    raise UserError(f"`dataset`: {rows.place(0)}", problem, fix)


def _ends_with_gold(table: datasets.Dataset, column: str) -> bool:
    """Return True if the first row has a conversation that ends with the assistant's turn, as no prompt does."""
    if column not in table.column_names:
        return False
    turns = table.select_columns([column])[0][column]  # other columns may hold images, which would be decoded
    last = turns[-1] if isinstance(turns, list) and turns else None
    return presets.role_and_content(last)[0] == "assistant"


def _has_roles(table: datasets.Dataset) -> bool:
    """Return True if the column `prompt` is text, or messages with the key `role`, which ShareGPT's turns lack."""
    kind = table.features.arrow_schema.field("prompt").type
    is_turns = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)
    return not is_turns or kind.value_type.get_field_index("role") >= 0


def _no_turns(parts: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    """Read nothing, because the template reads the row itself."""
    return "", {}


def _question(parts: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    return presets.user_turn(presets.text_of(parts, "question", where)), {}


def _given_prompt(parts: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    prompt = parts["prompt"]
    if isinstance(prompt, str) and prompt.strip():
        return prompt, {}
    if isinstance(prompt, list):
        turns = [presets.message(turn, where) for turn in prompt]
        if any(turn["content"].strip() for turn in turns):
            return turns, {}
    fix = "write text or messages that are not empty"
    raise UserError(f"`dataset`: {where}", f"it has the prompt {shown(prompt)}", fix)


def _answered_prompt(parts: Mapping[str, Any], where: object) -> tuple[Conversation, dict[str, Any]]:
    """Read a conversation, whose last turn is the gold if it is the assistant's."""
    turns, _ = _given_prompt(parts, where)
    if isinstance(turns, str) or turns[-1]["role"] != "assistant":
        return turns, {"answer": None}
    prompt, _ = _given_prompt({"prompt": turns[:-1]}, where)
    return prompt, {"answer": turns[-1]["content"].strip() or None}


def _has(rows: PlacedRows) -> str:
    return f"has the columns {listed(rows.table.column_names)}"


def _check_names(rows: PlacedRows, reading: _Reading) -> None:
    """Raise `UserError` if a column that stays in the row has a reserved name."""
    used_up = reading.used_up
    for column in rows.table.column_names:
        if column not in used_up and column in (*RESERVED, "prompt", *reading.made):
            problem = f"it has a column {column!r}, a name that the trainer takes for itself"
            fix = f"rename it, as in `columns: {{other_{column}: {column}}}`"
            raise UserError(f"`dataset`: {rows.place(0)}", problem, fix)


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)


def _template_columns(template: str) -> tuple[str, ...]:
    """Return the columns that a template names, sorted. Raise `UserError` for an invalid template."""
    environment = _environment()
    try:
        environment.from_string(template)
        return tuple(sorted(meta.find_undeclared_variables(environment.parse(template))))
    except Exception as error:  # Python may refuse the code that jinja2 makes of it, such as deep nesting
        problem = f"it is not a jinja2 template ({reason_of(error)})"
        raise UserError("`dataset.prompt_template`", problem, "correct it") from error


def columns_of_prompt(spec: DatasetSpec) -> tuple[str, ...] | None:
    """Return the columns that a dataset's prompts are made from, or None if its keys do not name them.

    Raises:
        UserError: The template is invalid.
    """
    if spec.prompt_template is not None:
        return _template_columns(spec.prompt_template)
    preset = presets.preset_of(spec)
    return None if preset is None else tuple(part for part in preset.columns if part in ("question", "text", "choices"))


def phrased_text(spec: DatasetSpec, text: str) -> str:
    """Return the user's message of a row with a text in the one column that the prompt is made from.

    The text itself is returned if the prompt is made from other columns too, or from an unknown one.

    Raises:
        UserError: The template is invalid, or fails on the text.
    """
    columns = columns_of_prompt(spec)
    if columns is None or len(columns) != 1:
        return text
    if spec.prompt_template is None:
        text = text.strip()  # as `text_of` does with the columns of presets
        return text if spec.labels is None else presets.with_labels(text, spec.labels)
    try:
        return _environment().from_string(spec.prompt_template).render({columns[0]: text})
    except Exception as error:  # a filter or method in a template may raise any exception
        problem = f"it fails on this text ({reason_of(error)})"
        raise UserError("`dataset.prompt_template`", problem, "write another text") from error
