"""The files of runs and evaluations: their names, how they are written, and how they are read. Nothing here imports torch.

A file is written under another name and renamed, so that a reader finds all of it or none. What is read may still have been
cut off, edited, or made by somebody else to do harm: it is compared with the shape that its readers rely on, and an error
names the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import compute, parquet

from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.files import JSON_BYTES, UnreadableFile, read_json
from grpo_rewards.files import replacing as replacing
from grpo_rewards.files import write_atomically as write_atomically

RECORD, LIVE = "run.json", "_log.jsonl"  # transformers pushes no file whose name begins with `_`
EVALUATIONS, BEFORE, AFTER = "evaluations", "before", "after"

# What a table may come to: of evaluations, some 100,000 long completions. At once, and over the whole file.
BATCH_ROWS, FILE_ROWS = 1024, 10_000_000
BATCH_BYTES, FILE_BYTES = 1 << 28, 1 << 30

FILE_SUFFIXES = frozenset({".bin", ".jinja", ".json", ".jsonl", ".md", ".model", ".parquet", ".png", ".safetensors"})
"""Suffixes of the files that a run writes into its folder."""

STATE_BYTES = 1 << 31
"""Largest log that is read, one entry at a time: a trainer_state.json of a million steps has 1.3 GB."""


class RunError(UserError):
    """A folder or file that can't be read as a run's or an evaluation's: one sentence that names it and the fix."""


def inside(folder: Path, *names: str) -> Path:
    """A place in a folder that may be somebody else's, to write to. Raises `RunError` if a link leads out of the folder."""
    place = folder.joinpath(*names)
    if not place.resolve().is_relative_to(folder.resolve()):
        raise RunError(f"{place}: a link leads out of {folder}, and nothing is written through it: remove the link")
    return place


def flush(path: Path) -> None:
    """Write a file's contents, or a folder's names, to the disk, so that they survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_names(folder: Path) -> None:
    """Raise `RunError` if a name in a run's folder, or among its completions, can't be written to.

    A link may lead out of the folder. Opening a pipe waits for a reader. A folder in place of a file stops the last
    save.
    """
    for names in ("*", "completions/*", "completions/images/*"):
        for path in folder.glob(names):
            if path.is_symlink():
                inside(folder, *path.relative_to(folder).parts)
            is_file_name = path.suffix in FILE_SUFFIXES
            if path.exists() and not path.is_file() and (is_file_name or not path.is_dir()):
                raise RunError(f"{path}: it is no ordinary file, and the run can't write there: remove it")


@dataclass(frozen=True)
class Kind:
    """What a value in JSON, or a column of a table, must be: its name in a sentence, and the test."""

    name: str
    holds: Callable[[Any], bool]


# Of values. JSON's `true` becomes a Python bool, which is an int too.
ANYTHING = Kind("anything", lambda value: True)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXT_OR_NULL = Kind("a text", lambda value: value is None or isinstance(value, str))
INTEGER = Kind("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))
INTEGER_OR_NULL = Kind("an integer", lambda value: value is None or INTEGER.holds(value))
STEP = Kind("an integer from 0", lambda value: INTEGER.holds(value) and 0 <= value < 2**63)
NUMBER = Kind("a number", lambda value: isinstance(value, float) or (INTEGER.holds(value) and abs(value) < 2**63))
NUMBER_OR_NULL = Kind("a number", lambda value: value is None or NUMBER.holds(value))
SHARE = Kind("a share with an interval (low <= value <= high)", lambda value: _is_share(value))
ESTIMATE = Kind("a number with an interval (low <= value <= high)", lambda value: _is_estimate(value))

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

EVALUATION: Shape = {
    "problems": INTEGER,
    # Where the rows have golds.
    "strict?": SHARE,
    "lenient?": SHARE,
    "majority?": SHARE,
    "pass_at?": {"*?": SHARE},
    "settings": {"samples": INTEGER, "strict?": [{"name": TEXT}]},
    "made_with?": {},
    "sampling?": {},
    "rewards?": {
        "*?": {"mean?": ESTIMATE, "passed?": SHARE, "majority?": SHARE, "pass_at?": {"*?": SHARE}, "unscored": INTEGER}
    },
}
ADAPTER: Shape = {"base_model_name_or_path": TEXT_OR_NULL}

# The columns of an evaluation's `completions.parquet`, and of its parts.
EVALUATED = {
    "problem": INTEGERS,
    "sample": INTEGERS,
    "prompt": TEXTS,
    "completion": TEXTS,
    # Where the rows have golds.
    "gold?": TEXTS,
    "answer?": TEXTS_OR_NULL,
    "strict?": BOOLEANS,
    "lenient?": BOOLEANS,
}


def read_object(
    path: Path, shape: Shape, fix: str = "restore or remove the file", *, most: int = JSON_BYTES
) -> dict[str, Any]:
    """Return the object that a JSON file of at most `most` bytes holds, which has a shape.

    Raises:
        FileNotFoundError: there is no such file.
        RunError: it is no ordinary file, too large, damaged, or holds something else; `fix` says what to do.
    """
    try:
        content = read_json(path, most)
    except UnreadableFile as error:
        raise RunError(f"{error}; {fix}") from error
    if problem := mismatch(content, shape):
        raise RunError(f"{path}: {problem}; {fix}")
    return content


def read_table(path: Path, columns: Mapping[str, Kind], fix: str = "restore or remove the file") -> pd.DataFrame:
    """These columns of a parquet file, a `column?` only where there is one. Raises `RunError` as `read_batches`."""
    batches = list(read_batches(path, columns, fix))
    return batches[0] if len(batches) == 1 else pd.concat(batches, ignore_index=True)


def read_batches(
    path: Path,
    columns: Mapping[str, Kind],
    fix: str = "restore or remove the file",
    row_groups: Sequence[int] | None = None,
) -> Iterator[pd.DataFrame]:
    """The same, at most `BATCH_ROWS` rows at a time: no other column is read, and no row before it is asked for.

    With `row_groups` only these row groups are read, and limits apply to what is read.

    A few kilobytes of parquet can stand for terabytes of repeated text. Text is therefore decoded only where it stays below
    `BATCH_BYTES` and, over the whole file, `FILE_BYTES`.

    Raises:
        RunError: the file is missing, damaged, too large, or holds something else; `fix` says what to do.
    """
    check_ordinary(path, fix)
    try:
        with parquet.ParquetFile(path) as file:
            metadata = file.metadata
            names = _columns(path, file, columns, fix)
            groups = range(metadata.num_row_groups) if row_groups is None else row_groups
            if metadata.num_rows > FILE_ROWS or _stored_bytes(file, names, groups) > FILE_BYTES:
                raise _too_large(path, fix)
            # Repeated text stays repeated until its size is known.
            leaves = [file.schema.column(place) for place in range(len(file.schema))]
            texts = [leaf.path for leaf in leaves if leaf.logical_type.type == "STRING"]
        with parquet.ParquetFile(path, metadata=metadata, read_dictionary=texts) as file:
            decoded = 0
            for batch in _batches_or_empty(file, names, groups):
                size = sum(map(_decoded_bytes, batch.columns))
                decoded += size
                if size > BATCH_BYTES or decoded > FILE_BYTES:
                    raise _too_large(path, fix)
                yield _checked_batch(path, batch, columns, fix)
    except RunError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, IndexError) as error:
        raise RunError(f"{path}: can't be read as parquet ({one_line(error)}); {fix}") from error


def _columns(path: Path, file: parquet.ParquetFile, columns: Mapping[str, Kind], fix: str) -> list[str]:
    """The names of the columns to read, all of them there."""
    there = file.schema_arrow.names
    wanted = [key.removesuffix("?") for key in columns if not key.endswith("?") or key.removesuffix("?") in there]
    for name in wanted:
        if name not in there:
            found = shortened(", ".join(there)) if there else "none"
            raise RunError(f"{path}: it has no column `{name}` (its columns: {found}); {fix}")
        if there.count(name) > 1:
            raise RunError(f"{path}: it has {there.count(name)} columns `{name}`; {fix}")
    return wanted


def _stored_bytes(file: parquet.ParquetFile, names: Sequence[str], row_groups: Sequence[int]) -> int:
    """The bytes of some columns before they are decoded, or their number of values if that is more, as the file states them."""
    groups = map(file.metadata.row_group, row_groups)
    chunks = (group.column(place) for group in groups for place in range(group.num_columns))
    wanted = (chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names)
    return sum(max(chunk.total_uncompressed_size, chunk.num_values) for chunk in wanted)


def _batches_or_empty(
    file: parquet.ParquetFile, names: Sequence[str], row_groups: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """The batches of some columns; one without rows where the file has none, so that its columns are still known."""
    found = False
    for group in row_groups:  # each has its own repeated texts, which pyarrow can't always join
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=list(names)):
            found = True
            yield batch
    if not found:
        yield pa.RecordBatch.from_pylist([], schema=pa.schema([file.schema_arrow.field(name) for name in names]))


def _decoded_bytes(array: pa.Array) -> int:
    """What an array takes once its repeated texts are written out."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return 8 * len(array) + (compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return 8 * len(array) + _decoded_bytes(array.flatten())
    if pa.types.is_struct(kind):
        return sum(map(_decoded_bytes, array.flatten()))
    return max(array.nbytes, len(array))


def _checked_batch(path: Path, batch: pa.RecordBatch, columns: Mapping[str, Kind], fix: str) -> pd.DataFrame:
    plain = [column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in batch.columns]
    table = pa.RecordBatch.from_arrays(plain, names=batch.schema.names).to_pandas()
    for key, kind in columns.items():
        name = key.removesuffix("?")
        if name in table.columns and not kind.holds(table[name]):
            raise RunError(f"{path}: its column `{name}` does not hold {kind.name}; {fix}")
    return table


def _too_large(path: Path, fix: str) -> RunError:
    return RunError(f"{path}: it decodes to more than a reader of it should hold ({FILE_BYTES >> 20} MiB); {fix}")


def check_ordinary(path: Path, fix: str) -> None:
    """Raise `RunError` for what is there and is no file: reading a pipe or a device may never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise RunError(f"{path}: it is no ordinary file; {fix}")


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
    return shortened(json.dumps(value))


def _is_share(value: Any) -> bool:
    return _is_estimate(value) and value["low"] >= 0 and value["high"] <= 1


def _is_estimate(value: Any) -> bool:
    are_numbers = isinstance(value, dict) and all(NUMBER.holds(value.get(key)) for key in ("low", "value", "high"))
    # False for NaN.
    return are_numbers and -math.inf < value["low"] <= value["value"] <= value["high"] < math.inf


def _is_conversation(value: Any) -> bool:
    if isinstance(value, str):
        return True
    is_list = hasattr(value, "__iter__") and not isinstance(value, (Mapping, bytes))  # parquet gives arrays
    return is_list and all(isinstance(message, Mapping) for message in value)
