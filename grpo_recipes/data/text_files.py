"""Rows in text files (JSON Lines, JSON, CSV) as memory-mapped tables; every error names its file and line.

`datasets` reads such files too, and guesses types from the first 10 megabytes or 10,000 rows: a later row of another type
is then changed without a word or fails without a line, dates become timestamps, and the CSV cells `NA` and `None` become
nulls. Here the type of a column is what all of its rows are, and text stays as it is written.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import datasets
import pyarrow as pa

from grpo_recipes.data import tables
from grpo_recipes.data.tables import BATCH, SHOWN, check_columns, check_fields, fingerprint, listed, stored
from grpo_rewards.errors import UserError, shortened
from grpo_rewards.files import LINE_BYTES, UnreadableFile, read_bytes

Text = TypeVar("Text", str, bytes)

_VERSION = 1
"""Part of a table's name: raise it when the same file gives another table."""

ARRAY_BYTES = 1 << 30
"""Largest file that is one JSON array, which is read whole."""

# A row's number in its file (a line, an entry), its text or its object.
_Rows = Iterator[tuple[int, Any]]
_Batch = Sequence[tuple[int, Mapping[str, Any]]]


def read(paths: Sequence[Path], key: str) -> datasets.Dataset:
    """The rows of the files, one after the other; `key` is the recipe's, for errors.

    A column that a row lacks is null there. Raises `UserError` for a file or line that can't be read.
    """
    kind = paths[0].suffix
    stats = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise _unreadable(path, key, error) from error
        stats += [path.resolve(), stat.st_size, stat.st_mtime_ns]
    return stored(fingerprint("text", _VERSION, kind, *stats), _Tables(paths, key))


def objects(paths: Sequence[Path], key: str) -> Iterator[tuple[Callable[[], str], Mapping[str, Any]]]:
    """The rows one by one, as they are written, each with its place (a file and its line) for errors."""
    for path in paths:
        word = "entry" if path.suffix == ".json" and _is_array(path) else "line"
        for number, row in _READERS[path.suffix](path, key):
            yield partial("{}, {} {}".format, path, word, number), row


def place(paths: Sequence[Path], key: str, index: int) -> str:
    """Where row `index` of `read`'s table stands. Reads the files again."""
    where, _ = next(islice(objects(paths, key), index, None))
    return where()


def _unreadable(path: Path, key: str, error: OSError) -> UserError:
    return UserError(f"`dataset.{key}`: {path} can't be read ({error.strerror}): correct the path or the file")


# Tables


class _Tables:
    """Batches of one schema, that of the first; when a later batch needs a wider one, the rest is read for its types only
    and the whole is read again.
    """

    def __init__(self, paths: Sequence[Path], key: str) -> None:
        self.paths, self.key = paths, key
        self.schema: pa.Schema | None = None

    def __call__(self) -> Iterator[pa.Table]:
        """The batches of the files."""
        needed = self.schema or pa.schema([])
        for path, batch in _batches(self.paths, self.key):
            needed = _wider(needed, path, batch)
            self.schema = self.schema or needed
            if needed == self.schema:
                yield pa.table({kind.name: _values(path, batch, kind.name, kind.type) for kind in needed}, needed)
        if self.schema is not None and needed != self.schema:
            self.schema = needed
            raise tables.Widened


def _batches(paths: Sequence[Path], key: str) -> Iterator[tuple[Path, _Batch]]:
    for path in paths:
        rows = _READERS[path.suffix](path, key)
        while batch := list(islice(rows, BATCH)):
            yield path, batch


def _wider(schema: pa.Schema, path: Path, batch: _Batch) -> pa.Schema:
    """`schema` with the columns and types of a batch taken in. Raises `UserError` for types that do not go together."""
    known = dict(zip(schema.names, schema.types, strict=True))
    names = dict.fromkeys(name for _, row in batch for name in row)
    check_columns(len(known.keys() | names), path)
    for name in names:
        before = known.get(name, pa.null())
        common = _common(before, _values(path, batch, name, None).type, as_text=path.suffix == ".csv")
        if common is None:
            raise _several_types(path, batch, name, before)
        known[name] = common
    check_fields(known.values(), path)
    return pa.schema(list(known.items()))


def _common(first: pa.DataType, second: pa.DataType, as_text: bool) -> pa.DataType | None:
    """The type that holds both: a float for a whole number and a float; of CSV cells, text for any other two."""
    if first == second:
        return first
    try:
        schemas = [pa.schema([("", kind)]) for kind in (first, second)]
        return pa.unify_schemas(schemas, promote_options="permissive").types[0]
    except pa.ArrowException:
        return pa.string() if as_text else None


def _values(path: Path, batch: _Batch, name: str, kind: pa.DataType | None) -> pa.Array:
    """A column of a batch, of the given type or of the one that its values have. Raises `UserError` for several types."""
    values = [row.get(name) for _, row in batch]
    if path.suffix == ".csv":
        return _cells(values, kind)
    try:
        return pa.array(values, kind)
    except _NO_COLUMN:
        raise _several_types(path, batch, name, kind) from None


_NO_COLUMN = (pa.ArrowException, OverflowError, TypeError, ValueError)


def _several_types(path: Path, batch: _Batch, name: str, kind: pa.DataType | None) -> UserError:
    """The error for a column of several types, at the first row whose value does not go with those before it."""
    kind = pa.null() if kind is None else kind
    for number, row in batch:
        common = None
        with contextlib.suppress(*_NO_COLUMN):
            common = _common(kind, pa.array([row.get(name)]).type, as_text=False)
        if common is None:
            return UserError(
                f"`dataset`: {path}, line {number}: the column {name!r} has values of several types, here "
                f"{shortened(repr(row.get(name)), SHOWN)}: give all one type, or leave it out"
            )
        kind = common
    return UserError(f"`dataset`: the column {name!r} of {path} has values of several types: give all one type")


_WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d+)?", re.ASCII)


def _cells(values: Sequence[str | None], kind: pa.DataType | None) -> pa.Array:
    """CSV cells as numbers where all of the column are, and as text as it is written otherwise (`007`, `NA`, `1,000`)."""
    given = [value for value in values if value is not None]
    if kind is None:
        kind = pa.null() if not given else pa.string()
        for pattern, number in ((_NUMBER, pa.float64()), (_WHOLE_NUMBER, pa.int64())):
            if given and all(map(pattern.fullmatch, given)):
                kind = number
    convert: Callable[[str], Any] = {pa.int64(): int, pa.float64(): float}.get(kind, str)
    return pa.array([None if value is None else convert(value) for value in values], kind)


# Files


def _json_rows(path: Path, key: str) -> _Rows:
    """The objects of a JSON file: one array, or one object a line."""
    return _array_entries(path, key) if path.suffix == ".json" and _is_array(path) else _lines(path, key)


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _array_entries(path: Path, key: str) -> _Rows:
    try:
        value = json.loads(read_bytes(path, ARRAY_BYTES))
    except UnreadableFile as error:
        raise UserError(f"`dataset.{key}`: {error}: write one object a line, as JSON Lines") from error
    except UnicodeDecodeError as error:
        raise UserError(f"`dataset.{key}`: {path} is not UTF-8 text: correct the path or the file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"`dataset`: {path} is not JSON ({error}): correct the file") from error
    for number, entry in enumerate(value, start=1):
        yield number, _checked_object(entry, f"{path}, entry {number}", b"\\ud")


def _lines(path: Path, key: str) -> _Rows:
    """The objects of a JSONL file; blank lines are passed over."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_bounded(file, path, key), start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, _object(line, path, number, key)
    except OSError as error:
        raise _unreadable(path, key, error) from error


def _bounded(file: IO[Text], path: Path, key: str) -> Iterator[Text]:
    """Yield the lines of a file. Raises `UserError` for one of more than `LINE_BYTES`."""
    while line := file.readline(LINE_BYTES):
        if len(line) == LINE_BYTES:
            raise UserError(f"`dataset.{key}`: {path} has a line of {LINE_BYTES:,} bytes or more: correct the file")
        yield line


def _object(line: bytes, path: Path, number: int, key: str) -> Mapping[str, Any]:
    where = f"{path}, line {number}"
    try:
        return _checked_object(json.loads(line.decode()), where, line)
    except UnicodeDecodeError as error:
        raise UserError(
            f"`dataset.{key}`: {path} is not UTF-8 text (line {number}): correct the path or the file"
        ) from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"`dataset`: {where} is not JSON ({error}): correct or remove the line") from error


def _checked_object(value: Any, where: str, line: bytes) -> Mapping[str, Any]:
    if b"\\ud" in line or b"\\uD" in line:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeError as error:
            raise UserError(f"`dataset`: {where} has half of a surrogate pair: correct or remove the line") from error
    if not isinstance(value, dict):
        raise UserError(f"`dataset`: {where} is not a JSON object: write one object with the row's columns")
    return value


def _csv_rows(path: Path, key: str) -> _Rows:
    """The records of a CSV file under the names in its first line; an empty cell is null."""
    csv.field_size_limit(1 << 30)  # the default refuses cells above 128 KiB
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_bounded(file, path, key), strict=True)
            names = next(reader, [])
            check_columns(len(names), path)
            if "" in names or len(set(names)) < len(names):
                raise UserError(
                    f"`dataset`: {path}, line 1 must name every column once, and it has {listed(names) or 'nothing'}"
                )
            line = 1
            for cells in reader:
                first, line = line + 1, reader.line_num
                if cells and len(cells) != len(names):
                    raise UserError(
                        f"`dataset`: {path}, line {first} has {len(cells)} cells, and the first line names {len(names)} "
                        "columns: put cells with commas or line breaks in double quotes"
                    )
                if cells:
                    yield first, dict(zip(names, (cell or None for cell in cells), strict=True))
    except UnicodeDecodeError as error:
        raise UserError(f"`dataset.{key}`: {path} is not UTF-8 text: correct the path or the file") from error
    except csv.Error as error:
        raise UserError(f"`dataset`: {path}, line {line + 1} is not CSV ({error}): correct its quotes") from error
    except OSError as error:
        raise _unreadable(path, key, error) from error


_READERS: Mapping[str, Callable[[Path, str], _Rows]] = {".jsonl": _json_rows, ".json": _json_rows, ".csv": _csv_rows}

SUFFIXES = tuple(_READERS)
"""The endings of the files that are read here."""
