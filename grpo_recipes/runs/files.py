"""The files of runs and evaluations: their names, how they are written, and how they are read. Nothing here imports torch.

A file is written under another name and renamed, so that a reader finds all of it or none. What is read may still have been
cut off, edited, or written by another program: it is compared with the shape that its readers rely on, and an error names
the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pyarrow import ArrowException

from grpo_rewards.errors import UserError

RECORD = "run.json"
EVALUATIONS, BEFORE, AFTER = "evaluations", "before", "after"
FAULT_FILES = "fault-rank*.json"


class RunError(UserError):
    """A folder or file that can't be read as a run's or an evaluation's: one sentence that names it and the fix."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`: it takes that name if the block succeeds, and is removed if it fails."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@dataclass(frozen=True)
class Kind:
    """What a value in JSON, or a column of a table, must be: its name in a sentence, and the test."""

    name: str
    holds: Callable[[Any], bool]


# Of values. JSON's `true` becomes a Python bool, which is an int too.
ANYTHING = Kind("anything", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXT_OR_NULL = Kind("a text", lambda value: value is None or isinstance(value, str))
INTEGER = Kind("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))
INTEGER_OR_NULL = Kind("an integer", lambda value: value is None or INTEGER.holds(value))
NUMBER = Kind("a number", lambda value: isinstance(value, float) or (INTEGER.holds(value) and abs(value) < 2**63))
SHARE = Kind("a share with an interval (low <= value <= high)", lambda value: _is_share(value))

# Of columns. A column without any value has no type of its own.
INTEGERS = Kind("integers", lambda column: column.dtype.kind in "iu")
NUMBERS = Kind("numbers", lambda column: column.dtype.kind in "biuf" or column.isna().all())
BOOLEANS = Kind("true or false", lambda column: column.dtype.kind == "b")
TEXTS = Kind("texts", lambda column: all(isinstance(value, str) for value in column))
TEXTS_OR_NULL = Kind("texts", lambda column: all(isinstance(value, str) for value in column.dropna()))
CONVERSATIONS = Kind("texts or lists of messages", lambda column: all(map(_is_conversation, column)))

Shape = Any
"""A `Kind`; a list with the shape of each item, empty for any; or a mapping with the shape of each key, `key?` if it may
be absent, and `*?` for every other key."""

TRAINER_STATE: Shape = {"log_history": [{"step": INTEGER}], "global_step?": INTEGER}
EVALUATION: Shape = {
    "problems": INTEGER,
    "strict": SHARE,
    "lenient": SHARE,
    "majority?": SHARE,
    "pass_at?": {"*?": SHARE},
    "settings": {"samples": INTEGER, "strict?": [{"name": TEXT}]},
}
ADAPTER: Shape = {"base_model_name_or_path": TEXT_OR_NULL}

# The columns of an evaluation's `completions.parquet`, and of its parts.
EVALUATED = {
    "problem": INTEGERS,
    "sample": INTEGERS,
    "prompt": TEXTS,
    "gold": TEXTS,
    "completion": TEXTS,
    "answer": TEXTS_OR_NULL,
    "strict": BOOLEANS,
    "lenient": BOOLEANS,
}


def read_object(path: Path, shape: Shape, fix: str = "restore or remove the file") -> dict[str, Any]:
    """A JSON file that holds an object of a shape.

    Raises:
        FileNotFoundError: there is no such file.
        RunError: it is damaged, or holds something else; `fix` says what to do.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise RunError(f"{path}: can't be read as JSON ({_one_line(error)}); {fix}") from error
    if problem := mismatch(content, shape):
        raise RunError(f"{path}: {problem}; {fix}")
    return content


def read_table(path: Path, columns: Mapping[str, Kind], fix: str = "restore or remove the file") -> pd.DataFrame:
    """A parquet file with at least these columns, a `column?` only where there is one.

    Raises `RunError` if the file is missing, damaged, or holds something else; `fix` says what to do.
    """
    try:
        table = pd.read_parquet(path)
    except (ArrowException, OSError, ValueError) as error:
        raise RunError(f"{path}: can't be read as parquet ({_one_line(error)}); {fix}") from error
    for key, kind in columns.items():
        name = key.removesuffix("?")
        if name not in table.columns:
            if key.endswith("?"):
                continue
            found = ", ".join(map(str, table.columns)) or "none"
            raise RunError(f"{path}: it has no column `{name}` (its columns: {found}); {fix}")
        if not kind.holds(table[name]):
            raise RunError(f"{path}: its column `{name}` does not hold {kind.name}; {fix}")
    return table


def mismatch(value: Any, shape: Shape, place: str = "") -> str | None:
    """Where a value differs from a shape first, as a clause; None if it does not."""
    if isinstance(shape, Kind):
        return None if shape.holds(value) else f"{_named(place)} is {_shown(value)}, not {shape.name}"
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{_named(place)} is {_shown(value)}, not a list"
        entries = [(f"{place}[{number}]", item, inner) for inner in shape for number, item in enumerate(value)]
    elif not isinstance(value, dict):
        return f"{_named(place)} is {_shown(value)}, not an object"
    elif missing := [key for key in shape if not key.endswith("?") and key not in value]:
        return f"{_named(place)} has no `{missing[0]}`"
    else:
        known = {"*": ANYTHING, **{key.removesuffix("?"): inner for key, inner in shape.items()}}
        entries = [(f"{place}.{key}" if place else key, value[key], known.get(key, known["*"])) for key in value]
    found = (mismatch(item, inner, where) for where, item, inner in entries)
    return next(filter(None, found), None)


def _named(place: str) -> str:
    return f"`{place}`" if place else "it"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_share(value: Any) -> bool:
    if not isinstance(value, dict) or not all(NUMBER.holds(value.get(key)) for key in ("low", "value", "high")):
        return False
    return 0 <= value["low"] <= value["value"] <= value["high"] <= 1  # false for NaN


def _is_conversation(value: Any) -> bool:
    if isinstance(value, str):
        return True
    is_list = hasattr(value, "__iter__") and not isinstance(value, (Mapping, bytes))  # parquet gives arrays
    return is_list and all(isinstance(message, Mapping) for message in value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
