"""Memory-mapped tables: the cache on disk, and limits on size.

No row stays in memory as a Python object after its batch. A table may therefore be larger than memory, and several
processes share its pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import xxhash
from filelock import FileLock

from grpo_rewards.errors import UserError, one_line, shortened

BATCH = 10_000
"""Number of rows that are read, changed and written at once."""

COLUMNS = 2_000
"""Largest number of columns of a table. `datasets` joins tables in time that is quadratic in it."""

FIELDS = 10_000
"""Largest number of columns and of keys in their objects, all rows together."""

SHOWN = 200
"""Largest number of characters that an error message shows of a row's value."""

_NAMES, _NAME_CHARACTERS = 20, 60


def check_columns(count: int, where: object) -> None:
    """Raise `UserError` if a table has more than `COLUMNS` columns. `where` is the table or its file."""
    if count > COLUMNS:
        raise UserError(
            f"`dataset`: {where} has {count:,} columns, and at most {COLUMNS:,} are read: select some of them"
        )


def check_fields(kinds: Iterable[pa.DataType], where: object) -> None:
    """Raise `UserError` if columns of these types, and the objects in them, have more than `FIELDS` keys together."""
    count, waiting = 0, list(kinds)
    while waiting:
        kind = waiting.pop()
        count += 1
        waiting += [kind.field(number).type for number in range(kind.num_fields)]
    if count > FIELDS:
        raise UserError(
            f"`dataset`: the objects in {where} have more than {FIELDS:,} different keys: write them as text (JSON)"
        )


def shown(value: object) -> str:
    """Return a value of a row for an error message, shortened to `SHOWN` characters."""
    return shortened(repr(value), SHOWN)


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error as a clause for ours."""
    return one_line(error).rstrip(".") or type(error).__name__


def listed(names: Iterable[str]) -> str:
    """Return the first names of columns and the number of the others, for an error message."""
    all_names = list(names)
    text = ", ".join(shortened(name, _NAME_CHARACTERS) for name in all_names[:_NAMES])
    more = len(all_names) - _NAMES
    return f"{text} and {more:,} more" if more > 0 else text


# Tables on disk


class Widened(Exception):
    """Signal that later rows need a wider schema than the written one, so that the table must be written again."""


def fingerprint(*parts: object) -> str:
    """Return the name of the cached table that is made from `parts`. Parts with the same text give the same name."""
    return xxhash.xxh3_128_hexdigest("\0".join(map(str, parts)).encode(errors="surrogatepass"))


def stored(name: str, batches: Callable[[], Iterator[pa.Table]]) -> datasets.Dataset:
    """Return the cached table `name`, written from `batches` (all of one schema) if it does not exist yet.

    One of several processes writes the table, and the others wait for it. Raises `UserError` if the cache is not
    writable.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "grpo_recipes"
    path = folder / f"{name}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                _write(path, batches)
    except OSError as error:
        raise UserError(
            f"`dataset`: {folder} is not writable ({error.strerror or error}): make room, or set HF_DATASETS_CACHE"
        ) from error
    try:
        return datasets.Dataset.from_file(str(path))
    except ValueError as error:  # Arrow cuts a column's name at a NUL, so the table and its schema have different names
        path.unlink(missing_ok=True)
        raise UserError("`dataset`: names of columns have control characters: rename the columns") from error


def _write(path: Path, batches: Callable[[], Iterator[pa.Table]]) -> None:
    """Write the batches beside `path` and move the file there, so that `path` never holds half a table."""
    partial_path = path.with_suffix(f".{os.getpid()}")
    try:
        try:
            _write_stream(partial_path, batches())
        except Widened:
            _write_stream(partial_path, batches())
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)


def _write_stream(path: Path, batches: Iterator[pa.Table]) -> None:
    with pa.OSFile(str(path), "wb") as sink:
        first = next(batches, pa.table({}))
        with pa.ipc.new_stream(sink, first.schema) as writer:
            writer.write_table(first)
            for batch in batches:
                writer.write_table(batch)
