"""Files of runs and evaluations: their names, their formats, and how they are read. Nothing here imports torch.

A file is written under another name and renamed, so that a reader finds it complete or not at all. A file may still be
cut off or edited. Its contents are therefore compared with the shape that readers rely on, and errors name the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.files import JSON_BYTES, UnreadableFile, open_ordinary, read_json
from grpo_rewards.files import replacing as replacing
from grpo_rewards.files import write_atomically as write_atomically

RECORD, LIVE = "run.json", "_log.jsonl"  # transformers pushes no file whose name begins with `_`
EVALUATIONS, BEFORE, AFTER = "evaluations", "before", "after"
RESULT, RESULT_TABLE = "evaluation.json", "completions.parquet"

BATCH_ROWS = 1024
"""Largest number of rows of a table that are decoded at once."""

STATE_BYTES = 1 << 31
"""Largest `trainer_state.json` that a resume reads. That of a million steps has 1.3 GB."""

RESTORE = "restore or remove the file"
"""Fix for a damaged file, in error messages."""


class RunError(UserError):
    """A missing or damaged file or folder of a run, a model or an evaluation. The message names it and the fix."""


def inside(folder: Path, *names: str) -> Path:
    """Return a path in a folder, to write to. Raises `RunError` if a link leads out of the folder."""
    place = folder.joinpath(*names)
    if not place.resolve().is_relative_to(folder.resolve()):
        raise RunError(place, f"a link leads out of {folder}, and nothing is written through it", "remove the link")
    return place


def flush(path: Path) -> None:
    """Write a file's contents, or a folder's names, to the disk, so that they survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_names(folder: Path) -> None:
    """Raise `RunError` if a link among the names that a run writes leads out of its folder."""
    for names in ("*", "completions/*", "completions/images/*"):
        for path in folder.glob(names):
            if path.is_symlink():
                inside(folder, *path.relative_to(folder).parts)


@dataclass(frozen=True)
class Condition:
    """Condition on a value in JSON, or on a column of a table."""

    name: str
    """Noun phrase for error messages."""
    holds: Callable[[Any], bool]


# Conditions on values. `true` in JSON becomes a Python bool, which is an int too.
ANYTHING = Condition("anything", lambda value: True)
FLAG = Condition("true or false", lambda value: isinstance(value, bool))
TEXT = Condition("a text", lambda value: isinstance(value, str))
TEXT_OR_NULL = Condition("a text", lambda value: value is None or isinstance(value, str))
INTEGER = Condition("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))
INTEGER_OR_NULL = Condition("an integer", lambda value: value is None or INTEGER.holds(value))
STEP = Condition("an integer from 0", lambda value: INTEGER.holds(value) and 0 <= value < 2**63)
NUMBER = Condition("a number", lambda value: isinstance(value, float) or (INTEGER.holds(value) and abs(value) < 2**63))
NUMBER_OR_NULL = Condition("a number", lambda value: value is None or NUMBER.holds(value))
SHARE = Condition(
    "a share with an interval (low <= value <= high)",
    lambda value: _is_estimate(value) and value["low"] >= 0 and value["high"] <= 1,
)
ESTIMATE = Condition(
    "a number with an interval (low <= value <= high, or both ends null)", lambda value: _is_estimate(value, True)
)

# Conditions on columns. A column without any value has no type of its own.
INTEGERS = Condition("integers", lambda column: column.dtype.kind in "iu")
NUMBERS = Condition("numbers", lambda column: column.dtype.kind in "biuf" or column.isna().all())
BOOLEANS = Condition("true or false", lambda column: column.dtype.kind == "b")
TEXTS = Condition("texts", lambda column: all(isinstance(value, str) for value in column))
TEXTS_OR_NULL = Condition("texts", lambda column: all(isinstance(value, str) for value in column.dropna()))
CONVERSATIONS = Condition("texts or lists of messages", lambda column: all(map(_is_conversation, column)))

Shape = Condition | list[Any] | Mapping[str, Any]
"""Shape of a value: a `Condition`, a list, or a mapping.

A list holds the shape of each item, or nothing if items may be anything. A mapping holds the shape of each key: `key?`
may be absent, and `*?` stands for every other key."""

BY_CALL: Shape = {
    "problems": INTEGER,
    "strict?": SHARE,
    "lenient?": SHARE,
    "rewards?": {"*?": {"mean?": ESTIMATE, "passed?": SHARE}},
}
"""Shape of the results of the completions that called a tool, or that called none."""

EVALUATION: Shape = {
    "problems": INTEGER,
    # Present if the rows have golds.
    "strict?": SHARE,
    "lenient?": SHARE,
    "majority?": SHARE,
    "pass_at?": {"*?": SHARE},
    "settings": {"samples": INTEGER, "strict?": [{"name": TEXT}]},
    "made_with?": {},
    "sampling?": {},
    "rewards?": {
        "*?": {
            "mean?": ESTIMATE,
            "passed?": SHARE,
            "majority?": SHARE,
            "pass_at?": {"*?": SHARE},
            "unscored": INTEGER,
            "highest_pay?": NUMBER,
        }
    },
    # Present if the recipe has tools.
    "tools?": {"called": SHARE, "calls": NUMBER, "with_call?": BY_CALL, "without_call?": BY_CALL},
}
"""Shape of `evaluation.json`."""

FAULT: Shape = {
    "sentence": TEXT,
    "time": NUMBER,
    # Present if a reward could not score a completion.
    "row?": {"reward": TEXT, "row": INTEGER, "prompt": TEXT, "completion": TEXT, "step": INTEGER_OR_NULL},
}
"""Shape of `fault-rank*.json`."""

ADAPTER: Shape = {"base_model_name_or_path": TEXT_OR_NULL}
"""Shape of `adapter_config.json`."""

EVALUATED = {
    "problem": INTEGERS,
    "sample": INTEGERS,
    "prompt": TEXTS,
    "completion": TEXTS,
    # Present if the rows have golds.
    "gold?": TEXTS,
    "answer?": TEXTS_OR_NULL,
    "strict?": BOOLEANS,
    "lenient?": BOOLEANS,
    # Present if the recipe has tools: number of calls that were answered, and the conversation as JSON text.
    "calls?": INTEGERS,
    "transcript?": TEXTS,
}
"""Columns of an evaluation's `completions.parquet`, and of its parts."""


def read_object(path: Path, shape: Shape, fix: str = RESTORE, *, most: int = JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: file to read.
        shape: shape that the object must have.
        fix: the fix that error messages name.
        most: largest size of the file in bytes.

    Raises:
        FileNotFoundError: there is no such file.
        RunError: the file is not a regular one, is too large or damaged, or has another shape.
    """
    try:
        content = read_json(path, most)
    except UnreadableFile as error:
        raise RunError(error.place, error.problem, fix) from error
    if problem := mismatch(content, shape):
        raise RunError(path, problem, fix)
    return content


def read_table(path: Path, columns: Mapping[str, Condition], fix: str = RESTORE) -> pd.DataFrame:
    """Return some columns of a parquet file. Arguments and errors are those of `read_batches`."""
    return pd.concat(list(read_batches(path, columns, fix)), ignore_index=True)


def read_batches(path: Path, columns: Mapping[str, Condition], fix: str = RESTORE) -> Iterator[pd.DataFrame]:
    """Yield some columns of a parquet file, at most `BATCH_ROWS` rows at a time, and at least one batch.

    Args:
        path: file to read.
        columns: conditions on the columns to read, by name. A `column?` may be absent.
        fix: the fix that error messages name.

    Raises:
        RunError: the file is missing, damaged, or has other columns.
    """
    try:
        with open_ordinary(path) as opened, parquet.ParquetFile(opened) as file:
            names, present = [], file.schema_arrow.names
            for key in columns:
                name = key.removesuffix("?")
                if name in present:
                    names.append(name)
                elif not key.endswith("?"):
                    found = shortened(", ".join(present)) if present else "none"
                    raise RunError(path, f"it has no column `{name}` (its columns: {found})", fix)
            # The types of the columns of a table without rows are checked too.
            empty = [file.read(names)] if file.metadata.num_rows == 0 else []
            for batch in chain(empty, file.iter_batches(BATCH_ROWS, columns=names)):
                table = batch.to_pandas()
                for key, condition in columns.items():
                    name = key.removesuffix("?")
                    if name in table.columns and not condition.holds(table[name]):
                        raise RunError(path, f"its column `{name}` does not hold {condition.name}", fix)
                yield table
    except RunError:
        raise
    except UnreadableFile as error:
        raise RunError(error.place, error.problem, fix) from error
    except (pa.ArrowException, OSError, ValueError, OverflowError, IndexError) as error:
        raise RunError(path, f"can't be read as parquet ({one_line(error)})", fix) from error


def mismatch(value: Any, shape: Shape, place: str = "") -> str | None:
    """Return the first difference between a value and a shape, as a clause, or None.

    Args:
        value: JSON value.
        shape: shape that the value must have.
        place: place of the value in the file, such as `rewards[0].name`.
    """
    subject = f"`{place}`" if place else "it"
    if isinstance(shape, Condition):
        return None if shape.holds(value) else f"{subject} is {_shown(value)}, not {shape.name}"
    parts: list[tuple[str, Any, Shape]] = []
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{subject} is {_shown(value)}, not a list"
        for inner in shape:
            parts += [(f"{place}[{number}]", item, inner) for number, item in enumerate(value)]
    else:
        if not isinstance(value, dict):
            return f"{subject} is {_shown(value)}, not an object"
        for key in shape:
            if not key.endswith("?") and key not in value:
                return f"{subject} has no `{key}`"
        shapes = {key.removesuffix("?"): inner for key, inner in shape.items()}
        for key, item in value.items():
            parts.append((f"{place}.{key}" if place else key, item, shapes.get(key, shapes.get("*", ANYTHING))))
    for where, item, inner in parts:
        if problem := mismatch(item, inner, where):
            return problem
    return None


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return shortened(json.dumps(value))


def _is_estimate(value: Any, may_lack_interval: bool = False) -> bool:
    if not isinstance(value, dict):
        return False
    if may_lack_interval and value.get("low", 0) is None and value.get("high", 0) is None:
        return NUMBER.holds(value.get("value")) and math.isfinite(value["value"])
    if not all(NUMBER.holds(value.get(key)) for key in ("low", "value", "high")):
        return False
    return -math.inf < value["low"] <= value["value"] <= value["high"] < math.inf  # False for NaN


def _is_conversation(value: Any) -> bool:
    if isinstance(value, str):
        return True
    is_list = hasattr(value, "__iter__") and not isinstance(value, (Mapping, bytes))  # parquet gives arrays
    return is_list and all(isinstance(message, Mapping) for message in value)
