"""Tables on disk, memory-mapped: what is made here once, by whichever process comes first, and read by all.

A row is never held as a Python object for longer than its batch, so that a table may be larger than memory and several
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

from grpo_rewards.errors import UserError, shortened

BATCH = 10_000
"""Rows that are read, changed and written at once."""


COLUMNS = 2_000
"""Number of columns that a table may have: `datasets` joins tables in time that is quadratic in it."""

FIELDS = 10_000
"""Number of columns and of keys in their objects, all rows together, that a table may have."""

SHOWN = 200
"""Number of characters of a row's value that an error message shows."""

_NAMES, _NAME_CHARACTERS = 20, 60


def check_columns(count: int, where: object) -> None:
    """Raise `UserError` for more than `COLUMNS` columns; `where` is the file or table that has them."""
    if count > COLUMNS:
        raise UserError(
            f"`dataset`: {where} has {count:,} columns, and a table of problems may have {COLUMNS:,}: keep those that the prompt "
            "and the rewards read"
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
            f"`dataset`: the objects in {where} have more than {FIELDS:,} different keys: write them as text (JSON), or as lists "
            "of keys and values"
        )


def listed(names: Iterable[str]) -> str:
    """Names of columns for an error message: the first of them, and how many more there are."""
    all_names = list(names)
    shown_names = [shortened(name, _NAME_CHARACTERS) for name in all_names[:_NAMES]]
    more = len(all_names) - _NAMES
    return ", ".join(shown_names) + (f" and {more:,} more" if more > 0 else "")


def fingerprint(*parts: object) -> str:
    """The name under which a table is kept that was made from `parts`, whose text tells them from others."""
    return xxhash.xxh3_128_hexdigest("\0".join(map(str, parts)).encode(errors="surrogateescape"))


def stored(name: str, batches: Callable[[], Iterator[pa.Table]]) -> datasets.Dataset:
    """The table kept as `name`, written from `batches` (all of one schema) unless it is there already.

    Of several processes one writes and the others wait. Raises `UserError` if the cache can't be written.
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
            f"`dataset`: its table can't be kept in {folder} ({error.strerror or error}): make room there, or set "
            "HF_DATASETS_CACHE to another folder"
        ) from error
    try:
        return datasets.Dataset.from_file(str(path))
    except (
        ValueError
    ) as error:  # Arrow ends the name of a column at a NUL, and its table has other columns than its schema
        path.unlink(missing_ok=True)
        raise UserError(
            "`dataset`: a table can't be made of its columns: rename those with control characters in their names"
        ) from error


class Widened(Exception):
    """What the batches raise whose later rows need a wider schema than was written: they are to be written anew."""


def _write(path: Path, batches: Callable[[], Iterator[pa.Table]]) -> None:
    """Write the batches beside `path` and move them there, so that what is at `path` is whole."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        try:
            _write_stream(partial, batches())
        except Widened:
            _write_stream(partial, batches())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_stream(path: Path, batches: Iterator[pa.Table]) -> None:
    with pa.OSFile(str(path), "wb") as sink:
        first = next(batches, pa.table({}))
        with pa.ipc.new_stream(sink, first.schema) as writer:
            writer.write_table(first)
            for batch in batches:
                writer.write_table(batch)
